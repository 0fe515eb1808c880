#!/bin/bash
# One recipe on several machines of a SLURM cluster: sbatch --nodes 2 scripts/slurm.sh recipes/pythia.yaml [--key value ...]
# One task per machine starts that machine's ranks, one per GPU asked for. docs/launch.md explains the parts.
#SBATCH --job-name=zero-recipes
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=1
#SBATCH --gpus-per-node=8
#SBATCH --cpus-per-task=64
#SBATCH --output=%x-%j.log
set -euo pipefail

: "${SLURM_GPUS_ON_NODE:?one rank is started per GPU, and this job asked for none: sbatch --gpus-per-node N}"
HOSTS=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | paste -sd, -)
export HOSTS
# on a cluster with several networks: export NCCL_SOCKET_IFNAME=ib0

srun --kill-on-bad-exit=1 --cpus-per-task="$SLURM_CPUS_PER_TASK" bash -c '
    set -euo pipefail
    zero-recipes meet --hosts "$HOSTS" --machine_rank "$SLURM_NODEID"
    exec accelerate launch --config_file accelerate_configs/multi_node.yaml \
        --num_machines "$SLURM_NNODES" --num_processes "$((SLURM_NNODES * SLURM_GPUS_ON_NODE))" \
        --machine_rank "$SLURM_NODEID" --main_process_ip "${HOSTS%%,*}" --main_process_port 29500 \
        run_sft.py "$@"
' slurm "$@"
