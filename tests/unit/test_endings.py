"""How a run ends is in its metrics.json: divergence, the first cause of a crash, a run that fails before it trains."""

import json
import math
from pathlib import Path
from tempfile import TemporaryDirectory
from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as draw

from tests.helpers.report_runs import on_cpu
from tests.helpers.sample_cases import strict
from zero_recipes.core.findings import Finding, Refusal
from zero_recipes.metrics.callback import UNFINISHED
from zero_recipes.metrics.failure import RankFailure, cause_of, failed_row, keep_failure, signal_in
from zero_recipes.metrics.schema import FILE, SCHEMA, Metrics
from zero_recipes.training.divergence import StopAtDivergence
from zero_recipes.training.output import RecipeRun

NUMBERS = draw.sampled_from([1.0, 2.5, 1e30, math.nan, math.inf, -math.inf])


def run_through(limit, steps, precision) -> tuple[int, StopAtDivergence]:
    """(steps until the run is ended, the callback); `steps`: loss and gradient norm of each."""
    metrics = SimpleNamespace(identity=SimpleNamespace(precision=precision), last_step=(1.0, 1.0))
    callback = StopAtDivergence(metrics, limit)
    for number, metrics.last_step in enumerate(steps, start=1):
        control = SimpleNamespace(should_training_stop=False, should_save=True, should_evaluate=True)
        callback.on_step_end(SimpleNamespace(process_index=0), SimpleNamespace(global_step=number), control)
        if control.should_training_stop:
            assert not control.should_save and not control.should_evaluate
            return number, callback
    return len(steps), callback


@given(
    draw.integers(1, 4),
    draw.sampled_from(["bf16", "fp16", "fp32"]),
    draw.lists(draw.tuples(NUMBERS, NUMBERS), min_size=1, max_size=12),
)
def test_as_many_steps_in_a_row_as_the_key_says_end_a_run(limit, precision, steps):
    """In fp16 a gradient norm alone is the loss scale's affair."""
    bad = [not math.isfinite(loss) or (precision != "fp16" and not math.isfinite(norm)) for loss, norm in steps]
    ends = [end for end in range(limit, len(steps) + 1) if all(bad[end - limit : end])]
    ended, callback = run_through(limit, steps, precision)
    assert ended == (ends[0] if ends else len(steps)) and (callback.in_a_row >= limit) == bool(ends)


# the first cause

NOISE = [
    "RuntimeError: [../third_party/gloo/gloo/transport/tcp/pair.cc:534] Connection closed by peer [127.0.0.1]:29",
    "DistBackendError: NCCL error in: ProcessGroupNCCL.cpp",
    "DistNetworkError: failed to recv",
    "RuntimeError: rank 0, which prepares the data of this machine, failed: x",
]


def failure(rank: int, error: str, time: float, status: str = "failed") -> RankFailure:
    return RankFailure(rank=rank, status=status, phase="train", error=error, largest_memory={}, time=time)


def unfinished() -> Metrics:
    return Metrics(schema=SCHEMA, status="failed", error=UNFINISHED, name="n", strategy="zero2")


@given(draw.permutations(range(4)), draw.lists(draw.sampled_from(NOISE), min_size=2, max_size=2), draw.booleans())
def test_the_first_cause_is_named_whoever_writes_first(order, noise, out_of_memory):
    """The noise of the others may be written before it (clocks differ); every order of writing ends the same."""
    cause = failure(0, "ValueError: a row is broken", 100.0)
    if out_of_memory:
        cause = failure(0, "OutOfMemoryError: CUDA out of memory", 105.0, "oom")
    everyone = [cause, failure(1, "ValueError: it broke later", 101.0)]
    everyone += [failure(2 + number, error, 90.0) for number, error in enumerate(noise)]
    losses = [2.0, 1.0, math.nan]
    with TemporaryDirectory() as name:
        folder = Path(name)
        for number in order:
            each = everyone[number]
            (folder / f"failure.rank{each.rank}.json").write_text(each.model_dump_json())
            keep_failure(folder, each, losses if number % 2 else [], unfinished(), resumes=False)
        assert cause_of(folder) == cause
        row = strict((folder / FILE).read_text())
    assert (row["status"], row["error"], row["failure"]["rank"]) == (cause.status, cause.error, cause.rank)
    assert row["loss_history"] == [2.0, 1.0, None]


@pytest.mark.parametrize(
    ("exit_code", "table", "name"),
    [
        (1, "  exitcode  : -9 (pid: 1)\n  exitcode  : -15 (pid: 2)", "SIGKILL"),
        (1, "  exitcode  : 1 (pid: 1)\n  exitcode  : -15 (pid: 2)", None),
        (1, "exitcode: -500", None),
        (-15, "", "SIGTERM"),
    ],
)
def test_the_signal_that_ended_a_worker(tmp_path, exit_code, table, name):
    assert signal_in(exit_code, table) == name
    row = failed_row(tmp_path, "zero2", exit_code, f"{table}\n")
    assert row.status == "failed" and row.failure.signal == name


def run_in(folder, checkpoint=None) -> SimpleNamespace:
    settings = SimpleNamespace(model_name_or_path="m")
    recipe = SimpleNamespace(name="r.yaml", sha256="ab", settings=settings)
    strategy = SimpleNamespace(name="zero2", zero_stage=2, world_size=2)
    return SimpleNamespace(
        output_dir=folder, checkpoint=checkpoint, recipe=recipe, strategy=strategy, device="cpu", precision="bf16"
    )


@pytest.mark.parametrize("resumes", [False, True])
@pytest.mark.parametrize("before", [None, "oom", "ok"])
def test_a_run_that_is_refused_or_breaks_while_loading(tmp_path, before, resumes):
    """Refused: the folder is as it was. Broken: it says why; a finished run's numbers stay, for its files do."""
    folder = tmp_path / "new" / "out"
    if before is not None:
        folder.mkdir(parents=True)
        (folder / FILE).write_text(json.dumps(on_cpu("zero2", status=before)))
    text = (folder / FILE).read_text() if before else None
    run = run_in(folder, "checkpoint-1" if resumes else None)
    with pytest.raises(Refusal), RecipeRun.hold(run):
        raise Refusal([Finding("ZR000", "what", "why", "fix")])
    assert (folder / FILE).read_text() == text if before else not folder.exists()
    with pytest.raises(MemoryError), RecipeRun.hold(run):
        raise MemoryError("no room")
    left = strict((folder / FILE).read_text())
    if before == "ok" and not resumes:
        assert left == json.loads(text)
    else:
        assert (left["status"], left["error"]) == ("oom", "MemoryError: no room")
    assert strict((folder / "failure.rank0.json").read_text())["status"] == "oom"


def test_what_fails_once_the_run_is_finished_leaves_its_metrics(tmp_path):
    (tmp_path / FILE).write_text(json.dumps(on_cpu("zero2")))
    with pytest.raises(OSError, match="upload"), RecipeRun.hold(run_in(tmp_path)) as output:
        output.metrics = SimpleNamespace(identity=None, write=lambda: None)
        output.finish()
        raise OSError("upload")
    assert (tmp_path / FILE).read_text() == json.dumps(on_cpu("zero2"))
    assert (tmp_path / "README.md").is_file()
