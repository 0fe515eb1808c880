"""One hour on one GPU, without a network. benchmarks/gpu_session.sh runs this there, part by part.

    python benchmarks/gpu_session.py --plans               # before, on a CPU: benchmarks/session/plans.json
    python benchmarks/gpu_session.py --part 1 2 --out OUT  # on the GPU; the parts: benchmarks/session/cases.py
    python benchmarks/gpu_session.py --collect FOLDER      # after: benchmarks/results/gpu_*.json, constants of the plan

Each run is a row of OUT/partN.jsonl as soon as it ends, a failed run too. A second call with the same OUT runs what is
missing or failed.
"""

import argparse
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))
os.chdir(ROOT)

from benchmarks.session import cases  # noqa: E402
from benchmarks.session.cases import Case  # noqa: E402
from benchmarks.session.collect import RESULTS, collect  # noqa: E402
from benchmarks.session.inputs import write_recipe  # noqa: E402
from zero_recipes.core.files import strict_json, write_json  # noqa: E402
from zero_recipes.core.process import free_port, kill_with_children  # noqa: E402
from zero_recipes.metrics.failure import failed_row  # noqa: E402
from zero_recipes.metrics.schema import FILE, Metrics  # noqa: E402

PLANS = ROOT / "benchmarks" / "session" / "plans.json"
PLANNED_PARTS = (2, 3, 4)
PATIENCE = 3  # times the expected seconds of a run, then it is killed


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--plans", action="store_true")
    parser.add_argument("--plan", metavar="CASE", help="print the plan of one run")
    parser.add_argument("--collect", type=Path, metavar="FOLDER")
    parser.add_argument("--part", type=int, nargs="+", choices=list(cases.PARTS))
    parser.add_argument("--out", type=Path, default=ROOT / "output" / "gpu_session")
    parser.add_argument("--work", type=Path, default=ROOT / "output" / "gpu_session_work")
    parser.add_argument("--minutes", type=float, default=9.5, help="for all parts of this call")
    parser.add_argument("--only", default="", metavar="WORD", help="runs whose name has it, e.g. 2.8b")
    given = parser.parse_args()
    planned = [case for part in PLANNED_PARTS for case in cases.cases(part)]
    if given.plans:
        write_json(PLANS, {"plans": plans_of(planned, given.work)})
    elif given.plan:
        (plan,) = plans_of([case for case in planned if case.slug == given.plan], given.work).values()
        print(json.dumps(plan))
    elif given.collect:
        print(*collect(given.collect, RESULTS), sep="\n")
    elif given.part:
        run_parts(given)
    else:
        parser.error("--plans, --part or --collect")


def plans_of(wanted: list[Case], work: Path) -> dict[str, Any]:
    """{slug: prediction}, as the run would plan itself with the tested versions of the libraries."""
    from zero_recipes.plan import job as plan_job
    from zero_recipes.plan.predict import Predictor

    jobs = {}
    for case in wanted:
        recipe = plan_job.read_recipe(write_recipe(case, work), [])
        strategy = "ddp" if case.strategy == "single" else case.strategy
        known = plan_job.read_strategies(recipe, (strategy,))
        config = plan_job.model_config(recipe.settings)
        jobs[case.slug] = plan_job.job_of(recipe, config, case.strategy, known[strategy], 1)
    predict = Predictor()
    predict.prepare(list(jobs.values()))
    return {slug: predict(job).model_dump(mode="json") for slug, job in jobs.items()}


def run_parts(given: argparse.Namespace) -> None:
    given.out.mkdir(parents=True, exist_ok=True)
    given.work.mkdir(parents=True, exist_ok=True)
    plans = json.loads(PLANS.read_text())["plans"] if PLANS.is_file() else {}
    session = Session(given.out, given.work, time.time() + given.minutes * 60, plans)
    for part in given.part:
        print(f"part {part}: {cases.PARTS[part]}", flush=True)
        done = session.done(part)
        for case in cases.cases(part):
            if case.slug not in done and given.only in case.slug:
                session.run(case)


