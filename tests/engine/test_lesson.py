"""The lesson's bare loop trains what run_sft.py trains."""

from __future__ import annotations

import pytest

STEPS = 4
QUICK = ["--eval_strategy", "no", "--sample_prompts", "null", "--save_model", "false", "--max_steps", str(STEPS)]


@pytest.mark.parametrize("stage", [0, 2, 3, pytest.param(1, marks=pytest.mark.grid)])
def test_the_bare_loop_has_the_losses_of_run_sft(two, tmp_path, stage):
    argv = ["recipes/tiny.yaml", "--deepspeed", f"ds_configs/zero{stage}.json", "--output_dir", str(tmp_path), *QUICK]
    ours = two.run("train", argv=argv)[0]["metrics"]["loss_history"]
    bare = two.run("lesson_cases.bare_loop", stage=stage, steps=STEPS)[0]
    print(ours, bare)
    assert bare == pytest.approx(ours, rel=1e-3)
    assert ours[-1] < ours[0]
