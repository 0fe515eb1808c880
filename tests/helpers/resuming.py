"""Runs that are interrupted and resumed: the recipe, and the comparison with the uninterrupted run."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

from tests.helpers.tiny import named, write_recipe, write_rows
from zero_recipes.checkpoint import manifest

SAVED_AT, STEPS = 4, 7
RESULT = Path(__file__).resolve().parents[2] / "benchmarks" / "results" / "resume.json"
LORA = {"use_peft": True, "lora_r": 4, "lora_target_modules": ["query_key_value", "dense"], "lora_dropout": 0.1}
NOTHING = dict.fromkeys(("loss", "grad_norm", "eval_loss", "weights", "states"), 0.0)


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


def arguments(recipe: Path, strategy: str, output_dir: Path, *more: str) -> list[str]:
    return [str(recipe), "--output_dir", str(output_dir), *named(strategy), *more]


def interrupted(whole: Path, folder: Path) -> Path:
    """What is left of a run that was killed after step 4."""
    shutil.copytree(whole, folder)
    shutil.rmtree(folder / f"checkpoint-{STEPS}")
    return folder


def compare(two, folder: Path, strategy: str, **keys) -> dict[str, float]:
    """Run, interrupt, resume; the largest differences, after asserting that only the remaining steps were trained."""
    recipe = resume_recipe(folder, **keys)
    whole = two.run("train_counted", argv=arguments(recipe, strategy, folder / "whole"))
    rest_dir = interrupted(folder / "whole", folder / "rest")
    argv = arguments(recipe, strategy, rest_dir, "--resume_from_checkpoint", "true")
    rest = two.run("train_counted", argv=argv)
    for rank in (0, 1):
        remaining = [step for step in whole[rank]["calls"] if step >= SAVED_AT]
        assert rest[rank]["calls"] == remaining and 0 < len(remaining) < len(whole[rank]["calls"])
    then, now = whole[0]["metrics"], rest[0]["metrics"]
    assert (now["strategy"], now["resumed_at"], now["first_step"]) == (strategy, [SAVED_AT], 1)
    assert then["resumed_at"] == [] and len(now["loss_history"]) == STEPS == len(then["loss_history"])
    assert now["tokens"] == then["tokens"] and [e["step"] for e in now["eval_history"]] == [5, STEPS]
    paths = [str(folder / name / f"checkpoint-{STEPS}") for name in ("whole", "rest")]
    assert manifest.damage(Path(paths[1])) is None
    gaps = two.run("checkpoint_gaps", one=paths[0], other=paths[1])[0]
    assert gaps["tensors"] > 40

    def gap(key: str) -> float:
        return max((abs(a - b) for a, b in zip(then[key], now[key], strict=True)), default=0.0)

    return {
        "loss": gap("loss_history"),
        "grad_norm": gap("grad_norm_history"),
        "eval_loss": max(
            abs(a["loss"] - b["loss"]) for a, b in zip(then["eval_history"], now["eval_history"], strict=True)
        ),
        "weights": gaps["weights"],
        "states": gaps["states"],
    }
