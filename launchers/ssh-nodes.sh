#!/bin/bash
# A training job under a plan on machines reached by ssh. Copy it, set the two lines below, and run it with the options
# of `fcp launch`; the folder must lie on storage that all nodes share:
#
#   ./ssh-nodes.sh --model qwen3-8b --plan plan.parquet --run-dir runs/a
#
set -euo pipefail
NODES=(${NODES:-node0 node1})  # in the order of the plan's nodes
FOLDER=${FOLDER:-$PWD}         # where the plan lies, the same on every node

pids=()
trap 'kill -TERM "${pids[@]}" 2>/dev/null || true' INT TERM
for k in "${!NODES[@]}"; do
    command=(fcp launch --nodes "${#NODES[@]}" --node-rank "$k" --master-addr "${NODES[0]}" "$@")
    # -tt: closing the connection ends the job on that node too.
    ssh -tt "${NODES[$k]}" "cd $(printf %q "$FOLDER") && exec $(printf '%q ' "${command[@]}")" </dev/null &
    pids+=($!)
done

status=0
for pid in "${pids[@]}"; do
    wait "$pid" || status=$?
done
exit "$status"
