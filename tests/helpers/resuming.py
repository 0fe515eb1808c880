"""Runs that are interrupted and resumed: the recipe, and the comparison with the uninterrupted run."""

import json
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.helpers import cases, checkpoint_cases
from tests.helpers.seeded import draw
from tests.helpers.tiny import arguments, write_recipe, write_rows
from zero_recipes.checkpoint.save import checkpoint_fault

SAVED_AT, STEPS = 4, 7
LORA = {"use_peft": True, "lora_r": 4, "lora_target_modules": ["query_key_value", "dense"], "lora_dropout": 0.1}
EXACT = dict.fromkeys(("loss", "grad_norm", "eval_loss", "weights", "states", "tokens"), 0.0)


def resume_recipe(folder: Path, **keys) -> Path:
    """Three steps an epoch, the last of them smaller: the run is resumed within its second epoch and enters a third.

    Dropout everywhere, a schedule with warm-up, weight decay: whatever is not restored shows in the losses.
    """
    usual = {"lr_scheduler_type": "cosine", "warmup_steps": 2, "weight_decay": 0.1, "learning_rate": 2e-3}
    usual |= {"gradient_accumulation_steps": 2, "max_steps": STEPS, "save_strategy": "steps", "save_steps": SAVED_AT}
    usual |= {"eval_strategy": "steps", "eval_steps": 5, "dataset_name": str(write_rows(folder / "few", count=20))}
    recipe = write_recipe(folder, **(usual | keys))
    config = folder / "model" / "config.json"
    values = json.loads(config.read_text()) | {"hidden_dropout": 0.1, "attention_dropout": 0.1}
    config.write_text(json.dumps(values))
    return recipe


KINDS: dict[str, dict[str, Any]] = {
    "random": {},
    "drop_last": {"dataloader_drop_last": True, "per_device_eval_batch_size": 1},  # of evaluation rows it drops none
    "unseeded": {"accelerator_config": {"use_seedable_sampler": False}},
    "split_batches": {"accelerator_config": {"split_batches": True}},
    "lengths": {"train_sampling_strategy": "group_by_length"},
    "rebalance": {"train_sampling_strategy": "batch_rebalance"},
    "packing": {"packing": True, "max_length": 64},
    "stream": {"dataset_streaming": True},
    "shuffled stream": {"dataset_streaming": True, "shuffle_dataset": True},
    "packed stream": {"dataset_streaming": True, "packing": True, "max_length": 64},
    "packed and shuffled stream": {
        "dataset_streaming": True,
        "packing": True,
        "max_length": 64,
        "shuffle_dataset": True,
    },
    "mixture": {"dataset_name": None, "test_split_size": 0.2},
    "lora": LORA,
}


@dataclass(frozen=True)
class Shape:
    """A run in the shape of its data and steps, killed after step `killed`; dropout is everywhere."""

    kind: str  # of KINDS
    rows: int
    micro: int
    accumulation: int
    killed: int
    steps: int
    strategy: str = "ddp"
    world: int = 2
    seed: int = 0  # of the rows

    def recipe(self, folder: Path, **others) -> Path:
        rows = write_rows(folder / "shaped", count=self.rows, seed=self.seed)
        keys = {"dataset_name": str(rows), "bf16": False} | KINDS[self.kind]
        if self.kind == "mixture":  # TRL's: rows of two files, of which it sets some aside
            more = write_rows(folder / "more", count=self.rows // 2 + 1, seed=self.seed + 1)
            files = [str(path / "train.jsonl") for path in (rows, more)]
            keys["datasets"] = [{"path": "json", "data_files": path} for path in files]
        return resume_recipe(
            folder,
            per_device_train_batch_size=self.micro,
            warmup_steps=min(2, self.steps - 1),  # the learning rate reaches its peak
            gradient_accumulation_steps=self.accumulation,
            max_steps=self.steps,
            save_steps=self.killed,
            **(keys | others),
        )


def drawn(number: int, world: int, strategies: tuple[str, ...], kinds: tuple[str, ...] = tuple(KINDS)) -> Shape:
    """A shape nobody has chosen. Rows seldom divide; the run is killed within its first three epochs or between two."""
    chance = draw("shape", number, world)
    kind, strategy = chance.choice(kinds), chance.choice(strategies)
    micro, accumulation = chance.choice((1, 2, 3, 4)), chance.choice((1, 2, 4))
    if kind == "split_batches":
        micro *= world  # accelerate cuts a micro batch into one part for each process
    total = micro * accumulation * world
    rows = chance.randint(total, max(total + 1, 61))
    epoch = -(-rows // total)
    killed = chance.randint(1, 3 * epoch)
    steps, seed = killed + chance.randint(1, epoch + 1), chance.randrange(1000)
    return Shape(kind, rows, micro, accumulation, killed, steps, strategy, world, seed)


def compare(group, folder: Path, strategy: str, **keys) -> dict[str, float]:
    """`gaps_of` the shape of `resume_recipe`."""
    shape = Shape("random", rows=20, micro=2, accumulation=2, killed=SAVED_AT, steps=STEPS, strategy=strategy)
    return gaps_of(group, folder, shape, **keys)


def gaps_of(group, folder: Path, shape: Shape, **keys) -> dict[str, float]:
    """Run the shape whole, and again from its checkpoint; the largest differences of all that is measured or saved,
    after asserting that only the remaining steps were trained."""
    recipe, whole, rest = shape.recipe(folder, **keys), folder / "whole", folder / "rest"
    then = group.run(cases.train_counted, argv=arguments(recipe, shape.strategy, whole))
    shutil.copytree(whole, rest)
    for path in rest.glob("checkpoint-*"):
        if int(path.name.split("-")[1]) > shape.killed:
            shutil.rmtree(path)
    argv = arguments(recipe, shape.strategy, rest, "--resume_from_checkpoint", "true")
    now = group.run(cases.train_counted, argv=argv)
    for earlier, later in zip(then, now, strict=True):
        assert later["calls"] == [step for step in earlier["calls"] if step >= shape.killed] != []
    then, now = then[0]["metrics"], now[0]["metrics"]
    assert (now["strategy"], now["resumed_at"], now["first_step"]) == (then["strategy"], [shape.killed], 1)
    assert len(now["loss_history"]) == shape.steps
    paths = [path / f"checkpoint-{shape.steps}" for path in (whole, rest)]
    assert checkpoint_fault(paths[1]) is None
    gaps = group.run(checkpoint_cases.checkpoint_gaps, one=str(paths[0]), other=str(paths[1]))[0]
    assert gaps.pop("tensors") > 20
    for metrics in (then, now):
        metrics |= {"eval_loss": [entry["loss"] for entry in metrics["eval_history"]]}
        metrics |= {"loss": metrics["loss_history"], "grad_norm": metrics["grad_norm_history"]}
        metrics |= {"tokens": list(metrics["tokens"].values())}
    return gaps | {key: largest(then[key], now[key]) for key in ("loss", "grad_norm", "eval_loss", "tokens")}


def largest(one: list[float], other: list[float]) -> float:
    return max((abs(a - b) for a, b in zip(one, other, strict=True)), default=0.0)
