"""Whatever breaks in a run, its metrics.json says so with what was known by then, and what was saved is not lost."""

import random

import pytest

from tests.helpers.tiny import named, write_recipe
from zero_recipes.checkpoint.verify import verify

KEYS = {"save_model": True, "max_steps": 3, "sample_prompts": 3, "sample_max_new_tokens": 2}
KEYS |= {"dataset_test_split": "train", "save_strategy": "steps", "save_steps": 2}


def test_out_of_memory_while_the_weights_are_loaded(one, tmp_path):
    path = write_recipe(tmp_path, **KEYS)
    argv = [str(path), "--output_dir", str(tmp_path / "out")]
    (ended,) = one.run("sample_cases.break_at", argv=argv, point="load", error="MemoryError", words="no room")
    row = ended["metrics"]
    assert (row["status"], row["error"], row["name"]) == ("oom", "MemoryError: no room", "recipe")
    assert (row["failure"]["phase"], row["world_size"], row["strategy"]) == ("model", 1, "single")
    (ended,) = one.run("sample_cases.break_at", argv=[*argv[:2], str(tmp_path / "no")], point="load", error="Refusal")
    assert ended["error"][0] == "Refusal" and not (tmp_path / "no").exists()


@pytest.mark.grid
@pytest.mark.parametrize("seed", range(12))
def test_wherever_both_ranks_break(two, tmp_path, seed):
    draw = random.Random(seed)
    point, strategy = (
        draw.choice(["step", "save", "samples", "scores"]),
        draw.choice(["ddp", "zero1", "zero3", "fsdp2"]),
    )
    calls = draw.randrange(3) if point == "step" else 0
    path = write_recipe(tmp_path, **KEYS | {"save_strategy": "no"})
    argv = [str(path), "--output_dir", str(tmp_path / "out"), *named(strategy)]
    kind = draw.choice(["RuntimeError", "MemoryError", "OSError"])
    ranks = two.run("sample_cases.break_at", argv=argv, point=point, calls=calls, error=kind, words=f"[/x] {seed}")
    row = ranks[0]["metrics"]
    assert row["status"] == ("oom" if kind == "MemoryError" else "failed") and f"[/x] {seed}" in row["error"]
    assert len(row["loss_history"]) == (calls if point == "step" else 3)
    phases = {"step": "train", "save": "save", "samples": "eval", "scores": "eval"}
    assert row["failure"]["phase"] == phases[point]
    if point in ("samples", "scores"):
        assert verify(tmp_path / "out", deep=True)["tensors"] and "is saved and whole" in row["error"]
