"""A checkpoint goes on under another ZeRO stage and world size: the same losses, the same bits, little memory."""

from __future__ import annotations

import itertools
import json
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.helpers.checkpoint_files import write_checkpoint
from tests.helpers.grid import grid
from tests.helpers.tiny import write_recipe, write_rows
from zero_recipes.checkpoint.reshard.write import reshard
from zero_recipes.checkpoint.resharded import FOLDER
from zero_recipes.cli import main as cli
from zero_recipes.core import environment
from zero_recipes.core.files import write_json

ROOT = Path(__file__).resolve().parents[2]
RESULT = ROOT / "benchmarks" / "results" / "reshard.json"
SAVED, STEPS = 5, 9  # epochs of 4 steps: saved in the second, ended in the third


class Runs:
    """Uninterrupted runs with a checkpoint in their middle, each made when it is first asked for."""

    def __init__(self, folder: Path, groups: dict, **keys):
        rows = write_rows(folder / "few", count=keys.pop("rows", 32))
        self.folder, self.groups = folder, groups
        settings = {
            "dataset_name": str(rows),
            "bf16": False,
            "max_steps": STEPS,
            "save_strategy": "steps",
            "save_steps": SAVED,
            "global_batch_size": 8,
            "per_device_train_batch_size": 2,
            "warmup_steps": 2,
            "lr_scheduler_type": "cosine",
            "weight_decay": 0.1,
            "max_grad_norm": 1.0,
        }
        self.recipe = write_recipe(folder, **(settings | keys))
        self.done: dict[tuple, list[float]] = {}

    def argv(self, strategy: str, out: Path, *more: str) -> list[str]:
        named = strategy if strategy.endswith(".json") else f"ds_configs/{strategy}.json"
        return [str(self.recipe), "--output_dir", str(out), "--deepspeed", named, *more]

    def source(self, strategy: str, world: int) -> Path:
        """The run's folder, with checkpoint-5 and states.pt (what DeepSpeed gathered when it was saved)."""
        out = self.folder / f"{Path(strategy).stem}-{world}"
        if (strategy, world) not in self.done:
            keep = {"step": SAVED, "path": str(self.folder / f"{out.name}.pt")}
            result = self.groups[world].run(
                "reshard_cases.train_and_keep_states", argv=self.argv(strategy, out), **keep
            )[0]
            assert result["world_size"] == world and result["groups"][0]
            self.done[strategy, world] = result["metrics"]["loss_history"]
        return out

    def go_on(self, source: tuple[str, int], target: tuple[str, int]) -> dict:
        """Reshard the checkpoint of `source`, resume it as `target`, compare; see cases.train_and_compare_states."""
        out = self.source(*source)
        strategy, world = target
        folder, batch = reshard(out / f"checkpoint-{SAVED}", world, int(Path(strategy).stem[4]))
        assert batch.total == 8 and batch.world_size == world
        resume = ["--resume_from_checkpoint", str(folder)]
        argv = self.argv(strategy, self.folder / "resumed", *resume)
        results = self.groups[world].run(
            "reshard_cases.train_and_compare_states", argv=argv, path=str(out.with_suffix(".pt"))
        )
        shutil.rmtree(folder)
        shutil.rmtree(self.folder / "resumed")
        assert results[0]["steps"] == [SAVED, STEPS], "Adam's step was not kept, or counted twice"
        assert all(result["counters"] == result["groups"] for result in results), "groups share a step counter"
        losses, wanted = results[0]["losses"], self.done[source]
        assert len(wanted) == STEPS and losses[:SAVED] == wanted[:SAVED], "the checkpoint carries its history"
        gap = max(abs(a - b) / abs(b) for a, b in zip(losses, wanted, strict=True))
        kept = {key: results[0][key] for key in ("different", "groups", "dtypes")}
        return {"gap": gap, "losses": losses[SAVED:]} | kept


