#!/usr/bin/env bash
# Keeps a run going on one worker though nobody is connected: run.sh and resume.sh call it there.
#
#   worker.sh start RUN MODULE FLAGS ...  ends what still runs, then starts python -m MODULE FLAGS ...
#                                         under the name RUN
#   worker.sh state RUN                   prints "jaxtrain-run HOST running" or "... ended STATUS",
#                                         and the last line of the output
#   worker.sh stop                        ends what runs: SIGTERM, and SIGKILL after 90 s
#   worker.sh log                         prints the output

set -euo pipefail
tree=~/jaxtrain folder=~/jaxtrain-run python=~/jaxtrain-venv/bin/python

# Of this and of earlier runs, however they were started: they would hold the chips.
processes() { pgrep -u "$(id -u)" -f "^$python " || true; }

# send SIGNAL SECONDS: until nothing runs any more, but no longer.
send() {
  local pids end=$((SECONDS + $2))
  while pids=$(processes) && [[ -n $pids ]]; do
    # shellcheck disable=SC2086 # one word for each
    [[ -z $1 ]] || kill -s "$1" $pids 2>/dev/null || true
    ((SECONDS < end)) || return 0
    set -- '' "$2"
    sleep 0.2
  done
}

stop() {
  send TERM "${JAXTRAIN_STOP_SECONDS:-90}"
  send KILL 10
}

case ${1:-} in
  start)
    run=$2
    shift 2
    [[ -e ${python%/bin/python}/installed ]] || {
      echo "error: $(hostname) is not installed, or not wholly: run install.sh" >&2
      exit 2
    }
    stop
    mkdir -p "$folder"
    rm -f "$folder/status"
    echo "$run" >"$folder/run"
    setsid "$0" supervise "$@" >"$folder/log" 2>&1 </dev/null &
    echo $! >"$folder/pid"
    ;;
  supervise)
    shift
    cd "$tree"
    status=0
    "$python" -u -m "$@" || status=$?
    echo "$status" >"$folder/status.new"
    mv "$folder/status.new" "$folder/status"
    ;;
  state)
    # Never begun here, or without a status and a process: the host was started anew.
    said=ended\ 137
    if [[ $(cat "$folder/run" 2>/dev/null) != "$2" ]]; then
      :
    elif [[ -e $folder/status ]]; then
      said="ended $(cat "$folder/status")"
    elif kill -0 "$(cat "$folder/pid")" 2>/dev/null; then
      said=running
    fi
    printf 'jaxtrain-run %s %s: %s\n' "$(hostname)" "$said" "$(tail -n 1 "$folder/log" 2>/dev/null | tr -d '\r')"
    ;;
  stop) stop ;;
  log) cat "$folder/log" ;;
  *)
    sed -n '2,/^$/s/^# \{0,1\}//p' "$0" >&2
    exit 2
    ;;
esac
