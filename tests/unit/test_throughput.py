"""benchmarks/throughput.py: its arithmetic, what it refuses to compare, and its page. The programs: tests/engine."""

from __future__ import annotations

import copy
import json
import random

import pytest

from benchmarks import throughput, throughput_inputs
from tests.helpers.tiny import ROOT

RESULT = ROOT / "benchmarks" / "results" / "throughput.json"


def rank_saw(seconds: list[float], tokens: list[int], elements: list[int], loss: float = 2.0) -> dict:
    return {
        "step_seconds": seconds,
        "tokens": tokens,
        "elements": elements,
        "supervised": tokens,
        "row_lengths": tokens,
        "held_out_loss": loss,
    }


def turn_of(loss: float = 2.0) -> dict:
    """A round of four steps of 100 tokens: 2 s in trl, half of it in the recipe, 0.9 s and 0.8 s in the loops."""

    def program(seconds: float, accumulation: int, padded: int) -> dict:
        tokens = [50 // accumulation] * (4 * accumulation)
        ranks = [rank_saw([9, 9, s, s], tokens, [padded * t for t in tokens], loss) for s in (seconds / 2, seconds)]
        return throughput.together(ranks, accumulation) | {"row_lengths": [25] * 16}

    turn = {"trl": program(2.0, 1, 2), "recipe": program(1.0, 2, 1)}
    return turn | {"engine": program(0.9, 2, 1), "plain": program(0.8, 2, 1)}


def test_speeds_are_real_tokens_of_both_ranks_by_the_slower_ranks_seconds_without_the_first_steps():
    turn = turn_of()
    assert turn["trl"]["tokens"] == turn["recipe"]["tokens"] == [100] * 4
    assert {name: throughput.tokens_per_second(program) for name, program in turn.items()} == pytest.approx(
        {"trl": 50, "recipe": 100, "engine": 100 / 0.9, "plain": 125}
    )


def test_the_summary_has_the_median_of_the_rounds_and_all_of_them():
    slow = turn_of()
    slow["trl"]["seconds"] = [9, 9, 4.0, 4.0]
    found = throughput.summary([turn_of(), slow, turn_of()])
    assert found["ratios"]["recipe/trl"] == {"median": pytest.approx(2.0), "by_round": pytest.approx([2.0, 4.0, 2.0])}
    assert found["ratios"]["recipe/engine"]["median"] == pytest.approx(0.9)
    assert found["ratios"]["engine/plain"]["median"] == pytest.approx(0.8 / 0.9)
    assert found["overhead_ms"] == pytest.approx(100)
    assert found["programs"]["trl"]["padding"] == 0.5 and found["programs"]["recipe"]["padding"] == 0


def test_programs_that_trained_alike_are_compared():
    turn = turn_of()
    turn["trl"]["held_out_loss"] *= 1.0099
    throughput.check(turn, "here")


@pytest.mark.parametrize("factor", [0.989, 1.011, float("nan")])
def test_no_speed_is_told_where_the_losses_disagree(factor):
    for name in ("trl", "engine", "plain"):
        turn = turn_of()
        turn[name]["held_out_loss"] *= factor
        with pytest.raises(throughput.Disagreement, match=f"the loss of {name} on held-out rows"):
            throughput.check(turn, "here")


@pytest.mark.parametrize(
    ("key", "value", "words"),
    [
        ("row_lengths", [25] * 15, "saw 15 rows, recipe 16"),
        ("row_lengths", [25] * 15 + [24], "other lengths"),
        ("seconds", [1.0] * 3, "saw 3 steps, recipe 4"),
        ("supervised", [99] * 4, "supervised 396 tokens, recipe 400"),
    ],
)
def test_no_speed_is_told_where_other_rows_were_trained_on(key, value, words):
    turn = turn_of()
    turn["trl"][key] = value
    with pytest.raises(throughput.Disagreement, match=words):
        throughput.check(turn, "here")


def test_a_disagreement_ends_it_with_exit_code_1_and_nothing_written(tmp_path, monkeypatch, capsys):
    group = type("NoGroup", (), {"close": lambda self: None})
    monkeypatch.setattr(throughput, "Group", lambda world_size: group())
    turn = turn_of()
    turn["engine"]["held_out_loss"] = 3.0
    monkeypatch.setattr(throughput, "_run", lambda group, program, job, workload: copy.deepcopy(turn[program]))
    result = tmp_path / "result.json"
    assert throughput.main(["--workloads", "1M, own rows", "--result", str(result)]) == 1
    assert "no result: 1M, own rows, ddp: the loss of engine" in capsys.readouterr().err and not result.exists()


def test_a_workload_takes_the_place_of_its_earlier_measurement_alone(tmp_path):
    path = tmp_path / "result.json"
    names = [each.name for each in throughput.WORKLOADS]
    for name, steps in ((names[2], 1), (names[0], 1), (names[2], 2)):
        throughput.keep(path, {"name": name, "steps": steps})
    kept = json.loads(path.read_text())["workloads"]
    assert [(name, each["steps"]) for name, each in kept.items()] == [(names[0], 1), (names[2], 2)]


def test_strategies_that_are_not_measured_again_stay_where_all_else_is_the_same(tmp_path):
    path, one = tmp_path / "result.json", {"name": throughput.WORKLOADS[0].name, "steps": 2, "seconds": 9}
    throughput.keep(path, one | {"strategies": {"zero0": 1, "zero2": 2}})
    throughput.keep(path, one | {"seconds": 4, "strategies": {"zero2": 3, "ddp": 4}})
    [kept] = json.loads(path.read_text())["workloads"].values()
    assert list(kept["strategies"].items()) == [("ddp", 4), ("zero0", 1), ("zero2", 3)]
    throughput.keep(path, one | {"steps": 3, "strategies": {"zero2": 5}})
    [kept] = json.loads(path.read_text())["workloads"].values()
    assert kept["strategies"] == {"zero2": 5}, "of other steps: not to be held against each other"


def test_packs_and_rows_fill_the_same_steps_with_the_same_tokens():
    for seed in range(4):
        draw = random.Random(seed)
        steps, packs = draw.randint(2, 6), draw.randint(1, 2)
        lengths = [min(1024, int(draw.lognormvariate(5, 0.7)) + 8) for _ in range(steps * 16 + 40)]
        length, rows = throughput_inputs.pack_length(lengths, steps, packs)
        assert rows == steps * 16 and length >= max(lengths[:rows])
        assert throughput_inputs.packs_of(lengths[:rows], length) == steps * 2 * packs
    with pytest.raises(ValueError, match="32 rows, 31 are there"):
        throughput_inputs.pack_length([9] * 31, 2, 1)


def test_alpacas_rows_are_skipped_where_they_are_not(monkeypatch, tmp_path):
    monkeypatch.setattr(throughput_inputs, "ALPACA", tmp_path / "alpaca_2k.jsonl")
    reasons = {each.name: throughput_inputs.missing(each) for each in throughput.WORKLOADS}
    assert reasons.pop("1M, own rows") is None and all(
        "not part of this repository" in each for each in reasons.values()
    )


# the ratio beside each fast setting
