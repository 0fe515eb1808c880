"""What a session on a GPU measured, beside what was planned: benchmarks/results/gpu_NAME.json

    python -m benchmarks.gpu_results benchmarks/session/NAME.yaml ROWS.jsonl   # rows of gpu_session.py, or a folder
    python -m benchmarks.gpu_results benchmarks/session/NAME.yaml --plan now   # planned_now, by today's planner

NAME.yaml says of the machine and of the cases what the rows do not (h200.yaml has all keys). A `planned_before` is
written once: a second call with other rows leaves it as it is. `--plan before` makes one for rows that came without, by
the code of `planned_by`, and marks them with `planned_after_the_run`. The court (benchmarks/planners/score.py) scores
the rows as a class of their own. Programs that ran side by side (benchmarks/session/side_by_side.py) are rows, too, and
`over_the_bare_loop` has each one's time over that of the bare DeepSpeed loops, cold and warm.
"""

import argparse
import json
import statistics
from dataclasses import replace
from pathlib import Path
from typing import Any

import yaml

from benchmarks.gpu_session import ROOT, Case, job_of_case, read_rows
from benchmarks.throughput import NOT_TIMED, together
from zero_recipes.core.files import write_json
from zero_recipes.core.gpus import Gpu, gpus
from zero_recipes.metrics.schema import Prediction
from zero_recipes.tools.plan.cost import estimate
from zero_recipes.tools.plan.job import Job
from zero_recipes.tools.plan.predict import Predictor

RESULTS = ROOT / "benchmarks" / "results"
FROM_METRICS = ("strategy", "world_size", "parameters", "trainable_parameters", "precision", "micro_batch_size")
FROM_METRICS += ("gradient_accumulation_steps", "max_length", "status", "error")
FROM_PLAN = ("source", "allocated_peak_bytes", "peak_phase", "reserved_bytes", "model_state_bytes")
FROM_PLAN += ("communication_bytes_per_step",)
LOSSES = 10  # the first of each run


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("session", type=Path, metavar="NAME.yaml")
    parser.add_argument("rows", type=Path, nargs="*", help="files of rows, or folders that hold rows.jsonl")
    parser.add_argument("--beside", type=Path, help="beside.json of side_by_side.py, where its row lacks it")
    parser.add_argument("--plan", choices=["before", "now"])
    given = parser.parse_args()
    session = yaml.safe_load(given.session.read_text())
    path = RESULTS / f"gpu_{given.session.stem}.json"
    document = json.loads(path.read_text()) if path.is_file() else {"rows": []}
    if given.rows:
        document = document_of(session, read_rows(given.rows), document["rows"], given.beside)
    if given.plan == "now":
        fill(document, "planned_now", [row for row in document["rows"] if "planned_before" in row])
    if given.plan == "before":
        late = [row for row in document["rows"] if can_be_planned(row)]
        fill(document, "planned_before", late)
        for row in late:
            row["planned_after_the_run"] = True
    write_json(path, document)
    print(f"{path}: {len(document['rows'])} rows")


def document_of(session: Case, rows: list[Case], written: list[Case], beside: Path | None) -> Case:
    """The session, and a row for each of its runs; plans of rows that are `written` already stay."""
    earlier = {row["case"]: row for row in written}
    document = {key: value for key, value in session.items() if key != "cases"}
    first = next(row["metrics"] for row in rows if "metrics" in row)
    document |= {"hardware": first["hardware"], "versions": first["versions"], "rows": []}
    for row in rows:
        told = session.get("cases", {}).get(row["case"], {})
        case = {"words": "", "keys": {}, "note": row.get("note", "")} | row | told
        found = measured_row(case, session["gpus"])
        if beside is not None and row["case"].startswith("side-"):  # of side_by_side.py
            case["beside"] = {"programs": json.loads(beside.read_text())}
        if "program" in (case.get("beside") or {}):
            found["measured"] = speed_of(case["beside"]["program"])
        if "programs" in (case.get("beside") or {}):
            found["programs"] = speeds_of(case["beside"]["programs"])
        if row.get("planned") and "metrics" in row:
            card = gpus()[session["card"]]
            found["planned_before"] = plan_of(job_of_case(found), Prediction.model_validate(row["planned"]), card)
        for key in ("planned_before", "planned_after_the_run", "planned_now"):
            if key in earlier.get(row["case"], {}):
                found[key] = earlier[row["case"]][key]
        document["rows"].append(found)
    document["over_the_bare_loop"] = over_the_bare_loop(document["rows"])
    return document


def speed_of(program: Case) -> Case:
    """Of a program of side_by_side.py: the median step of each of the two epochs, which have the same batches."""
    tokens = program["tokens"][: len(program["cold_seconds"]) * program["accumulation"]]
    found = {f"{kind}_step_seconds": [round(one, 4) for one in program[f"{kind}_seconds"]] for kind in ("cold", "warm")}
    found |= {f"{kind}_median": round(statistics.median(program[f"{kind}_seconds"]), 4) for kind in ("cold", "warm")}
    found |= {"tokens_of_an_epoch": sum(tokens), "held_out_loss": round(program["held_out_loss"], 5)}
    return found | {key: program[key] for key in ("allocated_peak_bytes",) if key in program}


