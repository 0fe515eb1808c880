"""The model of metrics.json: what is written is read again, committed files stay readable, all ranks are one row."""

import json
import math
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as draw

from tests.helpers.report_runs import PARAMETERS, on_cpu
from tests.helpers.sample_cases import strict
from zero_recipes.core import files
from zero_recipes.metrics import schema
from zero_recipes.metrics.failure import failed_row
from zero_recipes.metrics.probe import steps_not_timed
from zero_recipes.metrics.summary import History, RankFigures, continued, summarise

ROOT = Path(__file__).resolve().parents[2]

OK_ROW = on_cpu("zero1")


def row(**changes) -> schema.Metrics:
    return schema.Metrics.model_validate(OK_ROW | changes)


def test_an_unknown_key_is_ignored_and_another_schema_is_not(tmp_path):
    path = tmp_path / "metrics.json"
    path.write_text(json.dumps(OK_ROW | {"of_another_version": 1, "phase_seconds": {"train": 2.0, "logging": 1.0}}))
    assert schema.Metrics.read(path).phase_seconds["train"] == 2.0
    path.write_text(json.dumps(OK_ROW | {"schema": schema.SCHEMA + 1}))
    with pytest.raises(schema.ContractError, match=rf"metrics\.json: schema: Input should be {schema.SCHEMA}"):
        schema.Metrics.read(path)


def test_numbers_that_are_not_finite_are_null_in_the_file_and_nan_again(tmp_path):
    broken = row(
        loss_history=[2.0, math.nan, math.inf],
        grad_norm_history=[math.inf],
        eval_history=[{"step": 1, "loss": math.nan}],
    )
    broken.write(tmp_path / "metrics.json")
    content = strict((tmp_path / "metrics.json").read_text())
    assert (content["loss_history"], content["grad_norm_history"]) == ([2.0, None, None], [None])
    assert content["eval_history"] == [{"step": 1, "loss": None}]
    again = schema.Metrics.read(tmp_path / "metrics.json")
    assert [math.isfinite(loss) for loss in again.loss_history] == [True, False, False]
    assert math.isnan(again.grad_norm_history[0]) and math.isnan(again.eval_history[0].loss)


def test_a_file_is_replaced_whole_or_not_at_all(tmp_path, monkeypatch):
    path = tmp_path / "metrics.json"
    row().write(path)

    def full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(files.os, "replace", full)
    with pytest.raises(OSError, match="No space"):
        row(parameters=1).write(path)
    assert schema.Metrics.read(path).parameters == PARAMETERS


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


def test_ranks_are_brought_together():
    found = summarise([figures(1), figures(3)], [9.0, 1.0, 3.0], 1)
    assert [peak.rss for peak in found.peak_memory_bytes] == [100, 300]
    assert [states.params for states in found.model_state_bytes] == [1, 3]
    assert found.tokens == schema.Tokens(all=60, non_padding=40, supervised=20)
    assert found.tokens_per_second == schema.Tokens(all=10.0, non_padding=5.0, supervised=2.5)
    assert found.step_seconds == schema.StepSeconds(median=2.0, p90=3.0, warmup_steps_excluded=1)
    assert found.loss_history == [2.0, 4.0, 6.0]


def test_what_a_rank_does_not_know_nobody_does():
    unknown = [20, 10, None]
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


@given(draw.integers(0, 200))
def test_the_step_that_is_looked_into_is_never_a_timed_one(total):
    untimed = steps_not_timed(total)
    assert min(total // 2, 5) <= untimed <= total and (total == 0 or min(1, total - 1) < untimed)


def test_a_resumed_run_has_losses_and_tokens_of_the_whole_and_the_rest_of_the_last_process():
    earlier = summarise([figures(1)], [1.0, 1.0, 1.0], 0)
    now = summarise([figures(2)], [4.0, 4.0, 4.0], 0)
    found = continued(earlier, now)
    assert found.loss_history == [1.0, 2.0, 3.0, 2.0, 4.0, 6.0]
    assert found.tokens == schema.Tokens(all=60, non_padding=40, supervised=20)
    assert (found.step_seconds.median, found.peak_memory_bytes[0].rss) == (4.0, 200)
    assert continued(schema.Measurements(), now) == now


def test_a_checkpoint_carries_the_history_as_json():
    evaluation = schema.Evaluation(step=2, loss=1.5)
    history = History(
        summary=summarise([figures(1)], [1.0, 1.0, 1.0], 0),
        grad_norm_history=[1.0, math.inf],
        eval_history=[evaluation],
        first_step=1,
        resumed_at=[3],
    )
    answers = {"answers_before": {"prompts": [], "texts": [], "reference_losses": []}}
    again = History.model_validate(json.loads(json.dumps(history.model_dump(mode="json") | answers)))
    assert again.summary == history.summary and again.eval_history == [evaluation]
    assert (again.first_step, again.resumed_at, math.isfinite(again.grad_norm_history[1])) == (1, [3], False)
    assert History.model_validate({}).summary == schema.Measurements()


def test_a_failed_row_keeps_what_is_known_and_is_written_without_what_is_not(tmp_path):
    row(status="failed", error="the run has not finished", loss_history=[]).write(tmp_path / "metrics.json")
    ended = failed_row(tmp_path, "zero1", -9, "")
    assert (ended.parameters, ended.status, ended.failure.signal) == (PARAMETERS, "failed", "SIGKILL")
    ended.write(tmp_path / "metrics.json")
    assert schema.Metrics.read(tmp_path / "metrics.json").failure == ended.failure
    nothing = failed_row(tmp_path / "never_began", "zero1", 1, "it broke")
    assert nothing.failure == schema.Failure(phase="unknown", rank=None, largest_memory={}, signal=None)
    nothing.write(tmp_path / "nothing.json")
    assert set(strict((tmp_path / "nothing.json").read_text())) == {
        "schema",
        "status",
        "error",
        "name",
        "strategy",
        "failure",
    }


# what may be imported by whom

LIGHT = """
import importlib, pkgutil, sys
import zero_recipes, zero_recipes.core, zero_recipes.report
for package in (zero_recipes.core, zero_recipes.report):
    for module in pkgutil.iter_modules(package.__path__, package.__name__ + "."):
        importlib.import_module(module.name)
for name in ("theory.zero_paper", "metrics.schema", "metrics.read_runs", "metrics.failure"):
    importlib.import_module("zero_recipes." + name)
print(sorted({"torch", "transformers", "trl", "deepspeed", "zero_recipes.plan"} & set(sys.modules)))
"""


def test_core_report_and_the_model_of_the_file_load_no_model_library():
    done = subprocess.run([sys.executable, "-c", LIGHT], cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
