#!/bin/bash
# One node's part of a training job under a plan, by fcp 0.1.0.
#
#   bash node.sh [K]
#
# K is the node's number, from 0. Without it, it is this machine's line in the file `hostfile` next to this script, whose
# first line is node 0. The same script runs on every node; all must see the paths below.
set -eo pipefail
folder=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)

mapfile -t HOSTS < <(sed 's/#.*//' "$folder/hostfile" | awk 'NF { print $1 }')
if [ "${#HOSTS[@]}" != 2 ]; then
    echo "error: this job needs 2 node(s), but $folder/hostfile lists ${#HOSTS[@]}" >&2
    exit 1
fi
MASTER_ADDR=${HOSTS[0]#*@}

NODE_RANK=$1
names=" $(hostname) $(hostname -f 2>/dev/null || true) $(hostname -I 2>/dev/null || true) "
for k in "${!HOSTS[@]}"; do
    if [ -z "$NODE_RANK" ] && [[ $names == *" ${HOSTS[k]#*@} "* ]]; then
        NODE_RANK=$k
    fi
done
if [ -z "$NODE_RANK" ]; then
    echo "error: $(hostname) is not in $folder/hostfile; give the node's number: bash node.sh K" >&2
    exit 1
fi
STARTED=$(date +%Y%m%d-%H%M%S)

# CANN's own settings, unless they were sourced already.
for cann in /usr/local/Ascend/cann /usr/local/Ascend/ascend-toolkit; do
    if [ -z "$ASCEND_HOME_PATH" ] && [ -f "$cann/set_env.sh" ]; then
        # shellcheck disable=SC1091
        source "$cann/set_env.sh"
    fi
done
module load cuda/12.8
export FCP_PLAN='/shared/my data/plan.parquet'
export FCP_METRICS=/shared/runs/qwen3-8b-001/metrics.jsonl
export FCP_RUN_DIR=/shared/runs/qwen3-8b-001
export CUDA_DEVICE_MAX_CONNECTIONS=1
cd '/shared/my code'

exec /shared/venv/bin/python -m fcp_cli.launching.node \
    --node-rank="$NODE_RANK" \
    --log-dir=/shared/runs/qwen3-8b-001/logs/"$STARTED"-node"$NODE_RANK" \
    --grace=200 \
    --interface-for=GLOO_SOCKET_IFNAME \
    --master-addr="$MASTER_ADDR" \
    --master-port=29500 \
    -- \
    /shared/venv/bin/python -m torch.distributed.run \
    --nproc-per-node=8 \
    --nnodes=2 \
    --rdzv-backend=fcp \
    --rdzv-endpoint="$MASTER_ADDR":29500 \
    --rdzv-id=qwen3-8b-001-6fa82127d02ba98a \
    --rdzv-conf=rank="$NODE_RANK",timeout=600 \
    --log-dir=/shared/runs/qwen3-8b-001/logs/"$STARTED"-node"$NODE_RANK" \
    --redirects=3 \
    -m fcp_cli.training.train \
    --model qwen3-8b \
    --note 'it'"'"'s 5 $ \ "quoted"
and a second line'
