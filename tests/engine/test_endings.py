"""A run that breaks, diverges or is refused says so on all ranks; what was saved is kept, and its folder as it was."""

import pytest

from tests.helpers import ending_cases
from tests.helpers.ending_cases import strict
from tests.helpers.seeded import grid
from tests.helpers.tiny import arguments, write_recipe
from zero_recipes.checkpoint.save import checkpoint_fault
from zero_recipes.checkpoint.saved_model import entries_of, refuse_bad_numbers

# the decay multiplies matrices by -1e11 in each step: some steps later they are beyond fp32
KEYS = {"bf16": False, "learning_rate": 100, "weight_decay": 1e9, "max_steps": 9, "save_model": True}
KEYS |= {"save_strategy": "steps", "save_steps": 1, "save_total_limit": 1}
# one good step: at a rate of 0, by the schedule
KEYS |= {"lr_scheduler_type": "constant_with_warmup", "warmup_steps": 2}


@pytest.mark.parametrize("strategy", [grid("ddp"), grid("zero2"), "zero3", "fsdp2"])
def test_a_run_that_diverges_ends_and_keeps_the_checkpoint_before(two, tmp_path, strategy):
    path, out = write_recipe(tmp_path, **KEYS, stop_after_nonfinite_steps=2), tmp_path / "out"
    ranks = two.run(ending_cases.ending, argv=arguments(path, strategy, out))
    assert [rank["error"][0] for rank in ranks] == ["Diverged", "Diverged"] and ranks[0]["known"]
    metrics = ranks[0]["metrics"]
    losses = metrics["loss_history"]
    first = losses.index(None) + 1
    assert metrics["status"] == "diverged" and metrics["failure"]["phase"] == "train"
    assert losses == [loss for loss in losses[: first - 1] if loss > 0] + [None] * (len(losses) - first + 1)
    assert len(losses) < 9 and "no model is saved" in metrics["error"].lower()
    assert not [name for name in ranks[0]["files"] if name.endswith(".safetensors")]
    (kept,) = [name for name in ranks[0]["files"] if name.startswith("checkpoint-")]
    assert int(kept.partition("-")[2]) < first
    assert checkpoint_fault(out / kept) is None
    if (out / kept / "model.safetensors").is_file():  # FSDP2 keeps shards of its own
        refuse_bad_numbers(entries_of(out / kept))
    printed = two.log(0, 10**6)
    assert printed.count("(stop_after_nonfinite_steps)") > 0
    assert [strict(file.read_text())["status"] for file in out.glob("failure.rank*.json")] == ["diverged"] * 2


@pytest.mark.parametrize("strategy, limit, saved", [("zero3", 2, "checkpoint-2"), ("ddp", 3, "checkpoint-7")])
def test_one_ranks_loss_ends_both_at_the_same_step_or_neither(two, tmp_path, strategy, limit, saved):
    """Steps 3 and 4; the weights stay finite: fewer such steps than the limit are printed, and the run goes on."""
    keys = KEYS | {"learning_rate": 1e-3, "weight_decay": 0, "stop_after_nonfinite_steps": limit, "max_steps": 7}
    argv = arguments(write_recipe(tmp_path, **keys), strategy, tmp_path / "out")
    ranks = two.run(ending_cases.nan_on_rank_1, argv=argv, first=3, steps=2, value="inf")
    metrics, ends = ranks[0]["metrics"], limit == 2
    assert len(metrics["loss_history"]) == (4 if ends else 7) and metrics["loss_history"].index(None) == 2
    assert metrics["status"] == ("diverged" if ends else "ok")
    assert [rank["error"] is None for rank in ranks] == [not ends] * 2
    assert [name for name in ranks[0]["files"] if name.startswith("checkpoint-")] == [saved]


SAVED = {"save_model": True, "max_steps": 3, "sample_prompts": 3, "sample_max_new_tokens": 2}
SAVED |= {"dataset_test_split": "train", "save_strategy": "steps", "save_steps": 2}


def test_out_of_memory_while_the_weights_are_loaded(one, tmp_path):
    path = write_recipe(tmp_path, **SAVED)
    argv = [str(path), "--output_dir", str(tmp_path / "out")]
    (ended,) = one.run(ending_cases.break_at, argv=argv, point="load", error="MemoryError", words="no room")
    row = ended["metrics"]
    assert (row["status"], row["error"], row["name"]) == ("oom", "MemoryError: no room", "recipe")
    assert (row["failure"]["phase"], row["world_size"], row["strategy"]) == ("model", 1, "single")
    (ended,) = one.run(ending_cases.break_at, argv=[*argv[:2], str(tmp_path / "no")], point="load", error="Refusal")
    assert ended["error"][0] == "Refusal" and not (tmp_path / "no").exists()


def test_a_save_that_fails_on_both_ranks(two, tmp_path):
    path = write_recipe(tmp_path, **SAVED | {"save_strategy": "no"})
    argv = arguments(path, "zero1", tmp_path / "out")
    row = two.run(ending_cases.break_at, argv=argv, point="save", error="OSError", words="[/x]")[0]["metrics"]
    assert (row["status"], row["failure"]["phase"]) == ("failed", "save") and "OSError: [/x]" in row["error"]
    assert len(row["loss_history"]) == 3
    assert row["error"].endswith("(the model is not saved)")
    assert two.log(0, 10**6).count("the run failed (save); the model is not saved\n") == 1


def test_a_run_that_fails_before_its_end_says_nothing_of_a_save(two, tmp_path):
    """There is none yet, and the log of the failure ends with what failed."""
    argv = arguments(write_recipe(tmp_path, max_steps=2), "zero1", tmp_path / "out")
    printed = len(two.log(0, 10**6))
    row = two.run(ending_cases.nan_on_rank_1, argv=[*argv, "--stop_after_nonfinite_steps", "1"], first=1, steps=2)[0]
    assert row["metrics"]["status"] == "diverged" and "saved" not in row["metrics"]["error"].partition("(")[2]
    assert "the run failed" not in two.log(0, 10**6)[printed:]
