"""Tokens and model FLOPs of the steps that a run has taken, and MFU: their share of the card's peak."""

from __future__ import annotations

import torch

from zero_recipes.core.host import peak_flops_of
from zero_recipes.core.process import rank
from zero_recipes.distributed.group import gather_rows
from zero_recipes.libs.deepspeed import whole_shape
from zero_recipes.metrics.flops import ModelFlops, model_flops
from zero_recipes.metrics.probe import StepClock
from zero_recipes.metrics.schema import RunIdentity


class UsedFlops:
    """Of one run, on every rank. `peak`: dense FLOP/s of this run's card in its precision; None on CPUs and for a card
    that hardware.yaml has not."""

    def __init__(self, identity: RunIdentity):
        tf32 = identity.precision == "fp32" and torch.backends.cuda.matmul.fp32_precision == "tf32"
        self.peak = peak_flops_of(identity.device, "tf32" if tf32 else identity.precision)
        self.model: ModelFlops | None = None
        self.logged: torch.Tensor | int = 0  # what this rank had counted at the last log
        self.logged_steps = 0

    def count(self, model: torch.nn.Module) -> None:
        """Look at the model as it is trained, with its adapter. Where its config does not say how wide attention is,
        there are no FLOPs and no MFU, and a line in the log that says so."""
        try:
            self.model = model_flops(model, whole_shape)
        except (AttributeError, TypeError, ZeroDivisionError) as error:  # a config of the model's own making
            if rank() == 0:
                print(f"model FLOPs   not counted, no MFU: {error}", flush=True)

    def counted(self, inputs: dict[str, torch.Tensor], repeated: torch.Tensor | None) -> torch.Tensor:
        """All tokens of a micro batch, those without padding, those with a loss, then `squares`; on its device.

        Arguments: as of StageMetricsCallback.count_tokens.
        """
        ids = inputs["input_ids"]
        shared = "shift_labels" in inputs  # this process's part of each row (zero_recipes/distributed/ulysses.py)
        labels = inputs.get("labels", torch.full_like(ids, -100))
        supervised = inputs["shift_labels"] if shared else labels[..., 1:]
        first = torch.ones_like(ids, dtype=torch.bool) if repeated is None else ~repeated
        mask, positions = inputs.get("attention_mask"), inputs.get("position_ids")
        non_padding = first if mask is None else first & (mask != 0)
        if mask is None and positions is not None and not shared:
            # rows in one line; TRL's collator fills it up to pad_to_multiple_of with tokens at position 0, so that a
            # row of a single token at its very end is not counted either
            non_padding = non_padding & (positions.flip(-1).cumsum(-1) > 0).flip(-1)
        squares = self.squares(inputs, non_padding)
        return torch.stack([first.sum(), non_padding.sum(), (supervised != -100).sum(), *squares])

    def squares(self, inputs: dict[str, torch.Tensor], non_padding: torch.Tensor) -> list[torch.Tensor]:
        """metrics/flops.py `squares`, summed over the rows of a micro batch, for each window; on its device.

        `non_padding`: which places hold a token, of the shape of input_ids. Rows that stand in one line (packed or
        padding-free), or in several processes (Ulysses), are told apart by position_ids: the odd numbers up to a row's
        length add up to its square.
        """
        windows = () if self.model is None else tuple(self.model.attention)
        positions = inputs.get("position_ids")
        if positions is None:
            lengths = non_padding.sum(-1)
            seen = [lengths if window is None else lengths.clamp(max=window) for window in windows]
            return [(short * (2 * lengths - short)).sum() for short in seen]
        odd = (2 * positions + 1) * non_padding
        return [(odd if window is None else odd.clamp(max=2 * window)).sum() for window in windows]

    def of(self, counted: torch.Tensor | None) -> float:
        """FLOPs of what StageMetricsCallback has counted; 0 where the model's are not known."""
        if self.model is None or counted is None:
            return 0.0
        _, tokens, _, *squares = counted.tolist()
        return self.model.of_step(tokens, squares)

    def since_last_log(self, counted: torch.Tensor | None, steps: StepClock, world_size: int) -> dict[str, float]:
        """Tokens per second without padding, of all ranks, and MFU where the peak is known; for the progress line.

        Every rank calls it (one gather). `counted`: by this rank over the whole run.
        """
        seconds = sum(steps.seconds(self.logged_steps))
        if counted is None or not seconds:
            return {}
        everyone = gather_rows((counted - self.logged).reshape(1, -1)).sum(0)
        self.logged, self.logged_steps = counted, len(steps.steps)
        tokens = int(everyone[1])
        used = utilisation(self.of(everyone), tokens, seconds, world_size, self.peak)
        return {"tokens_per_second": tokens / seconds} | ({"mfu": used["mfu"]} if used.get("mfu") else {})


def utilisation(flops: float, tokens: int, seconds: float, ranks: int, peak: float | None) -> dict[str, float | None]:
    """The fields of Measurements. `flops`, `tokens` (without padding): of all ranks in `seconds`; `peak`: of one."""
    if not flops or not tokens or not seconds:
        return {}
    each = flops / seconds / ranks
    return {
        "model_flops_per_token": flops / tokens,
        "model_flops_per_second": each,
        "mfu": None if peak is None else each / peak,
    }
