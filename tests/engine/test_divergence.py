"""A run whose loss is not finite says so at once, ends on all ranks together, and leaves what was good before it."""

import random

import pytest

from tests.helpers.grid import grid
from tests.helpers.sample_cases import strict
from tests.helpers.tiny import arguments, named, write_recipe
from zero_recipes.checkpoint.save import checkpoint_fault, entries_of, refuse_bad_numbers

# the decay multiplies matrices by -1e11 in each step: some steps later they are beyond fp32
KEYS = {"bf16": False, "learning_rate": 100, "weight_decay": 1e9, "max_steps": 9, "save_model": True}
KEYS |= {"lr_scheduler_type": "constant"}
KEYS |= {"save_strategy": "steps", "save_steps": 1, "save_total_limit": 1}


@pytest.mark.parametrize("strategy", [grid("ddp"), grid("zero2"), "zero3", "fsdp2"])
def test_a_run_that_diverges_ends_and_keeps_the_checkpoint_before(two, tmp_path, strategy):
    limit = random.Random(strategy).choice([1, 2, 3])
    # one good step: at a rate of 0, by the schedule
    path = write_recipe(tmp_path, **KEYS, stop_after_nonfinite_steps=limit, warmup_steps=2)
    text = path.read_text().replace('"constant"', '"constant_with_warmup"')
    path.write_text(text)
    out = tmp_path / "out"
    ranks = two.run("sample_cases.ending", argv=arguments(path, strategy, out))
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


@pytest.mark.parametrize("seed", [0, 2])
def test_one_ranks_loss_ends_both_at_the_same_step_or_neither(two, tmp_path, seed):
    """The weights stay finite: fewer such steps than the limit are printed, and the run goes on."""
    draw = random.Random(seed)
    limit, steps, first = draw.randint(2, 3), draw.randint(1, 3), draw.randint(1, 3)
    keys = KEYS | {"learning_rate": 1e-3, "weight_decay": 0, "stop_after_nonfinite_steps": limit, "max_steps": 7}
    path = write_recipe(tmp_path, **keys)
    value = draw.choice(["nan", "inf", "-inf"])
    argv = [str(path), "--output_dir", str(tmp_path / "out"), *named(draw.choice(["ddp", "zero2", "zero3"]))]
    spoiled = {"first": first, "steps": steps, "value": value}
    ranks = two.run("sample_cases.nan_on_rank_1", argv=argv, **spoiled)
    metrics = ranks[0]["metrics"]
    length = first + limit - 1 if steps >= limit else 7
    assert len(metrics["loss_history"]) == length and metrics["loss_history"].index(None) == first - 1
    assert metrics["status"] == ("diverged" if steps >= limit else "ok")
    assert [rank["error"] is None for rank in ranks] == [steps < limit] * 2
    saved = [name for name in ranks[0]["files"] if name.startswith("checkpoint-")]
    assert saved == (
        [] if length == first + limit - 1 and first == 1 else [f"checkpoint-{7 if steps < limit else first - 1}"]
    )
