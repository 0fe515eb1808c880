"""docs/bare_loop.py trains what run_sft.py trains."""

import pytest

from tests.helpers.grid import grid

STEPS = 4
QUICK = ["--eval_strategy", "no", "--sample_prompts", "null", "--save_model", "false", "--max_steps", str(STEPS)]


# In fp32 only the order of sums differs. In bf16 another rounding of a gradient that is nearly zero changes the sign of
# Adam's first step there: the gap is bf16's, and grows with the steps as it does between the stages themselves.
@pytest.mark.parametrize("bf16, apart, stage", [grid(False, 1e-6, 0), (False, 1e-6, 2), (True, 5e-3, 3)])
def test_the_bare_loop_has_the_losses_of_run_sft(two, tmp_path, stage, bf16, apart):
    argv = ["recipes/tiny.yaml", "--deepspeed", f"ds_configs/zero{stage}.json", "--output_dir", str(tmp_path), *QUICK]
    ours = two.run("train", argv=[*argv, "--bf16", str(bf16).lower()])[0]["metrics"]["loss_history"]
    bare = two.run("step_cases.bare_loop", stage=stage, steps=STEPS, bf16=bf16)[0]
    assert bare == pytest.approx(ours, rel=apart)
    assert bare[:2] == pytest.approx(ours[:2], rel=1e-6), "the first rate is 0: two steps of the same weights"
    assert ours[-1] < ours[0]