@pytest.fixture(scope="module")
def groups(request):
    """The launched groups by world size, each launched when it is first used."""

    class Lazy(dict):
        def __missing__(self, world):
            return request.getfixturevalue({1: "one", 2: "two", 4: "four"}[world])

    return Lazy()


@pytest.fixture(scope="module")
def fp32(groups, tmp_path_factory):
    return Runs(tmp_path_factory.mktemp("fp32"), groups)


@pytest.mark.parametrize(
    ("source", "target"),
    [
        (("zero3", 2), ("zero2", 2)),
        grid(("zero2", 2), ("zero3", 2)),
        (("zero1", 2), ("zero3", 1)),
        grid(("zero2", 2), ("zero1", 1)),
        (("zero3", 1), ("zero1", 2)),
        grid(("zero3", 2), ("zero2", 4)),
        (("zero2", 4), ("zero3", 2)),
    ],
    ids=lambda run: "{}-world{}".format(*run),
)
def test_losses_go_on_as_if_nothing_had_happened(fp32, source, target):
    outcome = fp32.go_on(source, target)
    assert outcome["gap"] < 1e-5
    assert outcome["different"] == [], "states after loading are not the bits that were saved"
    assert outcome["groups"] == 2, "weight decay and none are two groups"


@pytest.mark.parametrize(
    ("source", "target"),
    [(("zero2", 2), ("zero3", 1)), grid(("zero3", 1), ("zero2", 2)), grid(("zero1", 2), ("zero2", 4))],
    ids=lambda run: "{}-world{}".format(*run),
)
def test_an_epoch_ends_with_the_same_rows_on_more_or_fewer_processes(groups, tmp_path, source, target):
    """27 rows, saved inside the second epoch: its last batches are filled with rows without a loss, on any number."""
    outcome = Runs(tmp_path, groups, rows=27).go_on(source, target)
    assert outcome["gap"] < 1e-5 and outcome["different"] == []


@pytest.mark.parametrize(
    ("source", "target"),
    [(("zero3", 2), ("zero2", 2)), grid(("zero2", 2), ("zero3", 1))],
    ids=lambda run: "{}-world{}".format(*run),
)
def test_bf16_masters_are_kept_and_the_weights_are_theirs(groups, tmp_path, source, target):
    outcome = Runs(tmp_path, groups, bf16=True).go_on(source, target)
    assert outcome["different"] == []
    assert outcome["gap"] < 1e-3


@pytest.fixture(scope="module")
def bf16_states(groups, tmp_path_factory):
    return Runs(tmp_path_factory.mktemp("bf16_states"), groups, bf16=True)


@pytest.mark.parametrize(
    ("source", "target"),
    [
        (("zero2_bf16_states", 2), ("zero3_bf16_states", 1)),
        grid(("zero2_bf16_states", 2), ("zero3_bf16_states", 2)),
        (("zero3_bf16_states", 2), ("zero2_bf16_states", 2)),
        grid(("zero3_bf16_states", 2), ("zero2_bf16_states", 1)),
        grid(("zero3_bf16_states", 1), ("zero2_bf16_states", 2)),
    ],
    ids=lambda run: "{}-world{}".format(*run),
)
def test_states_in_bf16_stay_so_bit_for_bit(bf16_states, source, target):
    outcome = bf16_states.go_on(source, target)
    assert outcome["different"] == [] and outcome["dtypes"] == ["torch.bfloat16"]
    assert outcome["gap"] < 2e-3


def test_states_in_bf16_go_on_in_fp32(bf16_states):
    """Exactly what was saved, in wider tensors; from then on it is another run."""
    outcome = bf16_states.go_on(("zero2_bf16_states", 2), ("zero1", 2))
    assert outcome["different"] == [] and outcome["dtypes"] == ["torch.float32"]
    assert 0 < outcome["gap"] < 1e-2


