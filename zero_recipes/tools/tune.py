"""`zero-recipes tune`: find the fastest settings on this machine, and write RECIPE.tuned.yaml.

The plan's formulas name the candidates that fit.
Each trains for a few steps.
The faster half goes on with twice as many, until two are left or the time is over.
"""

import argparse
import math
import shlex
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import yaml
from rich.console import Console

from zero_recipes.config.accelerate import FOLDER, launched_environment
from zero_recipes.config.command_line import words_without_tokens
from zero_recipes.config.recipe import Recipe
from zero_recipes.config.resolved_recipe import without_tokens
from zero_recipes.config.row_lengths import RowLengths
from zero_recipes.config.settings import derive_accumulation
from zero_recipes.config.strategy import launched_ds_config
from zero_recipes.core.files import FILES, as_typed, at_hand, write_text
from zero_recipes.core.findings import first_line, refusal
from zero_recipes.core.folder_lock import held
from zero_recipes.core.host import Host
from zero_recipes.core.measured_on import hardware_facts
from zero_recipes.core.tables import Column, plain, print_columns, terminal, working
from zero_recipes.core.units import count, percent, significant
from zero_recipes.data.prepare import rows_at_hand
from zero_recipes.engine.warnings import quieten
from zero_recipes.metrics.schema import Metrics
from zero_recipes.tools import sweep
from zero_recipes.tools.plan.job import Job, job_of, model_config, read_recipe
from zero_recipes.tools.plan.predict import Predictor, fit_of

STRATEGIES = ("ddp", "zero1", "zero2", "zero3")
OFFLOADED = ("zero2_offload", "zero3_offload")  # where none of the others fits
# of a candidate's first run, at least: 12 short steps vary by more than 10 %
FIRST_STEPS = 12
FIRST_SECONDS = 6.0
SAMPLED = 1000  # rows, for the length of packs
# how far its mean loss may be from the first candidate's
APART = 0.01  # the same rows in a step
PACKED_APART = 0.1  # other rows, as many tokens
RECOMPUTES = "activation_checkpointing"
# keys of a run that is measured and nothing else, as they stand on its command line
ONLY_MEASURED = {
    "early_stopping_patience": "null",
    "lr_scheduler_kwargs": "null",
    "lr_scheduler_type": "constant",  # a few steps have no schedule
    "eval_strategy": "no",
    "load_best_model_at_end": False,
    "overwrite": True,
    "push_to_hub": False,
    "report_to": "none",
    "sample_prompts": 0,
    "skip_plan": True,
}


def tune(arguments: argparse.Namespace) -> int:
    """Measure candidates, and write the fastest as a recipe. Returns the exit code.

    Raises Refusal before the first run.
    """
    quieten()
    path = arguments.recipe
    overrides = arguments.overrides
    console = terminal()
    new = Path(path.name if FILES in path.resolve().parents else path).with_suffix(".tuned.yaml")
    with working(f"reading {path}, its model and its rows"):
        import torch

        recipe = read_recipe(path, overrides)
        sweep.refuse_own_ds_config(path, recipe.settings)
        if new.exists() and not recipe.settings.overwrite:
            raise refusal("ZR863", new=new)
        gpus = 0 if recipe.settings.use_cpu else torch.cuda.device_count()
        processes = arguments.num_processes or gpus or 2
        capacity = Host().memory()[0] // processes
        if gpus:
            capacity = torch.cuda.get_device_properties(0).total_memory
        field = candidates(recipe, processes, capacity, "gpu" if gpus else "cpu", arguments.strategies)
    folder = arguments.output_dir or Path("output") / f"{path.stem}-tune"
    with held(folder, "tune"):
        sweep.refuse_results(path, recipe.settings, folder, field)
        rows = _measure(arguments, recipe, field, folder, processes, console)
    print_columns([Column("Candidate", lambda row: described(row.run))], MEASURED, rows, console)
    if len(rows) < min(2, len(field)):
        console.print("too short to compare; nothing is written")
        return 1
    best = rows[0]
    if best.status != "ok":
        console.print(f"no candidate finished; see the logs in {folder}")
        return 1
    launch = ["zero-recipes", "train", new, "--config_file", as_typed(best.run.config), "--num_processes", processes]
    command = shlex.join([str(word) for word in (*launch, *words_without_tokens(overrides))])
    write_text(new, tuned(recipe, best.run, [command, *header(rows, processes)]))
    console.print(plain(f"written: {new}\n{command}"), soft_wrap=True)
    return 0


def _measure(
    arguments: argparse.Namespace,
    recipe: Recipe,
    field: Sequence[sweep.SweepRun],
    folder: Path,
    processes: int,
    console: Console,
) -> list["Row"]:
    """The candidates' runs in `folder`, the fastest first."""
    path = arguments.recipe
    overrides = arguments.overrides
    console.print(f"{len(field)} candidates fit; {arguments.minutes:g} minutes on {processes} processes")

    def measure(run: sweep.SweepRun, steps: int, place: str) -> Row:
        started = time.monotonic()
        label = f"[{place}, {steps} steps] {described(run)}"
        values = ONLY_MEASURED | {"max_steps": steps}
        words = [*overrides, *(f"--{key}={value}" for key, value in values.items())]
        metrics = sweep.launched(path, run, folder / run.name, label, processes, words, console)
        row = Row(run, steps, metrics, time.monotonic() - started)
        console.print(plain(f"{label}: {row.summary}"), soft_wrap=True)
        return row

    return halved(field, measure, 60 * arguments.minutes, console)


