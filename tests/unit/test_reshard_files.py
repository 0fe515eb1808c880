"""What reshard refuses, and what it leaves behind when it is killed. No training."""

import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from tests.helpers.checkpoint_files import OPTIMIZER, rank_states, write_checkpoint
from tests.helpers.tiny import ROOT, write_recipe
from zero_recipes.checkpoint import reshard as resharding
from zero_recipes.checkpoint import save
from zero_recipes.checkpoint.reshard import reshard, strategy_of
from zero_recipes.checks import preflight
from zero_recipes.cli import main as cli
from zero_recipes.config import recipe as recipes
from zero_recipes.core.findings import Refusal


def contents(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def test_a_whole_checkpoint_is_written_beside_the_old_one(tmp_path):
    checkpoint = write_checkpoint(tmp_path)
    before = contents(checkpoint)
    facts = {"step": 7, "recipe_sha256": "abc", "zero_stage": 3, "world_size": 2}
    save.write_manifest(checkpoint, facts)
    folder, batch = reshard(checkpoint, 4, 2)
    assert (folder.name, tuple(batch)) == ("checkpoint-7-zero2-world4", (2, 1, 4))
    written = save.read_manifest(folder)
    assert save.checkpoint_fault(folder) is None and set(written["files"]) == set(contents(folder)) - {save.MANIFEST}
    kept = {key: written[key] for key in ("step", "recipe_sha256", "zero_stage", "world_size", "strategy")}
    assert kept == facts | {"zero_stage": 2, "world_size": 4, "strategy": "zero2"}
    assert [(folder / f"rng_state_{rank}.pth").read_bytes() for rank in range(4)] == [b"\0", b"\1", b"\0", b"\1"]
    for name in ("trainer_state.json", "scheduler.pt"):
        assert (folder / name).read_bytes() == before[name]
    assert not (folder / "latest").exists(), "transformers would look for DeepSpeed's files"
    bf16, offloaded = BF16_STATES, {"zero_optimization": {"offload_optimizer": {"device": "cpu"}}}
    assert [strategy_of(offloaded, 1), strategy_of(offloaded, 2), strategy_of(bf16, 3)] == [
        *("zero1", "zero2_offload", "zero3_bf16_states")
    ]
    del (after := contents(checkpoint))[save.MANIFEST]
    assert after == before, "the old checkpoint was touched"


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
    assert left == [".checkpoint-7-zero2-world1.zero-recipes.part", "checkpoint-7"], (
        "nothing that looks like a checkpoint"
    )
    monkeypatch.undo()
    folder, _ = reshard(checkpoint, 1, 2)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["checkpoint-7", folder.name]
    assert save.checkpoint_fault(folder) is None and contents(checkpoint) == before


def change_rank(number: int, change) -> Callable[[Path], None]:
    """What lets `change` loose on the states of a rank."""

    def broken(checkpoint: Path) -> None:
        states = rank_states()
        change(states, states["optimizer_state_dict"]["state"])
        torch.save({"optimizer_state_dict": states}, checkpoint / "global_step7" / OPTIMIZER.format(number))

    return broken


def count_apart(_, adam: dict) -> None:
    adam[1]["step"] += 7


def other_optimizer(_, adam: dict) -> None:
    for state in adam.values():
        state["momentum_buffer"] = state.pop("exp_avg")


BROKEN = {
    "no `latest`": ({}, lambda c: (c / "latest").unlink(), "without DeepSpeed", "ZR731"),
    "a rank": ({}, lambda c: (c / "global_step7" / OPTIMIZER.format(1)).unlink(), "states of 1 of 2 ranks", "ZR729"),
    "the manifest": ({}, lambda c: (c / save.HISTORY).write_text("{}"), "has no manifest.json", "ZR729"),
    "steps": ({}, change_rank(1, count_apart), "step counters differ", "ZR729"),
    "not Adam": (
        {},
        change_rank(1, other_optimizer),
        "than Adam's: exp_avg_sq, momentum_buffer",
        "ZR731",
    ),
    "BF16_Optimizer": ({}, change_rank(0, lambda states, _: states.pop("zero_stage")), "BF16_Optimizer", "ZR731"),
    "model parallel": ({"model": {"mp_world_size": 2}}, None, "model-parallel", "ZR731"),
    "experts": ({"model": {"num_experts": [4]}}, None, "mixture-of-experts", "ZR731"),
    "stage 0": ({"zero_optimization": {"stage": 0}}, None, "ZeRO stage 0", "ZR731"),
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


def test_targets_that_cannot_be(tmp_path):
    checkpoint = write_checkpoint(tmp_path)
    with pytest.raises(Refusal, match=r"batch of 8 .* by 3 .*ZR743"):
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


def test_a_checkpoint_without_a_manifest_gets_no_checksums(tmp_path, capsys):
    checkpoint = write_checkpoint(tmp_path)
    save.write_manifest(checkpoint, {"step": 7})
    assert save.read_manifest(reshard(checkpoint, 1, 2)[0])["checksums"]
    (checkpoint / save.MANIFEST).unlink()
    assert not save.read_manifest(reshard(checkpoint, 2, 3)[0])["checksums"] and "ZR772" in capsys.readouterr().out


BF16_STATES = {"bf16": {"enabled": True, "bf16_master_weights_and_grads": True, "bf16_optimizer_states": True}}


@pytest.fixture(scope="module")
def resharded(tmp_path_factory) -> dict[str, Path]:
    """{dtype of the states: checkpoint for one process}; and one whose best checkpoint was written before."""
    folder = tmp_path_factory.mktemp("resharded")
    configs = {"fp32": {}, "bf16": BF16_STATES}
    found = {name: reshard(write_checkpoint(folder / name, **config), 1, 2)[0] for name, config in configs.items()}
    found["best"] = Path(shutil.copytree(found["fp32"], folder / "best" / found["fp32"].name))
    (found["best"] / save.STATE).write_text('{"global_step": 7, "best_model_checkpoint": "out/checkpoint-5"}')
    save.write_manifest(found["best"], save.read_manifest(found["fp32"]))
    return found


BEST = ("--load_best_model_at_end", "true", "--eval_strategy", "steps", "--save_strategy", "steps")
ROUND_ROBIN = {"zero_optimization": {"stage": 2, "round_robin_gradients": True}}
WIDE_GRADIENTS = {"zero_optimization": {"stage": 1}, "data_types": {"grad_accum_dtype": "fp32"}}
LAUNCHES = {  # (states, DeepSpeed's configuration, other keys, the codes of what is refused)
    "stage 2": ("fp32", "zero2", (), []),
    "stage 3": ("fp32", "zero3", (), []),
    "another batch": ("fp32", "zero2", ("--gradient_accumulation_steps", "2"), ["ZR722"]),
    "stage 0": ("fp32", "zero0", (), ["ZR712"]),
    "no stage": ("fp32", None, (), ["ZR712"]),
    "rows by length": ("fp32", "zero2", ("--train_sampling_strategy", "group_by_length"), ["ZR714"]),
    "other rows are dropped": ("fp32", "zero2", ("--dataloader_drop_last", "true"), ["ZR714"]),
    "round robin": ("fp32", ROUND_ROBIN, (), ["ZR715"]),
    "fp32 gradients": ("fp32", WIDE_GRADIENTS, (), ["ZR715"]),
    "an earlier best": ("best", "zero2", BEST, ["ZR717"]),
    "an earlier best that is not loaded": ("best", "zero2", (), []),
    "narrower states": ("fp32", "zero3_bf16_states", ("--bf16", "true"), ["ZR289"]),
    "narrow states": ("bf16", "zero3_bf16_states", ("--bf16", "true"), []),
    "wider states": ("bf16", "zero1", ("--bf16", "true"), []),
}


@pytest.mark.parametrize(("states", "config", "keys", "codes"), LAUNCHES.values(), ids=LAUNCHES)
def test_a_launch_that_would_be_another_run_is_refused(resharded, tmp_path, monkeypatch, states, config, keys, codes):
    monkeypatch.chdir(ROOT)
    recipe = write_recipe(tmp_path, bf16=False, gradient_accumulation_steps=4, max_steps=9)
    argv = ["--resume_from_checkpoint", str(resharded[states]), "--output_dir", str(tmp_path / "out"), *keys]
    if isinstance(config, dict):
        config = json.dumps(json.loads((ROOT / "ds_configs" / "zero2.json").read_text()) | config)
    if config is not None:
        argv += ["--deepspeed", config if config.startswith("{") else f"ds_configs/{config}.json"]
    _, findings = preflight.preflight(recipe, recipes.read_recipe_file(recipe), argv, {}, rehearsal=True)
    assert [finding.code for finding in findings if finding.level == "error"] == codes
