"""One hour on one GPU, without a network. benchmarks/gpu_session.sh runs this there, part by part.

    python benchmarks/gpu_session.py --plans               # before, on a CPU: benchmarks/session/plans.json
    python benchmarks/gpu_session.py --part 1 2 --out OUT  # on the GPU; the parts: benchmarks/session/cases.yaml
    python benchmarks/gpu_session.py --collect FOLDER      # after: benchmarks/results/gpu_*.json, constants of the plan

Each run is a row of OUT/partN.jsonl as soon as it ends, a failed run too. A second call with the same OUT runs what is
missing or failed.
"""

import argparse
import hashlib
import json
import os
import re
import shutil
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import yaml

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))
os.chdir(ROOT)

from benchmarks.throughput import together, tokens_per_second  # noqa: E402
from zero_recipes.cli.sweep import sweep  # noqa: E402
from zero_recipes.core.files import strict_json, write_json  # noqa: E402
from zero_recipes.metrics.schema import FILE, Metrics  # noqa: E402

SESSION, RESULTS = ROOT / "benchmarks" / "session", ROOT / "benchmarks" / "results"
PLANS, WORK = SESSION / "plans.json", ROOT / "output" / "gpu_session_work"
TABLE = yaml.safe_load((SESSION / "cases.yaml").read_text())
NAMES = {1: "tiny", 2: "plan", 3: "speed", 4: "offload", 5: "fp16", 6: "throughput"}  # of results, by part
Case = dict[str, Any]  # a row of cases.yaml of one strategy, with its name; a row of OUT, with what was measured


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--plans", action="store_true")
    parser.add_argument("--collect", type=Path, metavar="FOLDER")
    parser.add_argument("--part", type=int, nargs="+", choices=list(TABLE["parts"]), default=[])
    parser.add_argument("--out", type=Path, default=ROOT / "output" / "gpu_session")
    parser.add_argument("--minutes", type=float, default=9.5, help="for all parts of this call")
    parser.add_argument("--only", default="", metavar="WORD", help="runs whose name has it, e.g. 2.8b")
    given = parser.parse_args()
    if given.plans:
        write_json(PLANS, {"made_from": planned_from(), "plans": plans_of(cases(2, 3, 4))})
    if given.collect:
        print(*collect(given.collect), sep="\n")
    known = json.loads(PLANS.read_text())
    if {2, 3, 4} & {*given.part} and known.get("made_from") != planned_from():
        parser.error(f"{PLANS} was made for other ds_configs or cases. Run --plans first, on a machine without a GPU")
    deadline, plans = time.monotonic() + given.minutes * 60, known["plans"]
    given.out.mkdir(parents=True, exist_ok=True)
    done = {row["case"] for row in read_rows(given.out) if row["status"] == "ok"}
    for case in cases(*given.part):
        if case["name"] in done or given.only not in case["name"]:
            continue
        row = {"planned": plans.get(case["name"])} | measured(case, deadline - time.monotonic())
        row |= {key: case[key] for key in ("part", "model", "strategy", "keys")} | {"case": case["name"]}
        with open(given.out / f"part{case['part']}.jsonl", "a", encoding="utf-8") as file:
            file.write(strict_json(row) + "\n")
        print(f"{case['name']}: {row['status']} {row['error'] or ''}"[:300], flush=True)


def cases(*parts: int) -> list[Case]:
    found = []
    for part in parts:
        for row in (row for row in TABLE["runs"] if row["part"] == part):
            for strategy in row["strategies"]:
                name = f"{part} {row['model']} {strategy} {row.get('words', '')}".strip()
                named = {"name": re.sub(r"[^a-z0-9.]+", "-", name), "strategy": strategy}
                named["file"] = "ddp" if strategy == "single" else strategy  # of accelerate_configs/
                found.append({"keys": {}, "script": "run.py"} | row | named)
    return found


def write_recipe(case: Case) -> Path:
    """The case's recipe and its model's folder, without weights, beneath WORK. It is compared with a plan that was
    made before."""
    recipe = yaml.safe_load(Path("recipes/tiny.yaml").read_text())
    if case["model"] != "tiny":
        model, rows = WORK / case["model"], WORK / "rows"
        shutil.copytree("tiny_world/base", model, ignore=shutil.ignore_patterns("*.safetensors"), dirs_exist_ok=True)
        config = json.loads(Path(f"zero_recipes/plan/models/{case['model']}.json").read_text())["config"]
        (model / "config.json").write_text(json.dumps(config))
        rows.mkdir(exist_ok=True)
        text = "the red fish hums in the cave by the river . " * 256  # longer than any max_length: every batch is full
        (rows / "train.jsonl").write_text((json.dumps({"text": text}) + "\n") * 512)
        recipe = TABLE["base"] | {"model_name_or_path": str(model), "dataset_name": str(rows)}
    recipe |= case["keys"] | {"skip_plan": True, "overwrite": True}
    path = WORK / f"{case['name']}.yaml"
    path.write_text(yaml.safe_dump({key: value for key, value in recipe.items() if value is not None}))
    return path


def planned_from() -> str:
    """A hash of what the plans are made for: measured peaks would be compared with those of other buckets."""
    files = [SESSION / "cases.yaml", *sorted(Path("ds_configs").glob("*.json"))]
    return hashlib.sha256(b"".join(path.read_bytes() for path in files)).hexdigest()


