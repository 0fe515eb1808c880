"""The model of metrics.json: what is written is read again, all ranks are one row, and how a run ended is in it."""

import errno
import io
import json
import math
import os
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as draw
from torch import distributed
from torch.distributed.checkpoint import CheckpointException
from transformers import TrainerControl, TrainerState

from tests.helpers.ending_cases import strict
from tests.helpers.report_runs import PARAMETERS, on_cpu
from tests.helpers.tiny import ROOT
from zero_recipes.checkpoint.manager import NotSaved, not_saved
from zero_recipes.checkpoint.save import begin_checkpoint
from zero_recipes.core import run_end
from zero_recipes.core.findings import Finding, Refusal, finding
from zero_recipes.core.process import PhaseClock
from zero_recipes.core.run_end import REFUSAL_FILE, UNFINISHED, PeerFailed, print_ending
from zero_recipes.engine.errors import is_echo
from zero_recipes.engine.faults.failed_shards import failures_raised
from zero_recipes.metrics import schema
from zero_recipes.metrics.failure import (
    REFUSAL,
    RankFailure,
    cause_of,
    failed_row,
    keep_failure,
    not_begun,
    signal_in,
    write_failure,
)
from zero_recipes.metrics.probe import RankFigures, continued, percentile_90, steps_not_timed, summarise
from zero_recipes.metrics.schema import FILE
from zero_recipes.training.divergence import Diverged, StopAtDivergence, StopWithoutProgress
from zero_recipes.training.session import Session

OK_ROW = on_cpu("zero1")


def row(**changes) -> schema.Metrics:
    return schema.Metrics.model_validate(OK_ROW | changes)


def test_an_unknown_key_is_ignored_and_another_schema_is_not(tmp_path):
    path = tmp_path / "metrics.json"
    path.write_text(json.dumps(OK_ROW | {"of_another_version": 1, "phase_seconds": {"train": 2.0, "logging": 1.0}}))
    assert schema.Metrics.read(path).phase_seconds["train"] == 2.0
    path.write_text(json.dumps(OK_ROW | {"schema": 3}))
    with pytest.raises(schema.ContractError, match=r"metrics\.json: schema: Input should be 1 or 2"):
        schema.Metrics.read(path)


def test_a_run_of_schema_1_that_has_not_finished_is_running():
    """It had failed with a certain error."""
    for error, wanted in (
        (UNFINISHED, ("running", None)),
        (f"{UNFINISHED}: the model is not saved", ("running", "the model is not saved")),
        ("ValueError: a row", ("failed", "ValueError: a row")),
    ):
        read = schema.Metrics.model_validate(OK_ROW | {"schema": 1, "status": "failed", "error": error})
        assert (read.status, read.error) == wanted


def test_numbers_that_are_not_finite_are_null_in_the_file_and_nan_again(tmp_path):
    evaluations = [{"step": 1, "loss": math.nan}]
    broken = row(loss_history=[2.0, math.nan, math.inf], grad_norm_history=[math.inf], eval_history=evaluations)
    broken.write(tmp_path / "metrics.json")
    content = strict((tmp_path / "metrics.json").read_text())
    assert (content["loss_history"], content["grad_norm_history"]) == ([2.0, None, None], [None])
    assert content["eval_history"] == [{"step": 1, "loss": None}]
    again = schema.Metrics.read(tmp_path / "metrics.json")
    assert [math.isfinite(loss) for loss in again.loss_history] == [True, False, False]
    assert math.isnan(again.grad_norm_history[0]) and math.isnan(again.eval_history[0].loss)


def figures(step: int, **changes) -> RankFigures:
    """Of one of two ranks."""
    figures = RankFigures(
        peak=schema.PeakMemory(allocated=None, reserved=None, rss=100 * step),
        states=schema.ModelStateBytes(params=step, grads=0, optimizer=0, offloaded_host=0, offloaded_disk=0),
        losses=[1.0 * step, 2.0 * step, 3.0 * step],
        tokens=[30, 20, 10],
        timed_tokens=[20, 10, 5],
    )
    return replace(figures, **changes)


def test_the_90th_percentile_is_not_the_slowest_of_ten():
    assert percentile_90([float(step) for step in range(10, 0, -1)]) == pytest.approx(9.1)
    assert percentile_90([2.0]) == 2.0 and percentile_90([]) is None


