"""supervised_logits_only: on CPUs too, the LM head scores the positions that have a loss, and no others."""

import pytest

from tests.helpers.grid import grid
from tests.helpers.tiny import named, write_recipe


@pytest.mark.parametrize(
    "strategy, packing",
    [("zero2", True), ("zero3", False), grid("ddp", True), grid("fsdp2", False), grid("zero0", True)],
)
def test_no_prompt_is_scored_and_the_run_trains_the_same(two, tmp_path, strategy, packing):
    path = write_recipe(
        tmp_path,
        bf16=False,
        max_steps=4,
        gradient_accumulation_steps=2,
        packing=packing,
        max_length=128,
        max_grad_norm=1.0,
    )
    found = {}
    for only in (True, False):  # the last run must score all again: the switch is for a run, not for the process
        argv = [str(path), "--output_dir", str(tmp_path / str(only)), "--supervised_logits_only", str(only).lower()]
        ranks = two.run("step_cases.train_scored", argv=[*argv, *named(strategy)])
        for rank in ranks:
            # where TRL itself leaves prompts out on CPUs, patches.score_supervised_positions_only must go
            assert rank["scored"] == (rank["supervised"] if only else rank["positions"])
            assert 0 < sum(rank["supervised"]) < 0.9 * sum(rank["positions"])
        found[only] = ranks[0]["metrics"]
    for key in ("loss_history", "grad_norm_history"):
        assert found[True][key] == pytest.approx(found[False][key], rel=1e-5), key
