"""`report` on damaged and foreign folders: a row that says why, or one refusal; never a traceback."""

from __future__ import annotations

import io
import json
import math
import random
from contextlib import chdir

import pytest
from rich.console import Console

from tests.helpers.damaged_metrics import CONTENTS, SAMPLE, damaged_folder, whole
from tests.helpers.report_runs import metrics, save
from zero_recipes.checkpoint.output_dir import refuse_occupied
from zero_recipes.cli import main as cli
from zero_recipes.cli.sweep import _row
from zero_recipes.core.findings import Refusal
from zero_recipes.metrics.read_runs import UnreadableRun, read_run
from zero_recipes.plan.cost import read_measured
from zero_recipes.report import write_report


def reported(folder):
    """(the row of zero1 in report.json, what was printed, the page, the markdown)."""
    console = Console(file=io.StringIO(), width=200)
    page = write_report(folder, console).read_text()
    (row,) = (row for row in json.loads((folder / "report.json").read_text())["rows"] if row["folder"] == "zero1")
    return row, console.file.getvalue(), page, (folder / "report.md").read_text()


def test_what_is_no_metrics_json_is_a_row_that_says_why(tmp_path):
    save(tmp_path / "ddp", metrics("ddp"))
    for number, content in enumerate(CONTENTS):
        folder = tmp_path / (f"run{number}" if number else "zero1")
        folder.mkdir()
        (folder / "metrics.json").write_bytes(content)
    row, printed, page, markdown = reported(tmp_path)
    assert row["status"] == "unreadable" and row["error"].startswith(str(tmp_path / "zero1" / "metrics.json"))
    assert row["error"] in markdown and "unreadable" in page and "| zero1 | unreadable |" in markdown
    rows = json.loads((tmp_path / "report.json").read_text())["rows"]
    assert [row["status"] for row in rows].count("unreadable") == len(CONTENTS)
    assert all(f"run{number}: unreadable. " in printed for number in range(1, len(CONTENTS)))
    assert all(row["error"] for row in rows if row["status"] == "unreadable")


@pytest.mark.parametrize(
    ("key", "value", "said"),
    [
        ("parameters", -5, "parameters: -5 is not between"),
        ("parameters", 10**400, "parameters: "),
        ("world_size", "2", "world_size: "),
        ("max_length", math.inf, "max_length: "),
        ("tokens_per_second", {"all": math.nan, "non_padding": 1.0, "supervised": 1.0}, "tokens_per_second.all: nan"),
        ("communication_bytes_per_step", {"all_reduce": -1}, "communication_bytes_per_step.all_reduce: -1"),
        ("loss_history", [1.0, 1e300], "loss_history.1: 1.0e+300 is beyond float32"),
        ("model", "x" * 100_000, "model: a text of 100,000 characters"),
        ("model", "\ud800", "model: "),
        ("schema", 2, "schema: "),
    ],
)
def test_a_value_that_nobody_can_have_measured_is_named(tmp_path, key, value, said):
    save(tmp_path, metrics("zero1") | {key: value})
    run = read_run(tmp_path / "metrics.json")
    assert isinstance(run, UnreadableRun) and f"metrics.json: {said}" in run.error


def test_what_is_no_file_is_a_row_too(tmp_path):
    save(tmp_path / "ddp", metrics("ddp"))
    for name, make in {
        "zero1": lambda path: path.mkdir(),
        "zero2": lambda path: path.symlink_to(path),
        "zero3": lambda path: path.symlink_to("nowhere"),
    }.items():
        (tmp_path / name).mkdir()
        make(tmp_path / name / "metrics.json")
    row, printed, _, _ = reported(tmp_path)
    printed = " ".join(printed.split())
    assert row["error"].endswith("Is a directory")
    assert "Too many levels of symbolic links" in printed and "No such file" in printed


def test_a_run_whose_samples_are_damaged_keeps_its_numbers(tmp_path):
    save(tmp_path / "zero1", metrics("zero1"), [SAMPLE])
    (tmp_path / "zero1" / "samples.jsonl").write_text('{"prompt": 5}\n')
    row, printed, page, _ = reported(tmp_path)
    assert row["status"] == "ok" and row["tokens_per_second"]
    assert "samples.jsonl line 1: prompt" in " ".join(printed.split()) and "samples.jsonl line 1: prompt" in page


@pytest.mark.parametrize("wrong", ["nothing", "a file", "an empty folder", "damaged files alone", "a loop"])
def test_a_wrong_folder_is_refused(tmp_path, capsys, wrong):
    folder = tmp_path / "runs"
    if wrong == "a file":
        folder.write_text("{}")
    elif wrong == "a loop":
        folder.symlink_to(folder)
    elif wrong != "nothing":
        folder.mkdir()
    if wrong == "damaged files alone":
        (folder / "metrics.json").write_text("{")
    assert cli.main(["report", str(folder)]) == 2
    assert "ZR560" in capsys.readouterr().err


def test_a_report_that_cannot_be_written_is_refused(tmp_path):
    save(tmp_path / "zero1", metrics("zero1"))
    (tmp_path / "report.html").mkdir()
    with pytest.raises(Refusal, match="ZR561"):
        write_report(tmp_path, Console(file=io.StringIO()))


@pytest.mark.parametrize("seed", range(6))
def test_drawn_damage_ends_in_a_report_or_one_refusal(tmp_path, seed):
    try:
        reported_or_not(tmp_path, seed)
    except Refusal as refusal:
        assert refusal.codes == ["ZR560"]


@pytest.mark.grid
@pytest.mark.parametrize("seed", range(1000, 1400))
def test_much_more_drawn_damage(tmp_path, seed):
    test_drawn_damage_ends_in_a_report_or_one_refusal(tmp_path, seed)


def reported_or_not(folder, seed):
    draw = random.Random(seed)
    console = Console(file=io.StringIO(), width=draw.choice([40, 80, 200]))
    write_report(damaged_folder(folder, draw), console)
    json.loads((folder / "report.json").read_text(), parse_constant=pytest.fail)


@pytest.mark.parametrize("content", CONTENTS, ids=lambda content: repr(content[:30]))
def test_nothing_that_is_no_metrics_json_calibrates(tmp_path, content):
    (tmp_path / "metrics.json").write_bytes(content)
    with pytest.raises(Refusal, match="ZR812"):
        read_measured(tmp_path / "metrics.json")


@pytest.mark.parametrize("key", ["world_size", "micro_batch_size", "gradient_accumulation_steps", "max_length"])
def test_a_number_that_no_run_has_does_not_calibrate(tmp_path, key):
    save(tmp_path, whole("zero1") | {key: -1})
    with pytest.raises(Refusal, match=rf"{key} is -1.*ZR562"):
        read_measured(tmp_path / "metrics.json")


def test_a_sweep_goes_on_where_a_run_left_damaged_files(tmp_path):
    (tmp_path / "failure.rank0.json").write_bytes(b"\xff{")
    row = _row(tmp_path, "zero1", 1, "it broke")
    assert row.status == "failed" and row.error.startswith("exit code 1; ")
    with chdir(tmp_path):
        assert read_run(tmp_path / "metrics.json").status == "failed"


@pytest.mark.parametrize("text", ["{", "[]", "7", "null", '{"status": []}', "\x00", "[" * 3000])
def test_a_folder_with_a_damaged_one_is_occupied(tmp_path, text):
    """What cannot be read may be a finished run's: it is kept, with a refusal and no traceback."""
    (tmp_path / "metrics.json").write_text(text)
    with pytest.raises(Refusal, match="ZR702"):
        refuse_occupied(tmp_path, None, overwrite=False)
