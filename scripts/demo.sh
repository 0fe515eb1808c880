#!/bin/sh
# The main job, offline, on the tiny world: every ZeRO stage measured, then the full run, saved, before and after.
# Two processes: on two GPUs where there are two, else on the CPU.
set -eu
out=${1:-output/demo}
gpus=$(python -c 'import torch; print(torch.cuda.device_count())')
if [ "$gpus" -lt 2 ]; then
    export CUDA_VISIBLE_DEVICES="" DS_ACCELERATOR=cpu # one GPU cannot serve two ranks
    export OMP_NUM_THREADS="${OMP_NUM_THREADS:-1}"
fi
failed=0
zero-recipes sweep recipes/tiny.yaml --strategies ddp,zero0,zero1,zero2,zero3 --num_processes 2 --output_dir "$out" \
    --max_steps 40 --eval_strategy no --sample_prompts 0 --overwrite true || failed=1
echo "full run: 120 steps under ZeRO-2, saved, answers before and after"
accelerate launch --config_file accelerate_configs/zero2.yaml --num_processes 2 \
    run_sft.py recipes/tiny.yaml --output_dir "$out/full" --overwrite true || failed=1
zero-recipes report "$out"
exit $failed
