#!/usr/bin/env bash
# Copies the working tree to all workers: what git tracks, and what it does not ignore, as it is now.
# What git does not track and is named like a secret (.env*, .netrc, *.key, *.pem, id_rsa* and the
# like, *credentials*.json) stays here, and is said; track it to have it copied.
#
#   sync.sh --project P --zone Z --name N
#
# On the workers the tree is replaced, but for its runs/ folder.
#
#   --archive FILE    copy what is packed in this file; where there is none, pack it there
#   --project, --zone, --name (or TPU_PROJECT, TPU_ZONE, TPU_NAME), --dry-run, --help

set -euo pipefail
# shellcheck source=lib.sh
source "$(dirname "$0")/lib.sh"

archive=''
while (($#)); do
  case $1 in
    --archive) archive=$(value "$@"); shift 2 ;;
    *) common_flag "$@"; shift "$used" ;;
  esac
done
need_target

root=$(cd "$(dirname "$0")/.." && pwd)
keep=$archive
archive=${archive:-${TMPDIR:-/tmp}/$name.tar.gz}

without_secrets() {
  local file
  while IFS= read -r -d '' file; do
    case ${file##*/} in
      .env* | .netrc | *.key | *.pem | id_rsa* | id_ecdsa* | id_ed25519* | *credentials*.json)
        echo "not copied, as it may be a secret: $file" >&2
        ;;
      *) printf '%s\0' "$file" ;;
    esac
  done
}

# Files that were deleted and not committed are still in git's list.
pack() {
  cd "$root"
  { git ls-files -z --cached && git ls-files -z --others --exclude-standard | without_secrets; } |
    while IFS= read -r -d '' file; do [[ ! -e $file ]] || printf '%s\0' "$file"; done |
    tar --null --files-from - -czf "$archive.new"
  mv "$archive.new" "$archive"
}

if $dry_run; then
  echo "# $archive: what git ls-files lists in $root"
elif [[ -z $keep || ! -e $archive ]]; then
  (pack)
fi
copy_to_all "$archive" jaxtrain.tar.gz
on_all_workers "mkdir -p $remote_tree && cd $remote_tree && \
find . -mindepth 1 -maxdepth 1 ! -name runs -exec rm -rf {} + && tar -xzf ~/jaxtrain.tar.gz"
