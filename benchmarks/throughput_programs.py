"""The programs that benchmarks/throughput.py alternates, as every rank of a process group runs them.

trl: `trl sft` (trl/scripts/sft.py, main) with its defaults; trl_tuned: the same, packed as the recipe is and without
activation checkpointing; recipe: run_sft.py; engine: a bare loop around deepspeed.initialize with DeepSpeed's own
defaults, engine_tuned: with the recipe's ds_config, ddp: around torch's DDP, all three on the very batches that the
recipe's data loader made.
"""

import contextlib
import copy
import gc
import json
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch.nn.functional import cross_entropy
from transformers import AutoModelForCausalLM, TrainerCallback
from trl import SFTTrainer

from zero_recipes.engine import attention
from zero_recipes.engine.faults.stage_0_first_step import fresh_adam_at_stage_0
from zero_recipes.engine.speed import supervised_positions

Batch = dict[str, torch.Tensor]
READ_BY_A_MODEL = ("input_ids", "attention_mask", "position_ids")
MAX_NORM = 1.0  # TrainingArguments' default, which trl and recipe take


@dataclass
class Seen:
    """What a program leaves of its training, on one rank."""

    device: str
    turn: Callable[[], None] = lambda: None  # waits for it, once the model is loaded
    marks: list[float] = field(default_factory=list)  # seconds: before the first step, and after each
    lengths: list[list[int]] = field(default_factory=list)  # tokens of each row, by micro batch
    elements: list[int] = field(default_factory=list)  # elements of each micro batch, padding included
    supervised: list[int] = field(default_factory=list)  # by micro batch
    batches: list[Batch] = field(default_factory=list)
    model: Any = None  # what is called: an engine, DDP, or the model itself
    trainer: Any = None
    config: dict | None = None  # of the engine that the trainer made

    def mark(self) -> None:
        if self.device == "cuda":
            torch.cuda.synchronize()
        self.marks.append(time.perf_counter())


class Clock(TrainerCallback):
    def __init__(self, seen: Seen):
        self.seen = seen

    def on_train_begin(self, args, state, control, **kwargs):
        self.seen.mark()

    def on_step_end(self, args, state, control, **kwargs):
        self.seen.mark()


@contextlib.contextmanager
def watched(seen: Seen, *callbacks: TrainerCallback, keep_batches: bool = False) -> Iterator[None]:
    """Whatever SFTTrainer trains within is timed; it neither saves its model nor takes the process group down."""
    train = SFTTrainer.train

    def watched_train(self, *arguments, **keywords):
        seen.trainer = self
        for callback in (*callbacks, Clock(seen)):
            self.add_callback(callback)
        self.data_collator = counting(self.data_collator, seen, keep_batches)
        seen.turn()
        return train(self, *arguments, **keywords)

    with (
        mock.patch.object(SFTTrainer, "train", watched_train),
        mock.patch.object(SFTTrainer, "save_model", lambda *arguments, **keywords: None),
        mock.patch.object(SFTTrainer, "end", lambda *arguments: None),
    ):
        yield
    seen.model = seen.trainer.model_wrapped
    plugin = seen.trainer.accelerator.state.deepspeed_plugin
    seen.config = None if plugin is None else copy.deepcopy(plugin.deepspeed_config)


def counting(collate: Callable[[list[dict]], Batch], seen: Seen, keep_batches: bool) -> Callable:
    def counted(rows: list[dict]) -> Batch:
        batch = collate(rows)
        seen.lengths.append([n for row in rows for n in row.get("seq_lengths") or [len(row["input_ids"])]])
        seen.elements.append(batch["input_ids"].numel())
        seen.supervised.append(int((batch["labels"][:, 1:] != -100).sum()))
        if keep_batches:
            seen.batches.append({k: v.clone() for k, v in batch.items() if k in (*READ_BY_A_MODEL, "labels")})
        return batch

    return counted


class FreshAdam(TrainerCallback):
    """What a recipe's run does at stage 0."""

    def on_train_begin(self, args, state, control, optimizer=None, **keywords):
        fresh_adam_at_stage_0(getattr(optimizer, "optimizer", None))


