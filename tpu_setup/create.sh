#!/usr/bin/env bash
# Creates a TPU: at once (on demand, or --spot), or by waiting in a queue (--queued).
#
#   create.sh --project P --zone Z --name N --type v5litepod-16 [--spot] [--queued]
#
#   --type TYPE       accelerator type, such as v5litepod-16
#   --runtime VERSION software of the hosts; left out, the one for the type, from
#                     https://docs.cloud.google.com/tpu/docs/runtimes
#   --spot            cheaper, and may be taken away at any time: see resume.sh
#   --reserved        from a reservation
#   --network NAME, --subnetwork NAME, --internal-ips (no external addresses), --service-account MAIL
#   --queued          ask for a queued resource of that name, and wait until it is active
#   --poll SECONDS    how often to ask while waiting (default 30)
#   --project, --zone, --name (or TPU_PROJECT, TPU_ZONE, TPU_NAME), --dry-run, --help

set -euo pipefail
# shellcheck source=lib.sh
source "$(dirname "$0")/lib.sh"

type='' queued=false poll=30
while (($#)); do
  case $1 in
    --type) type=$(value "$@"); shift 2 ;;
    --poll) poll=$(value "$@"); shift 2 ;;
    --queued) queued=true; shift ;;
    *) creation_flag "$@"; shift "$used" ;;
  esac
done
need_target
[[ -n $type ]] || die "which accelerator? give --type, such as v5litepod-16"

runtime='' flags=()
for ((i = 0; i < ${#placed[@]}; i++)); do
  if [[ ${placed[i]} == --runtime ]]; then runtime=${placed[++i]}; else flags+=("${placed[i]}"); fi
done
if [[ -z $runtime ]]; then
  case $type in
    v6e-*) runtime=v2-alpha-tpuv6e ;;
    v5p-*) runtime=v2-alpha-tpuv5 ;;
    v5litepod-*) runtime=v2-alpha-tpuv5-lite ;;
    v2-* | v3-* | v4-*) runtime=tpu-ubuntu2204-base ;;
    *) die "which software runs on $type? give --runtime" ;;
  esac
fi

if ! $queued; then
  tpu tpu-vm create --accelerator-type "$type" --version "$runtime" "${flags[@]}"
  exit
fi

tpu queued-resources create --node-id "$name" --accelerator-type "$type" \
  --runtime-version "$runtime" "${flags[@]}"
if $dry_run; then
  tpu queued-resources describe --format 'value(state.state)'
  exit
fi
while state=$(queue_state) && [[ $state != ACTIVE ]]; do
  case $state in
    FAILED | SUSPENDING | SUSPENDED) die "the queued resource $name is $state: see status.sh --queued" ;;
  esac
  echo "$name is ${state:-not there yet}; asking again in $poll s" >&2
  sleep "$poll"
done
