"""The phases of a rehearsal, judged by what its launches leave."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import NamedTuple

from zero_recipes.checkpoint.save import read_manifest
from zero_recipes.checkpoint.saved_model import NotWhole
from zero_recipes.checks.schedule import schedule_findings, schedule_of
from zero_recipes.config.accelerate import launched_environment
from zero_recipes.config.read import parse_recipe
from zero_recipes.config.recipe import recipe_in_force
from zero_recipes.config.settings import Settings, steps_by_epochs
from zero_recipes.config.strategy import Strategy, resolve_strategy
from zero_recipes.core.findings import (
    Finding,
    Refusal,
    downgraded,
    first_line,
    ignored_codes,
    raise_errors,
    refusal,
)
from zero_recipes.core.units import percent
from zero_recipes.data.prepare import rows_at_hand
from zero_recipes.metrics.read_runs import metric_errors, read_samples
from zero_recipes.metrics.schema import Metrics
from zero_recipes.metrics.scores import load_metrics, metric_finding, metric_findings
from zero_recipes.model.meta import size_of
from zero_recipes.tools.rehearse import words as over
from zero_recipes.tools.rehearse.equality import EqualLaunch, judged_equal
from zero_recipes.tools.verify import verify

FIRST = "checkpoint-2"
LAST = "checkpoint-3"
APART = 0.05  # of losses on half as many ranks: sums in another order, other random numbers of dropout
RESUMED = ("resumed", "fewer")  # launches
EQUAL = "equal"  # the launch whose steps plain torch takes too
ALONE = (EQUAL, *RESUMED)  # launches that no other goes on from


@dataclass(frozen=True)
class Rehearsal:
    """What is launched, decided before the first launch."""

    recipe: Path
    settings: Settings  # of the real job
    replicas: int  # of the real job: processes with rows of their own
    words: list[str]  # overrides of every launch
    config_file: Path  # of accelerate
    ranks: int
    nccl: Path | None  # its library, for several ranks on one GPU
    shortens: bool = False  # rows, after the launch with the longest
    equal: EqualLaunch | None = None  # how the job is launched to be compared with plain torch
    why_not_equal: str | None = None  # in words, where it is not

    @property
    def launches(self) -> dict[str, list[str]]:
        """The overrides of each launch, in order."""
        settings = self.settings
        applies = {
            over.SHORTER: self.shortens,
            over.LONGEST_FIRST: not (settings.packing or settings.streams),
            over.CHECKPOINTS: self.why_without_resume is None,
            over.EVALUATES: settings.evaluates,
            over.KEEPS_BEST: settings.load_best_model_at_end,
        }
        launches = {}
        for name, parts in over.LAUNCHES.items():
            if self.why_left_out(name) is None:
                launches[name] = " ".join(part for part in parts if applies.get(part, True)).split()
        if self.equal is not None:
            launches[EQUAL] += self.equal.words
        return launches

    @property
    def why_without_resume(self) -> str | None:
        """Why the job cannot be resumed; None if it can."""
        if self.settings.sequence_parallel_size > 1:
            return "sequence_parallel_size: nothing resumes (ZR254)"
        if self.settings.save_only_model:
            return "save_only_model: nothing resumes"
        return None

    def why_left_out(self, launch: str) -> str | None:
        """Say why a launch is not made; None of one that is."""
        if launch == EQUAL:
            return self.why_not_equal
        if launch not in ("killed", *RESUMED):
            return None
        if self.why_without_resume is not None:
            return self.why_without_resume
        if launch == "fewer" and self.ranks == 1:
            return "one rank has no half"
        if launch == "fewer" and self.ranks_in(launch) == 1 and self.strategy.is_fsdp:
            return "FSDP2 needs two ranks (ZR316)"
        return None

    @cached_property
    def strategy(self) -> Strategy:
        """The strategy of the real job. Raises Refusal."""
        processes = self.replicas * self.settings.sequence_parallel_size
        return resolve_strategy(self.settings, launched_environment(self.config_file, processes), size_of)

    def ranks_in(self, launch: str) -> int:
        """Count the processes of a launch."""
        return self.ranks // 2 if launch == "fewer" else self.ranks


class Ran(NamedTuple):
    """What a launch has left."""

    folder: Path  # of the launch's name
    metrics: Metrics
    seconds: float  # of the whole launch

    @property
    def is_over(self) -> bool:
        """Whether it came to its end. Metrics of a killed run say that it is running."""
        return self.metrics.status == ("running" if self.folder.name == "killed" else "ok")


Runs = Mapping[str, Ran]  # by the launch's name


class Row(NamedTuple):
    """A phase in the table."""

    phase: str
    result: str  # ok, failed, left out, not reached
    seconds: float | None = None
    detail: str = ""
    finding: Finding | None = None


def table_of(rehearsal: Rehearsal, ran: Runs) -> list[Row]:
    """Judge each phase by what the launches have left."""
    rows = []
    for launch, phases in over.PHASES.items():
        is_reached = launch in ran
        breaks = None
        if is_reached and not ran[launch].is_over:
            breaks = breaks_in(phases, ran[launch].metrics)
        was_refused = breaks is not None and ran[launch].metrics.status == "refused"  # before its first phase
        for phase, key in phases.items():
            why = rehearsal.why_left_out(launch)
            if why is not None:
                rows.append(Row(phase, "left out", detail=why))
            elif not is_reached or (was_refused and phase != breaks):
                rows.append(Row(phase, "not reached"))
            else:
                rows.append(judged(phase, key, breaks, rehearsal, ran[launch], ran))
                is_reached = phase != breaks
    return rows


def breaks_in(phases: Mapping[str, str | None], metrics: Metrics) -> str:
    """The phase in which a launch failed."""
    failed = metrics.failure.phase if metrics.failure else None
    named = over.PHASE_OF_CODE.get(metrics.failure and metrics.failure.code)
    if named in phases:
        return named
    for phase, key in phases.items():
        if failed and key == failed:
            return phase
    return list(phases)[0 if failed in ("startup", "data", "model") else -1]


def judged(phase: str, key: str | None, breaks: str | None, rehearsal: Rehearsal, mine: Ran, ran: Runs) -> Row:
    """Judge a phase of a launch. `breaks`: the phase in which this launch failed."""
    metrics = mine.metrics
    seconds = mine.seconds if key == "launch" else (metrics.phase_seconds or {}).get(key)
    code = (metrics.failure and metrics.failure.code) or ""
    if metrics.status == "refused" and mine.folder.name in ALONE:  # the strategy, or the order of the rows
        reason = metrics.failure.reason if metrics.failure else None
        return Row(phase, "left out", seconds, ": ".join(filter(None, [code, reason])))
    if key == "eval" and not (seconds or breaks):
        return Row(phase, "left out", detail="not in the recipe")
    try:
        if phase == breaks:
            raise broken(phase, metrics.error or metrics.status, mine.folder)
        judge = None if breaks else JUDGES.get(phase)
        return Row(phase, "ok", seconds, judge(rehearsal, ran) if judge else "")
    except Refusal as ending:
        return Row(phase, "failed", seconds, code or ending.codes[0], ending.findings[0])


def broken(phase: str, error: str, folder: Path) -> Refusal:
    """Make the finding of a phase that failed."""
    return refusal("ZR865", phase=phase, error=error, log=folder / "log.txt")


# judges: each returns a detail for the table, and raises a Refusal


def sampled(rehearsal: Rehearsal, ran: Runs) -> str:
    """Check that each metric has a score for each answer, also for an empty one, which a small model seldom gives."""
    settings = rehearsal.settings
    rows = read_samples(ran["whole"].folder / "samples.jsonl")
    findings = []
    for name, (error, count) in metric_errors(rows).items():
        findings.append(metric_finding(name, error, f"{count} of {len(rows)} answers"))
    findings = findings or list(metric_findings(load_metrics(settings)))
    if "ZR177" not in ignored_codes(settings.ignore):
        raise_errors([replace(found, level="error") for found in findings])
    return ""


def verified(rehearsal: Rehearsal, ran: Runs) -> str:
    """Check the saved model as `zero-recipes verify --deep` does."""
    folder = ran["whole"].folder
    try:
        found = verify(folder, deep=True, trust_remote_code=rehearsal.settings.trust_remote_code)
    except NotWhole as error:
        raise broken("verify", first_line(error), folder) from error
    return f"{found['tensors']} tensors"


def scheduled(rehearsal: Rehearsal, _: Runs) -> str:
    """Check that the real job's learning rate reaches its peak, and arrives at its end with the last step."""
    settings = rehearsal.settings
    steps = settings.max_steps
    if steps <= 0:
        rows = rows_at_hand(settings, rehearsal.recipe)
        if isinstance(rows, str):
            return f"not judged: {rows}"
        steps = steps_by_epochs(rows.epoch, settings, rehearsal.replicas)
    findings = list(schedule_findings(settings, rehearsal.strategy, steps))
    raise_errors(downgraded(findings, ignored_codes(settings.ignore)))
    if schedule_of(settings, rehearsal.strategy, steps) is None:
        return "not judged: it has no peak of its own"
    return f"ends with step {steps:,}"


