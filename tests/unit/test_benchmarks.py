"""The runs of a GPU session, which costs money: each is one that a run takes, and a failure is a row."""

import json
import sys
import time
from pathlib import Path

from benchmarks import gpu_session
from benchmarks.session import cases, inputs
from zero_recipes.config import recipe as recipes

ROOT = Path(__file__).resolve().parents[2]
ALL = [case for part in cases.PARTS for case in cases.cases(part)]
GB = 10**9


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