def plans_of(wanted: list[Case]) -> dict[str, Any]:
    """{name: prediction}, as the run would plan itself with the tested versions of the libraries."""
    from zero_recipes.plan import job as plan_job
    from zero_recipes.plan.predict import Predictor

    jobs = {}
    WORK.mkdir(parents=True, exist_ok=True)
    for case in wanted:
        recipe = plan_job.read_recipe(write_recipe(case), [])
        config, known = plan_job.model_config(recipe.settings), plan_job.read_strategies(recipe, (case["file"],))
        jobs[case["name"]] = plan_job.job_of(recipe, config, case["strategy"], known[case["file"]], 1)
    predict = Predictor()
    predict.prepare(list(jobs.values()))
    return {name: predict(job).model_dump(mode="json") for name, job in jobs.items()}


def measured(case: Case, seconds: float) -> dict[str, Any]:
    """Status, error, metrics.json and what the run's script measured beside it, where so many seconds are enough."""
    if seconds < case["seconds"]:
        return {"status": "skipped", "error": f"{seconds:.0f} s are left, it takes about {case['seconds']}"}
    out, script = WORK / case["name"], SESSION / case["script"]
    shutil.rmtree(out, ignore_errors=True)
    folder = out / case["file"]
    folder.mkdir(parents=True)
    recipe = write_recipe(case)
    if script.name == "run.py":
        saves = yaml.safe_load(recipe.read_text())["save_model"]
        sweep(recipe, [folder.name], 1, out, ["--save_model", str(saves).lower()], script=script)
    else:
        words = [case["strategy"], case["model"], str(folder), json.dumps(case["keys"])]
        with open(folder / "log.txt", "w") as log:
            subprocess.run([sys.executable, str(script), *words], stdout=log, stderr=log)
    beside, metrics = folder / "beside.json", folder / FILE
    found = {"beside": json.loads(beside.read_text()) if beside.is_file() else None, "status": "failed", "error": None}
    if metrics.is_file():
        row = Metrics.read(metrics)
        found |= {"status": row.status, "error": row.error}
        found["metrics"] = json.loads(row.model_dump_json(by_alias=True, exclude_unset=True))
    if found["status"] != "ok":
        found["log"] = (folder / "log.txt").read_text(errors="replace").splitlines()[-60:]
    shutil.rmtree(out)
    return found


def collect(folder: Path) -> list[str]:
    """Write results/gpu_*.json from all partN.jsonl below `folder`; lines that say what was written."""
    rows, lines = read_rows(folder), []
    for part, name in NAMES.items():
        own = [row | {"derived": derived(row) if row["status"] == "ok" else {}} for row in rows if row["part"] == part]
        if own:
            write_json(RESULTS / f"gpu_{name}.json", {"rows": own})  # each row's metrics name its machine
            lines.append(f"benchmarks/results/gpu_{name}.json: {len(own)} rows")
    return [*lines, f"zero_recipes/plan/overheads.yaml: {constants(rows)}"]


def read_rows(folder: Path) -> list[Case]:
    """The row of each case that counts: the latest, unless an earlier one is ok and the later is not."""
    found: dict[str, Case] = {}
    for path in sorted(folder.rglob("part*.jsonl")):
        for line in path.read_text().splitlines():
            try:
                row = json.loads(line)
            except ValueError:
                continue  # the machine went away while it was written
            if found.get(row["case"], {}).get("status") != "ok" or row["status"] == "ok":
                found[row["case"]] = row
    return list(found.values())


def derived(row: Case) -> Case:
    """Part 2: planned over measured, of both peaks. Part 6: tokens/s and held-out loss by program, and the recipe's
    speed over the others'. What CUDA itself held when training ended."""
    if row["part"] == 6:
        good = {name: each for name, each in row["beside"]["programs"].items() if "error" not in each}
        speeds = {name: tokens_per_second(together([each], each["accumulation"])) for name, each in good.items()}
        ratios = {f"recipe/{name}": speeds["recipe"] / speed for name, speed in speeds.items() if name != "recipe"}
        losses = {name: each["held_out_loss"] for name, each in good.items()}
        return {"tokens_per_second": speeds, "held_out_loss": losses} | ratios
    card, plan, (peak, *_) = row["beside"], row["planned"], row["metrics"]["peak_memory_bytes"]
    found = {"context_bytes": card["total_bytes"] - card["free_bytes"] - card["reserved_now_bytes"]}
    if row["part"] == 2:
        within = plan["reserved_bytes"]["low"] <= peak["reserved"] <= plan["reserved_bytes"]["high"]
        found |= {"allocated_ratio": plan["allocated_peak_bytes"] / peak["allocated"], "within_reserved_range": within}
    return found


def constants(rows: list[Case]) -> Case:
    """{"context": median bytes, "cached": the least and the largest reserved peak over the allocated one}."""
    good = [row for row in rows if row["status"] == "ok" and row["part"] != 6]
    ratios = [peak["reserved"] / peak["allocated"] for row in good for peak in row["metrics"]["peak_memory_bytes"]]
    context = statistics.median(derived(row)["context_bytes"] for row in good)
    return {"context": context, "cached": [round(min(ratios), 4), round(max(ratios), 4)]}


if __name__ == "__main__":
    main()
