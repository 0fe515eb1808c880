"""TRL's loss as GPUs compute it, on the supervised tokens alone, where a rank's micro batch has none of them."""

from __future__ import annotations

import json

import pytest

from tests.helpers.grid import grid
from tests.helpers.tiny import ROOT, named, write_recipe

NEVER_KEPT = {"stage3_param_persistence_threshold": 0, "stage3_max_live_parameters": 0, "stage3_max_reuse_distance": 0}
# micro batches of two ranks, two an optimizer step: one rank's, the other's, one whole step of one rank, both ranks'
MASKED = [[1, 1], [2, 0], [4, 1], [5, 1], [6, 0], [6, 1]]


def asked_for(strategy: str) -> list[str]:
    if strategy != "zero3":
        return named(strategy)
    config = json.loads((ROOT / "ds_configs" / "zero3.json").read_text())
    config["zero_optimization"] |= NEVER_KEPT  # the head is gathered for the loss, and again in backward
    return ["--deepspeed", json.dumps(config)]


@pytest.mark.parametrize("strategy", ["ddp", "zero2", "zero3", "fsdp2"])
def test_a_rank_without_a_supervised_token_neither_hangs_nor_spoils_the_run(two, tmp_path, strategy):
    """The same losses and gradient norms as those of the path that scores every position."""
    path = write_recipe(tmp_path, bf16=False, max_steps=5, gradient_accumulation_steps=2, max_grad_norm=1.0)
    found = {}
    for compacted in (True, False):
        argv = [str(path), "--output_dir", str(tmp_path / str(compacted)), *asked_for(strategy)]
        ranks = two.run("compaction_cases.train_compacted", argv=argv, compacted=compacted, masked=MASKED)
        assert all(rank["asked"] >= 10 for rank in ranks), "TRL no longer asks here"
        found[compacted] = ranks[0]["metrics"]
        assert found[compacted]["status"] == "ok"
    for key in ("loss_history", "grad_norm_history"):
        assert found[True][key] == pytest.approx(found[False][key], rel=1e-5), key
    assert found[True]["loss_history"][2] < found[True]["loss_history"][0] * 0.9, "one rank's tokens were left out"


@pytest.mark.parametrize(
    "strategy, packing",
    [("zero2", True), ("zero3", False), grid("ddp", True), grid("fsdp2", False), grid("zero0", True)],
)
def test_supervised_logits_only_scores_no_prompt_on_cpus_and_trains_the_same(two, tmp_path, strategy, packing):
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
        ranks = two.run("compaction_cases.train_counted", argv=[*argv, *named(strategy)])
        for rank in ranks:
            # where TRL leaves prompts out on CPUs by itself, the key and libs/lm_head.py must go
            assert rank["scored"] == (rank["supervised"] if only else rank["positions"])
            assert 0 < sum(rank["supervised"]) < 0.9 * sum(rank["positions"])
        found[only] = ranks[0]["metrics"]
    for key in ("loss_history", "grad_norm_history"):
        assert found[True][key] == pytest.approx(found[False][key], rel=1e-5), key
