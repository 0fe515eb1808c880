"""A checkpoint goes on under another ZeRO stage and world size: the same losses, the same bits."""

import functools
import itertools
import json
import shlex
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.helpers import cases, checkpoint_cases
from tests.helpers.seeded import SEED, count, draw, grid, write_result
from tests.helpers.tiny import ROOT, write_recipe, write_rows
from zero_recipes.tools import main as cli
from zero_recipes.tools.reshard import reshard

LARGEST = "largest_relative_loss_difference"
SAVED, STEPS = 5, 9  # epochs of 4 steps: saved in the second, ended in the third
USUAL = {"max_steps": STEPS, "save_strategy": "steps", "save_steps": SAVED, "global_batch_size": 8, "bf16": False}
USUAL |= {"per_device_train_batch_size": 2, "warmup_steps": 2, "lr_scheduler_type": "cosine", "weight_decay": 0.1}


class Runs:
    """Uninterrupted runs with a checkpoint in their middle, each made when it is first needed."""

    def __init__(self, folder: Path, group: Callable, rows: int = 32, **keys):
        self.folder, self.group = folder, group
        rows = write_rows(folder / "few", count=rows, seed=SEED)
        self.recipe = write_recipe(folder, **({"dataset_name": str(rows), "max_grad_norm": 1.0} | USUAL | keys))
        self.done: dict[tuple, list[float]] = {}

    def argv(self, strategy: str, out: Path, *more: str) -> list[str]:
        named = strategy if strategy.endswith(".json") else f"ds_configs/{strategy}.json"
        return [str(self.recipe), "--output_dir", str(out), "--deepspeed", named, *more]

    def source(self, strategy: str, world: int) -> Path:
        """The run's folder, with checkpoint-5 and states.pt (what DeepSpeed gathered when it was saved)."""
        out = self.folder / f"{Path(strategy).stem}-{world}"
        if (strategy, world) not in self.done:
            keep = {"step": SAVED, "path": str(self.folder / f"{out.name}.pt")}
            argv = self.argv(strategy, out)
            result = self.group(world).run(checkpoint_cases.train_and_keep_states, argv=argv, **keep)[0]
            assert result["world_size"] == world and result["groups"][0]
            self.done[strategy, world] = result["metrics"]["loss_history"]
        return out

    def go_on(self, source: tuple[str, int], target: tuple[str, int]) -> dict:
        """Reshard the checkpoint of `source`, resume it as `target`, compare; see cases.train_and_compare_states."""
        out = self.source(*source)
        strategy, world = target
        folder, batch = reshard(out / f"checkpoint-{SAVED}", world, int(Path(strategy).stem[4]))
        assert batch.total == 8 and batch.world_size == world
        argv = self.argv(strategy, self.folder / "resumed", "--resume_from_checkpoint", str(folder))
        path = str(out.with_suffix(".pt"))
        results = self.group(world).run(checkpoint_cases.train_and_compare_states, argv=argv, path=path)
        shutil.rmtree(folder)
        shutil.rmtree(self.folder / "resumed")
        assert results[0]["steps"] == [SAVED, STEPS], "Adam's step was not kept, or counted twice"
        assert all(result["counters"] == result["groups"] for result in results), "groups share a step counter"
        losses, wanted = results[0]["losses"], self.done[source]
        assert len(wanted) == STEPS and losses[:SAVED] == wanted[:SAVED], "the checkpoint carries its history"
        gap = max(abs(a - b) / abs(b) for a, b in zip(losses, wanted, strict=True))
        return {"gap": gap} | {key: results[0][key] for key in ("different", "groups", "dtypes")}


LORA = dict(use_peft=True, lora_r=3, lora_dropout=0.0, lora_target_modules=["query_key_value", "dense"])
LORA["loraplus_lr_ratio"] = 4.0
# kind of run -> (its keys, the largest relative difference of losses)
KINDS = {
    "fp32": ({}, 1e-5),
    "the last batch of an epoch is not full": ({"rows": draw("rows").randint(25, 31)}, 1e-5),
    "bf16": ({"bf16": True}, 1e-3),
    "bf16 states": ({"bf16": True}, 2e-3),
    "lora": (LORA, 1e-5),  # dropout is drawn by rank; what is frozen is not in the checkpoint
}


@pytest.fixture(scope="module")
def runs(request, tmp_path_factory):
    """The Runs of a kind, made when they are first used."""

    def group(world: int):
        return request.getfixturevalue({1: "one", 2: "two", 4: "four"}[world])

    @functools.cache
    def of(kind: str) -> Runs:
        return Runs(tmp_path_factory.mktemp("runs"), group, **KINDS[kind][0])

    return of


