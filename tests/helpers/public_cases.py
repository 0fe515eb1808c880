"""Configurations of other projects, run: by this repository, and as plain TRL would run them."""

from __future__ import annotations

import json
from pathlib import Path


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
