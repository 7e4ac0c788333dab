#!/usr/bin/env bash
# Submit every run of study.yaml to Slurm; those that ended early go on when it is called again.
#   examples/h100_qwen3_8b_fp8/study.sh [sbatch option ...]
set -euo pipefail
here=$(dirname "$0")
p3o study run "$here/study.yaml" --write | while read -r run run_dir; do
  RUN=$run RUN_DIR=$run_dir sbatch --job-name "${run_dir#runs/}" "$@" "$here/slurm.sh"
done
