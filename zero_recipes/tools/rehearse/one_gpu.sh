#!/bin/bash
# Several ranks of NCCL on one GPU: one_gpu.sh LIBNCCL RANKS PORT LAUNCHER... (accelerate's, its options and the program)
#
# NCCL takes them from 2.30 on with NCCL_MULTI_RANK_GPU_ENABLE: two by its documentation, four worked on one H200. torch's
# own NCCL is older: LIBNCCL is preloaded for the ranks alone.
# Each rank is a machine of its own for accelerate, with LOCAL_RANK 0 and LOCAL_WORLD_SIZE 1, so that refuse_uneven_gpus
# (config/run.py) takes one process on one GPU. When a rank fails, the others end. The exit code is its.
set -u
library=$1 ranks=$2 port=$3
shift 3
export NCCL_MULTI_RANK_GPU_ENABLE=1 NCCL_NVLS_ENABLE=0
trap 'kill $(jobs -p) 2>/dev/null; wait' EXIT
trap 'exit 143' TERM
for ((rank = 0; rank < ranks; rank++)); do
    LD_PRELOAD=$library "$1" "$2" "$3" --num_machines "$ranks" --machine_rank "$rank" --main_process_ip 127.0.0.1 \
        --main_process_port "$port" --deepspeed_multinode_launcher standard "${@:4}" &
done
for ((rank = 0; rank < ranks; rank++)); do
    wait -n || exit $?
done
