"""One hour on one GPU, without a network. benchmarks/gpu_session.sh runs this there, part by part.

    python benchmarks/gpu_session.py --plans               # before, on a CPU: benchmarks/session/plans.json
    python benchmarks/gpu_session.py --part 1 2 --out OUT  # on the GPU; the parts: benchmarks/session/cases.yaml
    python -m benchmarks.gpu_results benchmarks/session/NAME.yaml OUT   # after: benchmarks/results/gpu_NAME.json

Each run is a row of OUT/partN.jsonl as soon as it ends, a failed run too. A second call with the same OUT runs what is
missing or failed.
"""

import argparse
import hashlib
import json
import os
import re
import shutil
import subprocess
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import yaml

if TYPE_CHECKING:
    from zero_recipes.tools.plan.job import Job

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))
os.chdir(ROOT)

from zero_recipes.core.files import strict_json, write_json  # noqa: E402
from zero_recipes.metrics.schema import FILE, Metrics  # noqa: E402
from zero_recipes.tools.sweep import sweep  # noqa: E402

SESSION = ROOT / "benchmarks" / "session"
PLANS, WORK = SESSION / "plans.json", ROOT / "output" / "gpu_session_work"
TABLE = yaml.safe_load((SESSION / "cases.yaml").read_text())
Case = dict[str, Any]  # a row of cases.yaml of one strategy, with its name; a row of OUT, with what was measured


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--plans", action="store_true")
    parser.add_argument("--part", type=int, nargs="+", choices=list(TABLE["parts"]), default=[])
    parser.add_argument("--out", type=Path, default=ROOT / "output" / "gpu_session")
    parser.add_argument("--minutes", type=float, default=9.5, help="for all parts of this call")
    parser.add_argument("--only", default="", metavar="WORD", help="runs whose name has it, e.g. 2.8b")
    given = parser.parse_args()
    if given.plans:
        write_json(PLANS, {"made_from": planned_from(), "plans": plans_of(cases(2, 3, 4))})
    known = json.loads(PLANS.read_text())
    if {2, 3, 4} & {*given.part} and known.get("made_from") != planned_from():
        parser.error(f"{PLANS} was made for other ds_configs or cases. Run --plans first, on a machine without a GPU")
    deadline, plans = time.monotonic() + given.minutes * 60, known["plans"]
    given.out.mkdir(parents=True, exist_ok=True)
    done = {row["case"] for row in read_rows([given.out]) if row["status"] == "ok"}
    for case in cases(*given.part):
        if case["name"] in done or given.only not in case["name"]:
            continue
        row = {"planned": plans.get(case["name"])} | measured(case, deadline - time.monotonic())
        row |= {key: case[key] for key in ("part", "model", "strategy", "keys")}
        row |= {"case": case["name"], "words": case.get("words", "")}
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
    WORK.mkdir(parents=True, exist_ok=True)
    if case["model"] != "tiny":
        model, rows = WORK / case["model"], WORK / "rows"
        shutil.copytree("tiny_world/base", model, ignore=shutil.ignore_patterns("*.safetensors"), dirs_exist_ok=True)
        config = json.loads(Path(f"zero_recipes/tools/plan/models/{case['model']}.json").read_text())["config"]
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
    from zero_recipes.tools.plan.predict import Predictor

    jobs = {case["name"]: job_of_case(case) for case in wanted}
    predict = Predictor()
    predict.prepare(list(jobs.values()))
    return {name: predict(job).model_dump(mode="json") for name, job in jobs.items()}


def job_of_case(case: Case) -> "Job":
    """Of a case, or of a row of benchmarks/results/gpu_*.json."""
    from zero_recipes.tools.plan import job as plan_job

    named = {"name": case.get("name") or case["case"]}
    recipe = plan_job.read_recipe(write_recipe(case | named), [])
    config, strategy = plan_job.model_config(recipe.settings), case["strategy"]
    file = "ddp" if strategy == "single" else strategy
    known = plan_job.read_strategies(recipe, (file,))
    return plan_job.job_of(recipe, config, strategy, known[file], case.get("world_size", 1))


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


def read_rows(paths: list[Path]) -> list[Case]:
    """The rows of files, and of partN.jsonl below folders. Of each case the one that counts: the latest, unless an
    earlier one is ok and the later is not."""
    files = [file for path in paths for file in (sorted(path.rglob("part*.jsonl")) if path.is_dir() else [path])]
    found: dict[str, Case] = {}
    for line in (line for file in files for line in file.read_text().splitlines()):
        try:
            row = json.loads(line)
        except ValueError:
            continue  # the machine went away while it was written
        if status_of(found.get(row["case"], {})) != "ok" or status_of(row) == "ok":
            found[row["case"]] = row
    return list(found.values())


def status_of(row: Case) -> str | None:
    return row.get("status") or row.get("metrics", {}).get("status")


if __name__ == "__main__":
    main()
