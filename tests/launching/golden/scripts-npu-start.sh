#!/bin/bash
# Starts node.sh on every node of the file `hostfile` next to it, over ssh, and waits. Ctrl-C stops the job on all nodes;
# so does the first node that fails. This folder must be on storage that all nodes share. With pdsh instead:
#
#   pdsh -R ssh -w ^hostfile bash "$PWD/node.sh"
#
set -eo pipefail
folder=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
mapfile -t HOSTS < <(sed 's/#.*//' "$folder/hostfile" | awk 'NF { print $1 }')

pids=()
stop() { kill -TERM "${pids[@]}" 2>/dev/null || true; }
trap 'stopped=130; stop' INT
trap 'stopped=143; stop' TERM

for k in "${!HOSTS[@]}"; do
    # -tt: closing the connection ends the job on that node too.
    ssh -tt -- "${HOSTS[k]}" "exec bash $(printf %q "$folder/node.sh") $k" </dev/null &
    pids+=($!)
done

status=0
for _ in "${pids[@]}"; do
    if ! wait -n; then
        status=1
        stop
    fi
done
exit "${stopped:-$status}"