@pytest.mark.parametrize(
    ("kind", "source", "target"),
    [
        grid("fp32", ("zero3", 2), ("zero2", 2)),
        grid("fp32", ("zero1", 2), ("zero3", 1)),
        grid("fp32", ("zero2", 4), ("zero3", 2)),
        grid("fp32", ("zero2_offload", 2), ("zero3", 1)),  # DeepSpeedCPUAdam counts its steps with an integer
        grid("the last batch of an epoch is not full", ("zero2", 2), ("zero3", 1)),
        grid("bf16", ("zero3", 2), ("zero2", 2)),
        ("bf16 states", ("zero2_bf16_states", 2), ("zero3_bf16_states", 1)),
        grid("bf16 states", ("zero3_bf16_states", 2), ("zero2_bf16_states", 2)),
        ("lora", ("zero2", 2), ("zero3", 1)),
    ],
    ids=lambda value: value if isinstance(value, str) else "{}-world{}".format(*value),
)
def test_a_run_goes_on_as_if_nothing_had_happened(runs, kind, source, target):
    outcome = runs(kind).go_on(source, target)
    assert outcome["different"] == [], "states after loading are not the bits that were saved"
    assert outcome["gap"] < KINDS[kind][1]
    if kind == "bf16 states":
        assert outcome["dtypes"] == ["torch.bfloat16"]
    if kind == "fp32":
        assert outcome["groups"] == 2, "weight decay and none are two groups"


@pytest.mark.grid
def test_other_layouts_and_deepspeeds_own_scheduler(runs):
    """Several flat groups each, another order in them, and a schedule of the engine's."""
    fp32 = runs("fp32")
    automatic = dict.fromkeys(("total_num_steps", "warmup_min_lr", "warmup_max_lr", "warmup_num_steps"), "auto")
    scheduler = {"scheduler": {"type": "WarmupDecayLR", "params": automatic}}

    def changed(name: str, zero: dict, **blocks) -> str:
        config = json.loads((ROOT / "ds_configs" / f"{name}.json").read_text()) | blocks
        config["zero_optimization"] |= zero
        path = fp32.folder / f"{name}_{'_'.join([*zero, *blocks])}.json"
        path.write_text(json.dumps(config))
        return str(path)

    sub_groups = fp32.go_on((changed("zero3", {"sub_group_size": 20_000}), 2), ("zero1", 2))
    assert sub_groups["gap"] < 1e-5 and sub_groups["different"] == []
    # DeepSpeed's own gathering, which `different` is compared with, is wrong under round_robin_gradients
    assert fp32.go_on((changed("zero2", {"round_robin_gradients": True}), 2), ("zero1", 2))["gap"] < 1e-5
    outcome = fp32.go_on((changed("zero3", {}, **scheduler), 2), (changed("zero2", {}, **scheduler), 1))
    assert outcome["different"] == [] and outcome["gap"] < 1e-5


def test_the_printed_command_goes_on(runs, capsys):
    fp32 = runs("fp32")
    out = fp32.source("zero3", 2)
    assert cli.main(["reshard", str(out / f"checkpoint-{SAVED}"), "--world_size", "1", "--stage", "2"]) == 0
    words = shlex.split(capsys.readouterr().out.splitlines()[-1])
    assert words[:3] == ["zero-recipes", "train", "RECIPE.yaml"]
    assert words[3:7] == ["--config_file", "zero2.yaml", "--num_processes", "1"]
    argv = [str(fp32.recipe), *words[7:], "--deepspeed", "ds_configs/zero2.json"]
    shutil.rmtree(out / f"checkpoint-{STEPS}")  # as if the run had been interrupted: newer ones are not written over
    losses = fp32.group(1).run(cases.train, argv=argv)[0]["metrics"]["loss_history"]
    assert losses == pytest.approx(fp32.done["zero3", 2], rel=1e-5)
    assert (out / f"checkpoint-{STEPS}" / "latest").is_file(), "the next checkpoint is DeepSpeed's own"


@pytest.mark.grid
@pytest.mark.timeout(3600)
def test_every_stage_and_world_into_every_other(runs):
    """All of stages 1, 2, 3 and worlds 1, 2, 4; and the offloaded ones. Writes benchmarks/results/reshard.json."""
    plain = [(f"zero{stage}", world) for stage in (1, 2, 3) for world in (1, 2, 4)]
    offloaded = [("zero2_offload", 2), ("zero3_offload", 2)]
    pairs = [pair for pair in itertools.product(plain, plain) if pair[0] != pair[1]]
    pairs += [(source, target) for source in offloaded for target in [("zero2", 1), ("zero3", 4)]]
    pairs += [(source, target) for source in [("zero2", 1), ("zero3", 4)] for target in offloaded]
    rows = []
    for source, target in pairs:
        outcome = runs("fp32").go_on(source, target)
        assert outcome["gap"] < 1e-5 and outcome["different"] == [], (source, target)
        sides = {"from": source, "to": target}
        sides = {side: {"strategy": name, "world_size": world} for side, (name, world) in sides.items()}
        rows.append(sides | {LARGEST: outcome["gap"]})
    document = {
        "precision": "fp32",
        "global_batch": 8,
        "steps_before": SAVED,
        "steps_compared": STEPS - SAVED,
        LARGEST: max(row[LARGEST] for row in rows),
        "pairs": rows,
    }
    write_result("reshard.json", document)
    count("reshard", "every stage and world into every other", number=len(rows), relative_loss=document[LARGEST])
