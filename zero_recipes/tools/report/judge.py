"""What the measured rows say about the common claims. Each function below answers one question of texts.yaml.

It takes the rows of the comparison and returns (verdict, what was measured). A question that these rows cannot answer
gets the verdict "cannot tell" and the reason.
"""

import math
from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Literal, NamedTuple

from zero_recipes.core import units
from zero_recipes.metrics.read_runs import MeasuredRun, mean_scores
from zero_recipes.tools.report import read
from zero_recipes.tools.report.read import texts

Verdict = Literal["yes", "no", "cannot tell"]
Answer = tuple[Verdict, str]

EQUAL_MEMORY = 1e-3  # padding to whole partitions may add a few bytes to a stage
EQUAL_SPEED = 0.05  # less is noise
LOSS_FP32 = 1e-5
LOSS_16_BIT = 2e-2  # one step's rounding; tests hold short runs of the stages to 1e-3, and to 1e-5 in fp32
SAME_RUN = ("model", "parameters", "trainable_parameters", "world_size", "device", "precision", "micro_batch_size",
            "gradient_accumulation_steps", "max_length")  # fmt: skip
LOWER_IS_BETTER = {"reference_loss"}
JUDGED_SCORES = ("exact_match", "token_f1", "reference_loss")
ON_CPU = "They ran on CPU processes, which says little about GPUs."


class Judgement(NamedTuple):
    """One question about a comparison and its answer."""

    question: str
    verdict: Verdict
    measured: str
    claimed: str
    right: str


def judge_runs(runs: Sequence[MeasuredRun]) -> list[Judgement]:
    """All judgements on these runs, in the order in which a reader asks; three of them need compared rows."""
    compared = read.comparison(runs)
    judges = {"alike": _alike, "staircase": _staircase, "losses": _losses_equal}
    answers = {name: judge(compared) for name, judge in judges.items()} if compared else {}
    answers["answers"] = _answers(runs)
    wording = texts()["judgements"]
    return [Judgement(verdict=answer[0], measured=answer[1], **wording[name]) for name, answer in answers.items()]


def bottom_line(runs: Sequence[MeasuredRun]) -> str:
    """Which run to take, which where memory is short and at what cost, whether losses agree, and who did not finish."""
    compared, found = read.comparison(runs) or runs, []
    rows = read.table_rows(compared)
    timed = [row for row in rows if row["status"] == "ok" and row["tokens_per_second"]]
    best = max((row["tokens_per_second"] for row in timed), default=0)
    tied = [row for row in timed if row["tokens_per_second"] >= (1 - EQUAL_SPEED) * best]
    chosen = min(tied, key=lambda row: row["state_bytes"] or math.inf, default=None)  # of equal ones the simplest
    if chosen:
        speed = f"{units.count(chosen['tokens_per_second'])} tokens/s"
        why = "it fits and is the fastest"
        if tied[1:]:
            others = " and ".join(row["label"] for row in tied if row is not chosen)
            why = f"it is as fast as {others} within 5 %, and none of them needs less memory"
        take = f"Take {chosen['label']} ({speed}): {why}." if timed[1:] else f"{chosen['label']} reached {speed}."
        found.append(f"{take} {ON_CPU}" if chosen["device"] == "cpu" else take)
    least = min((row for row in timed if row["state_bytes"]), key=lambda row: row["state_bytes"], default=None)
    if least and chosen["state_bytes"] and least["state_bytes"] < chosen["state_bytes"]:
        saved, slower = (1 - least[key] / chosen[key] for key in ("state_bytes", "tokens_per_second"))
        states = f"{units.size(least['state_bytes'])} of model states per process, {100 * saved:.0f} % less"
        found.append(f"If memory is short, take {least['label']}: {states}, {100 * slower:.0f} % slower.")
    for claim, (verdict, why) in [("Losses agree", _losses_equal(compared)), ("Answers improved", _answers(runs))]:
        if verdict != "cannot tell":
            found.append(f"{claim}: {verdict}. {why.split('. ')[0].removesuffix('.')}.")
    ended = ", ".join(f"{row['label']} ({row['status']})" for row in rows if row["status"] != "ok")
    return " ".join([*found, *([f"Not finished: {ended}."] if ended else [])])


def sampled_run(runs: Sequence[MeasuredRun]) -> MeasuredRun | None:
    """The run whose answers are shown: a full run where there is one, otherwise the last that has samples."""
    with_samples = [run for run in runs if run.samples]
    return (read.single_runs(with_samples) or with_samples or [None])[-1]


