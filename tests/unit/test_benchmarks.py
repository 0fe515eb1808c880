"""The arithmetic of benchmarks/, what benchmarks/throughput.py refuses to compare, and the runs of a GPU session."""

from __future__ import annotations

import copy
import json
import sys
import time
from pathlib import Path

import pytest

from benchmarks import gpu_session, throughput
from benchmarks.session import cases, collect, inputs
from zero_recipes.config import recipe as recipes

ROOT = Path(__file__).resolve().parents[2]
ALL = [case for part in cases.PARTS for case in cases.cases(part)]
GB = 10**9


def turn_of() -> dict:
    """Four steps of 100 tokens: 2 s in trl, half of it in the recipe, 0.9 s in the bare loop."""

    def program(seconds: float, accumulation: int) -> dict:
        tokens = [50 // accumulation] * (4 * accumulation)
        seen = {"tokens": tokens, "elements": tokens, "supervised": tokens, "row_lengths": tokens, "held_out_loss": 2.0}
        ranks = [seen | {"step_seconds": [9, 9, each, each]} for each in (seconds / 2, seconds)]
        return throughput.together(ranks, accumulation) | {"row_lengths": [25] * 16}

    turn = {"trl": program(2.0, 1), "recipe": program(1.0, 2), "engine": program(0.9, 2)}
    return turn


def test_speeds_are_tokens_of_both_ranks_by_the_slower_rank_s_seconds_without_the_first_steps():
    turn = turn_of()
    assert turn["trl"]["tokens"] == turn["recipe"]["tokens"] == [100] * 4
    speeds = {name: throughput.tokens_per_second(program) for name, program in turn.items()}
    assert speeds == pytest.approx({"trl": 50, "recipe": 100, "engine": 100 / 0.9})


def test_the_summary_has_the_median_of_the_rounds():
    slow = turn_of()
    slow["trl"]["seconds"] = [9, 9, 4.0, 4.0]
    found = throughput.summary([turn_of(), slow, turn_of()])
    assert found["ratios"]["recipe/trl"] == {"median": pytest.approx(2.0), "by_round": pytest.approx([2.0, 4.0, 2.0])}


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("held_out_loss", 2.03),
        ("held_out_loss", float("nan")),
        ("row_lengths", [25] * 15 + [24]),
        ("seconds", [1.0] * 3),
        ("supervised", [99] * 4),
    ],
)
def test_programs_that_did_not_train_alike_are_not_compared(tmp_path, monkeypatch, capsys, key, value):
    monkeypatch.setattr(throughput, "Group", lambda world_size: type("NoGroup", (), {"close": lambda self: None})())
    turn = turn_of()
    throughput.check(turn, "here")
    turn["engine"][key] = value
    monkeypatch.setattr(throughput, "run", lambda group, program, job, workload: copy.deepcopy(turn[program]))
    result = tmp_path / "result.json"
    assert throughput.main(["--workloads", "1M, own rows", "--result", str(result)]) == 1
    assert "no result: 1M, own rows, ddp: " in capsys.readouterr().err and not result.exists()


def test_every_recipe_of_a_session_is_one_that_a_run_takes(tmp_path, monkeypatch):
    monkeypatch.chdir(ROOT)
    assert len({case.slug for case in ALL}) == len(ALL)
    for case in ALL:
        assert case.strategy == "single" or Path(f"accelerate_configs/{case.strategy}.yaml").is_file()
        if case.script == "side_by_side.py":
            continue
        path = inputs.write_recipe(case, tmp_path)
        read = recipes.parse_recipe(path, recipes.read_recipe_file(path), [])
        assert Path(read.settings.model_name_or_path, "config.json").is_file()


def test_a_run_that_fails_or_does_not_fit_the_time_is_a_row(tmp_path, monkeypatch):
    session = gpu_session.Session(tmp_path, tmp_path / "work", time.time() + 600, {})
    words = "raise SystemExit('torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB')"
    monkeypatch.setattr(gpu_session, "command_of", lambda *_: [sys.executable, "-c", words])
    case = ALL[0]
    session.run(case)
    session.deadline = time.time() + 1
    session.run(case)
    failed, skipped = map(json.loads, (tmp_path / "part1.jsonl").read_text().splitlines())
    assert failed["status"] in ("oom", "failed") and "out of memory" in "\n".join(failed["log"])
    assert skipped["status"] == "skipped" and "s are left" in skipped["error"] and session.done(1) == set()


def test_constants_are_fitted_to_the_measured_peaks():
    def row(segments: int, reserved: int, context: int) -> dict:
        card = {"total_bytes": 141 * GB, "free_bytes": 136 * GB - context, "reserved_now_bytes": 5 * GB}
        metrics = {"peak_memory_bytes": [{"allocated": 10 * GB, "reserved": reserved}]}
        return {"status": "ok", "planned": {"segment_bytes": segments}, "metrics": metrics, "beside": card}

    rows = [row(10 * GB, 11 * GB, 6 * 10**8), row(10 * GB, 10 * GB, 7 * 10**8), row(20 * GB, 25 * GB, 7 * 10**8)]
    assert collect.constants(rows) == {"context": 7 * 10**8, "fragmentation": 1.25}
    assert collect.constants([row(10 * GB, 9 * GB, 0)])["fragmentation"] == 1.0
    assert collect.constants([row(1, 99, 0) | {"status": "oom"}]) == {}