def test_ranks_are_brought_together():
    found = summarise([figures(1), figures(3)], [9.0, 1.0, 3.0], 1)
    assert [peak.rss for peak in found.peak_memory_bytes] == [100, 300]
    assert [states.params for states in found.model_state_bytes] == [1, 3]
    assert found.tokens == schema.Tokens(all=60, non_padding=40, supervised=20)
    assert found.tokens_per_second == schema.Tokens(all=10.0, non_padding=5.0, supervised=2.5)
    assert found.step_seconds == schema.StepSeconds(median=2.0, p90=2.8, warmup_steps_excluded=1)
    assert found.loss_history == [2.0, 4.0, 6.0]
    unknown = [20, 10, None]  # what a rank does not know, nobody does
    found = summarise([figures(1), figures(3, losses=None, tokens=unknown, timed_tokens=unknown)], [1.0, 1.0], 0)
    assert found.loss_history is found.tokens.supervised is found.tokens_per_second.supervised is None
    assert found.tokens.all == 50


def test_mfu_is_of_all_ranks_tokens_however_unevenly_they_lie(tmp_path):
    ranks = [figures(1, timed_flops=7e9), figures(3, timed_flops=1e9)]
    found = summarise(ranks, [9.0, 1.0, 3.0], 1, 1e10)
    assert (found.model_flops_per_token, found.model_flops_per_second) == (8e9 / 20, 8e9 / 4 / 2)
    assert found.mfu == pytest.approx(0.1)
    unknown = summarise(ranks, [9.0, 1.0, 3.0], 1)
    assert unknown.mfu is None and unknown.model_flops_per_second == found.model_flops_per_second
    kept = {"tokens_per_second", "step_seconds", "model_flops_per_token", "model_flops_per_second", "mfu"}
    row(**unknown.model_dump(include=kept)).write(tmp_path / "metrics.json")
    assert schema.Metrics.read(tmp_path / "metrics.json").mfu is None, "a row of a CPU is whole"


