"""Collectives, bytes and milliseconds of a step: python -m benchmarks.collectives [--only NAME ...] [--result FILE]

layers: stage 3 with a layer as a leaf module, and without, for 24 layers of tiny tensors and one row a step.
unkept: the same where no weight stays gathered and nothing is prefetched, as of a model that is too large for it.
reduction: stages 1 and 2 with DeepSpeed's all-reduce of whole buckets, and with a reduction to the owner of each part.
Each pair runs in both orders in one group of processes. Losses and norms must be equal, bit for bit with one or two
processes. Writes benchmarks/results/collectives.json.
"""

import argparse
import json
import sys
import tempfile
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any

from tests.helpers import leaf_cases
from tests.helpers.group import Group
from tests.helpers.tiny import NEVER_KEPT, ROOT, write_model, write_recipe
from zero_recipes.core.files import write_json
from zero_recipes.core.measured_on import hardware_facts, library_versions

RESULT = ROOT / "benchmarks" / "results" / "collectives.json"
NAMES = ("layers", "unkept", "reduction")
STEPS = 24
NOT_TIMED = 4  # the first, and those that the metrics probe
DEEP = {"hidden": 32, "intermediate": 64, "layers": 24}
WIDE = {"hidden": 256, "intermediate": 1024, "layers": 6}
RECOMPUTED = {"activation_checkpointing": True}
ROW = {"per_device_train_batch_size": 1}
Measured = dict[str, Any]

# (name, processes, strategy, sizes of the model, keys of the recipe)
LAYERS = [
    ("layers", 1, "zero3", DEEP, ROW),
    ("layers", 1, "zero3", DEEP, ROW | RECOMPUTED),
    ("layers", 2, "zero3", DEEP, ROW),
    ("layers", 2, "zero3", DEEP, ROW | RECOMPUTED),
]
UNKEPT = [("unkept", 2, "zero3", DEEP, ROW)]
REDUCTION = [
    ("reduction", 2, "zero1", WIDE, ROW),
    ("reduction", 2, "zero2", WIDE, ROW),
    ("reduction", 2, "zero2", DEEP, ROW),
    ("reduction", 4, "zero2", WIDE, ROW),
]


def ds_config(name: str, strategy: str, is_new: bool) -> Measured:
    config = json.loads((ROOT / "ds_configs" / f"{strategy}.json").read_text())
    if name != "reduction" and not is_new:
        config.pop("leaf_modules")
    if name == "layers":  # leaf_modules fills it in, and it rounds otherwise
        config["zero_optimization"]["memory_efficient_linear"] = False
    if name == "unkept":
        config["zero_optimization"] |= NEVER_KEPT
    if name == "reduction":
        config["zero_optimization"]["use_multi_rank_bucket_allreduce"] = not is_new
    return config


def milliseconds(marks: list[float]) -> list[float]:
    taken = [1000 * (end - start) for start, end in pairwise(marks)]
    return taken[NOT_TIMED:]


def measure(group: Group, name: str, processes: int, strategy: str, sizes: dict, keys: dict) -> Measured:
    turns: dict[bool, list[Measured]] = {False: [], True: []}
    with tempfile.TemporaryDirectory(prefix="collectives-") as folder:
        model = write_model(Path(folder) / "sized", **sizes)
        for number, is_new in enumerate((False, True, True, False)):
            config = ds_config(name, strategy, is_new)
            own = {"model_name_or_path": str(model), "deepspeed": config, "max_steps": STEPS}
            path = write_recipe(Path(folder), **own | keys)
            argv = [str(path), "--output_dir", f"{folder}/{number}"]
            turns[is_new].append(group.run(leaf_cases.train_counted, argv=argv)[0])
    old, new = (of_turns(turns[key]) for key in (False, True))
    losses = [turns[key][0]["loss_history"] for key in (False, True)]
    norms = [turns[key][0]["grad_norm_history"] for key in (False, True)]
    return {
        "measured": name,
        "processes": processes,
        "strategy": strategy,
        "model": sizes,
        "keys": keys,
        "losses_equal": losses[0] == losses[1],
        "norms_equal": norms[0] == norms[1],
        "last_losses": [each[-1] for each in losses],
        "without": old,
        "with": new,
    }


def of_turns(turns: list[Measured]) -> Measured:
    """The machine's other work only slows steps down: the least is the most certain."""
    wall = [ms for turn in turns for ms in milliseconds(turn["wall"])]
    cpu = [ms for turn in turns for ms in milliseconds(turn["cpu"])]
    return {
        "calls_per_step": turns[0]["calls"],
        "bytes_per_step": turns[0]["communication_bytes_per_step"],
        "wall_ms": {"least": round(min(wall), 1), "median": round(median(wall), 1)},
        "cpu_ms": {"least": round(min(cpu), 1), "median": round(median(cpu), 1)},
        "median_wall_ms_by_turn": [round(median(milliseconds(turn["wall"])), 1) for turn in turns],
    }


def main(argv: list[str]) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", choices=NAMES, default=NAMES)
    parser.add_argument("--processes", nargs="+", type=int, default=(1, 2, 4))
    parser.add_argument("--result", type=Path, default=RESULT)
    given = parser.parse_args(argv)
    rows = []
    for processes in given.processes:
        wanted = [job for job in LAYERS + UNKEPT + REDUCTION if job[1] == processes and job[0] in given.only]
        group = Group(processes)
        try:
            for job in wanted:
                rows.append(measure(group, *job))
                print(json.dumps(rows[-1]), flush=True)
        finally:
            group.close()
    known = json.loads(given.result.read_text())["rows"] if given.result.is_file() else []
    replaced = {(row["measured"], row["processes"]) for row in rows}
    rows += [row for row in known if (row["measured"], row["processes"]) not in replaced]
    about = {"command": "python -m benchmarks.collectives", "steps": STEPS, "not_timed": NOT_TIMED}
    write_json(given.result, about | {"hardware": hardware_facts("cpu"), "versions": library_versions(), "rows": rows})


if __name__ == "__main__":
    main(sys.argv[1:])
