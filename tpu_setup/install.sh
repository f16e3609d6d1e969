#!/usr/bin/env bash
# Installs the working tree on all workers, in a virtual environment of its own: run sync.sh first.
#
#   install.sh --project P --zone Z --name N
#
#   --extras NAMES    extras of the package besides tpu, such as text,vision
#   --versions FILE   install the versions of packages that this file names; where there is none,
#                     write there what was installed
#   --project, --zone, --name (or TPU_PROJECT, TPU_ZONE, TPU_NAME), --dry-run, --help

set -euo pipefail
# shellcheck source=lib.sh
source "$(dirname "$0")/lib.sh"

extras=tpu versions=''
while (($#)); do
  case $1 in
    --extras) given=$(value "$@"); extras=tpu,$given; shift 2 ;;
    --versions) versions=$(value "$@"); shift 2 ;;
    *) common_flag "$@"; shift "$used" ;;
  esac
done
need_target

pins=''
if [[ -n $versions && -s $versions ]]; then
  copy_to_all "$versions" jaxtrain-versions.txt
  pins=' -c ~/jaxtrain-versions.txt'
fi

# The package needs Python 3.11, and the hosts' Ubuntu 22.04 comes with 3.10. A new host installs
# updates by itself and holds apt's lock for minutes. worker.sh starts nothing without the mark.
on_all_workers "set -e
rm -f $remote_venv/installed
python=\$(command -v python3.13 || command -v python3.12 || command -v python3.11 || true)
if [ -z \"\$python\" ]; then
  for try in 1 2 3 4 5 6 7 8 9 10; do
    sudo apt-get update -qq &&
      sudo apt-get -o DPkg::Lock::Timeout=300 install -qq -y python3.11 python3.11-venv && break
    sleep 15
  done
  python=python3.11
fi
[ -x $remote_venv/bin/pip ] || \$python -m venv --clear $remote_venv
cd $remote_tree
$remote_venv/bin/python -m pip install -q$pins -e '.[$extras]'
touch $remote_venv/installed"

if [[ -n $versions && ! -s $versions ]]; then
  run mkdir -p "$(dirname "$versions")"
  freeze="$remote_venv/bin/python -m pip freeze --exclude-editable"
  if $dry_run; then
    on 0 "$freeze"
  else
    on 0 "$freeze" | { grep '==' || true; } >"$versions.new"
    [[ -s $versions.new ]] || die "the versions of what was installed could not be read"
    mv "$versions.new" "$versions"
  fi
fi
