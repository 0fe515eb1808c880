"""The questions that the report answers, from what runs recorded."""

import math
from collections.abc import Mapping, Sequence
from typing import Literal, NamedTuple

from zero_recipes.core import units, zero_paper
from zero_recipes.core.tables import Row
from zero_recipes.metrics.read_runs import MeasuredRun
from zero_recipes.tools.report import read
from zero_recipes.tools.report.read import Planned, Runs

Verdict = Literal["yes", "no", "cannot tell"]
Answer = tuple[Verdict, str]  # with what was measured, or why these runs cannot tell

EQUAL_SPEED = 0.05  # less is noise
LOSS_FP32 = 1e-5
LOSS_16_BIT = 2e-2  # one step's rounding; tests hold short runs of the stages to 1e-3, and to 1e-5 in fp32


# Fields of metrics.json in which compared runs do not differ.
SAME_RUN = (
    "model",
    "parameters",
    "trainable_parameters",
    "world_size",
    "device",
    "precision",
    "micro_batch_size",
    "gradient_accumulation_steps",
    "max_length",
)


class Judgement(NamedTuple):
    """A question about the compared runs, with its answer and what people think."""

    question: str
    verdict: Verdict
    measured: str
    claimed: str
    right: str


def judge_runs(runs: Runs) -> list[Judgement]:
    """Answer both questions about the compared runs; none without such runs."""
    compared = read.comparison(runs)
    if not compared:
        return []
    is_alike, differences = _alike(compared)
    is_equal, gaps = _losses_equal(compared)
    return [
        Judgement(
            question="Were all strategies run under the same conditions?",
            verdict=is_alike,
            measured=differences,
            claimed="Readers of such tables usually assume that only the stage differs.",
            right="Rows are comparable only if model, precision, ranks, batch size, sequence length, data and device "
            "are the same.",
        ),
        Judgement(
            question="Do all strategies have the same loss at every step?",
            verdict=is_equal,
            measured=gaps,
            claimed="The loss curves are identical, because ZeRO changes where values are stored, not what is "
            "computed.",
            right="The order of additions differs, so losses agree to about 1e-6 in fp32, and less closely in 16-bit "
            "precision. DeepSpeed by itself copies its master weights from 16-bit weights, which loses the first "
            "small updates; runs of this program start them from the loaded values, or say that they could not. "
            "DeepSpeed also accumulates and reduces gradients in 16 bits, unless the ds_config sets "
            '"communication_data_type": "fp32" and "data_types": {"grad_accum_dtype": "fp32"} (stages 1 to 3). FSDP2 '
            "uses 16 bits for both, DDP uses fp32 for both.",
        ),
    ]


def bottom_line(runs: Runs, plan: Planned | None = None) -> list[str]:
    """Say what it comes to: a recommendation, whether losses agree, unexpected volumes, and what did not finish.

    `plan`: of the same job on GPUs.
    """
    compared = read.comparison(runs) or runs
    rows = read.table_rows(compared)
    texts = _recommendation(rows, plan)
    verdict, measured = _losses_equal(compared)
    if verdict != "cannot tell":
        why = measured.split(". ")[0].removesuffix(".")
        texts.append(f"Losses agree: {verdict}. {why}.")
    texts += _volumes(rows)
    unfinished = [f"{row['label']} ({row['status']})" for row in rows if row["status"] != "ok"]
    if unfinished:
        texts.append(f"Not finished: {', '.join(unfinished)}.")
    return texts


def _recommendation(rows: Sequence[Row], plan: Planned | None) -> list[str]:
    """The fastest run; of those that are as fast the one with the smallest model states.

    CPUs say nothing about a GPU's speed: of runs there it is what the plan takes, else the smallest model states.
    """
    timed = [row for row in rows if row["status"] == "ok" and row["tokens_per_second"]]
    if not timed:
        return []
    timed.sort(key=lambda row: row["state_bytes"] or math.inf)
    if timed[0]["device"] == "cpu":
        on_cpu = "These runs on CPUs say nothing about the speed of GPUs"
        if plan is not None:
            return [f"Take {plan.strategy}, by zero-recipes plan: {plan.in_words.rstrip('.')}. {on_cpu}."]
        smallest = f"{timed[0]['label']} for the least memory: {units.size(timed[0]['state_bytes'])} of model states"
        count = timed[0]["world_size"]
        return [f"Take {smallest}. {on_cpu}: zero-recipes plan RECIPE.yaml --gpus {count} compares that."]
    fastest = max(row["tokens_per_second"] for row in timed)
    chosen, *others = (row for row in timed if row["tokens_per_second"] >= (1 - EQUAL_SPEED) * fastest)
    speed = f"{units.count(chosen['tokens_per_second'])} tokens/s"
    if len(timed) == 1:
        return [f"{chosen['label']} reached {speed}."]
    why = "it fits and is the fastest"
    if others:
        named = " and ".join(row["label"] for row in others)
        why = f"it is as fast as {named} within 5 %, and none of them needs less memory"
    return [f"Take {chosen['label']} ({speed}): {why}."]


