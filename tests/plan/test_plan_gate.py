"""The process that plans a run before it starts: its time limit, its end, and the cards that a plan is held against."""

from __future__ import annotations

import json
import os
import random
import statistics
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest
from datasets import Dataset

from tests.helpers.plan_jobs import GB, ROOT, job, recipe
from zero_recipes.config.run import RunConfig
from zero_recipes.config.strategy import Strategy
from zero_recipes.core.hardware import gpu_named, gpus
from zero_recipes.core.process import kill_with_children, lives
from zero_recipes.data.lengths import RowLengths
from zero_recipes.plan import cards, gate
from zero_recipes.plan.cost import estimate
from zero_recipes.plan.formulas.predict import predict_by_formulas
from zero_recipes.plan.overheads import overheads
from zero_recipes.plan.predict import Predictor
from zero_recipes.plan.simulator import parent as simulation
from zero_recipes.plan.simulator.time_limit import TimeLimit

HANGS = """
import json, os, signal, sys
child = os.fork()
if child:
    with open({pipe!r}, "w") as told:
        json.dump([os.getpid(), child], told)
while True:
    signal.pause()
"""


@pytest.fixture
def hanging(tmp_path, monkeypatch):
    """A worker that starts another and never answers; call it for their ids, once both run."""
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    monkeypatch.setattr(simulation, "WORKER", ("-c", HANGS.format(pipe=str(pipe))))
    return lambda: json.loads(pipe.read_text())  # waits for the writer


def end(pids: list[int]) -> bool:
    """Whether these processes, killed a moment ago, end."""
    guard = time.monotonic() + 60
    while any(map(lives, pids)) and time.monotonic() < guard:
        os.sched_yield()
    return not any(map(lives, pids))


def test_a_process_is_killed_with_all_that_it_has_started(hanging):
    process = subprocess.Popen([sys.executable, *simulation.WORKER])
    pids = hanging()
    kill_with_children(psutil.Process(process.pid))
    process.wait()
    assert end(pids)
    ended = subprocess.Popen([sys.executable, "-c", ""])
    known = psutil.Process(ended.pid)
    ended.wait()
    kill_with_children(known)  # nothing to do


def test_what_ends_with_its_parent_is_not_left_behind(tmp_path):
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    child = f"""
import os, signal
from zero_recipes.core.process import end_with_parent
end_with_parent()
with open({str(pipe)!r}, "w") as told:
    told.write(str(os.getpid()))
signal.pause()
"""
    starts = f"import subprocess, sys; subprocess.run([sys.executable, '-c', {child!r}])"
    parent = subprocess.Popen([sys.executable, "-c", starts], cwd=ROOT)
    orphan = int(pipe.read_text())
    parent.kill()
    parent.wait()
    assert end([orphan])


def test_a_simulation_that_is_ended_leaves_nothing_and_formulas_answer(hanging, tmp_path):
    limit = TimeLimit(3600)
    predict = Predictor(folder=tmp_path / "plans", limit=limit)
    with ThreadPoolExecutor(1) as other:
        answer = other.submit(predict, job("zero2"))
        pids = hanging()
        limit.end()
        found = answer.result()
    assert found.source == "formulas"
    assert found.notes[0] == "zero2 is by formulas: simulations were given 3600 s."
    assert end(pids)
    # what is asked next is not simulated either, and nothing was kept for a later program
    assert predict(job("zero3")).source == "formulas" and not list((tmp_path / "plans").glob("*"))


def test_the_time_of_all_simulations_together_is_limited(monkeypatch, tmp_path):
    monkeypatch.setattr(simulation, "WORKER", ("-c", "import signal; signal.pause()"))
    limit = TimeLimit(0.01)
    predict = Predictor(folder=tmp_path, limit=limit)
    assert [predict(job(name)).source for name in ("zero1", "zero2")] == ["formulas", "formulas"]
    assert limit.over
    # those of the jobs before count
    monkeypatch.setattr(simulation, "WORKER", ("-c", "pass"))
    limit = TimeLimit(3600)
    Predictor(folder=tmp_path, limit=limit)(job("zero1"))
    assert limit._left < 3600 and not limit.over


def test_a_simulation_that_crashes_is_answered_by_formulas_with_its_error(monkeypatch, tmp_path):
    monkeypatch.setattr(simulation, "WORKER", ("-c", "raise SystemExit('a library has changed')"))
    found = Predictor(folder=tmp_path, limit=TimeLimit(3600))(job("zero2"))
    assert found.source == "formulas"
    assert found.notes[0] == "zero2 is by formulas: zero2 on 2 ranks cannot be simulated: a library has changed."
    with pytest.raises(Exception, match="cannot be simulated"):  # the verb says so and stops
        Predictor(folder=tmp_path)(job("zero2"))


