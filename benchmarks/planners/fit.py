"""What published rows decide of zero_recipes/tools/plan/times.yaml: python -m benchmarks.planners.fit prints it.

Constants: those of FITTED, by coordinate search for the least mean of |log(planned / measured)|, every source with the
weight of the root of its rows. Ranges: measured over planned at the quantiles LEVELS, every source with the same
weight; of fewer than FEW sources the least and the most that a row shows, and WIDER. `left_out` fits both once for each
source, without its rows: what a plan would have printed for a source that nobody has seen.
"""

import math
from collections import Counter, defaultdict
from collections.abc import Callable
from typing import Any
from unittest.mock import patch

import numpy as np

from benchmarks.planners import court
from benchmarks.planners.court import Row
from zero_recipes.tools.plan import cost
from zero_recipes.tools.plan.formulas import Sizes, predict_by_formulas
from zero_recipes.tools.plan.shape import shape_of

FITTED = ("achievable", "activation_traffic", "layer_seconds", "gather_seconds", "cpu_adam")
# values at which what they stand for takes no time
NEUTRAL = {name: math.inf if name in ("achievable", "cpu_adam") else 0.0 for name in FITTED}
LEVELS = (0.1, 0.9)
FEW = 8
STEPS = (0.4, 0.1, 0.03)  # of the search, in logarithms


def prepared(rows: list[Row]) -> list[Row]:
    """Each with its job, prediction, card and seconds. A fit plans it a thousand times, with its sizes at hand."""
    found, shapes, sizes = [], {}, {}
    for row in rows:
        job = court.job_of_row(row)
        more = {"job": job, "prediction": predict_by_formulas(job), "card": court.gpu_of(row)}
        found.append(row | more | {"seconds": court.measured_seconds(row, job)})
        shape = shape_of(job.config, job.settings)
        shapes[id(job.config)], sizes[id(job)] = shape, Sizes(job, shape)
    cost.shape_of = lambda config, settings: shapes[id(config)]
    cost.Sizes = lambda job, shape: sizes[id(job)]
    return found


def planned(row: Row) -> cost.Speed:
    return cost.estimate(row["job"], row["prediction"], row["card"])


class Parts:
    """The parts of rows' steps, in which the fitted constants are linear: a fit looks at them thousands of times."""

    def __init__(self, rows: list[Row]):
        def with_constants(of_row: Callable[[Row], float], **values: float) -> np.ndarray:
            probed = cost.constants() | {
                name: {"value": values.get(name, default)} for name, default in NEUTRAL.items()
            }
            with patch.object(cost, "constants", lambda: probed):
                return np.array([of_row(row) for row in rows])

        def communicating(row: Row, computing: float) -> float:
            return cost._communicating(row["job"], row["prediction"], row["card"], computing)  # noqa: SLF001

        self.computing = with_constants(lambda row: planned(row).computing)
        self.products = with_constants(lambda row: planned(row).computing, achievable=1) - self.computing
        self.traffic = with_constants(lambda row: planned(row).computing, activation_traffic=1) - self.computing
        self.hosting = with_constants(hosting)
        self.layers = with_constants(hosting, layer_seconds=1) - self.hosting
        self.gathers = with_constants(hosting, gather_seconds=1) - self.hosting
        self.offloading = with_constants(offloading)
        self.updated = with_constants(offloading, cpu_adam=1) - self.offloading
        self.collectives = with_constants(lambda row: communicating(row, 0))
        self.bare = with_constants(lambda row: communicating(row, math.inf))
        self.hidden = with_constants(lambda row: cost.window(row["job"]) * cost.constant("hidden"))

    def seconds(self, **values: float) -> np.ndarray:
        """Of each row's step, before any range, as cost.py has them."""
        computing = self.computing + self.products / values["achievable"] + self.traffic * values["activation_traffic"]
        communicating = np.maximum(self.bare, self.collectives - self.hidden * computing)
        hosting = self.hosting + self.layers * values["layer_seconds"] + self.gathers * values["gather_seconds"]
        beside = np.maximum(hosting, computing + communicating)
        return beside + self.offloading + self.updated / values["cpu_adam"]


def hosting(row: Row) -> float:
    return cost._hosting(row["job"])  # noqa: SLF001


def offloading(row: Row) -> float:
    return cost._offloading(row["job"], row["prediction"], row["card"])  # noqa: SLF001


def fitted(rows: list[Row], start: dict[str, Any]) -> dict[str, Any]:
    """`start` (times.yaml) with other values and spreads."""
    found = start | {name: dict(start[name]) for name in FITTED}
    found |= {"spread": dict.fromkeys(start["spread"], (1, 1)), "centre": dict.fromkeys(start["centre"], 1)}
    rows_of = Counter(row["source"] for row in rows)
    weights = np.array([rows_of[row["source"]] ** -0.5 for row in rows])
    measured = np.array([row["seconds"] for row in rows])
    parts = Parts(rows)

    def error() -> float:
        seconds = parts.seconds(**{name: found[name]["value"] for name in FITTED})
        return float(weights @ abs(np.log(seconds / measured)))

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
        return weighted[0][0] / cost.WIDER if level < 1 / 2 else weighted[-1][0] * cost.WIDER
    below = [sum(weight for _, weight in weighted[: place + 1]) for place in range(len(weighted))]
    return next(value for (value, _), sum_of in zip(weighted, below, strict=True) if sum_of >= level * len(by_source))


def kinds(rows: list[Row]) -> dict[str, list[str]]:
    """{regime: what its rows cover}, `kinds` of times.yaml."""
    found: dict[str, set[str]] = defaultdict(set)
    for row in rows:
        found[cost.regime_of(row["job"])].update(cost.kinds_of(row["job"], row["gpu"]))
    return {regime: sorted(found[regime]) for regime in sorted(found)}


def left_out(rows: list[Row]) -> dict[str, cost.Speed]:
    """{id of a row: its speed by a fit without the rows of its source, whose kinds are then not covered either}."""
    found = {}
    none = {regime: [] for regime in cost.constants()["kinds"]}
    for source in sorted({row["source"] for row in rows}):
        others = [row for row in rows if row["source"] != source]
        constants = fitted(others, cost.constants()) | {"kinds": none | kinds(others)}
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
