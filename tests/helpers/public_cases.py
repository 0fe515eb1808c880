"""Configurations of other projects, run: by this repository, and as plain TRL would run them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

SMALL = 64  # rows a step, for all processes: more is not followed, and the file then contradicts its run


def fitting(config: Any) -> list[str]:
    """The options of a recipe that agree with a ds_config, as its owner would write them."""
    if not isinstance(config, dict):
        return []

    def at(*path: str) -> Any:
        node: Any = config
        for key in path:
            node = node.get(key) if isinstance(node, dict) else None
        return node

    def numbers(**places: Any) -> list[str]:
        plain = {k: v for k, v in places.items() if isinstance(v, (int, float)) and not isinstance(v, bool)}
        return [word for key, value in plain.items() for word in (f"--{key}", str(value))]

    bf16, fp16 = at("bf16", "enabled"), at("fp16", "enabled")
    precision = "fp16" if fp16 is True and bf16 is not True else "fp32" if bf16 is False and fp16 is False else "bf16"
    if "bf16" not in config and "fp16" not in config:
        precision = "fp32"
    options = ["--bf16", str(precision == "bf16").lower(), "--fp16", str(precision == "fp16").lower()]
    micro, total, accumulation = (
        at("train_micro_batch_size_per_gpu"),
        at("train_batch_size"),
        at("gradient_accumulation_steps"),
    )
    accumulation = accumulation if isinstance(accumulation, int) else 1
    if not isinstance(micro, int) and isinstance(total, int) and total % (2 * accumulation) == 0:
        micro = total // (2 * accumulation)
    if isinstance(micro, int) and 0 < micro * accumulation * 2 <= SMALL:
        options += ["--per_device_train_batch_size", str(micro)]
        options += ["--gradient_accumulation_steps", str(accumulation)]
    options += numbers(
        max_grad_norm=at("gradient_clipping"),
        learning_rate=at("optimizer", "params", "lr") or at("scheduler", "params", "warmup_max_lr"),
        weight_decay=at("optimizer", "params", "weight_decay"),
        adam_epsilon=at("optimizer", "params", "eps"),
    )
    betas = at("optimizer", "params", "betas")
    if isinstance(betas, list) and len(betas) == 2:
        options += numbers(adam_beta1=betas[0], adam_beta2=betas[1])
    warmup = at("scheduler", "params", "warmup_num_steps")
    return options + (numbers(warmup_steps=warmup) if isinstance(warmup, int) and warmup < 100 else [])


def set_by_launch(path: Path, num_processes: int | None) -> dict[str, str]:
    """What `accelerate launch --config_file path` sets for the processes that it starts, but where they meet."""
    import os

    from tests.helpers.accelerate_env import environment_of_launch

    environment = environment_of_launch(path, num_processes).items()
    left_out = ("PYTHON", "KMP", "OMP", "MASTER")
    return {name: text for name, text in environment if os.environ.get(name) != text and not name.startswith(left_out)}


def ours_launched(argv: list[str], environment: dict[str, str]) -> dict:
    """`ours`, in the environment of a launch."""
    import os

    os.environ.update(environment)
    return ours(argv)


def ours(argv: list[str]) -> dict:
    """How a run of run_sft.py ends: {"ended": "ran", "refused" or "died", "said": the message or the codes}."""
    import run_sft
    from zero_recipes.core.findings import Refusal

    try:
        run = run_sft.prepare(argv)
        trainer = run_sft.train(run)
        trainer.accelerator.wait_for_everyone()
    except Refusal as refusal:
        return {"ended": "refused", "said": " ".join(refusal.codes) + " " + refusal.what}
    except Exception as error:
        return {"ended": "died", "said": f"{type(error).__name__}: {error}"[:400]}
    metrics = json.loads((run.output_dir / "metrics.json").read_text())
    saved = any(run.output_dir.glob("*.safetensors"))
    ended = "ran" if metrics["status"] == "ok" and saved else "died"
    return {"ended": ended, "said": metrics["status"], "strategy": metrics["strategy"]}
