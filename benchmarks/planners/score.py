"""Score predictions.json against rows.yaml and times.yaml: python -m benchmarks.planners.score [--blind]

Nothing is simulated: the predictions are what predict.py wrote down before. Writes benchmarks/results/planners.json;
`--blind` scores the rows of blind/ into blind.json. docs/plan.md cites the medians.
"""

import csv
import json
import math
import statistics
import sys
from pathlib import Path
from typing import Any

from benchmarks.planners.court import (
    BLIND,
    FOLDER,
    ROOT,
    Row,
    card_of,
    gpu_rows,
    gpu_times,
    job_of_row,
    measured_bytes,
    measured_seconds,
    read_rows,
)
from benchmarks.planners.fit import kinds
from zero_recipes.core.files import write_json
from zero_recipes.tools.plan.cost import constants, regime_of
from zero_recipes.tools.plan.formulas import overheads

OURS = "this planner"
LITTLE = 10**9  # bytes of activations, of which an error says nothing
GOALS = {True: 0.03, False: 0.10}  # by `exact`
GROUPS = {
    "configuration and reading exact": lambda row: row["exact"],
    "allocator, live tensors": lambda row: row["read"] == "allocated" and not row["exact"],
    "allocator, reserved": lambda row: row["read"] == "reserved",
    "card, or reading not stated": lambda row: row["read"] in ("not stated", "nvidia-smi"),
    "one GPU, engine simulated": lambda row: row["gpus"] == 1 and row["found"]["source"] == "engine",
    "several GPUs, engine simulated": lambda row: row["gpus"] > 1 and row["found"]["source"] == "engine",
    "by formulas (FSDP, ZeRO++)": lambda row: row["found"]["source"] == "formulas",
    "all rows": lambda row: True,
}


def main(blind: bool) -> None:
    folder = BLIND if blind else FOLDER
    predictions = json.loads((folder / "predictions.json").read_text())
    known = predicted(folder / "rows.yaml", predictions["rows"])
    scored = [row | errors(row) for row in known if row["found"] and row["found"]["source"] != "none"]
    rows, earlier = ([row for row in scored if ("part" in row) == seen] for seen in (False, True))
    times = [scored_time(row, predictions["times"][row["id"]]) for row in read_rows(folder / "times.yaml")]
    regimes = {
        name: held([row for row in times if row["regime"] == name]) for name in sorted({row["regime"] for row in times})
    }
    names = dict.fromkeys(name for row in rows for name in row["errors"])
    document = {
        "groups": {name: summary(found) for name, of in GROUPS.items() if (found := [row for row in rows if of(row)])},
        "planners": {name: summary([row for row in rows if name in row["errors"]], name) for name in names},
        "cached": cached(),
        "rows": {row["id"]: row["errors"] | row["inside"] for row in rows},
        "times": {"all": held(times), "regimes": regimes, "rows": {row["id"]: row["scored"] for row in times}},
    }
    for plan in ("planned_before", "planned_now") if not blind else ():
        document |= this_program(plan)
    if blind:
        document["verdicts"] = verdicts(known)
    else:
        of_threads = predicted(FOLDER / "deaths.yaml", predictions["deaths"])
        document["verdicts"] = verdicts(known + of_threads)
        document["deaths"] = {row["id"]: said for row in of_threads if row["died"] and (said := verdict_on(row))}
        document["usable"] = usable_at_death()
        document["unplanned"] = unplanned(known + predicted(BLIND / "rows.yaml", blind_predictions()))
    if earlier:  # a blind set that is seen now
        document["groups"]["blind 1"] = summary(earlier)
        document["blind 1"] = {row["id"]: row["errors"] | row["inside"] for row in earlier}
    write_json(ROOT / "benchmarks" / "results" / ("blind.json" if blind else "planners.json"), document)
    own = {name: part for name, part in document.items() if name.startswith("this program")}
    brief = {kind: document[kind] for kind in ("groups", "planners", "cached")} | {"times": regimes} | own
    print(*(f"{kind}, {name}: {found}" for kind, part in brief.items() for name, found in part.items()), sep="\n")
    counts = ("likely", "held", "rows", "likely_left_out", "left_out")
    now = {name: [found[count] for count in counts] for name, found in regimes.items()} if not blind else None
    if now and constants()["holds"] != now:
        print(f"zero_recipes/tools/plan/times.yaml: `holds` is of other predictions: {now}")
    of_both = [row for place in (FOLDER, BLIND) for row in read_rows(place / "times.yaml")]
    if constants()["kinds"] != (covered := kinds([row | {"job": job_of_row(row)} for row in of_both])):
        print(f"zero_recipes/tools/plan/times.yaml: `kinds` are others: {covered}")


def blind_predictions() -> dict[str, Any]:
    return json.loads((BLIND / "predictions.json").read_text())["rows"]


def predicted(path: Path, predictions: dict[str, Any]) -> list[Row]:
    """The rows of a file, each with its prediction, or None, as "found". Its range is the one that a plan prints."""
    rows = []
    for row in read_rows(path):
        found = predictions.get(row["id"])
        if found and found["source"] != "none":
            found = found | {"device": overheads().reserved_range(found["allocated"], row["gpus"]).model_dump()}
        rows.append(row | {"found": found})
    return rows