def test_the_step_that_is_looked_into_is_never_a_timed_one():
    """It is the second, or the only one. Of a few steps half are timed, of many all but five."""
    for total in range(200):
        untimed = steps_not_timed(total)
        assert min(total // 2, 5) <= untimed <= total and (total == 0 or min(1, total - 1) < untimed), total
        assert untimed <= max(2, min(total // 2, 5)), total


def test_a_resumed_run_has_losses_and_tokens_of_the_whole_and_the_rest_of_the_last_process():
    earlier = summarise([figures(1)], [1.0, 1.0, 1.0], 0, skipped_steps=1)
    now = summarise([figures(2)], [4.0, 4.0, 4.0], 0, skipped_steps=2)
    found = continued(earlier, now)
    assert found.loss_history == [1.0, 2.0, 3.0, 2.0, 4.0, 6.0]
    assert found.tokens == schema.Tokens(all=60, non_padding=40, supervised=20)
    assert (found.step_seconds.median, found.peak_memory_bytes[0].rss, found.skipped_steps) == (4.0, 200, 3)
    assert continued(schema.Measurements(), now) == now


def test_a_failed_row_keeps_what_is_known_and_is_written_without_what_is_not(tmp_path):
    row(status="failed", error="the run has not finished", loss_history=[]).write(tmp_path / "metrics.json")
    ended = failed_row(tmp_path, "zero1", -9, "")
    assert (ended.parameters, ended.status, ended.failure.signal) == (PARAMETERS, "failed", "SIGKILL")
    ended.write(tmp_path / "metrics.json")
    assert schema.Metrics.read(tmp_path / "metrics.json").failure == ended.failure
    nothing = failed_row(tmp_path / "never_began", "zero1", 1, "it broke")
    assert nothing.failure == schema.Failure(phase="unknown", rank=None, largest_memory={}, signal=None)
    nothing.write(tmp_path / "nothing.json")
    known = strict((tmp_path / "nothing.json").read_text())
    assert set(known) == {"schema", "status", "error", "name", "strategy", "failure"}


# what may be imported by whom

LIGHT = """
import importlib, pkgutil, sys
import zero_recipes, zero_recipes.core, zero_recipes.tools.report
for package in (zero_recipes.core, zero_recipes.tools.report):
    for module in pkgutil.iter_modules(package.__path__, package.__name__ + "."):
        importlib.import_module(module.name)
for name in ("metrics.schema", "metrics.read_runs", "metrics.failure"):
    importlib.import_module("zero_recipes." + name)
print(sorted({"torch", "transformers", "trl", "deepspeed", "zero_recipes.tools.plan"} & set(sys.modules)))
"""


def test_core_report_and_the_model_of_the_file_load_no_model_library():
    done = subprocess.run([sys.executable, "-c", LIGHT], cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


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


def test_a_resumed_run_goes_on_counting_evaluations_without_progress():
    """With this run's patience; from a checkpoint of a run without early stopping it begins to count."""
    args = SimpleNamespace(load_best_model_at_end=True, metric_for_best_model="loss", greater_is_better=False)
    args.eval_strategy = "steps"

    def stop_after(state: TrainerState, patience: int, losses: list[float]) -> int | None:
        metrics, control = SimpleNamespace(stopped_early_at=None), TrainerControl()
        callback = StopWithoutProgress(metrics, patience, 0.0)
        callback.on_train_begin(args, state, control)
        for loss in losses:
            if control.should_training_stop:
                break
            state.global_step += 1
            callback.on_evaluate(args, state, control, {"eval_loss": loss})
            state.best_metric = min(loss, state.best_metric or loss)
        state.stateful_callbacks["StopWithoutProgress"] = callback.state()  # as the Trainer does at a checkpoint
        return metrics.stopped_early_at

    fresh = TrainerState(max_steps=9, stateful_callbacks=[TrainerControl()])
    assert stop_after(fresh, 3, [2.0, 2.1, 2.2]) is None
    resumed = replace(fresh, stateful_callbacks=dict(fresh.stateful_callbacks))
    assert stop_after(resumed, 3, [2.3, 2.4]) == 4
    assert stop_after(resumed, 3, [2.5]) == 4, "it was killed before its end"
    assert stop_after(resumed, 5, [2.6, 2.7]) == 6, "and now has more patience"
    assert stop_after(TrainerState(max_steps=2), 1, [2.0, 2.1]) is None, "its last step"


def test_weights_that_the_last_step_spoiled_are_not_saved():
    _, callback = run_through(2, [(1.0, 1.0)], "bf16")
    model, state = torch.nn.Linear(2, 2), SimpleNamespace(global_step=1)
    callback.on_train_end(None, state, None, model=model)
    model.weight.data[0, 1] = math.inf
    with pytest.raises(Diverged, match="not finite after step 1"):
        callback.on_train_end(None, state, None, model=model)


# the first cause

GLOO = "[../third_party/gloo/gloo/transport/tcp/pair.cc:534] Connection closed by peer [127.0.0.1]:29"
NOISE = [
    RuntimeError(GLOO),
    distributed.DistBackendError("NCCL error in: ProcessGroupNCCL.cpp"),
    distributed.DistNetworkError("failed to recv"),
    PeerFailed("rank 0, which reshards out/checkpoint-6, failed: OSError: no room"),
]


def failure(rank: int, error: Exception, time: float, status: str = "failed") -> RankFailure:
    """As that rank writes it."""
    text, echo = f"{type(error).__name__}: {error}", is_echo(error)
    about = {"phase": "train", "largest_memory": {}, "is_echo": echo}
    return RankFailure(rank=rank, status=status, error=text, time=time, **about)


@pytest.mark.parametrize("noise", NOISE, ids=lambda error: type(error).__name__)
def test_what_another_rank_failed_of_is_known_whatever_it_is_wrapped_in(tmp_path, noise):
    with pytest.raises(NotSaved) as caught:
        raise NotSaved("checkpoint-6 could not be saved") from noise
    assert write_failure(tmp_path, "save", caught.value, {}).is_echo
    assert write_failure(tmp_path, "save", noise, {}).is_echo
    with pytest.raises(NotSaved) as caught:
        raise NotSaved("checkpoint-6 could not be saved") from OSError("no room")
    assert not write_failure(tmp_path, "save", caught.value, {}).is_echo
    assert not write_failure(tmp_path, "save", ValueError("rank 0, which saves, is a name"), {}).is_echo


ZIP = "[enforce fail at inline_container.cc:863] . PytorchStreamWriter failed writing file data/4: file write failed"
SAFETENSORS = "Error while serializing: I/O error: {} (os error 5)"


def raised_from(error: Exception, cause: Exception) -> Exception:
    error.__cause__ = cause
    return error


UNSAVED = {  # error -> (what the run ends with, a part of its message), where 5 bytes of the disk are free
    "full": (OSError(errno.ENOSPC, "No space left on device"), NotSaved, "its disk is full"),
    "quota": (OSError(errno.EDQUOT, "Disk quota exceeded"), NotSaved, "its disk is full"),
    "a cause": (raised_from(ValueError("x"), OSError(errno.ENOSPC, "left")), NotSaved, "its disk is full"),
    "safetensors": (RuntimeError(SAFETENSORS.format(os.strerror(errno.ENOSPC))), NotSaved, "its disk is full"),
    "torch": (RuntimeError(ZIP), NotSaved, "its disk is full"),
    "a broken disk": (OSError(errno.EIO, "Input/output error"), NotSaved, "Input/output error. Earlier"),
    "safetensors on it": (RuntimeError(SAFETENSORS.format("Input/output error")), NotSaved, "could not be saved: Ru"),
    "a dead rank": (RuntimeError(GLOO), PeerFailed, "another rank failed, was killed"),
    "a rank that hangs": (
        RuntimeError("[unbound_buffer.cc:84] Timed out waiting 1800000ms for recv operation to complete"),
        PeerFailed,
        "did not answer",
    ),
    "a full disk there": (PeerFailed("rank 1, which saves, failed: OSError: no room"), PeerFailed, "no room"),
}


@pytest.mark.parametrize("name", UNSAVED)
def test_a_save_that_fails_names_its_cause(tmp_path, monkeypatch, name):
    error, kind, said = UNSAVED[name]
    monkeypatch.setattr(shutil, "disk_usage", lambda _: SimpleNamespace(free=5 if kind is NotSaved else 10**9))
    checkpoint = tmp_path / "checkpoint-6"
    begin_checkpoint(checkpoint)
    (checkpoint / "half.pt").write_text("half")
    ended = not_saved(checkpoint, error)
    is_full = "full" in said
    assert type(ended) is kind and said in str(ended) and ("space" in str(ended)) == is_full
    assert (checkpoint / "half.pt").read_text() == ("" if is_full else "half")


def test_a_fault_in_a_save_is_no_fault_of_the_disk(tmp_path, monkeypatch):
    error = KeyError("mine")
    assert not_saved(tmp_path / "checkpoint-6", error) is error
    monkeypatch.setattr(shutil, "disk_usage", lambda _: SimpleNamespace(free=10**9))
    ended = not_saved(tmp_path / "checkpoint-6", RuntimeError(ZIP))
    assert isinstance(ended, NotSaved) and "full" not in str(ended)


@pytest.mark.parametrize(("number", "kind"), [(0, PeerFailed), (1, OSError), (2, PeerFailed)])
def test_a_failed_save_of_shards_is_an_exception_of_the_rank_that_failed(monkeypatch, number, kind):
    monkeypatch.setenv("RANK", str(number))
    failures = {2: (ValueError("later"), None), 1: (OSError(errno.ENOSPC, "no room"), None)}
    with pytest.raises(kind, match="no room"), failures_raised():
        raise CheckpointException("save", failures)


def test_what_another_rank_failed_of_is_one_line(monkeypatch, capsys):
    monkeypatch.delenv("TORCHELASTIC_ERROR_FILE", raising=False)
    for error in (PeerFailed("rank 1 died"), NotSaved("checkpoint-6 could not be saved")):
        monkeypatch.setenv("RANK", "0")
        assert print_ending(error) == 1
        assert capsys.readouterr().err.count("\n") == 1
    monkeypatch.setenv("RANK", "1")  # only this rank knows
    assert print_ending(NotSaved("checkpoint-6 could not be saved")) == 1
    assert "checkpoint-6" in capsys.readouterr().err


def test_a_launcher_never_reads_half_of_a_ranks_message(tmp_path, monkeypatch, capsys):
    """It reads as soon as another rank is dead."""
    file = tmp_path / "error.json"
    monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(file))
    was_there = []
    replace = os.replace

    def replaced(source, target):
        was_there.append(file.exists())
        replace(source, target)

    monkeypatch.setattr(os, "replace", replaced)
    assert print_ending(NotSaved("checkpoint-6 could not be saved")) == 1
    assert was_there == [False] and "checkpoint-6" in json.loads(file.read_text())["message"]["message"]
    monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(file / "below"))
    assert print_ending(NotSaved("checkpoint-7 could not be saved")) == 1
    assert "checkpoint-7" in capsys.readouterr().err


def test_a_failure_of_an_earlier_version_is_read(tmp_path):
    written = json.loads(failure(1, ValueError("a"), 1.0).model_dump_json())
    del written["is_echo"]
    (tmp_path / "failure.rank1.json").write_text(json.dumps(written))
    assert cause_of(tmp_path).error == "ValueError: a"


@given(draw.permutations(range(4)), draw.lists(draw.sampled_from(NOISE), min_size=2, max_size=2), draw.booleans())
def test_the_first_cause_is_named_whoever_writes_first(order, noise, out_of_memory):
    """The noise of the others may be written before it (clocks differ); every order of writing ends the same."""
    cause = failure(0, ValueError("a row is broken"), 100.0)
    if out_of_memory:
        cause = failure(0, torch.OutOfMemoryError("CUDA out of memory"), 105.0, "oom")
    everyone = [cause, failure(1, ValueError("it broke later"), 101.0)]
    everyone += [failure(2 + number, error, 90.0) for number, error in enumerate(noise)]
    losses = [2.0, 1.0, math.nan]
    unfinished = not_begun("n", "zero2")
    with TemporaryDirectory() as name:
        folder = Path(name)
        for number in order:
            each = everyone[number]
            (folder / f"failure.rank{each.rank}.json").write_text(each.model_dump_json())
            keep_failure(folder, each, losses if number % 2 else [], unfinished, resumes=False)
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


@pytest.mark.parametrize("rank", ["0", "1"])
def test_a_refusal_is_told_to_who_launched_the_run(tmp_path, monkeypatch, rank):
    """By any rank: torchrun stops rank 0 (SIGTERM) when rank 1 has refused first."""
    monkeypatch.setenv("RANK", rank)
    monkeypatch.setenv(REFUSAL_FILE, str(tmp_path / REFUSAL))
    monkeypatch.setattr(run_end, "wait_for_rank_0", lambda seconds: None)
    assert print_ending(Refusal([Finding("ZR211", "a", "b", "c"), Finding("ZR212", "d", "e", "f")])) == 2
    row = failed_row(tmp_path, "zero1", 1, "exitcode  : -9 (pid: 7)")
    assert row.status == "refused" and "fix: f" in row.error
    assert (row.failure.code, row.failure.reason) == ("ZR211", "a")
    assert failed_row(tmp_path, "zero1", 1, "").status == "failed", "it is of one run alone"


@pytest.mark.parametrize(
    "ending", [Refusal([finding("ZR116", path="\ud800.yaml", cwd="/", fix="")]), OSError("\udfff")]
)
def test_half_a_surrogate_pair_in_a_message_is_printed(tmp_path, monkeypatch, ending):
    """JSON of a data set may hold one, and no terminal or file takes it."""
    printed = io.BytesIO()
    monkeypatch.setattr(sys, "stderr", io.TextIOWrapper(printed, encoding="utf-8"))
    monkeypatch.setenv(REFUSAL_FILE, str(tmp_path / REFUSAL))
    print_ending(ending)
    assert rb"\ud" in printed.getvalue()
    write_failure(tmp_path, "data", ending, {})
    assert r"\ud" in cause_of(tmp_path).error
    if isinstance(ending, Refusal):
        assert r"\ud800.yaml" in failed_row(tmp_path, "zero1", 1, "").error


def run_in(folder, checkpoint=None) -> SimpleNamespace:
    settings = SimpleNamespace(model_name_or_path="m")
    recipe = SimpleNamespace(name="r.yaml", sha256="ab", settings=settings)
    strategy = SimpleNamespace(name="zero2", zero_stage=2, world_size=2, ds=SimpleNamespace(on_nvme=()))
    about = {"recipe": recipe, "strategy": strategy, "device": "cpu", "precision": "bf16"}
    return SimpleNamespace(output_dir=folder, checkpoint=checkpoint, **about)


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
    with pytest.raises(Refusal), Session(run, PhaseClock()):
        raise Refusal([Finding("ZR000", "what", "why", "fix")])
    assert (folder / FILE).read_text() == text if before else not folder.exists()
    with pytest.raises(MemoryError), Session(run, PhaseClock()):
        raise MemoryError("no room")
    left = strict((folder / FILE).read_text())
    if before == "ok" and not resumes:
        assert left == json.loads(text)
    else:
        assert (left["status"], left["error"]) == ("oom", "MemoryError: no room")
    assert strict((folder / "failure.rank0.json").read_text())["status"] == "oom"
