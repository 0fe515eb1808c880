"""What is read off optimizer steps: model states, seconds, tokens, FLOPs."""

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from pydantic import Field

from zero_recipes.config.strategy import Strategy
from zero_recipes.core.gpus import peak_flops_of
from zero_recipes.core.process import say
from zero_recipes.engine.deepspeed import base_optimizer, state_bytes, whole_shape
from zero_recipes.engine.nvme import swapped_bytes
from zero_recipes.metrics import schema
from zero_recipes.metrics.flops import ModelFlops, model_flops

MOST_WARMUP_STEPS = 5


class StateProbe:
    """Measures the largest model states within one optimizer step, in bytes by part.

    Gradients are largest while the backward pass ends (stage 1 holds them whole only until then) or inside the
    optimizer (DeepSpeed makes fp32 copies there).

    `optimizer`: as accelerate has wrapped it; `record` is called as each phase ends.
    """

    def __init__(self, model: torch.nn.Module, optimizer: Any, strategy: Strategy, record: Callable[[str], None]):
        self.model = model
        self.record = record
        self.strategy = strategy
        self.parameters = list(model.parameters())  # within a step FSDP2 puts gathered ones in their place
        self.states_of = optimizer.optimizer if strategy.is_deepspeed else base_optimizer(optimizer)
        self.offload = (strategy.ds.offload_optimizer is not None, strategy.ds.offload_param is not None)
        self.largest: dict[str, int] = {}
        self.hooks: list = []

    def attach(self) -> None:
        """Look at the states in each phase from now on."""
        for p in self.parameters:
            if p.requires_grad:
                self.hooks.append(p.register_post_accumulate_grad_hook(self._after_gradient))
        self.hooks.append(self.model.register_forward_hook(self._after_forward))
        self.hooks.append(base_optimizer(self.states_of).register_step_pre_hook(self._before_optimizer))

    def detach(self) -> dict[str, int]:
        """Look no more. Returns the largest bytes of each part within the step."""
        self.read()
        self.record("step")
        for hook in self.hooks:
            hook.remove()
        self.hooks = []
        return self.largest

    def read(self) -> dict[str, int]:
        """Look at the states now. Returns the largest bytes of each part so far."""
        now = state_bytes(self.model, self.parameters, self.states_of, *self.offload)
        now["offloaded_disk"] = swapped_bytes(self.strategy)
        self.largest = {part: max(self.largest.get(part, 0), size) for part, size in now.items()}
        return self.largest

    def _after_forward(self, *_arguments) -> None:
        self.record("forward")
        self.read()  # gradients of the micro steps before this one: FSDP2 keeps them whole until the last

    def _before_optimizer(self, *_arguments) -> None:
        self.read()  # returns None: a torch optimizer takes a hook's value for new arguments

    def _after_gradient(self, _parameter: torch.Tensor) -> None:
        self.record("backward")
        self.read()


class StepClock:
    """Times optimizer steps with their data loading, without logs, evaluation and checkpoints between them.

    By events on CUDA: no step waits for the device.
    """

    def __init__(self, device: str) -> None:
        self.on_cuda = device == "cuda"
        self.start_mark = None
        self.steps: list[tuple] = []

    def open(self) -> None:
        """Begin a step. Called again, it moves the beginning of the next step."""
        self.start_mark = self._mark()

    def close(self) -> None:
        """End a step, and begin the next."""
        self.steps.append((self.start_mark, self._mark()))
        self.open()

    def seconds(self, first: int = 0) -> list[float]:
        """The seconds of each closed step, from the `first` on."""
        if self.on_cuda:
            torch.cuda.synchronize()
            return [start.elapsed_time(end) / 1000 for start, end in self.steps[first:]]
        return [end - start for start, end in self.steps[first:]]

    def _mark(self):
        if not self.on_cuda:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event


