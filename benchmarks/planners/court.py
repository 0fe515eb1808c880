"""The rows of rows.yaml (memory) and of times.yaml, and the jobs that reproduce them."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import yaml

from zero_recipes.config.read import parse_recipe
from zero_recipes.core.gpus import Gpu, gpus
from zero_recipes.tools.plan import job as plan_job
from zero_recipes.tools.plan.job import Job

FOLDER = Path(__file__).parent
BLIND = FOLDER / "blind"  # rows that were written down before any was predicted
ROOT = FOLDER.parents[1]
UNITS = {"B": 1, "GB": 10**9, "GiB": 2**30, "MiB": 2**20}
BUCKET = 50_000_000  # elements, of rows that name no other size
HEAD, KEPT = "loss_head_of_row", "keeps_inputs_of_row"  # in a job's model config, where model classes ignore them
WORKSPACES = (8_519_680, 33_554_432)  # core/hardware.yaml
HOPPER = ("H100", "H200", "H800", "B200")  # and Blackwell: cards of the second
CARDS = {"96": 97_871 * 2**20}  # GB: bytes, where hardware.yaml lacks the card
Row = dict[str, Any]  # a row's keys: rows.yaml, times.yaml


def read_rows(path: Path) -> list[Row]:
    """Every row with what its groups say of it; recipe keys of a row go over those of its group."""
    return [row for group in yaml.safe_load(path.read_text()) for row in _flat(group)]


def _flat(group: Row) -> list[Row]:
    shared = {key: value for key, value in group.items() if key != "rows"}
    rows = []
    for row in group["rows"]:
        own = shared | row | {"recipe": shared.get("recipe", {}) | row.get("recipe", {})}
        rows += _flat(own) if "rows" in row else [own]
    return rows


def gpu_rows(plan: str) -> list[Row]:
    """What this program itself took on a GPU (results/gpu_*.json), twice: allocated and reserved. `plan`: which of a
    row's plans predicts it, "planned_before" or "planned_now"."""
    rows = []
    for path in sorted((ROOT / "benchmarks" / "results").glob("gpu_*.json")):
        for run in json.loads(path.read_text())["rows"]:
            if plan not in run or "planned_after_the_run" in run:
                continue
            found, ranks = run[plan], run["world_size"]
            predicted = {"allocated": found["allocated_peak_bytes"], "device": found["reserved_bytes"], "others": {}}
            row = {"gpus": ranks, "unit": "B", "exact": True, "found": predicted | {"source": found["source"]}}
            for read in ("allocated", "reserved"):
                name = f"{path.stem}-{run['case']}"
                rows.append(row | {"id": name, "read": read, "measured": run["measured"][f"{read}_peak_bytes"]})
    return rows


def gpu_times(plan: str) -> list[Row]:
    """Steps of those runs that had the GPU to themselves."""
    rows = []
    for path in sorted((ROOT / "benchmarks" / "results").glob("gpu_*.json")):
        for run in json.loads(path.read_text())["rows"]:
            if plan in run and "step_seconds" in run["measured"]:
                row = {"id": f"{path.stem}-{run['case']}", "planned": run[plan]["step_seconds"]}
                rows.append(row | {"seconds": run["measured"]["step_seconds"]})
    return rows


def card_of(row: Row) -> int | None:
    """Bytes of a row's card, which rows of memory name as people do: "A100 80 GB". None where it is not known."""
    if "capacity" in row:
        return int(row["capacity"] * UNITS["GiB"])
    words = str(row.get("gpu")).lower().split()
    if len(words) < 2 or words[-1] != "gb":
        return None
    size = words[-2]
    name = "".join(words[:-2]).replace("a800", "a100").replace("h800", "h100") or "a100"
    return CARDS[size] if f"{name}-{size}gb" not in gpus() else gpus()[f"{name}-{size}gb"].memory_bytes


def measured_bytes(row: Row) -> float:
    return row["measured"] * UNITS[row["unit"]]


def measured_seconds(row: Row, job: Job) -> float:
    """Of one step. Tokens per second are of one GPU, samples of all."""
    sequences = job.settings.per_device_train_batch_size * job.settings.gradient_accumulation_steps
    done = {"s": row["measured"] ** 2, "tokens/s": sequences * job.settings.max_length}
    return (done | {"samples/s": sequences * row["gpus"]})[row["unit"]] / row["measured"]


def gpu_of(row: Row) -> Gpu:
    links = {f"{kind}_gb_s": row[kind] for kind in ("network", "link") if kind in row}
    return gpus()[row["gpu"]].model_copy(update=links)


def job_of_row(row: Row) -> Job:
    """Raises Refusal where the planner does not take the recipe."""
    given = {"model_name_or_path": row["model"], "dataset_name": "rows", "output_dir": "output"} | row["recipe"]
    given |= {"max_steps": 2, "use_peft": row["method"] != "full", "load_in_4bit": row["method"] == "qlora"}
    recipe, ds_config = parse_recipe(FOLDER / "rows.yaml", given, []), None
    if row["strategy"] not in ("single", "fsdp2"):
        ds_config = plan_job.read_strategies(recipe, [row["strategy"]])[row["strategy"]]
    if ds_config is not None:
        ds_config.pop("bucket_sizes", None)  # theirs are not ours
        ds_config.pop("leaf_modules", None)
        zero = ds_config["zero_optimization"]
        buckets = {key: BUCKET for key, value in zero.items() if value == "auto" and "bucket" in key}
        ds_config = ds_config | {"zero_optimization": zero | buckets | row.get("ds", {})}
    own = yaml.safe_load((FOLDER / "models.yaml").read_text())
    config = own.get(row["model"]) or plan_job.known_models()[row["model"]]["config"]
    config = config | {HEAD: row.get("head", "fused")} | ({KEPT: True} if row.get("keeps_inputs") else {})
    workspace = WORKSPACES[str(row.get("gpu"))[:4].upper() in HOPPER]
    per_node = row.get("per_node", 8)
    job = plan_job.job_of(recipe, config, row["strategy"], ds_config, row["gpus"], per_node)
    return replace(job, workspace=workspace)
