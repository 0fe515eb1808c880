"""The rows of rows.yaml (memory) and of times.yaml, and the jobs that reproduce them."""

from pathlib import Path
from typing import Any

import yaml

from zero_recipes.core.host import Gpu, gpus
from zero_recipes.plan.job import Job

FOLDER = Path(__file__).parent
ROOT = FOLDER.parents[1]
UNITS = {"B": 1, "GB": 10**9, "GiB": 2**30, "MiB": 2**20}
READINGS = ("allocated", "reserved", "nvidia-smi", "not stated")
METHODS = ("full", "lora", "qlora")
REQUIRED = ("id", "source", "lab", "gpu", "gpus", "model", "method", "strategy", "measured", "unit", "read", "exact")
REQUIRED += ("head", "recipe")
OF_TIMES = ("id", "source", "lab", "gpu", "gpus", "model", "method", "strategy", "measured", "unit", "recipe")
OPTIONAL = ("unknown", "ds", "per_node")  # what is not known of the row; changes of the ds_config; GPUs of a machine
OPTIONAL += ("part", "network", "link")  # in times.yaml: GB/s of each GPU to other machines, to others of its machine
OPTIONAL += ("keeps_inputs",)  # packed products hold their inputs (other_trainers.py)
BLIND = FOLDER / "blind"  # rows that were written down before any was predicted


def read_rows(path: Path = FOLDER / "rows.yaml") -> list[dict[str, Any]]:
    """Every row with what its groups say of it; recipe keys of a row go over those of its group."""
    return [row for group in yaml.safe_load(path.read_text()) for row in _flat(group)]


def _flat(group: dict[str, Any]) -> list[dict[str, Any]]:
    shared = {key: value for key, value in group.items() if key != "rows"}
    rows = []
    for row in group["rows"]:
        own = shared | row | {"recipe": shared.get("recipe", {}) | row.get("recipe", {})}
        rows += _flat(own) if "rows" in row else [own]
    return rows


def measured_bytes(row: dict[str, Any]) -> float:
    return row["measured"] * UNITS[row["unit"]]


def measured_seconds(row: dict[str, Any], job: Job) -> float:
    """Of one step. Tokens per second are of one GPU, samples of all."""
    sequences = job.settings.per_device_train_batch_size * job.settings.gradient_accumulation_steps
    done = {
        "s": row["measured"] ** 2,
        "tokens/s": sequences * job.settings.max_length,
        "samples/s": sequences * row["gpus"],
    }
    return done[row["unit"]] / row["measured"]


def gpu_of(row: dict[str, Any]) -> Gpu:
    links = {f"{kind}_gb_s": row[kind] for kind in ("network", "link") if kind in row}
    return gpus()[row["gpu"]].model_copy(update=links)


def config_of(name: str) -> dict[str, Any]:
    from zero_recipes.plan import job as plan_job

    known = plan_job.known_models()
    own = yaml.safe_load((FOLDER / "models.yaml").read_text())
    return dict(own[name] if name in own else known[name]["config"])


def job_of_row(row: dict[str, Any]) -> Job:
    """Raises Refusal where the planner does not take the recipe."""
    from benchmarks.planners.other_trainers import KEPT, KEY
    from zero_recipes.config import recipe as recipes
    from zero_recipes.plan import job as plan_job

    given = {"model_name_or_path": row["model"], "dataset_name": "rows", "output_dir": "output"} | row["recipe"]
    given |= {"max_steps": 2, "use_peft": row["method"] != "full", "load_in_4bit": row["method"] == "qlora"}
    recipe = recipes.parse_recipe(FOLDER / "rows.yaml", given, [])
    ds_config = None
    if row["strategy"] not in ("single", "fsdp2"):
        strategies = plan_job.read_strategies(recipe, [row["strategy"]], ROOT / "accelerate_configs")
        ds_config = strategies[row["strategy"]]
    if ds_config is not None:
        ds_config = ds_config | {"zero_optimization": ds_config["zero_optimization"] | row.get("ds", {})}
    config = config_of(row["model"]) | {KEY: row.get("head", "fused")}
    config |= {KEPT: True} if row.get("keeps_inputs") else {}
    return plan_job.job_of(recipe, config, row["strategy"], ds_config, row["gpus"], row.get("per_node", 8))
