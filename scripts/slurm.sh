#!/usr/bin/env bash
#SBATCH --job-name=strands-rollout
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=1
#SBATCH --gpus-per-node=8
#SBATCH --exclusive
# A template of a Slurm job: train.sh on the first node starts Ray, and the other nodes join it. Submit it in this repository's folder,
# which all nodes must share, and adapt the lines above to your cluster, such as with --partition, --time and --container-image:
#   MODEL=qwen3.5-27B sbatch --nodes=4 scripts/slurm.sh [colocated|async] [OPTIONS OF train.sh]
set -euo pipefail

: "${SLURM_JOB_NUM_NODES:?not set; submit this script with sbatch}"
export NUM_NODES="$SLURM_JOB_NUM_NODES" NUM_GPUS="${NUM_GPUS:-${SLURM_GPUS_ON_NODE:-8}}"
# use the first address of this node; set MASTER_ADDR if the other nodes reach this node at another address
export MASTER_ADDR="${MASTER_ADDR:-$(hostname -I | awk '{print $1}')}"

# shellcheck disable=SC2016 # the other nodes expand it
join='until ray start --address="$MASTER_ADDR:6379" --num-gpus="$NUM_GPUS" --disable-usage-stats --block; do sleep 5; done'
others=$((NUM_NODES - 1))
workers=(srun "--nodes=$others" "--ntasks=$others" "--exclude=${SLURMD_NODENAME:-$(hostname -s)}" bash -c "$join")

if [[ " $* " == *" --dry-run "* ]]; then
  [[ $others -eq 0 ]] || printf '# on the other nodes, beside the job\n# %s\n\n' "$(printf '%q ' "${workers[@]}")"
elif [[ $others -gt 0 ]]; then
  "${workers[@]}" &
  trap 'kill '"$!"' 2>/dev/null || true' EXIT
fi
bash "${SLURM_SUBMIT_DIR:?not set; submit this script with sbatch}/scripts/train.sh" "$@"