def _alike(runs: Sequence[MeasuredRun]) -> Answer:
    """A comparison needs equal conditions; what a failed row does not know cannot differ."""
    if len(runs) < 2:
        return "cannot tell", "There is only one row."
    seen = {key: {getattr(run, key) for run in runs} - {None} for key in SAME_RUN}
    # the same data in the same order makes the same number of tokens, padding included
    seen["tokens trained on"] = {run.tokens.all for run in runs if run.status == "ok" and run.tokens}
    written = lambda value: f"{value:,.0f}" if isinstance(value, (int, float)) else str(value)  # noqa: E731
    differing = {key: sorted(map(written, values)) for key, values in seen.items() if len(values) > 1}
    listed = "; ".join(f"{key} ({', '.join(values)})" for key, values in differing.items())
    measured = f"The rows differ in {listed}." if differing else f"{len(runs)} rows with the same settings."
    return _yes(not differing), f"{measured} Each ran once."


def _staircase(runs: Sequence[MeasuredRun]) -> Answer:
    finished = {run.strategy: run for run in runs if run.status == "ok" and run.fullest_rank}
    stages = [finished.get("zero0") or finished.get("ddp")]  # without zero0, ddp stands for it
    stages += [finished.get(name) for name in ("zero1", "zero2", "zero3")]
    totals = {run.label: run.fullest_rank.total for run in stages if run}
    if len(totals) < 2:
        return "cannot tell", "Fewer than two stages were measured."
    measured = f"Model states of the fullest rank: {_listed(totals, units.size)}."
    rises = [(a, b) for a, b in pairwise(totals) if totals[b] > totals[a] * (1 + EQUAL_MEMORY)]
    for lower, upper in rises:
        measured += f" {upper} holds more than {lower}."
    textbooks = {run.label: read.textbook(run) for run in stages if run}
    shares = {label: totals[label] / size for label, size in textbooks.items() if size}
    if shares:
        measured += f" Measured over textbook: {_listed(shares, '{:.3f}'.format)}."
    return _yes(not rises), measured


def _losses_equal(runs: Sequence[MeasuredRun]) -> Answer:
    trained = [run for run in runs if run.status == "ok" and run.loss_history]
    if len(trained) < 2:
        return "cannot tell", "Fewer than two strategies have losses."
    losses = {run.label: run.losses.items() for run in trained}
    broken = {label: next((s for s, loss in found if not math.isfinite(loss)), None) for label, found in losses.items()}
    if broken := {label: step for label, step in broken.items() if step is not None}:
        return "no", f"The loss is not finite: {_listed(broken, 'from step {}'.format)}."
    steps = _common_steps(trained)
    if not steps:
        return "cannot tell", "No step is in the histories of all strategies."
    sixteen_bit = any(run.precision != "fp32" for run in trained)
    holds, measured = _within(trained, LOSS_16_BIT if sixteen_bit else LOSS_FP32)
    if rounded := [run.label for run in trained if run.exact_master_weights is False]:
        measured += f" Master weights of {', '.join(rounded)} began rounded to 16 bits."
    if any(set(run.losses) != set(steps) for run in trained):
        measured += f" Only steps {steps[0]} to {steps[-1]} are compared; some strategies have other steps, too."
    return _yes(holds), measured


def _common_steps(runs: Sequence[MeasuredRun]) -> list[int]:
    return sorted(set.intersection(*(set(run.losses) for run in runs)))


def _within(runs: Sequence[MeasuredRun], limit: float) -> tuple[bool, str]:
    """Whether the losses of all runs agree at each step that all have, by their largest relative difference."""
    losses = {run.label: run.losses for run in runs}
    worst, steps = (0.0, 0, "", ""), _common_steps(runs)
    for step in steps:
        low, high = (choose(losses, key=lambda name: losses[name][step]) for choose in (min, max))
        apart = losses[high][step] - losses[low][step]
        if apart > 0:
            gap = apart / max(abs(losses[low][step]), abs(losses[high][step]))
            worst = max(worst, (gap, step, low, high), key=lambda entry: entry[0])
    gap, step, low, high = worst
    if gap == 0:
        return True, f"Equal to the last bit over {len(steps)} steps."
    where = f"at step {step} between {low} and {high}"
    return gap <= limit, f"The largest gap is {gap:.2g} of the loss, {where} (limit {limit:g})."


def _answers(runs: Sequence[MeasuredRun]) -> Answer:
    """yes only where no score is worse, no where none is better."""
    run = sampled_run(runs)
    answered = [sample for sample in run.samples if None not in (sample.before, sample.after)] if run else []
    if not answered:
        return "cannot tell", "No run has answers from before and after training."
    means = mean_scores(answered)
    listed = "; ".join(f"{name} {before:.3f} to {after:.3f}" for name, (before, after, _) in means.items())
    measured = f"{run.label}: mean {listed or 'scores missing'}."
    signs = {name: -1 if name in LOWER_IS_BETTER else 1 for name in JUDGED_SCORES if name in means}
    gains = [sign * (means[name][1] - means[name][0]) for name, sign in signs.items()]
    if not gains or (min(gains) < 0 < max(gains)):
        return "cannot tell", measured
    return _yes(max(gains) > 0), measured


def _yes(holds: bool) -> Verdict:
    return "yes" if holds else "no"


def _listed(values: Mapping[str, float], written) -> str:
    return ", ".join(f"{label} {written(value)}" for label, value in values.items())
