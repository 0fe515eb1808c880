"""What a model's card says of a run's measurements, as texts. card.md.j2 only places them."""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from zero_recipes.core import units
from zero_recipes.metrics.read_runs import SampleRow, mean_scores, question, short
from zero_recipes.metrics.schema import Metrics, PredictedMetrics

SHOWN_SAMPLES = 5


class Number(NamedTuple):
    """A number of the run, as it was measured and as it was planned; "" where it is not known."""

    what: str
    measured: str
    planned: str = ""


def method_of(run: Metrics, is_adapter: bool) -> str:
    """How the model was trained, in brackets; "" where a part of the weights was."""
    if is_adapter:
        return " (LoRA; this repository holds only the adapter)"
    return " (all weights)" if run.trainable_parameters == run.parameters else ""


def facts_of(run: Metrics, adapter: Mapping[str, Any]) -> list[tuple[str, str]]:
    """Name adapter, parameters, strategy and steps: (what, text). `adapter`: its configuration, empty without one."""
    facts = []
    if adapter:
        trained = f"{run.trainable_parameters:,} trainable parameters"
        facts.append(("LoRA", f"rank {adapter['r']}, alpha {adapter['lora_alpha']}; {trained}"))
    parameters = f"{run.parameters:,}" if run.parameters else ""
    if not adapter and run.trainable_parameters and run.trainable_parameters != run.parameters:
        parameters += f", {run.trainable_parameters:,} of them trained"
    facts.append(("Parameters", f"{parameters}, computed in {run.precision}"))
    machine = f"{run.strategy} on {run.world_size} x {run.device}"
    processor = (run.hardware or {}).get("cpu")
    if run.device == "cpu" and processor:
        machine += f" ({processor})"
    facts.append(("Strategy", machine))
    steps = str(len(run.loss_history)) if run.loss_history else ""
    if run.tokens and run.tokens.non_padding:
        steps += f", {run.tokens.non_padding:,} tokens, {run.tokens.supervised or 0:,} of them supervised"
    facts.append(("Steps", steps))
    return facts


def numbers_of(run: Metrics) -> list[Number]:
    """Name what was measured or planned, of the rank that needs most."""
    plan = run.predicted or PredictedMetrics()
    states = run.fullest_rank
    sent = run.communication_bytes_per_step
    seconds = run.step_seconds and run.step_seconds.median
    numbers = [
        Number("Model states per process", units.size((states and states.total) or None), _size(plan.state_bytes)),
        _peak(run, plan),
        Number("Communication per step and process", units.size(sum(sent.values())) if sent else ""),
        Number("Tokens per second, all processes", units.count(run.speed)),
        Number("Seconds per step, median", units.significant(seconds) if seconds else ""),
        Number("Model FLOPs utilization", units.percent(run.mfu)),
    ]
    return [number for number in numbers if number.measured or number.planned]


def _peak(run: Metrics, plan: PredictedMetrics) -> Number:
    if run.device == "cpu":
        return Number("Peak memory per process (RSS)", units.size(run.peak("rss")))
    measured = units.size(run.peak("allocated"))
    return Number("Peak memory per GPU, allocated", measured, _size(plan.peak_memory_bytes))


def _size(number_of_bytes: int | None) -> str:
    return units.size(number_of_bytes or None)


def losses_of(run: Metrics) -> list[str]:
    """Say the first and the last loss, and that on held-out rows."""
    lines = []
    if run.losses:
        steps = list(run.losses)
        first = steps[0]
        last = steps[-1]
        begins = f"{units.fixed(run.losses[first], 4)} at step {first}"
        ends = f"{units.fixed(run.losses[last], 4)} at step {last}"
        lines.append(f"Training loss: {begins}, {ends}.")
    if run.eval_history:
        newest = run.eval_history[-1]
        lines.append(f"Loss on held-out rows: {units.fixed(newest.loss, 4)} after step {newest.step}.")
    return lines


def samples_of(samples: Sequence[SampleRow]) -> list[tuple[str, str, str]]:
    """Shorten the first samples: (prompt, answer before, answer after)."""
    rows = []
    for sample in samples[:SHOWN_SAMPLES]:
        rows.append((short(question(sample.prompt)), short(sample.before), short(sample.after)))
    return rows


def scores_of(samples: Sequence[SampleRow]) -> list[tuple[str, str, str, int]]:
    """Average the scores of all samples: (score, mean before, mean after, rows)."""
    rows = []
    for name, (before, after, count) in mean_scores(samples).items():
        rows.append((name, units.fixed(before, 3), units.fixed(after, 3), count))
    return rows