def of_trainer(job: dict, seen: Seen, program: str) -> None:
    """run_sft.py with the recipe, whose batches are kept, or `trl sft`: `job["trl"]` names the task (model, rows,
    learning rate), `job["trl_tuned"]` the fast settings too."""
    from trl.scripts import sft

    from tests.helpers import cases

    argv = [] if job["strategy"] in ("ddp", "single") else ["--deepspeed", f"ds_configs/{job['strategy']}.json"]
    keys = job[program] | {"output_dir": f"{job['folder']}/{program}"}
    argv += [word for key, value in keys.items() for word in (f"--{key}", str(value))]
    if program == "recipe":
        with watched(seen, keep_batches=True):
            cases.train([str(Path(job["folder"]) / "recipe.yaml"), *argv])
        return
    # DeepSpeed's stage 0 counts a step too many (faults/stage_0_first_step.py); left in, the loss would be another
    with watched(seen, FreshAdam()):
        sft.main(*sft.make_parser().parse_args_and_config(argv, fail_with_unknown_args=False))


def engine(job: dict, seen: Seen, model, fed: Seen, by_default: bool) -> None:
    """A bare loop around the engine of the strategy with the config of `fed`, the recipe, or only with its stage and
    offload and the rest of zero_optimization as DeepSpeed has it by default."""
    import deepspeed

    config, batches = fed.config, fed.batches
    known = {key: value for key, value in config.items() if key != "train_batch_size"}  # follows from the others
    if by_default:
        kept = {"stage", "offload_optimizer", "offload_param"} & set(config["zero_optimization"])
        known["zero_optimization"] = {key: config["zero_optimization"][key] for key in kept}
    optimizer = adam(model, config, job)
    seen.model, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=known)
    if job["strategy"] == "zero0":  # DeepSpeed 0.19.8 has taken a step without gradients (faults/stage_0_first_step.py)
        for state in optimizer.state.values():
            state["step"].zero_()
    ranks, each = dist.get_world_size(), job["accumulation"]
    seen.model.train()
    for micro, tokens in steps_of(job, batches, seen, seen.model.optimizer):
        for batch in micro:
            loss = summed_loss(seen.model, batch, seen.device) / tokens
            seen.model.backward(loss * (ranks * each))  # it divides by both
            seen.model.step()


def plain(job: dict, seen: Seen, model, batches: list[Batch], wrapped: bool) -> None:
    """A plain PyTorch loop on `batches`: bf16 autocast over fp32 weights, torch's DDP where there are several ranks, or
    where `wrapped`."""
    model.to(seen.device)
    ranks, each = dist.get_world_size(), job["accumulation"]
    seen.model = torch.nn.parallel.DistributedDataParallel(model) if ranks > 1 or wrapped else model
    optimizer = adam(model, None, job)
    seen.model.train()
    for micro, tokens in steps_of(job, batches, seen, optimizer):
        for number, batch in enumerate(micro, 1):
            with seen.model.no_sync() if seen.model is not model and number < each else contextlib.nullcontext():
                with torch.autocast(seen.device, torch.bfloat16):
                    loss = summed_loss(seen.model, batch, seen.device) / tokens
                (loss * ranks).backward()  # DDP divides by them
        torch.nn.utils.clip_grad_norm_(model.parameters(), MAX_NORM)
        optimizer.step()
        optimizer.zero_grad()


def load(job: dict):
    return AutoModelForCausalLM.from_pretrained(job["model"], dtype=torch.float32, attn_implementation=job["attention"])