def run_to_plan() -> RunConfig:
    own = recipe("pythia")
    settings = own.settings.replace(predict=True, deepspeed=None)
    return RunConfig(own, settings, own.given, Strategy("single", 1, None, "none"), "cpu", Path("out"))


def test_a_run_that_fails_while_it_is_planned_leaves_no_planner(hanging, monkeypatch, tmp_path, capsys):
    monkeypatch.chdir(ROOT)
    monkeypatch.setattr("huggingface_hub.constants.HF_HOME", str(tmp_path))
    with pytest.raises(OSError, match="rows"), gate.planning(run_to_plan()):
        pids = hanging()  # it plans while rows are tokenised
        raise OSError("rows")
    assert end(pids)
    assert capsys.readouterr().out == "plan          planning, up to 90 s\n"


def test_a_plan_that_hangs_costs_a_run_its_time_limit(monkeypatch, tmp_path, capsys):
    monkeypatch.chdir(ROOT)
    monkeypatch.setattr("huggingface_hub.constants.HF_HOME", str(tmp_path))
    monkeypatch.setattr(simulation, "WORKER", ("-c", "import signal; signal.pause()"))
    monkeypatch.setattr(gate, "SECONDS", 0.01)
    with gate.planning(run_to_plan()) as planned:
        assert planned().source == "formulas"
    said = capsys.readouterr().out
    assert "by textbook formulas; it took" in said
    assert "plan          single is by formulas: simulations were given 0 s." in said


@pytest.mark.parametrize("packing", [False, True])
def test_a_runs_own_plan_says_how_long_a_step_of_its_rows_takes(monkeypatch, capsys, packing):
    """On a GPU that hardware.yaml has: of the prepared rows' own lengths, as `zero-recipes plan` estimates."""
    monkeypatch.chdir(ROOT)
    draw = random.Random(packing)
    lengths = [[draw.randint(5, 60) for _ in range(8)] if packing else [draw.randint(5, 400)] for _ in range(50)]
    train = Dataset.from_dict({"input_ids": [[1] * sum(pack) for pack in lengths]})
    train = train.add_column("seq_lengths", lengths) if packing else train
    own = run_to_plan()
    run = replace(own, settings=own.settings.replace(packing=packing), device="cuda")
    monkeypatch.setattr("torch.cuda.get_device_name", lambda: "NVIDIA H100 80GB HBM3")
    monkeypatch.setattr(cards, "card", lambda index=None: cards.Card(0, "here", 2000 * GB, 0))
    monkeypatch.setattr(gate, "Predictor", lambda limit: predict_by_formulas)
    with gate.planning(run) as planned:
        planned(SimpleNamespace(train=train, rows=len(train)))
    said = capsys.readouterr().out
    asked = gate.job_of_run(run, {})
    flat = tuple(length for pack in lengths for length in pack)
    speed = estimate(asked, predict_by_formulas(asked), gpu_named("h100-80gb", gpus()),
                     rows=RowLengths(flat, len(lengths), None, ""))  # fmt: skip
    low, high = (f"{each:,.0f}" for each in speed.tokens_per_second)
    assert f"{low} to {high} real tokens/s" in said and f"{statistics.mean(flat):,.0f} tokens on average" in said
    # a card that is not known, and a stream
    with gate.planning(run) as planned:
        planned(SimpleNamespace(train=None, rows=None))
    monkeypatch.setattr("torch.cuda.get_device_name", lambda: "a card of tomorrow")
    with gate.planning(run) as planned:
        planned(SimpleNamespace(train=train, rows=len(train)))
    assert "real tokens/s" not in capsys.readouterr().out


@pytest.mark.parametrize(
    ("used", "reserved", "others"),
    [(0, 0, 0), (0.7, 0, 0), (1.5, 0, 0), (19, 18, 0), (12.0, 0, 12.0), (30, 18, 12.0), (80, 0, 80.0)],
)
def test_what_other_processes_hold_of_a_card(monkeypatch, used, reserved, others):
    monkeypatch.setattr("torch.cuda.mem_get_info", lambda index: (int((80 - used) * GB), 80 * GB))
    monkeypatch.setattr("torch.cuda.memory_reserved", lambda index: int(reserved * GB))
    monkeypatch.setattr("torch.cuda.device_count", lambda: 4)
    own = overheads().beside_segments(1) if others else 0
    assert cards.card().others == pytest.approx(others * GB - own, abs=1)
    assert [card.total for card in cards.cards_here(2)] == [80 * GB] * 2 and len(cards.cards_here(8)) == 4