@pytest.mark.parametrize(
    ("source", "target"),
    [(("zero2", 2), ("zero3", 1)), grid(("zero3", 2), ("zero1", 2))],
    ids=lambda run: "{}-world{}".format(*run),
)
def test_lora_keeps_its_adapters_states(groups, tmp_path, source, target):
    """What is frozen is the base model's, and is not in the checkpoint. Dropout (0.05 in TRL) is drawn by rank."""
    runs = Runs(
        tmp_path, groups, use_peft=True, lora_r=3, lora_dropout=0.0, lora_target_modules=["query_key_value", "dense"]
    )
    outcome = runs.go_on(source, target)
    assert outcome["different"] == [] and outcome["gap"] < 1e-5


@pytest.mark.parametrize(
    ("source", "target"),
    [
        (("zero2_offload", 2), ("zero3", 1)),
        grid(("zero2", 2), ("zero3_offload", 1)),
    ],
    ids=lambda run: "{}-world{}".format(*run),
)
def test_an_offloaded_optimizer_as_source_and_target(fp32, source, target):
    """DeepSpeedCPUAdam counts its steps with an integer, torch's AdamW with a tensor; they round differently."""
    outcome = fp32.go_on(source, target)
    assert outcome["different"] == [] and outcome["gap"] < 1e-5


def test_sub_groups_of_stage_3_and_round_robin_of_stage_2_are_read(fp32):
    """Layouts that the plain configurations do not have: several flat groups each, and another order in them."""
    configs = {"zero3": {"sub_group_size": 20_000}, "zero2": {"round_robin_gradients": True}}
    for name, changes in configs.items():
        config = json.loads((ROOT / "ds_configs" / f"{name}.json").read_text())
        config["zero_optimization"] |= changes
        path = fp32.folder / f"{name}_other_layout.json"
        path.write_text(json.dumps(config))
        outcome = fp32.go_on((str(path), 2), ("zero1", 2))
        assert outcome["gap"] < 1e-5
        if name == "zero3":  # DeepSpeed's own gathering is wrong under round_robin_gradients: see below
            assert outcome["different"] == []


def test_deepspeeds_own_scheduler_goes_on(fp32):
    """transformers writes no scheduler.pt then: its state is the engine's."""
    paths = {}
    for name in ("zero2", "zero3"):
        config = json.loads((ROOT / "ds_configs" / f"{name}.json").read_text())
        automatic = dict.fromkeys(("total_num_steps", "warmup_min_lr", "warmup_max_lr", "warmup_num_steps"), "auto")
        config["scheduler"] = {"type": "WarmupDecayLR", "params": automatic}
        paths[name] = fp32.folder / f"{name}_scheduler.json"
        paths[name].write_text(json.dumps(config))
    outcome = fp32.go_on((str(paths["zero3"]), 2), (str(paths["zero2"]), 1))
    assert outcome["different"] == [] and outcome["gap"] < 1e-5


def test_round_robin_gradients_cannot_be_a_target(two):
    """Fails when DeepSpeed maps what it lays out: then remove the refusal in checkpoint/compatibility.py."""
    assert all(result == [True, False] for result in two.run("reshard_cases.masters_read_through_round_robin"))


@pytest.mark.private
def test_setting_a_part_at_stage_3_is_still_needed(two):
    """Fails when DeepSpeed pads what it is given whole: then use safe_set_full_* alone in resharded.py."""
    first, last = two.run("reshard_cases.set_whole_at_stage_3")
    assert first == "no error" and "exceeds dimension size" in last


def test_the_printed_command_goes_on(fp32, capsys):
    out = fp32.source("zero3", 2)
    assert cli.main(["reshard", str(out / f"checkpoint-{SAVED}"), "--world_size", "1", "--stage", "2"]) == 0
    words = shlex.split(capsys.readouterr().out.splitlines()[-1])
    assert words[:4] == ["accelerate", "launch", "--config_file", "accelerate_configs/zero2.yaml"]
    assert words[4:8] == ["--num_processes", "1", "run_sft.py", "RECIPE.yaml"]
    argv = [str(fp32.recipe), *words[8:], "--deepspeed", "ds_configs/zero2.json"]
    shutil.rmtree(out / f"checkpoint-{STEPS}")  # as if the run had been interrupted: newer ones are not written over
    losses = fp32.groups[1].run("train", argv=argv)[0]["metrics"]["loss_history"]
    assert losses == pytest.approx(fp32.done["zero3", 2], rel=1e-5)
    assert (out / f"checkpoint-{STEPS}" / "latest").is_file(), "the next checkpoint is DeepSpeed's own"