def adam(model, config: dict | None, job: dict) -> torch.optim.Optimizer:
    """AdamW with TrainingArguments' defaults; DeepSpeed's own where it lies on the host."""
    known = {"lr": job["learning_rate"], "betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 0.0}
    if "offload_optimizer" in (config or {}).get("zero_optimization", {}):
        from deepspeed.ops.adam import DeepSpeedCPUAdam

        return DeepSpeedCPUAdam(model.parameters(), **known)
    return torch.optim.AdamW(model.parameters(), **known, fused=True)


def steps_of(job: dict, batches: list[Batch], seen: Seen, optimizer) -> Iterator[tuple[list[Batch], torch.Tensor]]:
    """(micro batches, their tokens with a loss over all ranks) of each step, timed; the learning rate falls to 0 as
    TrainingArguments' default does."""
    each = job["accumulation"]
    steps = len(batches) // each
    seen.mark()
    for step in range(steps):
        for group in optimizer.param_groups:
            group["lr"] = job["learning_rate"] * (1 - step / steps)
        micro = batches[step * each : (step + 1) * each]
        tokens = sum((batch["labels"][:, 1:] != -100).sum() for batch in micro).to(seen.device)
        dist.all_reduce(tokens)
        yield micro, tokens
        seen.mark()


def summed_loss(model, batch: Batch, device: str) -> torch.Tensor:
    read = {key: batch[key].to(device) for key in READ_BY_A_MODEL if key in batch}
    logits = model(**read, use_cache=False).logits[:, :-1]
    labels = batch["labels"][:, 1:].to(device)
    return cross_entropy(logits.flatten(0, 1).float(), labels.flatten(), ignore_index=-100, reduction="sum")


def held_out_loss(seen: Seen, rows: list[dict[str, list[int]]]) -> float:
    """The loss per supervised token of the trained model on rows that no program has trained on. Collective."""
    ranks, rank = dist.get_world_size(), dist.get_rank()
    seen.model.eval()
    found = torch.zeros(2, dtype=torch.float64, device=seen.device)
    with torch.no_grad(), torch.autocast(seen.device, torch.bfloat16):
        for row in rows[rank::ranks]:  # as many on every rank: stage 3 gathers each layer on all of them
            batch = {key: torch.tensor([value]) for key, value in row.items()}
            batch["attention_mask"] = torch.ones_like(batch["input_ids"])  # one row, which no pack's attention takes
            tokens = (batch["labels"][:, 1:] != -100).sum()
            found += torch.stack([summed_loss(seen.model, batch, seen.device).double(), tokens.to(found)])
    dist.all_reduce(found)
    return float(found[0] / found[1])


LAST_RECIPE: list[Seen] = []  # what the recipe left for the programs after it
KEPT = ("lengths", "elements", "supervised", "batches", "config")  # of it, in the file job["kept"]


def run(program: str, job: dict, turn: Callable[[], None] = lambda: None) -> dict:
    """Train once; what was seen of it on this rank. `job`: benchmarks/throughput_inputs.py, job_of. Programs in
    processes of their own give the batches on in the file job["kept"]."""
    torch.manual_seed(0)
    seen = Seen(job["device"], turn)
    supervised_positions.apply(False)  # what the recipe had of them before is no other program's
    attention.attend_by_row(False)
    if program in job:
        of_trainer(job, seen, program)
    if program == "recipe":
        LAST_RECIPE[:] = [seen]
        if "kept" in job:
            torch.save({name: getattr(seen, name) for name in KEPT}, job["kept"])
    if program not in job:
        model = load(job)
        seen.turn()
    if program not in job and "kept" in job:
        LAST_RECIPE[:] = [Seen(job["device"], **torch.load(job["kept"]))]
    (fed,) = LAST_RECIPE or [seen]
    if program.startswith("engine") and fed.config is not None:
        engine(job, seen, model, fed, program == "engine")
    elif program not in job:
        plain(job, seen, model, fed.batches, wrapped=program == "ddp")
    fed = seen if seen.lengths else fed
    found = {
        "step_seconds": [later - earlier for earlier, later in pairwise(seen.marks)],
        "tokens": [sum(lengths) for lengths in fed.lengths],
        "elements": fed.elements,
        "supervised": fed.supervised,
        "row_lengths": sorted(length for lengths in fed.lengths for length in lengths),
        "held_out_loss": held_out_loss(seen, json.loads(Path(job["held_out"]).read_text())),
    }
    if seen.trainer is not None:
        seen.trainer.model_wrapped = seen.trainer.model = None
    seen.model = None
    gc.collect()
    return found
