"""What a step of run_sft.py costs beside a bare DeepSpeed loop, line by line: python -m benchmarks.host_overhead

One pair of CPU processes. After every step of our run on recipes/tiny.yaml (1M parameters) a bare loop takes a step on
the same batch: deepspeed.initialize with the run's own DeepSpeed config, optimizer groups and loss, and no more than
forward, backward and step. A part is switched off in every other step of ours, or its calls are timed. Writes
benchmarks/results/host_overhead.json; about six minutes on two cores.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import json
import os
import statistics
import tempfile
import time
from pathlib import Path
from unittest import mock

import torch
import torch.distributed as dist
from accelerate.scheduler import AcceleratedScheduler
from deepspeed.utils import numa
from transformers import AutoModelForCausalLM, Trainer, TrainerCallback

from tests.helpers.group import Group
from zero_recipes.core import environment
from zero_recipes.libs.lm_head import score_supervised_positions_only

ROOT = Path(__file__).resolve().parents[1]
RESULT = ROOT / "benchmarks" / "results" / "host_overhead.json"
STAGES = (0, 2, 3)
STEPS, NOT_TIMED = 208, 8
OURS = ("StageMetricsCallback", "StopAtDivergence", "DeleteOverwritten", "AnswersBeforeTraining", "FreshAdamAtStage0")
BARE = {"bare, TRL's LM head": ("log_probs",), "bare, the model's own loss": None}
SUPERVISED = "supervised logits alone"
SWITCHES = ("ours", SUPERVISED, "token metrics as TRL", "our callbacks off", "NUMA nodes asked anew")


def main(steps: int = STEPS) -> None:
    group = Group(2)
    with tempfile.TemporaryDirectory() as folder:
        stages = {}
        for stage in STAGES:
            ranks = group.run("overhead_cases.host_overhead", stage=stage, steps=steps, folder=folder)
            stages[f"zero{stage}"] = summary(ranks)
            print(f"zero{stage}", json.dumps(stages[f"zero{stage}"], indent=1), flush=True)
    group.close()
    document = {
        "command": "python -m benchmarks.host_overhead",
        "recipe": "recipes/tiny.yaml",
        "steps": steps - NOT_TIMED,
        "stages": stages,
        "versions": environment.versions(),
        "hardware": environment.hardware("cpu"),
    }
    RESULT.write_text(json.dumps(document, indent=2) + "\n")


def summary(ranks: list[list]) -> dict:
    """Of the records of all ranks, [what, step, wall ms, main thread's CPU ms]: medians and spreads.

    A difference is the median over steps and ranks of what a step took more than the bare one on the same batch.
    """
    found: dict[str, dict[tuple[int, int], list[float]]] = {}
    for rank, records in enumerate(ranks):
        for what, step, *spent in records:
            found.setdefault(what, {})[rank, step] = spent
    table = {what: _figures(list(values.values())) for what, values in found.items()}
    fused, own = BARE
    over = {what: _over(found[what], found[fused]) for what in SWITCHES}
    ours = over["ours"]

    def less(a: dict, b: dict) -> dict:
        return {kind: round(a[kind] - b[kind], 2) for kind in a}

    off = less(ours, over["our callbacks off"])
    return {
        "ms_per_step": {what: table[what] for what in (*BARE, *SWITCHES)},
        "over_the_bare_loop": ours,
        "over_the_bare_loop_with_the_models_own_loss": _over(found["ours"], found[own]),
        "supervised_logits_only_over_the_bare_loop_with_the_models_own_loss": _over(found[SUPERVISED], found[own]),
        "by_switching": {
            "TRL's gathers and reads of token metrics in each micro batch": less(over["token metrics as TRL"], ours),
            "DeepSpeed's numactl for every bucket": less(over["NUMA nodes asked anew"], ours),
            "TRL's fused LM head, against the model's own loss": _over(found[fused], found[own]),
            "our callbacks": off,
        },
        "our_callbacks_percent_of_the_step": {kind: round(100 * off[kind] / table["ours"][kind], 2) for kind in off},
        "by_timing_calls": {what: table[what] for what in table if what not in (*BARE, *SWITCHES)},
    }


def _over(ours: dict, bare: dict) -> dict[str, float]:
    pairs = [(ours[at], bare[at]) for at in ours]
    return {
        kind: round(statistics.median(one[n] - other[n] for one, other in pairs), 2)
        for n, kind in enumerate(("wall_ms", "cpu_ms"))
    }


def _figures(values: list[list[float]]) -> dict:
    wall, cpu = ([each[n] for each in values] for n in (0, 1))
    tenths = statistics.quantiles(wall, n=10)
    return {
        "wall_ms": round(statistics.median(wall), 2),
        "wall_ms_tenths": [round(tenths[0], 2), round(tenths[-1], 2)],
        "cpu_ms": round(statistics.median(cpu), 2),
    }


# in the processes


def measure(stage: int, steps: int, folder: str) -> list[tuple[str, int, float, float]]:
    """One run of ours, a bare step after each of its steps. Returns the records that `summary` takes."""
    import run_sft
    from zero_recipes.training.trainer import RecipeTrainer

    argv = [str(ROOT / "recipes" / "tiny.yaml"), "--deepspeed", str(ROOT / "ds_configs" / f"zero{stage}.json")]
    argv += ["--output_dir", f"{folder}/zero{stage}", "--max_steps", str(steps), "--eval_strategy", "no"]
    argv += ["--sample_prompts", "null", "--save_model", "false", "--logging_steps", "1000"]
    timed, train = [], RecipeTrainer.train_to_the_end

    def interleaved(self):
        timed.append(Interleaved(self))
        self.add_callback(timed[0])
        with timed[0].timing():
            train(self)

    with mock.patch.object(RecipeTrainer, "train_to_the_end", interleaved):
        run_sft.train(run_sft.prepare(argv))
    return timed[0].records


class Interleaved(TrainerCallback):
    """The last callback: it ends a step of ours, takes the bare ones, and begins the next."""

    def __init__(self, trainer):
        self.trainer, self.step, self.batch = trainer, 0, None
        self.records: list[tuple[str, int, float, float]] = []
        self.calls: dict[str, list[float]] = {}
        self.callbacks, self.ask = trainer.callback_handler, numa.get_numa_cores

    def timing(self):
        """Time the calls of named parts while a step of ours is at work."""
        from zero_recipes.metrics.callback import StageMetricsCallback
        from zero_recipes.training.divergence import StopAtDivergence
        from zero_recipes.training.trainer import RecipeTrainer

        parts = [
            ("data loader and the count of the step's tokens", RecipeTrainer, "get_batch_samples"),
            ("of it transformers' gather of the count", Trainer, "_get_num_items_in_batch"),
            ("our count of a micro batch's tokens", StageMetricsCallback, "count_tokens"),
            ("of it our gather of losses and norms", StageMetricsCallback, "_bring_losses_together"),
            ("our callback at the end of a step, its gather included", StageMetricsCallback, "on_step_end"),
            ("our look for divergence", StopAtDivergence, "on_step_end"),
            ("FLOPs of a micro batch", RecipeTrainer, "floating_point_ops"),
            ("learning rate schedule", AcceleratedScheduler, "step"),
            ("gradient norm", RecipeTrainer, "_get_grad_norm"),
            ("log, evaluate, save", Trainer, "_maybe_log_save_evaluate"),
        ]
        stack = contextlib.ExitStack()
        for name, owner, method in parts:
            if hasattr(owner, method):
                stack.enter_context(mock.patch.object(owner, method, self._timed(name, getattr(owner, method))))
        stack.enter_context(mock.patch.object(self.trainer, "training_step", self._keeping(self.trainer.training_step)))
        return stack

    def _timed(self, name, method):
        @functools.wraps(method)
        def timed(*arguments, **keywords):
            wall, cpu = time.perf_counter(), time.thread_time()
            try:
                return method(*arguments, **keywords)
            finally:
                spent = self.calls.setdefault(name, [0.0, 0.0])
                spent[0] += 1e3 * (time.perf_counter() - wall)
                spent[1] += 1e3 * (time.thread_time() - cpu)

        return timed

    def _keeping(self, training_step):
        def kept(model, inputs, num_items_in_batch=None):
            self.batch = {name: inputs[name].clone() for name in ("input_ids", "attention_mask", "labels")}
            return training_step(model, inputs, num_items_in_batch)

        return kept

    def on_train_begin(self, *arguments, **keywords):
        self.bare = {name: BareLoop(self.trainer, outputs) for name, outputs in BARE.items()}
        self.open()

    def open(self) -> None:
        self.calls.clear()
        dist.barrier()
        self.began = time.perf_counter(), time.thread_time()

    def close(self, what: str) -> None:
        wall, cpu = 1e3 * (time.perf_counter() - self.began[0]), 1e3 * (time.thread_time() - self.began[1])
        if self.step >= NOT_TIMED:
            self.records.append((what, self.step, wall, cpu))
            if what == "ours":
                self.records += [(name, self.step, *spent) for name, spent in self.calls.items()]

    def on_step_end(self, *arguments, **keywords):
        self.close(SWITCHES[self.step % len(SWITCHES)])
        self._switch("ours")
        order = list(self.bare.items())
        for name, bare in order if self.step // len(SWITCHES) % 2 else reversed(order):
            self.open()
            bare.take_step(self.batch)
            self.close(name)
        self.step += 1
        self._switch(SWITCHES[self.step % len(SWITCHES)])
        self.open()

    def on_train_end(self, *arguments, **keywords):
        self._switch("ours")

    def _switch(self, to: str) -> None:
        score_supervised_positions_only(to == SUPERVISED)
        self.trainer.token_metrics = "micro_batch" if to == "token metrics as TRL" else "logging_steps"
        numa.get_numa_cores = self.ask.__wrapped__ if to == "NUMA nodes asked anew" else self.ask
        for callback in self.callbacks.callbacks:
            if type(callback).__name__ in OURS:
                for event in ("on_step_begin", "on_step_end"):
                    vars(callback).pop(event, None)
                    if to == "our callbacks off":
                        setattr(callback, event, lambda *_, **__: None)
        metrics = self.trainer.stage_metrics
        vars(metrics).pop("count_tokens", None)
        if to == "our callbacks off":
            metrics.count_tokens = lambda *_: None


class BareLoop:
    """deepspeed.initialize on the run's model and settings: forward, backward, step.

    `outputs`: those of TRL's fused LM head; None for the model's own loss. The tokens of the step are counted over all
    ranks, without which the loss would be another one.
    """

    def __init__(self, trainer, outputs: tuple[str, ...] | None):
        import deepspeed
        from trl.trainer.utils import add_fused_lm_head

        model = AutoModelForCausalLM.from_pretrained(trainer.model.config.name_or_path, dtype=torch.float32)
        if outputs:
            add_fused_lm_head(model, outputs=outputs)
        self.fused = bool(outputs)
        decays = set(trainer.get_decay_parameter_names(model))
        named = list(model.named_parameters())
        args = trainer.args
        groups = [
            {"params": [p for name, p in named if name in decays], "weight_decay": args.weight_decay},
            {"params": [p for name, p in named if name not in decays], "weight_decay": 0.0},
        ]
        optimizer = torch.optim.AdamW(groups, lr=args.learning_rate, fused=args.optim == "adamw_torch_fused")
        config = copy.deepcopy(trainer.model_wrapped.config)
        self.engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=config)
        self.engine.train()

    def take_step(self, batch: dict[str, torch.Tensor]) -> None:
        tokens = (batch["labels"][:, 1:] != -100).sum()
        dist.all_reduce(tokens)
        if self.fused:
            loss = -self.engine(**batch, use_cache=False, fused_lm_head=True).log_probs.sum() / tokens
        else:
            loss = self.engine(**batch, use_cache=False, num_items_in_batch=tokens).loss
        self.engine.backward(loss * dist.get_world_size())
        self.engine.step()


if __name__ == "__main__":
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    main()