# what is tried


def candidates(
    recipe: Recipe, processes: int, capacity: int, device: str, strategies: Sequence[str] | None
) -> list[sweep.SweepRun]:
    """List what fits by the plan's formulas. Raises Refusal if nothing fits.

    First the recipe as it is, then packs, then what differs from the recipe in one way, then in two.
    """
    predict = Predictor(quick=True)
    config = model_config(recipe.settings)
    splits = batches(recipe, processes)
    for names in [strategies] if strategies else [STRATEGIES, OFFLOADED]:
        found = []  # (place, run)
        for name in names:
            if processes == 1 and name not in ("ddp", *OFFLOADED):
                continue
            file = at_hand(FOLDER / f"{name}.yaml")
            ds_config, _ = launched_ds_config(launched_environment(file, processes), recipe.settings.precision)
            job = job_of(recipe, config, name, ds_config, processes, device=device)
            for rank, batch in enumerate(splits):
                for recomputes in _fitting(job.changed(**batch), ds_config, predict, capacity):
                    values = dict(batch)
                    if recomputes != job.recomputes:
                        values[RECOMPUTES] = recomputes
                    is_recipe = not values and name == names[0]
                    place = -1 if is_recipe else rank + recomputes
                    found.append((place, sweep.SweepRun(name, file, values)))
        if found:
            found.sort(key=lambda one: one[0])
            return [run for _, run in found]
    raise refusal("ZR862", recipe=recipe.path, tried=", ".join(strategies or [*STRATEGIES, *OFFLOADED]))


def _fitting(job: Job, ds_config: dict[str, Any] | None, predict: Predictor, capacity: int) -> list[bool]:
    """Whether to recompute activations: both if the recipe does, else only if nothing fits without."""
    fitting = []
    for recomputes in (False, True):
        prediction = predict(job.changed(**{RECOMPUTES: recomputes}).under(job.strategy, ds_config))
        if fit_of(prediction, capacity).runs:
            fitting.append(recomputes)
    return fitting if job.recomputes else fitting[:1]


