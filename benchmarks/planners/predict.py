"""Our predictions of the rows, written down before they are scored: python benchmarks/planners/predict.py

The engine is simulated where the planner can, as `zero-recipes plan` does; the formulas answer elsewhere. A row that
stands in predictions.json already with the same job and the same planner is left alone; `--rows a,b` takes some only.
What was measured of memory is not read here. `--times` predicts steps' times (times.yaml) instead, all by formulas.
`--blind` predicts the rows of blind/ instead.
"""

import argparse
import json
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from benchmarks.planners import court, estimators, fit, other_trainers  # noqa: E402
from zero_recipes.core.files import write_json  # noqa: E402
from zero_recipes.core.findings import Refusal  # noqa: E402
from zero_recipes.core.host import library_versions  # noqa: E402
from zero_recipes.metrics.schema import Prediction  # noqa: E402
from zero_recipes.plan import predict as planner  # noqa: E402
from zero_recipes.plan.formulas import Sizes, overheads, predict_by_formulas, shape_of  # noqa: E402
from zero_recipes.plan.job import Job  # noqa: E402
from zero_recipes.plan.simulator import parent as simulation  # noqa: E402

AT_ONCE = 4  # rows of one child process


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rows", help="ids by comma; all without it")
    parser.add_argument("--times", action="store_true", help="steps' times")
    parser.add_argument("--blind", action="store_true", help="the rows of blind/")
    arguments = parser.parse_args()
    wanted, folder = arguments.rows, court.BLIND if arguments.blind else court.FOLDER
    file, known = folder / "predictions.json", court.read_rows(folder / "rows.yaml")
    simulation.WORKER = ("-m", "benchmarks.planners.other_trainers")
    written = json.loads(file.read_text()) if file.is_file() else {"rows": {}, "times": {}}
    if arguments.times:
        times = times_of(court.read_rows(folder / "times.yaml"), fits=not arguments.blind)
        return write_json(file, written | {"times": times})
    rows = [row for row in known if wanted is None or row["id"] in wanted.split(",")]
    jobs = {row["id"]: court.job_of_row(row) for row in rows}
    todo = [row for row in rows if written["rows"].get(row["id"], {}).get("job") != digest(jobs[row["id"]])]
    for start in range(0, len(todo), AT_ONCE):
        some = todo[start : start + AT_ONCE]
        predictions = predict([jobs[row["id"]] for row in some])
        for row, prediction in zip(some, predictions, strict=True):
            written["rows"][row["id"]] = entry(jobs[row["id"]], prediction)
        write_json(file, document(known, written, jobs))
        print(f"{start + len(some)} of {len(todo)}: {', '.join(row['id'] for row in some)}", flush=True)
    write_json(file, document(known, written, jobs))


def document(rows: list[dict[str, Any]], written: dict[str, Any], jobs: dict[str, Job]) -> dict[str, Any]:
    """The whole file; of rows that are gone nothing is kept."""
    kept = {}
    for row in rows:
        found = written["rows"].get(row["id"])
        if found is not None and row["id"] in jobs and found["source"] != "none":
            found["others"] = estimators.estimates(row, jobs[row["id"]], found["trainable"])
        if found is not None:
            kept[row["id"]] = found
    return {"versions": library_versions(), "rows": kept, "times": written["times"]}


def times_of(published: list[dict[str, Any]], fits: bool) -> dict[str, dict[str, Any]]:
    """{id: seconds of a step, [low, high], and of its parts, as `zero-recipes plan --quick` has them}. `fits`: the rows
    fit times.yaml; "left_out" is then a plan's range whose constants and spread are fitted without the row's source."""
    rows = fit.prepared(published)
    with fit.shapes_at_hand(rows):
        left_out = fit.left_out(rows) if fits else {}
        speeds = {row["id"]: fit.planned(row) for row in rows}
    parts = ("computing", "communicating", "waiting", "offloading")
    return {
        name: {"step_seconds": in_seconds(speed.step_seconds)}
        | ({"left_out": in_seconds(left_out[name])} if fits else {})
        | {part: round(getattr(speed, part), 4) for part in parts}
        for name, speed in speeds.items()
    }


def in_seconds(ends: tuple[float, float]) -> list[float]:
    return [round(end, 4) for end in ends]


def digest(job: Job) -> str:
    """Of the job and the planner's code: another planner answers anew."""
    return job.key({"planner": planner.own_code()})[:16]


def predict(jobs: list[Job]) -> list[Prediction | str]:
    """A prediction for each, or why there is none."""
    by_engine = [job for job in jobs if simulation.not_simulated(job) is None]
    try:
        simulated = dict(zip(map(id, by_engine), simulation.simulate(by_engine), strict=True)) if by_engine else {}
    except Refusal as refusal:
        if len(jobs) == 1:
            return [f"{refusal.what}: {refusal.why}"]
        return [predict([job])[0] for job in jobs]
    return [simulated.get(id(job)) or as_published(job, predict_by_formulas(job)) for job in jobs]


def as_published(job: Job, prediction: Prediction) -> Prediction:
    """The formulas know TRL's fused head only; at the end of forward others hold logits beside what backward needs and
    what is gathered. All published FSDP of adapters is torch's first, whose hooks on frozen layers
    (torch/distributed/fsdp/_runtime_utils.py `_register_post_backward_reshard_only_hook`) keep each recomputed layer's
    input and its gradient to the end of backward."""
    head, settings, sizes = job.config[other_trainers.KEY], job.settings, Sizes(job, shape_of(job.config, job.settings))
    tokens = settings.per_device_train_batch_size * prediction.max_length
    inputs = 2 * tokens * job.config["num_hidden_layers"] * job.config["hidden_size"]  # of recomputed layers
    phases, backward = {}, sizes.phases()["backward"]
    if job.recomputes and head != "fused":
        logits = tokens * job.config["vocab_size"] * other_trainers.BYTES_PER_LOGIT[head]
        forward = {"activations": inputs, "loss_head": logits, "grads": 0, "other": 0}
        phases["forward"] = backward | forward
    if job.recomputes and job.is_fsdp and settings.use_peft:
        phases["backward"] = backward | {"activations": backward["activations"] + inputs}
    phase = max(phases, key=lambda name: sum(phases[name].values()), default=None)
    if phase is None or sum(phases[phase].values()) <= prediction.allocated_peak_bytes:
        return prediction
    at_peak = {part: int(size) for part, size in phases[phase].items()}
    peak = sum(at_peak.values())
    changed = {"allocated_peak_bytes": peak, "peak_phase": phase, "at_peak": at_peak}
    return prediction.model_copy(update=changed | {"reserved_bytes": overheads().reserved_range(peak, job.world_size)})


def entry(job: Job, prediction: Prediction | str) -> dict[str, Any]:
    """What stands in the file. `device`: with cache, context and NCCL, as planned."""
    found: dict[str, Any] = {"job": digest(job)}
    if isinstance(prediction, str):
        return found | {"source": "none", "why": prediction}
    low, high = prediction.reserved_bytes.low, prediction.reserved_bytes.high
    return found | {
        "source": prediction.source,
        "parameters": prediction.parameters,
        "trainable": prediction.trainable_parameters,
        "allocated": prediction.allocated_peak_bytes,
        "device": {"low": low, "high": high},
        "peak_phase": prediction.peak_phase,
        "at_peak": prediction.at_peak,
    }


if __name__ == "__main__":
    main()
