"""The session on a rented GPU, as far as it can be held without one: its runs, its rows, and what is made of them."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest
import torch

from benchmarks.session import cases, collect, inputs, machine, run, runs
from zero_recipes.config import recipe as recipes

ROOT = Path(__file__).resolve().parents[2]
ALL = [case for part in cases.PARTS for case in cases.cases(part)]
PLANS = ROOT / "benchmarks" / "session" / "plans.json"
GB = 10**9


def test_every_run_has_a_name_of_its_own_and_files_that_exist():
    assert len({case.slug for case in ALL}) == len(ALL)
    files = {f"accelerate_configs/{case.strategy}.yaml" for case in ALL if case.strategy != "single"}
    assert [file for file in files if not (ROOT / file).is_file()] == []


@pytest.mark.parametrize("rehearse", [False, True])
def test_every_recipe_is_one_that_a_run_takes(tmp_path, monkeypatch, rehearse):
    monkeypatch.chdir(ROOT)
    for case in ALL:
        path = inputs.write_recipe(case, tmp_path, rehearse)
        read = recipes.parse_recipe(path, recipes.read_recipe_file(path), [])
        assert Path(read.settings.model_name_or_path).joinpath("config.json").is_file()
        assert read.settings.max_steps >= 4  # ZeRO-Infinity's first steps fill its buffers
        assert read.settings.use_cpu == rehearse


def test_the_wheels_are_pinned():
    script = (ROOT / "benchmarks" / "gpu_session.sh").read_text()
    names = re.search(r'^NAMES="(.*?)"', script, re.DOTALL | re.MULTILINE)[1].replace("\\\n", "").split()
    locked = {line.partition("==")[0].lower() for line in (ROOT / "requirements.lock").read_text().splitlines()}
    assert len(names) > 15 and {name.lower() for name in names} <= locked
    assert "torch" not in names


# Session: rows, whatever becomes of a run


def session_of(tmp_path: Path, monkeypatch, *commands: list[str]) -> list[dict]:
    """The rows of runs whose command lines are `commands`."""
    waiting = list(commands)
    monkeypatch.setattr(runs, "command_of", lambda case, recipe, folder: [*waiting.pop(0), str(folder)])
    session = runs.Session(tmp_path / "out", tmp_path / "work", time.time() + 600, {}, rehearse=True)
    session.out.mkdir()
    session.run_all([cases.Case(1, f"run {n}", "tiny", "zero2", {}, 60) for n in range(len(commands))], 2, 0)
    rows = [json.loads(line) for line in (session.out / "part1.jsonl").read_text().splitlines()]
    assert session.done(1) == {row["case"] for row in rows if row["status"] == "ok"}
    return rows


def test_a_run_that_fails_is_a_row_with_its_last_words_and_the_next_one_starts(tmp_path, monkeypatch):
    words = "raise SystemExit('torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB')"
    first, second = session_of(tmp_path, monkeypatch, [sys.executable, "-c", words], [sys.executable, "-c", "1"])
    assert first["status"] in ("oom", "failed") and "out of memory" in "\n".join(first["log"])
    assert second["status"] == "failed" and second["error"]  # it left no metrics.json


def test_a_run_that_hangs_is_ended_with_the_processes_that_it_started(tmp_path):
    waits = "import time; print(flush=True); time.sleep(99)"
    starts = (
        f"import subprocess, sys, time; subprocess.Popen([sys.executable, '-c', {waits!r}], start_new_session=True);"
    )
    command = [sys.executable, "-c", f"{starts} time.sleep(99)"]
    child = subprocess.Popen(command, stdout=subprocess.PIPE, start_new_session=True)
    child.stdout.readline()  # both are there now
    worker = psutil.Process(child.pid).children()[0]
    session = runs.Session(tmp_path, tmp_path, time.time() + 600, {})
    one = runs.Running(ALL[0], child, tmp_path, time.time(), 0)
    assert not session._too_long(one) and worker.is_running()
    one.started = 0.0
    assert session._too_long(one)
    assert child.returncode == -9 and psutil.wait_procs([worker], timeout=10)[1] == []


def test_what_no_longer_fits_the_time_is_skipped_and_said(tmp_path):
    session = runs.Session(tmp_path, tmp_path / "work", time.time() + 30, {})
    session.run_all(cases.cases(4), 1, 0)
    rows = [json.loads(line) for line in (tmp_path / "part4.jsonl").read_text().splitlines()]
    assert [row["status"] for row in rows] == ["skipped"] * len(cases.cases(4))
    assert all("s are left" in row["error"] for row in rows)


def test_what_the_host_cannot_hold_is_skipped_and_said(tmp_path):
    case = cases.cases(4)[1]
    plan = {"reserved_bytes": {"low": 1, "high": 2}, "host_bytes": {"load": 1, "training": 10**18}}
    session = runs.Session(tmp_path, tmp_path / "work", time.time() + 600, {case.slug: plan})
    session.run_all([case], 1, 0)
    assert "host memory by the plan" in (tmp_path / "part4.jsonl").read_text()


def test_the_machine_is_described_whatever_is_missing(tmp_path, monkeypatch):
    smi = tmp_path / "nvidia-smi"
    smi.write_text("#!/bin/sh\necho 'NVIDIA H200, 580.159.03, 143771 MiB, 4 MiB'\n")
    smi.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/bin:/usr/bin")
    monkeypatch.setattr(machine, "ASKED", 'print(\'{"name": "NVIDIA H200", "total_bytes": 150754820096}\')')
    monkeypatch.setattr(machine, "PACKAGES", ("torch", "no-such-package"))
    described = machine.describe(tmp_path)
    assert "143771 MiB" in described["nvidia_smi"] and machine.card_bytes(described) == 150754820096
    assert described["versions"]["no-such-package"] == "not installed"
    assert machine.card_bytes(described | {"torch": "ImportError: libcudart"}) == 0


def test_what_lies_beside_the_allocator_is_read_from_the_card(monkeypatch):
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda: (100 * GB, 140 * GB))
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda: 39 * GB)
    row = {"alone": True, "beside": run._card()}
    assert collect.beside_allocator(row) == {"context_bytes": GB}
    assert collect.beside_allocator(row | {"alone": False}) == {}


def test_runs_side_by_side_stay_within_the_card(tmp_path, monkeypatch):
    """Three runs of 60, 50 and 30 of 100 bytes: the second has to wait for the first, and nothing passes it."""
    held, most = {}, []
    plans = {f"2-run-{n}": {"reserved_bytes": {"low": 1, "high": high}} for n, high in enumerate((60, 50, 30))}
    session = runs.Session(tmp_path, tmp_path, time.time() + 600, plans, rehearse=True)

    class Child:
        def poll(self):
            return 0

    def start(case, beside_others):
        held[case.slug] = session.planned_bytes(case)
        most.append(sum(held.values()))
        return runs.Running(case, Child(), tmp_path, time.time(), held[case.slug], not beside_others)

    monkeypatch.setattr(session, "_start", start)
    monkeypatch.setattr(session, "_end", lambda one: held.pop(one.case.slug))
    wanted = [cases.Case(2, f"run {n}", "pythia-410m", "zero2") for n in range(3)]
    session.run_all(wanted, 4, 100)
    assert held == {} and len(most) == 3 and max(most) <= 90


# --collect


def row_of(name: str, segments: int, reserved: int, context: int = 0, **other) -> dict:
    total = 141 * GB
    return {
        "part": 2,
        "rehearsal": False,
        "case": name,
        "status": "ok",
        "alone": bool(context),
        "planned": {
            "allocated_peak_bytes": 9 * GB,
            "segment_bytes": segments,
            "reserved_bytes": {"low": segments, "high": 2 * segments},
            "flops_per_step": 10**14,
        },
        "metrics": {"peak_memory_bytes": [{"allocated": 10 * GB, "reserved": reserved, "rss": 1}]},
        "beside": {
            "step_seconds": [9.0, 9.0, 0.25, 0.25],
            "total_bytes": total,
            "free_bytes": total - 5 * GB - context,
            "reserved_now_bytes": 5 * GB,
        },
    } | other


def written(folder: Path, part: int, *rows: dict, rest: str = "") -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"part{part}.jsonl"
    path.write_text("".join(json.dumps(row | {"part": part}) + "\n" for row in rows) + rest)
    return folder


def test_constants_are_fitted_to_what_was_measured():
    rows = [row_of("a", 10 * GB, 11 * GB, 600_000_000), row_of("b", 10 * GB, 10 * GB, 700_000_000)]
    rows += [row_of("c", 20 * GB, 25 * GB), row_of("d", 1, 99, status="oom")]
    assert collect.constants(rows) == {"context": 650_000_000, "fragmentation": 1.25}
    assert collect.constants([row_of("e", 10 * GB, 9 * GB)]) == {"fragmentation": 1.0}  # never below
    assert collect.constants([]) == {}


def test_results_say_planned_over_measured_and_the_share_of_the_card(tmp_path):
    machine = {"case": "machine", "rehearsal": False, "machine": {"torch": json.dumps({"name": "NVIDIA H200"})}}
    written(tmp_path / "one", 2, machine, row_of("a", 10 * GB, 11 * GB, 6 * 10**8), rest='{"part": 2, "cut')
    written(tmp_path / "two", 3, machine, row_of("b", 10 * GB, 11 * GB))
    collect.collect(tmp_path, tmp_path / "results", trial=True)
    (row,) = json.loads((tmp_path / "results" / "gpu_plan.json").read_text())["rows"]
    assert row["derived"]["allocated_ratio"] == 0.9 and row["derived"]["context_bytes"] == 6 * 10**8
    (row,) = json.loads((tmp_path / "results" / "gpu_speed.json").read_text())["rows"]
    assert row["derived"]["flops_per_second"] == 4e14
    assert row["derived"]["share_of_peak"] == pytest.approx(4e14 / 989e12)
    part = collect.gpu_part(tmp_path / "results")
    assert "0.900 to 0.900" in part and "40.4%" in part and "gpu_speed.json" in part


def test_a_later_failure_does_not_take_the_place_of_a_measurement(tmp_path):
    written(tmp_path / "1", 2, row_of("a", 1, 2), row_of("b", 1, 2, status="oom"))
    written(tmp_path / "2", 2, row_of("a", 1, 2, status="failed"), row_of("b", 1, 2))
    assert {row["case"]: row["status"] for row in collect.read_rows(tmp_path)} == {"a": "ok", "b": "ok"}


def test_a_rehearsal_is_not_taken_for_a_measurement(tmp_path):
    written(tmp_path, 2, row_of("a", 1, 2, rehearsal=True))
    with pytest.raises(ValueError, match="rehearsal"):
        collect.collect(tmp_path, tmp_path / "results")
    with pytest.raises(ValueError, match="no part"):
        collect.collect(tmp_path / "empty", tmp_path / "results")


@pytest.mark.parametrize(
    ("name", "tflops"),
    [
        ("NVIDIA H200", 989),
        ("NVIDIA H100 80GB HBM3", 989),
        ("NVIDIA A100-SXM4-80GB", 312),
        ("NVIDIA GeForce GT 710", None),
    ],
)
def test_the_peak_is_that_of_the_card(name, tflops):
    assert collect.peak_flops({"torch": json.dumps({"name": name})}) == (None if tflops is None else tflops * 1e12)


# Side by side with trl sft and a bare loop


def test_rows_of_any_length_fill_the_packs_of_a_side_by_side_run():
    from transformers import AutoTokenizer

    from benchmarks.session.side_by_side import texts_of, tokens_per_word
    from benchmarks.throughput_inputs import pack_length

    tokenizer = AutoTokenizer.from_pretrained(ROOT / "tiny_world" / "base")
    per_word = tokens_per_word(tokenizer)

    def tokens(texts: list[str]) -> list[int]:
        return [len(ids) + 1 for ids in tokenizer(texts)["input_ids"]]

    for longest in (2048, 64):
        even = tokens(texts_of(48, longest, None, per_word))
        assert len(even) == 48 and min(even) > longest
        lengths = tokens(texts_of(48, longest, 12, per_word))
        pack, rows = pack_length(lengths, 6, 2, ranks=1)
        assert rows == 48 and 0.9 * longest < pack <= longest and max(lengths) > 2 * sum(lengths) / 48


def test_the_speeds_of_a_side_by_side_run(tmp_path):
    def program(step: float, accumulation: int) -> dict:
        each = [1000 // accumulation] * (4 * accumulation)
        ran = {"step_seconds": [9.0, 9.0, step, step], "tokens": each, "elements": each, "supervised": each}
        return ran | {"row_lengths": [1000] * 4, "held_out_loss": 2.0, "accumulation": accumulation}

    row = row_of("7-a", 1, 2) | {"part": 7}
    row["metrics"] |= {"model_flops_per_token": 1e9}
    programs = {"trl": program(0.5, 1), "recipe": program(0.25, 2), "engine": {"error": "out of memory"}}
    row["beside"] = {"programs": programs}
    machine = {"case": "machine", "part": 7, "rehearsal": False}
    machine["machine"] = {"torch": json.dumps({"name": "NVIDIA H100 80GB HBM3"})}
    found = collect.document(7, [machine, row])["rows"][0]["derived"]
    assert found["tokens_per_second"] == {"trl": 2000, "recipe": 4000} and found["recipe/trl"] == 2
    assert found["mfu"]["recipe"] == pytest.approx(4e12 / collect.peak_flops(machine["machine"]))
    assert "recipe/engine" not in found
    assert "2.00 to 2.00 times" in collect._in_short(7, [{"derived": found}])