@dataclass
class Session:
    """`deadline` is a time.time(); `plans` maps a slug to its prediction."""

    out: Path
    work: Path
    deadline: float
    plans: dict[str, Any]

    def write(self, part: int, row: dict[str, Any]) -> None:
        """Append a row to the part's file; it is on the disk when this returns."""
        with open(self.out / f"part{part}.jsonl", "a", encoding="utf-8") as file:
            file.write(strict_json({"part": part} | row) + "\n")
            file.flush()
            os.fsync(file.fileno())

    def done(self, part: int) -> set[str]:
        """Cases of a part that an earlier call with the same `out` measured."""
        path = self.out / f"part{part}.jsonl"
        rows = map(json.loads, path.read_text().splitlines()) if path.is_file() else []
        return {row["case"] for row in rows if row.get("status") == "ok"}

    def run(self, case: Case) -> None:
        """Run a case and write its row, whatever happens."""
        row = {"case": case.slug, "model": case.model, "strategy": case.strategy, "keys": case.keys}
        row["planned"] = self.plans.get(case.slug)
        reason = self._cannot(case)
        if reason:
            self.write(case.part, row | {"status": "skipped", "error": reason})
            return
        folder = self.work / case.slug / "run"
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
        command = command_of(case, self.work, folder)
        started = time.time()
        code = self._ended(command, folder.parent / "log.txt", case)
        log = (folder.parent / "log.txt").read_text(errors="replace").splitlines()
        try:
            row |= outcome(case, folder, code, "\n".join(log[-400:]))
        except Exception as error:  # a row that cannot be read must not end the session
            row |= {"status": "failed", "error": f"the row cannot be read: {error!r}"}
        row |= {"seconds": round(time.time() - started, 1)} | ({} if row["status"] == "ok" else {"log": log[-60:]})
        self.write(case.part, row)
        shutil.rmtree(folder, ignore_errors=True)
        shutil.rmtree(self.work / "swap", ignore_errors=True)
        print(f"{case.slug}: {row['status']} after {row['seconds']:.0f} s {row.get('error') or ''}"[:300], flush=True)

    def _cannot(self, case: Case) -> str | None:
        left = self.deadline - time.time()
        if left < case.seconds:
            return f"{max(left, 0):.0f} s are left, it takes about {case.seconds}"
        plan, memory = self.plans.get(case.slug), psutil.virtual_memory().available
        needed = 0 if plan is None else max(plan["host_bytes"]["load"], plan["host_bytes"]["training"])
        return f"the plan needs {needed:,} bytes of host memory of {memory:,}" if needed > memory else None

    def _ended(self, command: list[str], log: Path, case: Case) -> int:
        """The exit code; a run that takes too long is killed with the processes that it started."""
        environment = {"OMP_NUM_THREADS": "4"} | os.environ | {"PYTHONUNBUFFERED": "1"}
        with open(log, "w") as file:
            child = subprocess.Popen(command, stdout=file, stderr=file, env=environment, start_new_session=True)
            try:
                return child.wait(min(self.deadline - time.time(), PATIENCE * case.seconds))
            except subprocess.TimeoutExpired:
                kill_with_children(psutil.Process(child.pid))
                return child.wait()


def command_of(case: Case, work: Path, folder: Path) -> list[str]:
    program = f"benchmarks/session/{case.script}"
    if case.script == "side_by_side.py":
        return [sys.executable, program, case.strategy, case.model, str(folder), json.dumps(case.keys)]
    script = [program, str(write_recipe(case, work)), "--output_dir", str(folder)]
    if case.strategy == "single":
        return [sys.executable, *script]
    launch = [sys.executable, "-m", "accelerate.commands.launch", "--config_file"]
    launch += [f"accelerate_configs/{case.strategy}.yaml", "--num_processes", "1"]
    return [*launch, "--main_process_port", str(free_port()), *script]


def outcome(case: Case, folder: Path, code: int, log: str) -> dict[str, Any]:
    """What the run left: status, error, metrics.json and what its script measured beside it."""
    found: dict[str, Any] = {}
    if (folder / "beside.json").is_file():
        found["beside"] = json.loads((folder / "beside.json").read_text())
    if code:
        failed_row(folder, case.strategy, code, log).write(folder / FILE)
    metrics = Metrics.read(folder / FILE)
    error = "its time was up" if code == -signal.SIGKILL else metrics.error
    carried = json.loads(metrics.model_dump_json(by_alias=True, exclude_unset=True))
    return found | {"status": metrics.status, "error": error, "metrics": carried}


if __name__ == "__main__":
    main()