def equal_to_plain_torch(rehearsal: Rehearsal, ran: Runs) -> str:
    """Check that plain torch, which takes the same steps in one process, comes to the same."""
    out = ran[EQUAL].folder
    words = [*rehearsal.words, *rehearsal.launches[EQUAL], "--output_dir", str(out)]
    settings = parse_recipe(rehearsal.recipe, recipe_in_force(rehearsal.recipe), words).settings
    return judged_equal(out, settings, rehearsal.recipe, rehearsal.equal.without)


def resumed_alike(_: Rehearsal, ran: Runs) -> str:
    """Check that the killed and resumed run is the uninterrupted one, bit for bit."""
    one = outcome(ran["whole"])
    other = outcome(ran["resumed"])
    different = sorted(name for name in one.keys() | other.keys() if one.get(name) != other.get(name))
    if different:
        text = "; ".join(f"{name} {other.get(name)} instead of {one.get(name)}" for name in different)
        raise refusal("ZR866", different=text, folder=ran["resumed"].folder)
    return "equal bit for bit"


def outcome(ran: Ran) -> dict:
    """Losses, gradient norms, and the checksums of the last checkpoint's files with weights."""
    checksums = read_manifest(ran.folder / LAST)["checksums"]
    weights = {name: digits for name, digits in checksums.items() if name.endswith((".safetensors", ".distcp"))}
    return {"losses": ran.metrics.loss_history, "gradient norms": ran.metrics.grad_norm_history, **weights}


def resumed_on_fewer(_: Rehearsal, ran: Runs) -> str:
    """Check that the losses go on as those of twice as many ranks."""
    one = ran["whole"].metrics.losses
    other = ran["fewer"].metrics.losses
    apart = max(abs(other.get(step, 0.0) / loss - 1) for step, loss in one.items())
    if apart > APART:
        raise refusal("ZR867", losses=list(other.values()), whole=list(one.values()))
    return f"losses {percent(apart)} apart"


JUDGES = {
    "plain torch": equal_to_plain_torch,
    "samples": sampled,
    "verify": verified,
    "schedule": scheduled,
    "resume": resumed_alike,
    "resume on half": resumed_on_fewer,
}
