#!/usr/bin/env bash
# Trains on a GKE cluster through xpk, for as many weeks as it takes: Kubernetes starts the job again
# whenever its slice is taken away or it ends so that it can be resumed. Nothing of it runs on your
# own machine.
#
#   xpk.sh --project P --zone Z --cluster C --name N --type v5litepod-16 --image IMAGE \
#     -- experiments.gpt --run-dir gs://BUCKET/RUN --save-minutes 10 ...
#
# What follows -- is what follows "python -m"; --auto-resume is added. IMAGE is built from
# kubernetes/Dockerfile: name it by digest or by a tag that never moves, for it holds the versions of
# all packages that the run goes on with. Needs xpk (pip install xpk) and a cluster that
# "xpk cluster create" has made.
#
#   --slices N        slices of that type (default 1); give the run --mesh.dcn-data N
#   --restarts N      how often to start again (default 1000)
#   --grace SECONDS   between SIGTERM and SIGKILL, to save a checkpoint (default 120)
#   --project, --zone, --name (or TPU_PROJECT, TPU_ZONE, TPU_NAME), --dry-run, --help

set -euo pipefail
# shellcheck source=lib.sh
source "$(dirname "$0")/lib.sh"

type='' cluster='' image='' slices=1 restarts=1000 grace=120
while (($#)); do
  case $1 in
    --type) type=$(value "$@"); shift 2 ;;
    --cluster) cluster=$(value "$@"); shift 2 ;;
    --image) image=$(value "$@"); shift 2 ;;
    --slices) slices=$(value "$@"); shift 2 ;;
    --restarts) restarts=$(value "$@"); shift 2 ;;
    --grace) grace=$(value "$@"); shift 2 ;;
    --) shift; break ;;
    *) common_flag "$@"; shift "$used" ;;
  esac
done
need_target
[[ -n $type ]] || die "which accelerator? give --type, such as v5litepod-16"
[[ -n $cluster ]] || die "which cluster? give --cluster"
[[ -n $image ]] || die "which image? give --image, built from tpu_setup/kubernetes/Dockerfile"
[[ $slices =~ ^[1-9][0-9]*$ ]] || die "--slices is $slices: give a whole number of at least 1"
[[ $restarts =~ ^[0-9]+$ ]] || die "--restarts is $restarts: give a whole number of at least 0"
(($#)) || die "run what? write it after --, as in -- experiments.gpt --steps 100"
[[ " $* " =~ \ --run-dir[\ =]gs:// ]] ||
  die "nothing on a TPU outlives it: give the command a --run-dir gs://BUCKET/RUN"
refuse_dry_run "$@"

# One of a run's processes ends with what happened, the others with 77 or 134, and Kubernetes looks at
# the one that ends first. xpk starts again after 42 and 127 to 255 by itself.
codes=$(exit_codes restartable)

run xpk workload create --project "$project" --zone "$zone" --cluster "$cluster" \
  --workload "$name" --tpu-type "$type" --num-slices "$slices" --docker-image "$image" \
  --restart-on-exit-codes "$codes" --max-restarts "$restarts" \
  --termination-grace-period-seconds "$grace" \
  --command "exec python -u -m $(printf '%q ' "$@")--auto-resume"
