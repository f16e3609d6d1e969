#!/usr/bin/env bash
# Installs the working tree in an environment of its own, with the packages that its run began with.
#
#   pinned.sh EXTRAS VERSIONS
#
#   EXTRAS    of the package, such as tpu,text
#   VERSIONS  a file that outlives this machine (gs:// or s3://BUCKET/RUN.versions, or on a shared disk). What
#             it names is what is installed. Where there is none, the newest versions are installed
#             and written there, by whoever comes first; what is there is never replaced.
#
# The recipes for SkyPilot call it before every attempt of a run. It needs uv, which brings Python
# along; the environment is ~/jaxtrain-venv.

set -euo pipefail

(($# == 2)) || {
  sed -n '2,/^$/s/^# \{0,1\}//p' "$0" >&2
  exit 2
}
extras=$1 versions=$2 environment=~/jaxtrain-venv
export PATH="$HOME/.local/bin:$PATH"
scratch=$(mktemp -d)
trap 'rm -rf "$scratch"' EXIT

# Prints the versions; fails where there are none, and ends the script where nobody can say.
read_versions() {
  if [[ $versions == s3://* ]]; then
    aws s3 cp "$versions" - 2>"$scratch/why" && return
    [[ $(<"$scratch/why") == *"(404)"* ]] && return 1
    echo "error: $versions cannot be read: $(<"$scratch/why")" >&2
    exit 1
  elif [[ $versions != gs://* ]]; then
    [[ -s $versions ]] && cat "$versions"
  elif found=$(gcloud storage ls "$versions" 2>&1); then
    gcloud storage cat "$versions"
  elif [[ $found != *"matched no objects"* ]]; then
    echo "error: $versions cannot be read: $found" >&2
    exit 1
  else
    return 1
  fi
}

# All leave alone what is there.
keep_versions() {
  if [[ $versions == gs://* ]]; then
    gcloud storage cp --no-clobber "$1" "$versions"
  elif [[ $versions == s3://* ]]; then
    local path=${versions#s3://}
    aws s3api put-object --bucket "${path%%/*}" --key "${path#*/}" --body "$1" --if-none-match '*' \
      >/dev/null 2>"$scratch/why" || [[ $(<"$scratch/why") == *PreconditionFailed* ]] || {
      cat "$scratch/why" >&2
      exit 1
    }
  else
    mkdir -p "$(dirname "$versions")"
    # Whole or not at all, under its name; an empty file is nobody's.
    local whole
    whole=$(mktemp -u "$versions.XXXXXX") # made by cp, so that others may read it
    cp "$1" "$whole"
    ln "$whole" "$versions" 2>/dev/null || [[ -s $versions ]] || mv "$whole" "$versions"
    rm -f "$whole"
  fi
}

install() {
  uv pip install -q --python "$environment/bin/python" -e "$(dirname "$0")/..[$extras]" "$@"
}

[[ -x $environment/bin/python ]] || uv venv -q --python 3.12 "$environment"
if read_versions >"$scratch/versions"; then
  install -c "$scratch/versions"
  exit
fi
install
uv pip freeze -q --python "$environment/bin/python" --exclude-editable | grep "==" >"$scratch/new"
keep_versions "$scratch/new"
# Another host may have been first.
read_versions >"$scratch/versions"
cmp -s "$scratch/new" "$scratch/versions" || install -c "$scratch/versions"
