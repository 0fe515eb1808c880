"""What a run shows of itself while it trains: the lines of its log, and the bar of a terminal."""

import io
import os
import pty
import sys

import pytest
from transformers import TrainerControl, TrainerState

from zero_recipes.metrics.callback import StageMetricsCallback
from zero_recipes.tools.sweep import LOGGED
from zero_recipes.training import progress
from zero_recipes.training.progress import RunProgress

LOGS = {"loss": 1.48936, "grad_norm": 3.8378, "learning_rate": 0.00033333, "tokens_per_second": 11432}
LOGS |= {"peak_memory_bytes": 739192832, "communication_bytes_per_step": 0, "num_tokens": 3993, "total_flos": 1.0e9}


@pytest.fixture
def clock(monkeypatch):
    """The time that RunProgress reads, in seconds: set clock[0]."""
    now = [1000.0]
    monkeypatch.setattr(progress.time, "monotonic", lambda: now[0])
    return now


def trains(shown: RunProgress, clock: list[float], first: int = 0, steps: int = 4, rank: int = 0) -> None:
    """Four steps of a run of 120: the first takes 60 s, the others 3 s each, then comes the log."""
    state = TrainerState(global_step=first, max_steps=120, is_world_process_zero=rank == 0)
    control = TrainerControl()
    shown.on_train_begin(None, state, control)
    for step in range(1, steps + 1):
        clock[0] += 60 if step == 1 else 3
        state.global_step = first + step
        shown.metrics.step_losses.append(1.5)
        shown.metrics.last_step = (1.5, 0.0)
        shown.on_step_end(None, state, control)
    shown.on_log(None, state, control, logs=dict(LOGS))
    shown.on_train_end(None, state, control)


def test_a_line_of_the_log_says_how_far_the_run_is(capsys, clock):
    """The first step, which compiles, is left out of the pace."""
    trains(RunProgress(StageMetricsCallback(), has_bar=False), clock)
    printed = capsys.readouterr()
    assert printed.out == (
        "step 4 of 120: loss 1.489, 11,432 tokens/s, peak memory 739 MB, 5 min 48 s left, grad_norm 3.838, "
        "learning_rate 0.0003333, communication_per_step 0 MB, num_tokens 3,993\n"
    )
    assert printed.err == ""
    assert LOGGED.match(printed.out)[0] == "step 4 of 120: loss 1.489"


def test_a_resumed_run_counts_its_own_steps(capsys, clock):
    trains(RunProgress(StageMetricsCallback(), has_bar=False), clock, first=60)
    assert "step 64 of 120: " in (line := capsys.readouterr().out)
    assert " 168 s left" in line or " 2 min 48 s left" in line


def test_what_is_not_known_is_not_shown(capsys, clock):
    """After one step there is no pace, after the last one no time is left; an evaluation has neither loss nor speed."""
    shown = RunProgress(StageMetricsCallback(), has_bar=False)
    trains(shown, clock, steps=1)
    assert "left" not in capsys.readouterr().out
    trains(shown, clock, first=116)
    assert "left" not in capsys.readouterr().out
    state = TrainerState(global_step=60, max_steps=120)
    shown.on_log(None, state, None, logs={"eval_loss": 0.75774, "eval_runtime": 19.9231})
    assert capsys.readouterr().out == "step 60 of 120: eval_loss 0.7577, eval_runtime 19.92\n"


def test_rank_1_shows_nothing(capsys, clock):
    trains(RunProgress(StageMetricsCallback(), has_bar=True), clock, rank=1)
    printed = capsys.readouterr()
    assert (printed.out, printed.err) == ("", "")


def test_a_terminal_has_a_bar(capsys, clock, monkeypatch):
    """Of one that does not know its width, as `docker run -t` gives, too: tqdm would draw none there."""
    ours, theirs = pty.openpty()
    assert os.get_terminal_size(theirs).columns == 0
    with os.fdopen(theirs, "w") as terminal:
        monkeypatch.setattr(sys, "stderr", terminal)
        trains(RunProgress(StageMetricsCallback(), has_bar=True), clock)
        terminal.flush()
        drawn = os.read(ours, 10_000).decode()
    os.close(ours)
    assert "step 0 of 120" in drawn
    assert "step 4 of 120, loss 1.5, 11,432 tokens/s, 5 min 48 s left" in drawn
    assert capsys.readouterr().out.startswith("step 4 of 120: loss 1.489")


def test_an_evaluation_has_a_bar_of_its_own(clock, monkeypatch):
    monkeypatch.setattr(sys, "stderr", drawn := io.StringIO())
    shown = RunProgress(StageMetricsCallback(), has_bar=True)
    state = TrainerState(global_step=60, max_steps=120)
    for _ in range(2):
        shown.on_prediction_step(None, state, None, eval_dataloader=[1, 2])
    assert shown.evaluation_bar.n == 2
    shown.on_evaluate(None, state, None)
    assert shown.evaluation_bar is None
    assert "evaluation, batch 0 of 2" in drawn.getvalue()
