"""One hour on one GPU, without a network: benchmarks/gpu_session.sh runs this there, part by part.

    python benchmarks/gpu_session.py --plans                # beforehand, on a CPU: benchmarks/session/plans.json
    python benchmarks/gpu_session.py --part 1 2 --out OUT   # there; the parts: benchmarks/session/cases.py
    python benchmarks/gpu_session.py --collect FOLDER       # afterwards: benchmarks/results/gpu_*.json, README, the
                                                            # plan's constants (zero_recipes/plan/overheads.yaml)

Each run is a row of OUT/partN.jsonl as soon as it has ended, a failure too; a second call with the same OUT goes on
with what is missing or failed. --rehearse runs all of it on a CPU with models of two layers, to find what would stop
it; its rows say so. --collect takes them for a trial alone (--results FOLDER); with --rehearse it keeps how they ended
(benchmarks/results/gpu_session_rehearsal.json).
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))
os.chdir(ROOT)

from benchmarks.session import cases, inputs, machine  # noqa: E402
from benchmarks.session.collect import RESULTS, collect, keep_rehearsal  # noqa: E402
from benchmarks.session.runs import Session  # noqa: E402

PLANS = ROOT / "benchmarks" / "session" / "plans.json"
AT_ONCE = {2: 4}  # memory is measured, not time: runs of part 2 share the card
QUANTIZER = [sys.executable, "benchmarks/session/quantizer.py"]
PLANNED_PARTS = (2, 3, 4)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--plans", action="store_true")
    parser.add_argument("--plan", metavar="CASE", help="one of --plans anew, printed")
    parser.add_argument("--collect", type=Path, metavar="FOLDER")
    parser.add_argument("--results", type=Path, help="where --collect writes, instead of the committed results")
    parser.add_argument("--part", type=int, nargs="+", choices=list(cases.PARTS))
    parser.add_argument("--out", type=Path, default=ROOT / "output" / "gpu_session")
    parser.add_argument("--work", type=Path, default=ROOT / "output" / "gpu_session_work")
    parser.add_argument("--minutes", type=float, default=9.5, help="of all parts of this call together")
    parser.add_argument("--only", default="", metavar="WORD", help="runs whose name has it, e.g. 2.8b")
    parser.add_argument("--rehearse", action="store_true")
    given = parser.parse_args()
    if given.plans:
        write_plans(given.work)
    elif given.plan:
        print(
            json.dumps(plans_of([case for case in planned_cases() if case.slug == given.plan], given.work)[given.plan])
        )
    elif given.collect and given.rehearse:
        print(*keep_rehearsal(given.collect, given.results or RESULTS), sep="\n")
    elif given.collect:
        print(*collect(given.collect, given.results or RESULTS, trial=given.results is not None), sep="\n")
    elif given.part:
        run_parts(given)
    else:
        parser.error("--plans, --part or --collect")


def planned_cases() -> list[cases.Case]:
    """The runs that a plan is made for."""
    return [case for part in PLANNED_PARTS for case in cases.cases(part)]


def write_plans(work: Path) -> None:
    """Predict every run of parts 2 to 4 and keep it, with the versions that it was made with."""
    from zero_recipes.core import environment
    from zero_recipes.core.files import write_json

    found = {}
    wanted = planned_cases()
    for first in range(0, len(wanted), 4):  # what is done is kept: a second call goes on
        found |= plans_of(wanted[first : first + 4], work)
        print(f"{len(found)} of {len(wanted)}", flush=True)
    write_json(PLANS, {"versions": environment.versions(), "plans": found})


def plans_of(wanted: list[cases.Case], work: Path) -> dict[str, Any]:
    """{slug: prediction}, as the run's own plan would be where its versions are known."""
    from zero_recipes.plan import jobs as plan_jobs
    from zero_recipes.plan.predict import Predictor

    jobs = {}
    for case in wanted:
        recipe = plan_jobs.read_recipe(inputs.write_recipe(case, work, rehearse=False), [])
        strategy = "ddp" if case.strategy == "single" else case.strategy
        known = plan_jobs.read_strategies(recipe, (strategy,))
        config = plan_jobs.model_config(recipe.settings)
        jobs[case.slug] = plan_jobs.job_of(recipe, config, case.strategy, known[strategy], 1)
    predict = Predictor()
    predict.prepare(list(jobs.values()))
    of_the_machine = {"seconds", "resident_bytes"}
    return {slug: predict(job).model_dump(mode="json", exclude=of_the_machine) for slug, job in jobs.items()}


def run_parts(given: argparse.Namespace) -> None:
    """The parts one after another. Whatever fails in one, the next begins."""
    given.out.mkdir(parents=True, exist_ok=True)
    given.work.mkdir(parents=True, exist_ok=True)
    plans = json.loads(PLANS.read_text())["plans"] if PLANS.is_file() else {}
    session = Session(given.out, given.work, time.time() + given.minutes * 60, plans, given.rehearse)
    described = machine.describe(given.work)
    for part in given.part:
        print(f"part {part}: {cases.PARTS[part]}", flush=True)
        session.write(part, {"case": "machine", "machine": described})
        try:
            if part == 5:
                compare_quantizer(session)
            else:
                known = cases.rehearsed(part) if given.rehearse else cases.cases(part)
                done = session.done(part)
                wanted = [case for case in known if case.slug not in done and given.only in case.slug]
                session.run_all(wanted, AT_ONCE.get(part, 1), machine.card_bytes(described))
        except Exception as error:
            session.write(part, {"case": "session", "status": "failed", "error": f"{type(error).__name__}: {error}"})
            print(f"part {part} ended early: {error!r}", flush=True)


def compare_quantizer(session: Session) -> None:
    """Part 5 in a process of its own: a kernel that fails can take its process along."""
    command = [*QUANTIZER, str(session.out / "part5.jsonl"), *(["--rehearse"] if session.rehearse else [])]
    left = session.deadline - time.time()
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=max(left, 1))
        code, log = done.returncode, done.stdout + done.stderr
    except subprocess.TimeoutExpired as error:
        code, log = "none: its time was up", str(error.stdout or "")
    row = {"case": "quantizer", "status": "ok" if code == 0 else "failed", "log": log.splitlines()[-60:]}
    session.write(5, row | ({} if code == 0 else {"error": f"exit code {code}"}))


if __name__ == "__main__":
    main()
