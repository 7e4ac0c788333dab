#!/usr/bin/env bash
#SBATCH --job-name=p3o-qwen3-30b-a3b
#SBATCH --nodes=12
#SBATCH --ntasks-per-node=1
#SBATCH --gpus-per-node=8
#SBATCH --cpus-per-task=64
#SBATCH --exclusive
#SBATCH --time=24:00:00
#
# sbatch examples/h100_qwen3_30b_a3b/slurm.sh [--section.field VALUE ...]
#
# The first TRAINER_NODES nodes train, the others serve. A job that is submitted again continues
# its run dir. The repository, the model and the run dir are on a file system that all nodes share.
set -euo pipefail

RUN=${RUN:-examples/h100_qwen3_30b_a3b/run.yaml}
RUN_DIR=${RUN_DIR:-runs/qwen3_30b_a3b}
TRAINER_NODES=${TRAINER_NODES:-8}
SERVERS_PER_NODE=${SERVERS_PER_NODE:-4} # rollout.launch.replicas of RUN
PORT=${PORT:-30000}
# Servers listen on the cluster's network, so they ask for a key.
export P3O_API_KEY=${P3O_API_KEY:-$(openssl rand -hex 24)}

mapfile -t nodes < <(scontrol show hostnames "$SLURM_JOB_NODELIST")
trainers=("${nodes[@]:0:TRAINER_NODES}")
servers=("${nodes[@]:TRAINER_NODES}")
list() { local IFS=,; echo "$*"; }

urls=()
for node in "${servers[@]}"; do
  for ((n = 0; n < SERVERS_PER_NODE; n++)); do urls+=("http://$node:$((PORT + n))"); done
done
resume=()
if [ -e "$RUN_DIR/checkpoints/latest" ]; then resume=(--resume); fi

srun --nodes="${#servers[@]}" --ntasks="${#servers[@]}" --nodelist="$(list "${servers[@]}")" \
  bash -c 'exec p3o serve "$@" --logs "$0.servers/$(hostname)"' "$RUN_DIR" "$RUN" \
  --run.dir "$RUN_DIR" --rollout.launch.host 0.0.0.0 --rollout.launch.port "$PORT" "$@" &
serving=$!
trap 'kill "$serving" 2> /dev/null || true; wait' EXIT

srun --nodes="${#trainers[@]}" --ntasks="${#trainers[@]}" --nodelist="$(list "${trainers[@]}")" \
  torchrun --nnodes "${#trainers[@]}" --nproc-per-node 8 \
  --rdzv-backend c10d --rdzv-endpoint "${trainers[0]}:29500" --rdzv-id "$SLURM_JOB_ID" \
  -m megatron_p3o.cli train "$RUN" "${resume[@]}" \
  --run.dir "$RUN_DIR" --rollout.servers "[$(list "${urls[@]}")]" "$@"