def batches(recipe: Recipe, processes: int) -> list[dict[str, Any]]:
    """List keys that split the same global batch: packs, the recipe's own ({}), other micro batches."""
    settings = recipe.settings
    micro = settings.per_device_train_batch_size
    replicas = processes // settings.sequence_parallel_size
    derived = derive_accumulation(settings, recipe.explicit, replicas)
    total = micro * (settings.gradient_accumulation_steps if derived is None else derived)

    def split(size: int, passes: int) -> dict[str, Any]:
        keys = {"per_device_train_batch_size": size, "gradient_accumulation_steps": passes}
        if derived is not None:
            keys["global_batch_size"] = size * passes * replicas
        return keys

    others = [split(size, total // size) for size in range(total, 0, -1) if total % size == 0 and size != micro]
    packs = []
    for passes, length in pack_lengths(recipe, total):
        packs.append(split(1, passes) | {"packing": True, "max_length": length})
    return [*packs[:1], {}, *others[:1], *packs[1:], *others[1:]]


def pack_lengths(recipe: Recipe, rows: int) -> Iterator[tuple[int, int]]:
    """Find the shortest packs that hold `rows` on average, as TRL packs.

    Gives (packs of a process in a step, tokens of each).

    Empty if a row is cut, or the recipe packs already or cannot.
    """
    from datasets import Dataset
    from trl import pack_dataset

    settings = recipe.settings
    if settings.joined_by or settings.sequence_parallel_size > 1:
        return
    found = rows_at_hand(settings, recipe.path)
    if not isinstance(found, RowLengths) or max(found.lengths, default=math.inf) >= (settings.max_length or math.inf):
        return
    data = Dataset.from_dict({"input_ids": [[0] * int(length) for length in found.lengths[:SAMPLED]]})
    for passes in (1, 2, 4):
        length = math.ceil(rows * found.mean / passes / 8) * 8
        if length < max(found.lengths):
            continue
        while len(data) * passes < rows * len(pack_dataset(data, length, "bfd")):
            length += 8
        yield passes, length


def described(run: sweep.SweepRun) -> str:
    """Name a run in words, e.g. "zero2, packs of 400, 1 x 2"."""
    values = run.values
    words = [run.strategy]
    if not values:
        words.append("unchanged")
    if "packing" in values:
        words.append(f"packs of {values['max_length']}")
    if "per_device_train_batch_size" in values:
        words.append(f"{values['per_device_train_batch_size']} x {values['gradient_accumulation_steps']}")
    if RECOMPUTES in values:
        words.append(f"activation checkpointing {'on' if values[RECOMPUTES] else 'off'}")
    return ", ".join(words)


# how it is measured


@dataclass(frozen=True)
class Row:
    """A candidate's last measurement."""

    run: sweep.SweepRun
    steps: int
    metrics: Metrics
    seconds: float  # of the whole launch
    apart: float | None = None  # its mean loss from that of the first candidate

    @property
    def speed(self) -> float:
        """Non-padding tokens a second in a median step; 0 if not measured."""
        found = self.metrics
        if found.status != "ok" or not found.step_seconds or not found.step_seconds.median:
            return 0.0
        return found.tokens.non_padding / len(found.loss_history) / found.step_seconds.median

    @property
    def status(self) -> str:
        """The run's status, or that its loss is another than the first candidate's."""
        limit = PACKED_APART if "packing" in self.run.values else APART
        if self.apart is None or self.apart <= limit:
            return self.metrics.status
        return "loss differs"

    @property
    def summary(self) -> str:
        """Speed and steps in a line, or why there is no speed."""
        if not self.speed:
            return f"{self.metrics.status}: {first_line(self.metrics.error or 'not timed')}"
        return f"{count(self.speed)} tokens/s over {self.steps} steps"


MEASURED = [
    Column("Status", lambda row: row.status),
    Column("Steps", lambda row: str(row.steps)),
    Column("Step", lambda row: f"{significant(row.metrics.step_seconds.median)} s" if row.speed else ""),
    Column("Tokens/s", lambda row: count(row.speed or None)),
    Column("Loss diff", lambda row: percent(row.apart)),
]


def halved(field: Sequence[sweep.SweepRun], measure: Callable[..., Row], seconds: float, console: Console) -> list[Row]:
    """Measure the candidates in rounds. Returns all rows, the fastest first, later rounds before earlier ones.

    `measure`: takes a candidate, steps and its place ("1/9").
    The first round may take half of the time: its steps are fewer where all would not fit.
    Another one begins only if it will end in time.
    """
    ends = time.monotonic() + seconds
    steps = FIRST_STEPS
    first = measure(field[0], steps, f"1/{len(field)}")
    ran = [first]
    if first.speed and len(field) * (first.seconds + FIRST_SECONDS) < seconds / 2:
        steps = max(steps, math.ceil(FIRST_SECONDS / first.metrics.step_seconds.median))
    if steps > FIRST_STEPS:
        ran = []  # it runs again, with as many steps as the others
    until = ends - seconds / 2
    last: dict[str, Row] = {}  # by the candidate's name
    while True:
        for number in range(len(ran), len(field)):
            if ran and time.monotonic() + max(row.seconds for row in ran) > until:
                minutes = math.ceil(2 * len(field) * max(row.seconds for row in ran) / 60)
                console.print(f"{len(field) - number} candidates were skipped; all take about --minutes {minutes}")
                break
            ran.append(measure(field[number], steps, f"{number + 1}/{len(field)}"))
        for row in compared(ran):
            name = row.run.name
            if name in last and row.status == "ok" and last[name].speed > row.speed:
                # the fastest round counts: other load on the machine only slows one down
                row = replace(row, metrics=last[name].metrics)
            last[name] = row
        ordered = sorted(last.values(), key=lambda row: (row.status == "ok", row.steps, row.speed), reverse=True)
        good = [row for row in ordered if row.status == "ok" and row.steps == steps]
        going_on = good[: math.ceil(len(good) / 2)]
        needed = sum(row.seconds + steps * row.metrics.step_seconds.median for row in going_on)
        if len(good) < 3 or time.monotonic() + needed > ends:
            return ordered
        field = [row.run for row in going_on]
        steps *= 2
        ran = []
        until = math.inf


def compared(rows: Sequence[Row]) -> list[Row]:
    """Measure how far each mean loss is `apart` from the first that ran, unpacked if one is."""
    timed = [row for row in rows if row.speed]
    if not timed:
        return list(rows)
    first = min(timed, key=lambda row: "packing" in row.run.values)
    baseline = statistics.fmean(first.metrics.loss_history)
    with_distance = []
    for row in rows:
        if row.speed:
            row = replace(row, apart=abs(statistics.fmean(row.metrics.loss_history) / baseline - 1))
        with_distance.append(row)
    return with_distance


# what is left of it


def header(rows: Sequence[Row], processes: int) -> list[str]:
    """Write the comment above a tuned recipe: the machine, and what was measured."""
    facts = hardware_facts("cpu")
    machine = f"{facts['cpu']}, {facts['cpu_cores']} cores"
    card = rows[0].metrics.device
    if card != "cpu":
        machine += f", {card}"
    lines = [f"  {described(row.run)}: {row.summary[:100]}" for row in rows]
    return [f"Measured by zero-recipes tune, {processes} processes, {machine}; this recipe is the fastest:", *lines]


def tuned(recipe: Recipe, run: sweep.SweepRun, header: Sequence[str]) -> str:
    """Write the recipe's keys with what the run changed."""
    keys = without_tokens(yaml.safe_load(recipe.path.read_text()) | dict(run.values))
    comments = [f"# {line}\n" for line in header]
    return "".join(comments) + yaml.safe_dump(keys, sort_keys=False, allow_unicode=True)
