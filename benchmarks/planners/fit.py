"""What published rows decide of zero_recipes/tools/plan/times.yaml: python -m benchmarks.planners.fit prints it.

Constants: those of FITTED, by coordinate search for the least mean of |log(planned / measured)|, every source with the
weight of the root of its rows. Ranges: measured over planned at the quantiles LEVELS, every source with the same
weight; of fewer than FEW sources the least and the most that a row shows, and WIDER. `left_out` fits both once for each
source, without its rows: what a plan would have printed for a source that nobody has seen.
"""

import math
from collections import Counter, defaultdict
from typing import Any
from unittest.mock import patch

from benchmarks.planners import court
from benchmarks.planners.court import Row
from zero_recipes.tools.plan import cost
from zero_recipes.tools.plan.formulas import predict_by_formulas
from zero_recipes.tools.plan.shape import shape_of

FITTED = ("achievable", "activation_traffic", "layer_seconds", "gather_seconds", "cpu_adam")
LEVELS = (0.1, 0.9)
FEW, WIDER = 8, 1.25
STEPS = (0.4, 0.1, 0.03)  # of the search, in logarithms


def prepared(rows: list[Row]) -> list[Row]:
    """Each with its job, prediction, card and seconds. A fit plans it a thousand times, with its shape at hand."""
    found, shapes = [], {}
    for row in rows:
        job = court.job_of_row(row)
        more = {"job": job, "prediction": predict_by_formulas(job), "card": court.gpu_of(row)}
        found.append(row | more | {"seconds": court.measured_seconds(row, job)})
        shapes[id(job.config)] = shape_of(job.config, job.settings)
    cost.shape_of = lambda config, settings: shapes[id(config)]
    return found


def planned(row: Row) -> cost.Speed:
    return cost.estimate(row["job"], row["prediction"], row["card"])


def fitted(rows: list[Row], start: dict[str, Any]) -> dict[str, Any]:
    """`start` (times.yaml) with other values and spreads."""
    found = start | {name: dict(start[name]) for name in FITTED}
    found |= {"spread": dict.fromkeys(start["spread"], (1, 1)), "centre": dict.fromkeys(start["centre"], 1)}
    rows_of = Counter(row["source"] for row in rows)

    def error() -> float:
        return sum(abs(math.log(planned(row).middle / row["seconds"])) / rows_of[row["source"]] ** 0.5 for row in rows)

    with patch.object(cost, "constants", lambda: found):
        least = error()
        for step in STEPS:
            moved = True
            while moved:
                moved = False
                for name in FITTED:
                    for factor in (math.exp(step), math.exp(-step)):
                        before = found[name]["value"]
                        found[name]["value"] = before * factor
                        now = error()
                        if now < least * (1 - 1e-4):
                            least, moved = now, True
                        else:
                            found[name]["value"] = before
        ratios = measured_over_planned(rows, start["spread"])
    found["spread"] = {name: tuple(quantile(of, level) for level in LEVELS) for name, of in ratios.items()}
    found["centre"] = {name: median(of) for name, of in ratios.items()}
    return found


def measured_over_planned(rows: list[Row], regimes: dict[str, Any]) -> dict[str, dict[str, list[float]]]:
    """By regime and source."""
    ratios: dict[str, dict[str, list[float]]] = {regime: defaultdict(list) for regime in regimes}
    for row in rows:
        speed = planned(row)
        beside = speed.middle - speed.offloading
        if not speed.offloading:
            ratios[cost.passes_of(row["job"])][row["source"]].append(row["seconds"] / speed.middle)
        elif row["seconds"] > 1.5 * beside:
            ratios["offload"][row["source"]].append((row["seconds"] - beside) / speed.offloading)
    return ratios


def median(by_source: dict[str, list[float]]) -> float:
    """Of all values, those of each source together with the same weight."""
    weighted = sorted((value, 1 / len(values)) for values in by_source.values() for value in values)
    place = 0
    weight = weighted[0][1]
    while weight < len(by_source) / 2:
        place += 1
        weight += weighted[place][1]
    return weighted[place][0]


def quantile(by_source: dict[str, list[float]], level: float) -> float:
    """Of all values, those of each source together with the same weight."""
    weighted = sorted((value, 1 / len(values)) for values in by_source.values() for value in values)
    if len(by_source) < FEW:
        return weighted[0][0] / WIDER if level < 1 / 2 else weighted[-1][0] * WIDER
    below = [sum(weight for _, weight in weighted[: place + 1]) for place in range(len(weighted))]
    return next(value for (value, _), sum_of in zip(weighted, below, strict=True) if sum_of >= level * len(by_source))


def left_out(rows: list[Row]) -> dict[str, cost.Speed]:
    """{id of a row: its speed by a fit without the rows of its source}."""
    found = {}
    for source in sorted({row["source"] for row in rows}):
        constants = fitted([row for row in rows if row["source"] != source], cost.constants())
        with patch.object(cost, "constants", lambda constants=constants: constants):
            found |= {row["id"]: planned(row) for row in rows if row["source"] == source}
    return found


def main() -> None:
    found = fitted(prepared(court.read_rows(court.FOLDER / "times.yaml")), cost.constants())
    print(*(f"{name}: {found[name]['value']:.3g}" for name in FITTED), sep="\n")
    print(*(f"{name}: [{low:.2f}, {high:.2f}]" for name, (low, high) in found["spread"].items()), sep="\n")
    print(*(f"{name}: {middle:.2f}" for name, middle in found["centre"].items()), sep="\n")


if __name__ == "__main__":
    main()