def steps_not_timed(total: int) -> int:
    """How many of a run's first steps are not timed.

    The first step compiles and allocates, the probe of the memory slows down the second.
    """
    return min(total, max(2, min(MOST_WARMUP_STEPS, total // 2)))


class UsedFlops:
    """Counts tokens and the model FLOPs that a run's steps use, and gives speed and MFU."""

    def __init__(self, identity: schema.RunIdentity):
        precision = identity.precision
        if precision == "fp32" and torch.backends.cuda.matmul.fp32_precision == "tf32":
            precision = "tf32"
        self.peak = peak_flops_of(identity.device, precision)  # dense; None of CPUs and unknown cards
        self.model: ModelFlops | None = None
        self.logged: torch.Tensor | int = 0  # what this rank had counted at the last log
        self.logged_steps = 0

    def count(self, model: torch.nn.Module) -> None:
        """Learn what the model's FLOPs are. `model`: with its adapter.

        Where its config does not say how wide attention is, nothing is counted, and a line says so.
        """
        try:
            self.model = model_flops(model, whole_shape)
        except (AttributeError, TypeError, ZeroDivisionError) as error:  # a config of the model's own making
            say(f"model FLOPs   not counted, no MFU: {error}")

    def counted(self, inputs: dict[str, torch.Tensor], repeated: torch.Tensor | None) -> torch.Tensor:
        """What is counted of a micro batch, of shape (3 + windows,), on its device.

        All tokens, those without padding, those with a loss, then `squares`.
        `repeated`: the places of rows that fill up the last batch, which do not count.
        """
        ids = inputs["input_ids"]
        if "shift_labels" in inputs:  # this process's part of each row (Ulysses)
            supervised = inputs["shift_labels"]
        else:
            supervised = inputs.get("labels", torch.full_like(ids, -100))[..., 1:]
        counts = torch.ones_like(ids, dtype=torch.bool)
        if repeated is not None:
            counts = ~repeated
        non_padding = counts & _holds_token(inputs)
        squares = self.squares(inputs, non_padding)
        return torch.stack([counts.sum(), non_padding.sum(), (supervised != -100).sum(), *squares])

    def squares(self, inputs: dict[str, torch.Tensor], non_padding: torch.Tensor) -> list[torch.Tensor]:
        """Attention's squares (metrics/flops.py `squares`) over the rows of a micro batch, by window; on its device.

        Rows joined in one line (packed or padding-free), or in several processes (Ulysses), are told apart by
        position_ids: n odd numbers add up to n².
        """
        if self.model is None:
            return []
        positions = inputs.get("position_ids")
        if positions is None:
            lengths = non_padding.sum(-1)
        else:
            odd = (2 * positions + 1) * non_padding
        found = []
        for window in self.model.attention:
            if positions is None:
                seen = lengths if window is None else lengths.clamp(max=window)
                summands = seen * (2 * lengths - seen)
            else:
                summands = odd if window is None else odd.clamp(max=2 * window)
            found.append(summands.sum())
        return found

    def of(self, counted: torch.Tensor | None) -> float:
        """The FLOPs of counted tokens; 0 where the model's are not known."""
        if self.model is None or counted is None:
            return 0.0
        _, tokens, _, *squares = counted.tolist()
        return self.model.of_step(tokens, squares)

    def since_last_log(self, counted: torch.Tensor, steps: StepClock, world_size: int) -> dict[str, float]:
        """Speed and MFU since the last log. `counted`: by all ranks since then."""
        seconds = sum(steps.seconds(self.logged_steps))
        tokens = int(counted[1])
        self.logged_steps = len(steps.steps)
        rates = {}
        if seconds:
            rates["tokens_per_second"] = round(tokens / seconds)  # a float is printed as 1.15e+04
        mfu = utilisation(self.of(counted), tokens, seconds, world_size, self.peak).get("mfu")
        if mfu:
            rates["mfu"] = mfu
        return rates


def _holds_token(inputs: dict[str, torch.Tensor]) -> torch.Tensor:
    """Which places of a micro batch are no padding, of the shape of input_ids."""
    mask = inputs.get("attention_mask")
    if mask is not None:
        return mask != 0
    positions = inputs.get("position_ids")
    if positions is None or "shift_labels" in inputs:
        return torch.ones_like(inputs["input_ids"], dtype=torch.bool)
    # rows in one line; TRL's collator fills it up to pad_to_multiple_of with tokens at position 0,
    # so that a row of a single token at its very end is not counted either
    return (positions.flip(-1).cumsum(-1) > 0).flip(-1)


def utilisation(flops: float, tokens: int, seconds: float, ranks: int, peak: float | None) -> dict[str, float | None]:
    """FLOPs for each token, FLOP/s of each rank and MFU; empty where one of the first three arguments is 0.

    `flops`, `tokens` (without padding): of all ranks in `seconds`; `peak`: FLOP/s of one, None where unknown.
    """
    if not flops or not tokens or not seconds:
        return {}
    each = flops / seconds / ranks
    return {
        "model_flops_per_token": flops / tokens,
        "model_flops_per_second": each,
        "mfu": None if peak is None else each / peak,
    }


# all ranks together


@dataclass(frozen=True)
class RankFigures:
    """What one rank has measured of its steps, for `summarise`."""

    peak: schema.PeakMemory
    states: schema.ModelStateBytes
    losses: list[float] | None  # one per optimizer step of this process; None where they are not known
    tokens: list[int | None]  # over all its steps: all, non-padding, supervised (None where they are not known)
    timed_tokens: list[int | None]  # over the timed ones
    timed_flops: float = 0.0  # the model's, over the timed steps; 0 where they are not counted


class History(schema.Part):
    """What a checkpoint carries of a run's measurements; all of it may be missing."""

    summary: schema.Measurements = schema.Measurements()
    grad_norm_history: list[schema.Number] = Field([])
    eval_history: list[schema.Evaluation] = Field([])
    first_step: int | None = None  # of the loss history
    resumed_at: list[int] = Field([])
    exact_master_weights: bool | None = None


def summarise(
    ranks: Sequence[RankFigures], seconds: Sequence[float], warmup: int, peak_flops: float | None = None, **more: Any
) -> schema.Measurements:
    """Measurements of all ranks over at least one step, as one.

    `seconds`: of each step; `warmup`: how many are not timed. Where none is timed, times and rates are null.
    `peak_flops`: FLOP/s of a card; `more`: fields of Measurements that rank 0 alone knows.
    """
    timed = seconds[warmup:]
    rates: dict[str, Any] = {"tokens_per_second": None}
    if timed:
        rates = _rates(ranks, sum(timed), peak_flops)
    return schema.Measurements(
        peak_memory_bytes=[rank.peak for rank in ranks],
        model_state_bytes=[rank.states for rank in ranks],
        tokens=_sums([rank.tokens for rank in ranks]),
        step_seconds=schema.StepSeconds(
            median=statistics.median(timed) if timed else None,
            p90=percentile_90(timed),
            warmup_steps_excluded=warmup,
        ),
        loss_history=_mean_losses([rank.losses for rank in ranks]),
        **rates,
        **more,
    )


def _rates(ranks: Sequence[RankFigures], seconds: float, peak_flops: float | None) -> dict[str, Any]:
    tokens = _sums([rank.timed_tokens for rank in ranks])
    per_second = {kind: None if count is None else count / seconds for kind, count in tokens}
    flops = sum(rank.timed_flops for rank in ranks)
    used = utilisation(flops, tokens.non_padding, seconds, len(ranks), peak_flops)
    return {"tokens_per_second": schema.Tokens(**per_second), **used}


def _mean_losses(losses: Sequence[list[float] | None]) -> list[float] | None:
    """Of each step over the ranks; None where one of them does not know its own."""
    if None in losses:
        return None
    return [sum(step) / len(step) for step in zip(*losses, strict=True)]


def percentile_90(seconds: Sequence[float]) -> float | None:
    """The seconds that nine of ten steps do not exceed; None without steps.

    "inclusive": the slowest is the 100th percentile.
    """
    if len(seconds) < 2:
        return max(seconds, default=None)
    return statistics.quantiles(seconds, n=10, method="inclusive")[-1]


def continued(earlier: schema.Measurements, now: schema.Measurements) -> schema.Measurements:
    """Measurements of a resumed run: losses and tokens of all of it, everything else of the last process."""
    if earlier.tokens is None:
        return now
    more = {
        "loss_history": [*(earlier.loss_history or []), *now.loss_history],
        "tokens": _sums([list(dict(each.tokens).values()) for each in (earlier, now)]),
    }
    if now.skipped_steps is not None:
        more["skipped_steps"] = (earlier.skipped_steps or 0) + now.skipped_steps
    return now.model_copy(update=more)


def _sums(counts: Sequence[Sequence[int | None]]) -> schema.Tokens:
    """Of each kind; None where one of them is not known."""
    sums = {}
    for kind, *column in zip(schema.Tokens.model_fields, *counts, strict=True):
        sums[kind] = None if None in column else sum(column)
    return schema.Tokens(**sums)