def over_the_bare_loop(rows: list[Case]) -> Case:
    """{"MODEL STRATEGY": {program and way: {"cold": ..., "warm": ...}}}; a bare loop's time is the mean of those that
    ran in the same way with cuDNN or without, before and after the recipe."""
    found: Case = {}
    compared = [row for row in rows if "warm_median" in row["measured"]]
    for row in compared:
        alike = [
            other["measured"]
            for other in compared
            if (other["program"].split()[0], other["way"])
            == ("engine", row["way"] if "cudnn" in row["way"] else "no cudnn")
            and (other["model"], other["strategy"]) == (row["model"], row["strategy"])
        ]
        if not alike:
            continue
        ratios = {}
        for kind in ("cold", "warm"):
            bare = statistics.fmean(one[f"{kind}_median"] for one in alike)
            ratios[kind] = round(row["measured"][f"{kind}_median"] / bare, 3)
        found.setdefault(f"{row['model']} {row['strategy']}", {})[row["words"]] = ratios
    return found


def measured_row(case: Case, gpus_there: int) -> Case:
    """What was measured, the largest of all ranks. Times of runs that shared the GPU have a name of their own."""
    row = {key: case.get(key) for key in ("case", "model", "strategy", "keys", "words", "note", "status", "error")}
    row |= {key: case[key] for key in ("call", "way", "program", "layers", "seconds") if case.get(key)}
    if "metrics" not in case:  # it ended before it wrote any, or was left out
        return row | {"measured": {}}
    metrics = case["metrics"]
    row["model"] = row["model"] or Path(metrics["model"]).name.replace("base", "tiny")
    row |= {key: metrics[key] for key in FROM_METRICS}
    row["ranks_on_each_gpu"] = metrics["world_size"] // gpus_there
    row["beside_others"] = case.get("beside_others", False)
    peaks, states = metrics["peak_memory_bytes"], metrics["model_state_bytes"]
    measured: Case = {"losses": (metrics["loss_history"] or [])[:LOSSES], "steps": len(metrics["loss_history"] or [])}
    if peaks and peaks[0]["allocated"] is not None:  # there is a GPU
        measured["allocated_peak_bytes"] = max(rank["allocated"] for rank in peaks)
        measured["reserved_peak_bytes"] = max(rank["reserved"] for rank in peaks)
    if states:
        measured["model_state_bytes"] = {part: max(rank[part] for rank in states) for part in states[0]}
    measured["communication_bytes_per_step"] = metrics["communication_bytes_per_step"]
    seconds = metrics["step_seconds"] or {}
    if seconds.get("median"):
        shared = row["beside_others"] or row["ranks_on_each_gpu"] > 1
        measured["step_seconds_while_shared" if shared else "step_seconds"] = round(seconds["median"], 4)
        if not shared:
            measured["mfu"] = metrics["mfu"] and round(metrics["mfu"], 4)
    card = case.get("beside") or {}
    if "reserved_now_bytes" in card:
        measured["context_bytes"] = card["total_bytes"] - card["free_bytes"] - card["reserved_now_bytes"]
    return row | {"measured": measured}


def speeds_of(programs: Case) -> Case:
    """Of each program of side_by_side.py: seconds and tokens by step, and the median without the steps that warm up."""
    found = {}
    for name, program in programs.items():
        if program.get("error"):
            found[name] = {"error": program["error"]}
            continue
        steps = together([{"row_lengths": []} | program], program["accumulation"])
        found[name] = {"step_seconds": [round(seconds, 4) for seconds in steps["seconds"]], "tokens": steps["tokens"]}
        found[name]["median_step_seconds"] = round(statistics.median(steps["seconds"][NOT_TIMED:]), 4)
        found[name]["held_out_loss"] = round(program["held_out_loss"], 5)
    return found


def can_be_planned(row: Case) -> bool:
    """Runs of whole rows of max_length that ended, in the recipe's own way, and that no plan was made for."""
    is_run = row["model"] != "tiny" and not {"programs", "program", "way"} & set(row)
    return is_run and row["status"] == "ok" and "planned_before" not in row


def fill(document: Case, key: str, rows: list[Case]) -> None:
    """Plan these rows as a run would plan itself, and write it into them."""
    card = gpus()[document["card"]]
    jobs = [replace(job_of_case(row), workspace=card.workspace_bytes) for row in rows]
    predict = Predictor()
    predict.prepare(jobs)
    for row, job in zip(rows, jobs, strict=True):
        row[key] = plan_of(job, predict(job), card)


def plan_of(job: Job, planned: Prediction, card: Gpu) -> Case:
    """What of a plan was measured too, and the range of a step's seconds on that card."""
    found: dict[str, Any] = {key: value for key, value in planned.model_dump(mode="json").items() if key in FROM_PLAN}
    ends = estimate(job, planned, card).step_seconds
    return found | {"step_seconds": [round(end, 3) for end in ends]}


if __name__ == "__main__":
    main()
