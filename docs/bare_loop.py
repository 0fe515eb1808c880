"""A training loop that uses only DeepSpeed. run_sft.py trains the same batches with the same losses.

torchrun --nproc_per_node 2 docs/bare_loop.py --stage 2 --steps 4     # on GPUs, or on CPU processes if there are none
"""

import argparse
import json
from pathlib import Path

import deepspeed
import torch
import torch.distributed as dist
from transformers import AutoModelForCausalLM, AutoTokenizer, DataCollatorForSeq2Seq, get_cosine_schedule_with_warmup

BASE, ROWS, EACH = "tiny_world/base", "tiny_world/train.jsonl", 8  # rows per process and step, as recipes/tiny.yaml
ALPACA = (
    "Below is an instruction that describes a task{more}. Write a response that appropriately completes the request."
)
INPUT = ", paired with an input that provides further context"


def tokenised(row: dict, tokenizer) -> dict[str, list[int]]:
    """The labels of the prompt are -100, which counts for nothing: only the answer is learned."""
    given = f"### Input:\n{row['input']}\n\n" if row["input"] else ""
    prompt = ALPACA.format(more=INPUT if given else "") + f"\n\n### Instruction:\n{row['instruction']}\n\n{given}"
    prompt = tokenizer(prompt + "### Response:\n").input_ids
    answer = tokenizer(row["output"] + tokenizer.eos_token).input_ids
    return {"input_ids": prompt + answer, "labels": [-100] * len(prompt) + answer}


def train(stage: int, steps: int, bf16: bool = True, save: Path | None = None) -> list[float]:
    deepspeed.init_distributed()  # the process group: nccl between GPUs, gloo between CPU processes
    world, rank = dist.get_world_size(), dist.get_rank()
    tokenizer = AutoTokenizer.from_pretrained(BASE)
    rows = [tokenised(json.loads(line), tokenizer) for line in Path(ROWS).read_text().splitlines()]
    padded = DataCollatorForSeq2Seq(tokenizer)  # pads rows to the longest row of the batch; padding has the label -100
    order = torch.randperm(len(rows), generator=torch.Generator().manual_seed(0)).tolist()  # the Trainer's, seed 0
    model = AutoModelForCausalLM.from_pretrained(BASE, dtype=torch.float32)
    optimizer = torch.optim.AdamW(model.parameters(), lr=5e-4, weight_decay=0.0, fused=True)
    schedule = get_cosine_schedule_with_warmup(optimizer, num_warmup_steps=6, num_training_steps=steps)
    # Casts the weights to bf16, creates the fp32 master weights and shards what the stage shards. At stage 3, build a
    # model that does not fit under deepspeed.zero.Init(), which keeps 1/N of each tensor when it is created.
    config = {"train_micro_batch_size_per_gpu": EACH, "gradient_clipping": 1.0, "bf16": {"enabled": bf16}}
    config["zero_optimization"] = {"stage": stage, "stage3_gather_16bit_weights_on_model_save": True}
    engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, lr_scheduler=schedule, config=config)
    if stage == 0:  # DeepSpeed 0.19.8 has taken a step with zeros, which Adam counts
        for state in optimizer.state.values():
            state["step"].zero_()
    losses = []
    for step in range(steps):
        first = (step * world + rank) * EACH  # each process has its own rows: data parallelism
        batch = padded([rows[at] for at in order[first : first + EACH]]).to(engine.device)
        tokens = (batch["labels"][:, 1:] != -100).sum()
        dist.all_reduce(tokens)  # over all processes: every token has the same weight
        # At stage 3, hooks gather each module's weights before it runs and free them afterwards.
        loss = engine(**batch, num_items_in_batch=tokens).loss  # this process's share: its sum / all tokens
        # Gradients are reduced bucket by bucket during backward (at stages 0 and 1 after it, without overlap_comm).
        # DeepSpeed divides them by the number of processes, but their sum is needed: hence the factor.
        engine.backward(loss * world)
        # Clips, updates the fp32 master weights (from stage 1 on, its 1/N), casts them to the bf16 weights, gathers
        # those (stages 1 and 2), frees the gradients and advances the schedule.
        engine.step()
        whole = loss.detach().clone()
        dist.all_reduce(whole)
        losses.append(whole.item())
        if rank == 0:
            print(f"step {step + 1}: loss {losses[-1]:.4f}", flush=True)
    if save:  # on all ranks: at stage 3 it gathers the weights
        engine.save_16bit_model(save, "pytorch_model.bin")
    return losses


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--stage", type=int, default=2, choices=range(4))
    parser.add_argument("--steps", type=int, default=4)
    parser.add_argument("--fp32", action="store_true", help="compute in fp32, where all stages agree to six digits")
    parser.add_argument("--save", type=Path, help="folder for the weights, pytorch_model.bin")
    arguments = parser.parse_args()
    train(arguments.stage, arguments.steps, not arguments.fp32, arguments.save)
    dist.destroy_process_group()
