"""Non-padding tokens per second of programs side by side: python -m benchmarks.throughput [--workloads NAME ...]

`trl sft` with its defaults, and packed without activation checkpointing; run_sft.py with a fast recipe; on the very
batches of the recipe bare loops around deepspeed.initialize, with DeepSpeed's own defaults and with the recipe's
ds_config, and one around torch's DDP. They take turns in one pair of processes, so that what else the machine does hits
all alike. Speeds are compared only where all saw the same rows in as many steps and their losses on held-out rows
agree; otherwise this ends with exit code 1.

Writes benchmarks/results/throughput.json, where each strategy of a workload replaces its earlier measurement. --quick:
a minute, one strategy, writes nothing without --result.
"""

import argparse
import json
import sys
import tempfile
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from benchmarks import throughput_programs  # noqa: E402
from benchmarks.throughput_inputs import ALPACA, Workload, job_of  # noqa: E402
from tests.helpers.group import Group  # noqa: E402
from zero_recipes.core.files import write_json  # noqa: E402
from zero_recipes.core.measured_on import hardware_facts, library_versions  # noqa: E402

RESULT = ROOT / "benchmarks" / "results" / "throughput.json"
STRATEGIES = ("ddp", "zero0", "zero1", "zero2", "zero3")
WORKLOADS = (
    Workload("12M, Alpaca", "gpt_neox-12m", "alpaca", steps=5, learning_rate=5e-4),
    # a packed step has other rows than a padded one: at 2e-4 four steps ended 1.3 % apart, at 5e-5 0.1 %
    Workload("45M, Alpaca", "llama-45m", "alpaca", steps=4, learning_rate=5e-5),
)
QUICK = Workload("quick", "own", "own", steps=4, learning_rate=1e-4, at_once=2)
NOT_TIMED = 2  # steps: buffers are made, and the recipe's probe reads the second one
TOLERANCE = 0.01  # of the loss per supervised token
PROGRAMS = ("trl", "trl_tuned", "recipe", "engine", "engine_tuned", "ddp")  # the last three take the recipe's batches
Row = dict[str, Any]


def main(argv: list[str]) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workloads", nargs="+", choices=[each.name for each in WORKLOADS])
    parser.add_argument("--strategies", nargs="+", choices=STRATEGIES)
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--result", type=Path)
    given = parser.parse_args(argv)
    wanted = [QUICK] if given.quick else [w for w in WORKLOADS if w.name in (given.workloads or w.name)]
    strategies = given.strategies or (["zero2"] if given.quick else STRATEGIES)
    result = given.result or (None if given.quick else RESULT)
    group = Group(2)
    try:
        for workload in wanted:
            if workload.rows == "alpaca" and not ALPACA.is_file():
                print(f"{workload.name}: skipped, {ALPACA.name} (CC BY-NC 4.0) is not part of this repository")
                continue
            for strategy in strategies:
                measured = measure(group, workload, strategy, 1 if given.quick else given.rounds)
                if result is not None:
                    keep(result, measured)
    finally:
        group.close()


def measure(group: Group, workload: Workload, strategy: str, rounds: int) -> Row:
    """All programs under a strategy, `rounds` times."""
    programs = [name for name in PROGRAMS if strategy != "ddp" or not name.startswith("engine")]
    turns: list[dict[str, Row]] = []
    with tempfile.TemporaryDirectory(prefix="throughput-") as folder:
        job = job_of(workload, Path(folder)) | {"strategy": strategy}
        for number in range(1, rounds + 1):
            slow = {"trl"} if turns else set()  # once: it is far behind
            turns.append({})
            for name in (name for name in programs if name not in slow):
                ranks = group.run(throughput_programs.run, program=name, job=job)
                turns[-1][name] = together(ranks, 1 if name == "trl" else workload.accumulation)
            check(turns[-1], f"{workload.name}, {strategy}")
            print(f"{workload.name}, round {number}, {strategy}: {in_a_line(turns[-1])}", flush=True)
    own = {key: getattr(workload, key) for key in ("name", "model", "rows", "steps", "learning_rate")}
    return own | {
        "steps_not_timed": NOT_TIMED,
        "rows_seen": job["rows"],
        "longest_row": job["longest_row"],
        "pack_length": job["max_length"],
        "packs_per_step": 2 * workload.packs,
        "strategies": {strategy: summary(turns)},
        "versions": library_versions(),
        "hardware": hardware_facts("cpu"),
    }


