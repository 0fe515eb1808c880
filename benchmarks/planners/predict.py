"""Our predictions of the rows, written down before they are scored: python -m benchmarks.planners.predict

The engine is simulated where the planner can, as `zero-recipes plan` does; the formulas answer elsewhere. A row that
stands in predictions.json already with the same job and the same planner is left alone; `--rows a,b` takes some only.
What was measured of memory is not read here. `--times` predicts steps' times (times.yaml) instead, all by formulas.
`--blind` predicts the rows of blind/ instead, `--deaths` runs that died of memory (deaths.yaml). `--quick` simulates
none of them.
"""

import argparse
import json
from typing import Any

from benchmarks.planners import court, estimators, fit
from benchmarks.planners.other_trainers import BYTES_PER_LOGIT
from zero_recipes.core.files import write_json
from zero_recipes.core.measured_on import library_versions
from zero_recipes.metrics.schema import Prediction
from zero_recipes.tools.plan.cache import versions
from zero_recipes.tools.plan.formulas import Sizes, predict_by_formulas
from zero_recipes.tools.plan.job import Job
from zero_recipes.tools.plan.shape import shape_of
from zero_recipes.tools.plan.simulator import parent as simulation

AT_ONCE = 4  # rows of one child process


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rows", help="ids by comma; all without it")
    parser.add_argument("--times", action="store_true", help="steps' times")
    parser.add_argument("--blind", action="store_true", help="the rows of blind/")
    parser.add_argument("--deaths", action="store_true", help="the rows of deaths.yaml")
    parser.add_argument("--quick", action="store_true", help="by formulas alone")
    arguments = parser.parse_args()
    folder = court.BLIND if arguments.blind else court.FOLDER
    file = folder / "predictions.json"
    written = json.loads(file.read_text()) | {"versions": library_versions()}
    if arguments.times:
        written["times"] = times_of(court.read_rows(folder / "times.yaml"), fits=not arguments.blind)
        return write_json(file, written)
    simulation.WORKER = ("-m", "benchmarks.planners.other_trainers")
    kind = "deaths" if arguments.deaths else "rows"
    known = court.read_rows(folder / f"{kind}.yaml")
    found_before = written.get(kind, {})
    jobs = {row["id"]: court.job_of_row(row) for row in known}
    keys = {name: job.key({"planner": versions()["zero_recipes"]})[:16] for name, job in jobs.items()}
    wanted = arguments.rows.split(",") if arguments.rows else list(jobs)
    changed = {name for name in wanted if found_before.get(name, {}).get("job") != keys[name]}
    todo = [row for row in known if row["id"] in changed]
    for start in range(0, len(todo), AT_ONCE):
        some = todo[start : start + AT_ONCE]
        for row, found in zip(some, predict([jobs[row["id"]] for row in some], arguments.quick), strict=True):
            found_before[row["id"]] = {"job": keys[row["id"]]} | entry(row, jobs[row["id"]], found)
        write_json(file, written | {kind: {name: found_before[name] for name in jobs if name in found_before}})
        print(f"{start + len(some)} of {len(todo)}: {', '.join(row['id'] for row in some)}", flush=True)


def times_of(published: list[court.Row], fits: bool) -> dict[str, dict[str, Any]]:
    """{id: seconds of a step, [low, high], and of its parts, as `zero-recipes plan --quick` has them}. `fits`: the rows
    fit times.yaml; "left_out" and "likely_left_out" are then ranges that are fitted without the row's source."""
    rows, found = fit.prepared(published), {}
    left_out = fit.left_out(rows) if fits else {}
    for row in rows:
        speed, name = fit.planned(row), row["id"]
        ranges = {"step_seconds": speed.step_seconds, "likely": speed.likely}
        if fits:
            ranges |= {"left_out": left_out[name].step_seconds, "likely_left_out": left_out[name].likely}
        parts = ("computing", "communicating", "waiting", "offloading")
        found[name] = {key: [round(end, 4) for end in ends] for key, ends in ranges.items()}
        found[name] |= {part: round(getattr(speed, part), 4) for part in parts}
    return found


def predict(jobs: list[Job], quick: bool) -> list[Prediction | str]:
    """A prediction for each, or why there is none."""
    by_engine = [] if quick else [job for job in jobs if simulation.not_simulated(job) is None]
    simulated = dict(zip(map(id, by_engine), simulation.simulate(by_engine), strict=True)) if by_engine else {}
    return [simulated.get(id(job)) or as_published(job, predict_by_formulas(job)) for job in jobs]


def as_published(job: Job, prediction: Prediction) -> Prediction:
    """The formulas know TRL's fused head only; at the end of forward others hold logits beside what backward needs and
    what is gathered. All published FSDP of adapters is torch's first, whose hooks on frozen layers
    (torch/distributed/fsdp/_runtime_utils.py `_register_post_backward_reshard_only_hook`) keep each recomputed layer's
    input and its gradient to the end of backward."""
    head, settings, sizes = job.config[court.HEAD], job.settings, Sizes(job, shape_of(job.config, job.settings))
    tokens = settings.per_device_train_batch_size * prediction.max_length
    inputs = 2 * tokens * sizes.shape.layers * sizes.shape.hidden  # of recomputed layers
    phases, backward = {prediction.peak_phase: prediction.at_peak}, sizes.phases()["backward"]
    if head != "fused":
        logits = tokens * job.config["vocab_size"] * BYTES_PER_LOGIT[head]
        kept = inputs if job.recomputes else backward["activations"]
        phases["forward"] = backward | {"activations": kept, "loss_head": logits, "grads": 0, "other": 0}
    if job.recomputes and job.is_fsdp and settings.use_peft:
        phases["backward"] = backward | {"activations": backward["activations"] + inputs}
    phase = max(phases, key=lambda name: sum(phases[name].values()))
    at_peak = {part: int(size) for part, size in phases[phase].items()}
    peak = sum(at_peak.values())
    if peak <= prediction.allocated_peak_bytes:
        return prediction
    return prediction.model_copy(update={"allocated_peak_bytes": peak, "peak_phase": phase, "at_peak": at_peak})


def entry(row: court.Row, job: Job, prediction: Prediction | str) -> dict[str, Any]:
    """What stands in the file. `others`: other planners."""
    if isinstance(prediction, str):
        return {"source": "none", "why": prediction}
    peak = prediction.allocated_peak_bytes
    return {
        "source": prediction.source,
        "parameters": prediction.parameters,
        "trainable": prediction.trainable_parameters,
        "allocated": peak,
        "peak_phase": prediction.peak_phase,
        "at_peak": prediction.at_peak,
        "others": estimators.estimates(row, job, prediction.trainable_parameters),
    }


if __name__ == "__main__":
    main()
