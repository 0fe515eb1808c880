"""What reshard refuses, and what it leaves behind when it is killed. No training."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path

import pytest
import torch

from tests.helpers.checkpoint_files import MODEL, OPTIMIZER, rank_states, write_checkpoint
from tests.helpers.tiny import write_recipe
from zero_recipes.checkpoint import reshard as resharding
from zero_recipes.checkpoint.reshard import open_checkpoint, reshard, strategy_of
from zero_recipes.checkpoint.save import (
    MANIFEST,
    STATES,
    checkpoint_fault,
    manifest_facts,
    read_manifest,
    write_manifest,
)
from zero_recipes.checks import preflight
from zero_recipes.cli import main as cli
from zero_recipes.config import recipe as recipes
from zero_recipes.core.findings import Refusal

ROOT = Path(__file__).resolve().parents[2]


def contents(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def test_a_whole_checkpoint_is_written_beside_the_old_one(tmp_path):
    checkpoint = write_checkpoint(tmp_path)
    before = contents(checkpoint)
    facts = {"step": 7, "recipe_sha256": "abc", "zero_stage": 3, "world_size": 2}
    write_manifest(checkpoint, facts)
    folder, batch = reshard(checkpoint, 4, 2)
    assert (folder.name, tuple(batch)) == ("checkpoint-7-zero2-world4", (2, 1, 4))
    written = read_manifest(folder)
    assert checkpoint_fault(folder) is None and set(written["files"]) == set(contents(folder)) - {MANIFEST}
    kept = {key: written[key] for key in ("step", "recipe_sha256", "zero_stage", "world_size", "strategy")}
    assert kept == facts | {"zero_stage": 2, "world_size": 4, "strategy": "zero2"}
    assert [(folder / f"rng_state_{rank}.pth").read_bytes() for rank in range(4)] == [b"\0", b"\1", b"\0", b"\1"]
    for name in ("trainer_state.json", "scheduler.pt"):
        assert (folder / name).read_bytes() == before[name]
    assert not (folder / "latest").exists(), "transformers would look for DeepSpeed's files"
    del (after := contents(checkpoint))[MANIFEST]
    assert after == before, "the old checkpoint was touched"


def test_the_micro_batch_shrinks_where_the_global_batch_asks_for_it(tmp_path):
    _, batch = reshard(write_checkpoint(tmp_path, gradient_accumulation_steps=1), 4, 1)
    assert tuple(batch) == (1, 1, 4)


def test_a_killed_reshard_leaves_nothing_half(tmp_path, monkeypatch):
    checkpoint = write_checkpoint(tmp_path)
    before = contents(checkpoint)

    def die(source, name):
        if name == "a.bias":
            raise KeyboardInterrupt
        return original(source, name)

    original = resharding.read_parameter
    monkeypatch.setattr(resharding, "read_parameter", die)
    with pytest.raises(KeyboardInterrupt):
        reshard(checkpoint, 1, 2)
    left = sorted(path.name for path in tmp_path.iterdir())
    assert left == [".checkpoint-7-zero2-world1.part", "checkpoint-7"], "nothing that looks like a checkpoint"
    monkeypatch.undo()
    folder, _ = reshard(checkpoint, 1, 2)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["checkpoint-7", folder.name]
    assert checkpoint_fault(folder) is None and contents(checkpoint) == before


def cut_off(checkpoint: Path) -> None:
    path = checkpoint / "global_step7" / OPTIMIZER.format(1)
    path.write_bytes(path.read_bytes()[:-200])


def count_apart(checkpoint: Path) -> None:
    states = rank_states(2)
    states["optimizer_state_dict"]["state"][1]["step"] += 7
    torch.save({"optimizer_state_dict": states}, checkpoint / "global_step7" / OPTIMIZER.format(1))


def other_optimizer(checkpoint: Path) -> None:
    states = rank_states(2)
    for state in states["optimizer_state_dict"]["state"].values():
        state["momentum_buffer"] = state.pop("exp_avg")
    torch.save({"optimizer_state_dict": states}, checkpoint / "global_step7" / OPTIMIZER.format(1))


def by_another_class(checkpoint: Path) -> None:
    states = rank_states(2)
    del states["zero_stage"]
    torch.save({"optimizer_state_dict": states}, checkpoint / "global_step7" / OPTIMIZER.format(0))


def shorten(checkpoint: Path) -> None:
    states = rank_states(2)
    states["fp32_flat_groups"][0] = states["fp32_flat_groups"][0][:-2].clone()
    torch.save({"optimizer_state_dict": states}, checkpoint / "global_step7" / OPTIMIZER.format(1))


def lose_by_manifest(checkpoint: Path) -> None:
    write_manifest(checkpoint, {"step": 7})
    (checkpoint / "scheduler.pt").unlink()


BROKEN = {
    "no `latest`": ({}, lambda c: (c / "latest").unlink(), "without DeepSpeed", "ZR731"),
    "no folder": ({}, lambda c: shutil.rmtree(c / "global_step7"), "'global_step7' is no folder", "ZR729"),
    "no model states": ({}, lambda c: (c / "global_step7" / MODEL).unlink(), "no *_model_states.pt", "ZR729"),
    "a rank": ({}, lambda c: (c / "global_step7" / OPTIMIZER.format(1)).unlink(), "states of 1 of 2 ranks", "ZR729"),
    "rank 0": ({}, lambda c: (c / "global_step7" / OPTIMIZER.format(0)).unlink(), "states of 1 of 2 ranks", "ZR729"),
    "cut off": ({}, cut_off, "cannot be read", "ZR729"),
    "too short": ({}, shorten, "too short for b.weight", "ZR729"),
    "steps": ({}, count_apart, "step counters differ", "ZR729"),
    "by manifest": ({}, lose_by_manifest, "lacks scheduler.pt", "ZR729"),
    "not Adam": ({}, other_optimizer, "other optimizer states than Adam's: exp_avg_sq, momentum_buffer", "ZR731"),
    "BF16_Optimizer": ({}, by_another_class, "BF16_Optimizer", "ZR731"),
    "model parallel": ({"model": {"mp_world_size": 2}}, None, "model-parallel", "ZR731"),
    "experts": ({"model": {"num_experts": [4]}}, None, "mixture-of-experts", "ZR731"),
    "stage 0": ({"zero_optimization": {"stage": 0}}, None, "ZeRO stage 0", "ZR731"),
    "fp16": ({"fp16": {"enabled": True}}, None, "in fp16", "ZR731"),
    "MiCS": ({"zero_optimization": {"stage": 3, "mics_shard_size": 2}}, None, "mics_shard_size", "ZR731"),
    "masters alone in bf16": ({"bf16": {"bf16_master_weights_and_grads": True}}, None, "states in fp32", "ZR731"),
    "NVMe": ({"zero_optimization": {"stage": 3, "offload_optimizer": {"device": "nvme"}}}, None, "on NVMe", "ZR731"),
}


@pytest.mark.parametrize("name", BROKEN)
def test_a_checkpoint_that_cannot_be_read_is_refused_and_nothing_written(tmp_path, name):
    changes, break_it, said, code = BROKEN[name]
    checkpoint = write_checkpoint(tmp_path, **changes)
    if break_it is not None:
        break_it(checkpoint)
    with pytest.raises(Refusal, match=re.escape(said)) as caught:
        reshard(checkpoint, 1, 2)
    assert caught.value.codes == [code] and caught.value.why and caught.value.fix
    assert not [path for path in tmp_path.iterdir() if path.name.startswith("checkpoint-7-")]


def test_targets_that_cannot_be(tmp_path, monkeypatch):
    checkpoint = write_checkpoint(tmp_path)
    with pytest.raises(Refusal, match=r"batch of 8 .* over 3 .*ZR743"):
        reshard(checkpoint, 3, 2)
    with pytest.raises(SystemExit):
        cli.main(["reshard", str(checkpoint), "--world_size", "1", "--stage", "0"])
    folder, _ = reshard(checkpoint, 1, 2)
    with pytest.raises(Refusal, match="ZR741"):
        reshard(checkpoint, 1, 2)
    with pytest.raises(Refusal, match="ZR731"):
        reshard(folder, 2, 2)
    with pytest.raises(Refusal, match="ZR731"):
        reshard(tmp_path / "checkpoint-8", 1, 2)
    monkeypatch.setattr(resharding.Host, "free_disk", lambda self, folder: 10)
    with pytest.raises(Refusal, match=r"needs \d+ B, and 10 B are free .*ZR744"):
        reshard(checkpoint, 1, 1)


def test_the_strategy_to_launch_keeps_what_was_offloaded():
    offloaded = {"zero_optimization": {"offload_optimizer": {"device": "cpu"}}}
    assert [strategy_of(offloaded, stage) for stage in (1, 2, 3)] == ["zero1", "zero2_offload", "zero3_offload"]
    assert strategy_of({"zero_optimization": {"offload_param": {"device": "none"}}}, 3) == "zero3"
    in_bf16 = {"bf16": {"bf16_master_weights_and_grads": True, "bf16_optimizer_states": True}}
    assert [strategy_of(in_bf16, stage) for stage in (1, 2, 3)] == ["zero1", "zero2_bf16_states", "zero3_bf16_states"]
    assert strategy_of(in_bf16 | offloaded, 2) == "zero2_offload"


def test_states_in_bf16_are_never_made_of_wider_ones(tmp_path, monkeypatch):
    """The other way round every number is kept."""
    monkeypatch.chdir(ROOT)
    folder, _ = reshard(write_checkpoint(tmp_path), 1, 2)
    (found,) = refused_at_launch(tmp_path, folder, "zero3_bf16_states", "--bf16", "true")
    assert found.startswith("bf16.bf16_master_weights_and_grads resumes") and found.endswith("in fp32")

    narrow = {"enabled": True, "bf16_master_weights_and_grads": True, "bf16_optimizer_states": True}
    checkpoint = write_checkpoint(tmp_path / "narrow", bf16=narrow)
    source = open_checkpoint(checkpoint)
    assert source.state_bytes == 6 * (15 + 7 + 3), "masters and two moments of two bytes each"
    folder, _ = reshard(checkpoint, 1, 2)
    assert refused_at_launch(tmp_path, folder, "zero3_bf16_states", "--bf16", "true") == []
    assert refused_at_launch(tmp_path, folder, "zero1", "--bf16", "true") == []


def refused_at_launch(folder: Path, checkpoint: Path, strategy: str, *overrides: str) -> list[str]:
    """What preflight finds about a run on one process that resumes from `checkpoint`."""
    recipe = folder / "recipe.yaml"
    if not recipe.exists():
        write_recipe(folder, bf16=False, gradient_accumulation_steps=4, max_steps=9)
    named = [] if strategy == "ddp" else ["--deepspeed", f"ds_configs/{strategy}.json"]
    argv = ["--resume_from_checkpoint", str(checkpoint), "--output_dir", str(folder / "out"), *named, *overrides]
    _, findings = preflight.preflight(recipe, recipes.read_recipe_file(recipe), argv, {}, rehearsal=True)
    return [finding.what for finding in findings if finding.level == "error"]


def test_a_launch_that_would_be_another_run_is_refused(tmp_path, monkeypatch):
    monkeypatch.chdir(ROOT)
    folder, _ = reshard(write_checkpoint(tmp_path), 1, 2)
    assert refused_at_launch(tmp_path, folder, "zero2") == []
    assert refused_at_launch(tmp_path, folder, "zero3") == [], "the states fit every stage"
    (found,) = refused_at_launch(tmp_path, folder, "zero2", "--gradient_accumulation_steps", "2")
    assert found.endswith("was written with 8 sequences per step; this run takes 4")
    (found,) = refused_at_launch(tmp_path, folder, "zero0")
    assert found.startswith("zero0 resumes")
    (found,) = refused_at_launch(tmp_path, folder, "ddp")
    assert found.startswith("single resumes")
    (found,) = refused_at_launch(tmp_path, folder, "zero2", "--train_sampling_strategy", "group_by_length")
    assert found.startswith("train_sampling_strategy: group_by_length on 1 processes")
    config = json.loads((ROOT / "ds_configs" / "zero2.json").read_text())
    config["zero_optimization"]["round_robin_gradients"] = True
    (found,) = refused_at_launch(tmp_path, folder, "ddp", "--deepspeed", json.dumps(config))
    assert found.startswith("round_robin_gradients resumes")

    config["zero_optimization"] = {"stage": 1}
    config["data_types"] = {"grad_accum_dtype": "fp32"}
    (found,) = refused_at_launch(tmp_path, folder, "ddp", "--deepspeed", json.dumps(config))
    assert found.startswith("data_types.grad_accum_dtype at stage 1 resumes")

    facts = manifest_facts(folder)
    state = folder / "trainer_state.json"
    state.write_text('{"global_step": 7, "best_model_checkpoint": "out/checkpoint-5"}')
    assert refused_at_launch(tmp_path, folder, "zero2")[0].endswith("is not whole"), "its size is another"
    write_manifest(folder, facts)
    assert refused_at_launch(tmp_path, folder, "zero2") == []
    best = ["--load_best_model_at_end", "true", "--eval_strategy", "steps", "--save_strategy", "steps"]
    assert refused_at_launch(tmp_path, folder, "zero2", *best)[0].startswith("load_best_model_at_end")
    (folder / STATES / "a.bias.safetensors").unlink()
    (found,) = refused_at_launch(tmp_path, folder, "zero2")
    assert found.endswith("is not whole")