def together(ranks: list[Row], accumulation: int) -> Row:
    """What all ranks saw of one training, by optimizer step; a step's seconds are those of the slower rank."""
    each = range(0, len(ranks[0]["tokens"]), accumulation)
    by_step = {
        key: [sum(sum(rank[key][first : first + accumulation]) for rank in ranks) for first in each]
        for key in ("tokens", "elements", "supervised")
    }
    seconds = [max(pair) for pair in zip(*(rank["step_seconds"] for rank in ranks), strict=True)]
    lengths = sorted(length for rank in ranks for length in rank["row_lengths"])
    return by_step | {"seconds": seconds, "row_lengths": lengths, "held_out_loss": ranks[0]["held_out_loss"]}


def tokens_per_second(program: Row) -> float:
    return sum(program["tokens"][NOT_TIMED:]) / sum(program["seconds"][NOT_TIMED:])


def check(turn: dict[str, Row], where: str) -> None:
    """Ends this program unless all saw the same rows in as many steps, and ended with the same loss."""
    recipe = turn["recipe"]
    for name, program in turn.items():
        if program["row_lengths"] != recipe["row_lengths"] or len(program["seconds"]) != len(recipe["seconds"]):
            sys.exit(f"no result: {where}: {name} saw other rows than recipe, or in more or fewer steps")
        if sum(program["supervised"]) != sum(recipe["supervised"]):
            sys.exit(f"no result: {where}: {name} supervised other tokens than recipe")
        gap = abs(program["held_out_loss"] / recipe["held_out_loss"] - 1)
        if not gap <= TOLERANCE:  # NaN is none
            sys.exit(f"no result: {where}: the held-out losses of {name} and recipe are {gap:.1%} apart")


def summary(turns: list[dict[str, Row]]) -> Row:
    """Of one strategy: each program's figures, and the recipe's speed over the others'. Other work on the machine only
    slows a step down: of each step the fastest of the rounds counts."""
    programs = {}
    for name, first in turns[0].items():
        by_round = [turn[name]["seconds"] for turn in turns if name in turn]
        fastest = [min(each) for each in zip(*by_round, strict=True)]
        programs[name] = {
            "tokens_per_second": tokens_per_second(first | {"seconds": fastest}),
            "tokens_per_second_by_round": [tokens_per_second(first | {"seconds": seconds}) for seconds in by_round],
            "step_seconds": [[round(each, 4) for each in seconds] for seconds in by_round],
            "tokens_per_step": first["tokens"],
            "padding": 1 - sum(first["tokens"]) / sum(first["elements"]),
            "held_out_loss": [turn[name]["held_out_loss"] for turn in turns if name in turn],
        }
    speeds = {name: program["tokens_per_second"] for name, program in programs.items()}
    ratios = {f"recipe/{name}": speeds["recipe"] / speed for name, speed in speeds.items() if name != "recipe"}
    return {"programs": programs, "ratios": ratios}


def keep(path: Path, measured: Row) -> None:
    known = json.loads(path.read_text())["workloads"] if path.is_file() else {}
    before = known.get(measured["name"], {"strategies": {}})
    known[measured["name"]] = measured | {"strategies": before["strategies"] | measured["strategies"]}
    write_json(path, {"command": "python -m benchmarks.throughput", "workloads": known})


def in_a_line(turn: dict[str, Row]) -> str:
    speeds = " ".join(f"{name} {tokens_per_second(program):,.0f}" for name, program in turn.items())
    losses = " ".join(f"{program['held_out_loss']:.4f}" for program in turn.values())
    return f"{speeds} tokens/s; losses {losses}"


if __name__ == "__main__":
    main(sys.argv[1:])
