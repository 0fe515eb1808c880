"""DeepSpeed's newer savings: bf16 states resume, leaf modules are needed. More of them: test_model_states.py."""

import json

import pytest

from tests.helpers.faults import ds_config
from tests.helpers.tiny import named, write_experts, write_recipe
from zero_recipes.checkpoint.verify import verify

LEAF = {"leaf_module": {"classes": ["OwnSparseMoeBlock"]}}


def losses(group, recipe, folder, *options: str, case: str = "train") -> list[float]:
    argv = [str(recipe), "--output_dir", str(folder), "--overwrite", "true", *options]
    return group.run(case, argv=argv)[0]["metrics"]["loss_history"]


def test_bf16_states_resume_bit_for_bit(two, tmp_path):
    saves = ("--save_strategy", "steps", "--save_steps", "2", "--save_model", "true")
    recipe = write_recipe(tmp_path, max_steps=4)
    for stage in (2, 3):
        mode, out = named(f"zero{stage}_bf16_states"), tmp_path / f"whole{stage}"
        whole = losses(two, recipe, out, *mode, *saves)
        assert verify(out)
        elements = json.loads((out / "metrics.json").read_text())["trainable_parameters"]
        states = sum(path.stat().st_size for path in (out / "checkpoint-2").rglob("*_optim_states.pt"))
        assert states == pytest.approx(3 * 2 * elements, rel=0.2)  # master and two moments
        resumed = (*mode, *saves, "--resume_from_checkpoint", str(out / "checkpoint-2"))
        assert losses(two, recipe, tmp_path / f"again{stage}", *resumed)[-2:] == whole[-2:]


@pytest.mark.private
def test_experts_of_their_own_need_leaf_modules(two, tmp_path):
    """Stage 2's gradients are wrong (ZR285): fails when DeepSpeed no longer mixes them up, then drop that refusal."""
    recipe = write_recipe(tmp_path, trust_remote_code=True, bf16=False)
    write_experts(tmp_path / "model")
    right = losses(two, recipe, tmp_path / "out", *named("zero0"))
    stage_3 = losses(two, recipe, tmp_path / "out", "--deepspeed", json.dumps(ds_config(3, **LEAF)))
    stage_2 = losses(two, recipe, tmp_path / "out", *named("zero2"), case="train_unchecked")
    assert stage_3 == pytest.approx(right, rel=1e-5) and stage_2 != pytest.approx(right, rel=1e-4)