def _volumes(rows: Sequence[Row]) -> list[str]:
    """Volumes that a paper's formula does not give."""
    unlike = []
    for row in rows:
        sent = units.fixed(row["communication_in_phi"], 2)
        paper = units.fixed(row["paper_in_phi"], 2)
        # ZeRO++'s paper counts what crosses between nodes
        if sent and paper not in ("", sent) and row["strategy"] not in zero_paper.PLUS_PLUS:
            formula = paper if unlike else f"by the ZeRO paper's formula {paper}"
            unlike.append(f"{row['label']} {sent} ({formula})")
    if not unlike:
        return []
    return [f"Sent in a step, in sizes of the weights: {', '.join(unlike)}. The libraries are built so."]


def sampled_run(runs: Runs) -> MeasuredRun | None:
    """The run whose answers are shown: the last that has samples, a full run if there is one."""
    with_samples = [run for run in runs if run.samples]
    chosen = read.single_runs(with_samples) or with_samples
    return chosen[-1] if chosen else None


def _alike(runs: Runs) -> Answer:
    """What a failed row does not know cannot differ."""
    if len(runs) < 2:
        return "cannot tell", "There is only one row."
    conditions = {}
    for key in SAME_RUN:
        conditions[key] = {getattr(run, key) for run in runs}
    # the same data in the same order makes the same number of tokens, padding included
    conditions["tokens trained on"] = {run.tokens.all for run in runs if run.status == "ok" and run.tokens}
    differing = []
    for key, values in conditions.items():
        known = sorted(map(_written, values - {None}))
        if len(known) > 1:
            differing.append(f"{key} ({', '.join(known)})")
    measured = f"{len(runs)} rows with the same settings."
    if differing:
        measured = f"The rows differ in {'; '.join(differing)}."
    return "no" if differing else "yes", f"{measured} Each ran once."


def _written(value: float | str) -> str:
    return value if isinstance(value, str) else f"{value:,.0f}"


def _losses_equal(runs: Runs) -> Answer:
    trained = [run for run in runs if run.status == "ok" and run.loss_history]
    if len(trained) < 2:
        return "cannot tell", "Fewer than two strategies have losses."
    losses = {run.label: run.losses for run in trained}
    broken = []
    for label, history in losses.items():
        bad = [step for step, loss in history.items() if not math.isfinite(loss)]
        if bad:
            broken.append(f"{label} from step {bad[0]}")
    if broken:
        return "no", f"The loss is not finite: {', '.join(broken)}."
    steps = sorted(set.intersection(*map(set, losses.values())))
    if not steps:
        return "cannot tell", "No step is in the histories of all strategies."
    limit = LOSS_FP32
    rounded = []
    for run in trained:
        if run.precision != "fp32":
            limit = LOSS_16_BIT
        if run.exact_master_weights is False:
            rounded.append(run.label)
    measured = f"Equal to the last bit over {len(steps)} steps."
    gap, where = _largest_gap(losses, steps)
    if gap:
        measured = f"The largest gap is {gap:.2g} of the loss, {where} (limit {limit:g})."
    if rounded:
        measured += f" Master weights of {', '.join(rounded)} began rounded to 16 bits."
    if max(map(len, losses.values())) > len(steps):
        measured += f" Only steps {steps[0]} to {steps[-1]} are compared; some strategies have other steps, too."
    return "yes" if gap <= limit else "no", measured


def _largest_gap(losses: Mapping[str, Mapping[int, float]], steps: Sequence[int]) -> tuple[float, str]:
    """(gap at one step, relative to the larger loss; where it is)."""
    largest = 0.0
    where = ""
    for step in steps:
        at_step = {label: history[step] for label, history in losses.items()}
        low = min(at_step, key=at_step.get)
        high = max(at_step, key=at_step.get)
        larger = max(abs(at_step[low]), abs(at_step[high])) or 1
        gap = (at_step[high] - at_step[low]) / larger
        if gap > largest:
            largest = gap
            where = f"at step {step} between {low} and {high}"
    return largest, where