def this_program(plan: str) -> dict[str, Any]:
    """A class of its own: what this program took on a GPU, by which of its plans. Its errors are among no others."""
    scored = [row | errors(row) for row in gpu_rows(plan)]
    if not scored:
        return {}
    found: dict[str, Any] = {"rows": {}}
    for read in ("allocated", "reserved"):
        own = [row for row in scored if row["read"] == read]
        found[read] = summary(own)
        found["rows"][read] = {row["id"]: row["errors"][OURS] for row in own}
    peaks = [(row["read"], row["id"], row["measured"]) for row in scored]
    allocated = {name: bytes_ for read, name, bytes_ in peaks if read == "allocated"}
    ratios = sorted(bytes_ / allocated[name] for read, name, bytes_ in peaks if read == "reserved")
    found["reserved over allocated"] = [round(ratios[0], 3), round(ratios[-1], 3)]
    times = gpu_times(plan)
    for row in times:
        low, high = row["planned"]
        row["error"] = round((low * high) ** 0.5 / row["seconds"] - 1, 4)
    return {f"this program on a GPU, {plan}": found | ({"steps": held(times)} if times else {})}


def scored_time(row: Row, predicted: dict[str, Any]) -> Row:
    """With the middle of the likely range over the measured seconds, less one, and whether the ranges that are fitted
    without the row's source hold it."""
    job, (low, high) = job_of_row(row), predicted["step_seconds"]
    seconds = measured_seconds(row, job)
    scored = {"regime": regime_of(job), "seconds": round(seconds, 3), "planned": [low, high]}
    likely = predicted["likely"]
    scored["likely"] = likely
    scored["error"] = round(math.sqrt(math.prod(likely)) / seconds - 1, 4)
    for name in ("left_out", "likely_left_out"):
        if name in predicted:
            scored[name] = predicted[name][0] <= seconds <= predicted[name][1]
    found = row | scored | {"scored": scored}
    return found | {"of_left_out": predicted["left_out"]} if "left_out" in predicted else found


def held(rows: list[Row]) -> dict[str, Any]:
    """How many measured seconds lie in the planned range, and in one that is fitted without the row's source. `width`:
    the median of a range's high end over its low end."""
    found = {"rows": len(rows), "held": sum(row["planned"][0] <= row["seconds"] <= row["planned"][1] for row in rows)}
    if "likely" in rows[0]:
        found["likely"] = sum(row["likely"][0] <= row["seconds"] <= row["likely"][1] for row in rows)
    for name in ("left_out", "likely_left_out"):
        if name in rows[0]:
            found[name] = sum(row[name] for row in rows)
    found["width"] = median_width(rows, "planned")
    if "of_left_out" in rows[0]:
        found["width_left_out"] = median_width(rows, "of_left_out")
    return found | median_and_worst({row["id"]: row["error"] for row in rows})


def median_width(rows: list[Row], name: str) -> float:
    return round(statistics.median(row[name][1] / row[name][0] for row in rows), 2)


def errors(row: Row) -> dict[str, Any]:
    """Predicted over measured, less one, by planner, and whether a plan's range holds the reading. Ours is of what was
    read: live tensors, with the cache of a card that is nearly full (torch's own count has no CUDA and no NCCL in it),
    or also with what is beside them where a card was read or the source does not say."""
    found, read, measured = row["found"], row["read"], measured_bytes(row)
    beside = found["device"]["low"] - found["allocated"]
    ours = found["allocated"] * (1 if read == "allocated" else overheads().cached[0])
    ours += 0 if read in ("allocated", "reserved") else beside
    ratios = {OURS: ours} | {name: value for name, value in found["others"].items() if value is not None}
    low, high = (end - (beside if read == "reserved" else 0) for end in found["device"].values())
    return {
        "errors": {name: round(value / measured - 1, 4) for name, value in ratios.items()},
        "inside": {} if read == "allocated" else {"inside": low <= measured <= high},
        "width": high / low,
    }


def verdicts(rows: list[Row]) -> dict[str, dict[str, int]]:
    """What the plan says of runs that ran and of runs that died of memory, on their cards: how many of each verdict.

    "earlier": by the verdict until November 2026, which was that of the range that nvidia-smi may show.
    """
    found: dict[str, dict[str, int]] = {}
    for row in rows:
        said = verdict_on(row)
        outcome = "died" if row.get("died") else "ran"
        for when, verdict in said.items():
            name = outcome if when == "now" else f"{outcome}, {when}"
            counts = found.setdefault(name, {"fits": 0, "may run out": 0, "does not fit": 0})
            counts[verdict] += 1
    return found