@pytest.mark.grid
def test_every_stage_and_world_into_every_other(fp32):
    """All of stages 1, 2, 3 and worlds 1, 2, 4; and the offloaded ones. Writes benchmarks/results/reshard.json."""
    runs = [(f"zero{stage}", world) for stage in (1, 2, 3) for world in (1, 2, 4)]
    offloaded = [("zero2_offload", 2), ("zero3_offload", 2)]
    pairs = [pair for pair in itertools.product(runs, runs) if pair[0] != pair[1]]
    pairs += [(source, target) for source in offloaded for target in [("zero2", 1), ("zero3", 4)]]
    pairs += [(source, target) for source in [("zero2", 1), ("zero3", 4)] for target in offloaded]
    rows = []
    for source, target in pairs:
        outcome = fp32.go_on(source, target)
        assert outcome["gap"] < 1e-5 and outcome["different"] == [], (source, target)
        sides = {"from": source, "to": target}
        rows.append(
            {side: {"strategy": name, "world_size": world} for side, (name, world) in sides.items()}
            | {"largest_relative_loss_difference": outcome["gap"]}
        )
    document = {
        "precision": "fp32",
        "global_batch": 8,
        "steps_before": SAVED,
        "steps_compared": STEPS - SAVED,
        "largest_relative_loss_difference": max(row["largest_relative_loss_difference"] for row in rows),
        "pairs": rows,
        "hardware": environment.hardware("cpu"),
        "versions": environment.versions(),
    }
    write_json(RESULT, document)


MEASURE = """
import os, sys
from pathlib import Path
from zero_recipes.libs.warnings import quieten
quieten()
import deepspeed, rich.progress, safetensors.torch, torch
from zero_recipes.checkpoint.reshard.write import reshard

checkpoint = Path(sys.argv[1])

def bytes_of(name):
    line = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith(name))
    return int(line.split()[1]) * 1024

def grown(work):
    if os.fork():
        return os.wait()
    Path("/proc/self/clear_refs").write_text("5")  # proc(5): the peak begins anew
    before = bytes_of("VmRSS")
    kept = work()
    print("grown", bytes_of("VmHWM") - before, flush=True)
    os._exit(0)

grown(lambda: [torch.load(path, weights_only=False) for path in checkpoint.rglob("*_optim_states.pt")])
grown(lambda: reshard(checkpoint, 1, 3))
"""


def test_a_checkpoint_is_never_in_memory_whole(tmp_path):
    """300 MB of states in 96 parameters: the peak grows by ten or so of them, mapped pages and imports included."""
    shapes = [{f"layers.{number}.weight": (1024, 256) for number in range(96)}, {"norm.bias": (1024,)}]
    checkpoint = write_checkpoint(tmp_path, shapes=shapes)
    size = sum(path.stat().st_size for path in checkpoint.rglob("*_optim_states.pt"))
    assert size > 300e6
    command = [sys.executable, "-c", MEASURE, str(checkpoint)]
    ended = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300)
    whole, lean = (int(line.split()[1]) for line in ended.stdout.splitlines() if line.startswith("grown "))
    assert ended.returncode == 0, ended.stderr[-2000:]
    assert whole > 0.95 * size, "the measure does not see what is loaded"
    assert lean < 0.2 * size
    assert sum(path.stat().st_size for path in tmp_path.rglob(f"{FOLDER}/*")) > 0.99 * size
