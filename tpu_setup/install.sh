#!/usr/bin/env bash
# Installs the working tree on all workers, in a virtual environment of its own: run sync.sh first.
#
#   install.sh --project P --zone Z --name N
#
#   --extras NAMES    extras of the package besides tpu, such as text,vision
#   --project, --zone, --name (or TPU_PROJECT, TPU_ZONE, TPU_NAME), --dry-run, --help

set -euo pipefail
# shellcheck source=lib.sh
source "$(dirname "$0")/lib.sh"

extras=tpu
while (($#)); do
  case $1 in
    --extras) given=$(value "$@"); extras=tpu,$given; shift 2 ;;
    *) common_flag "$@"; shift "$used" ;;
  esac
done
need_target

# The package needs Python 3.11, and the hosts' Ubuntu 22.04 comes with 3.10.
on_all_workers "set -e
python=\$(command -v python3.13 || command -v python3.12 || command -v python3.11 || true)
if [ -z \"\$python\" ]; then
  sudo apt-get update -qq
  sudo apt-get install -qq -y python3.11 python3.11-venv
  python=python3.11
fi
[ -x $remote_python ] || \$python -m venv ~/jaxtrain-venv
cd $remote_tree
$remote_python -m pip install -q -e '.[$extras]'"
