#!/bin/sh
# The main job on the tiny world, offline: measures every ZeRO stage, then trains, saves and samples the full run.
# Two processes, on two GPUs if there are two, otherwise on the CPU.
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
echo "full run: 120 steps with ZeRO-2, with answers before and after"
accelerate launch --config_file accelerate_configs/zero2.yaml --num_processes 2 \
    run_sft.py recipes/tiny.yaml --output_dir "$out/full" --overwrite true || failed=1
# which strategy GPUs would take: the report's first line, where the runs were on CPUs
zero-recipes plan recipes/tiny.yaml --gpus 2 --quick --strategies ddp,zero0,zero1,zero2,zero3 --json > "$out/plan.json" ||
    rm -f "$out/plan.json"
zero-recipes report "$out"
exit $failed