def verdict_on(row: Row) -> dict[str, str]:
    """What the plan says of one run on its card, "now" and "earlier". Empty without a prediction or a card."""
    prediction = row["found"]
    card = card_of(row)
    if card is None or not prediction or prediction["source"] == "none":
        return {}
    allocated = prediction["allocated"]
    needed = allocated + overheads().beside_segments(row["gpus"])
    shown = overheads().reserved_range(allocated, row["gpus"]).high
    most = allocated + overheads().unplanned_bytes(prediction["source"], allocated, prediction["at_peak"])
    now = verdict_of(needed, most <= overheads().usable_bytes(card), card)
    return {"now": now, "earlier": verdict_of(needed, shown <= card, card)}


def activations(prediction: dict[str, Any]) -> float:
    """Bytes planned at the peak that are no model states."""
    return prediction["at_peak"]["activations"] + prediction["at_peak"]["loss_head"]


def unplanned(rows: list[Row]) -> dict[str, dict[str, float]]:
    """What runs had allocated beyond the planned peak: of overheads.yaml. A simulation's as a share of its activations.

    Of full fine-tuning and LoRA, where the allocator was read.
    """
    shares: dict[str, list[float]] = {"engine": [], "formulas": []}
    for row in rows:
        prediction = row["found"]
        if row["read"] != "allocated" or row["method"] == "qlora" or not prediction or prediction["source"] == "none":
            continue
        beyond = measured_bytes(row) - prediction["allocated"]
        if prediction["source"] == "formulas":
            shares["formulas"].append(beyond / prediction["allocated"])
        elif activations(prediction) > LITTLE:
            shares["engine"].append(beyond / activations(prediction))
    found = {}
    for source, of_source in shares.items():
        at = statistics.quantiles(of_source, n=10, method="inclusive")
        values = {"median": at[4], "90 %": at[8], "most": max(of_source)}
        found[source] = {"runs": len(of_source)} | {name: round(value, 3) for name, value in values.items()}
    return found


def verdict_of(needed: float, has_room: bool, card: int) -> str:
    if needed > card:
        return "does not fit"
    return "fits" if has_room else "may run out"


def usable_at_death() -> dict[str, dict[str, float]]:
    """What runs had allocated and asked for when they died of memory, over their card: of overheads.yaml, by oom.csv.

    Training runs of language models that no other process shared the card with.
    """
    lines = [line for line in (FOLDER / "oom.csv").read_text().splitlines() if not line.startswith("#")]
    shares: dict[int, list[float]] = {}
    for row in csv.DictReader(lines):
        is_whole = row["capacity_gib"] and row["allocated_gib"] and row["tried_gib"]
        if row["use"] != "train" or row["domain"] != "llm" or not is_whole:
            continue
        capacity = float(row["capacity_gib"])
        size = max(size for size in overheads().usable if size <= capacity)
        share = (float(row["allocated_gib"]) + float(row["tried_gib"])) / capacity
        shares.setdefault(size, []).append(share)
    found = {}
    for size, of_size in sorted(shares.items()):
        at = statistics.quantiles(of_size, n=20, method="inclusive")
        values = {"least": min(of_size), "10 %": at[1], "median": at[9]}
        found[f"from {size} GiB"] = {"runs": len(of_size)} | {name: round(value, 3) for name, value in values.items()}
    return found


def summary(rows: list[Row], name: str = OURS) -> dict[str, Any]:
    """`ours`: the median of this planner on the same rows. `inside`: readings inside the printed range, of how many.
    `width`: the median of that range's high end over its low end."""
    found = {"rows": len(rows)} | median_and_worst({row["id"]: row["errors"][name] for row in rows})
    if name != OURS:
        return found | {"ours": median_and_worst({row["id"]: row["errors"][OURS] for row in rows})["median"]}
    found["within_goal"] = sum(abs(row["errors"][OURS]) <= GOALS[row["exact"]] for row in rows)
    read = [row for row in rows if row["inside"]]
    if read:
        found["inside"] = [sum(row["inside"]["inside"] for row in read), len(read)]
        found["width"] = round(statistics.median(row["width"] for row in read), 2)
    return found


def median_and_worst(errors: dict[str, float]) -> dict[str, Any]:
    worst = max(errors, key=lambda name: abs(errors[name]))
    median = round(statistics.median(map(abs, errors.values())), 4)
    found = {"median": median, "worst": errors[worst], "worst_row": worst}
    return found | {"lowest": min(errors.values()), "highest": max(errors.values())}


def cached() -> dict[str, float]:
    """What cards show less CUDA and NCCL, over what was allocated: the quantiles of shown.csv, of overheads.yaml."""
    lines = [line for line in (FOLDER / "shown.csv").read_text().splitlines() if not line.startswith("#")]
    pairs = [(float(p["shown_mib"]), int(p["allocated_peak_bytes"]), int(p["gpus"])) for p in csv.DictReader(lines)]
    ratios = sorted((s * 2**20 - overheads().beside_segments(gpus)) / allocated for s, allocated, gpus in pairs)
    at = statistics.quantiles(ratios, n=20, method="inclusive")
    values = {"least": ratios[0], "10 %": at[1], "median": at[9], "90 %": at[17], "most": ratios[-1]}
    return {"pairs": len(ratios)} | {name: round(value, 3) for name, value in values.items()}


if __name__ == "__main__":
    main(blind="--blind" in sys.argv[1:])
