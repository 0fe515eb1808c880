"""Write docs/scenarios.md and benchmarks/results/scenarios.json: known models on known machines, planned.

    python scripts/scenarios.py [--quick]    # plans all of them; --quick: by formulas
    python scripts/scenarios.py --new        # all but those that the JSON has by the engine
    python scripts/scenarios.py --check      # exits 1 if the page is not what the JSON says

Every scenario is the job of recipes/pythia.yaml (full fine-tuning in bf16, micro batches of 4 sequences of 512 tokens,
no recomputation) with another model and other GPUs. No GPU is needed and nothing is measured.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from scripts import scenario_claims as claims  # noqa: E402
from zero_recipes.core.files import write_json  # noqa: E402
from zero_recipes.core.hardware import Gpu, gpu_named, gpus  # noqa: E402
from zero_recipes.core.units import count as in_words  # noqa: E402
from zero_recipes.core.units import parameters, significant, size  # noqa: E402
from zero_recipes.metrics.prediction import Prediction  # noqa: E402
from zero_recipes.plan import jobs  # noqa: E402
from zero_recipes.plan.advice import smallest_change  # noqa: E402
from zero_recipes.plan.fit import fit_of  # noqa: E402
from zero_recipes.plan.formulas.predict import predict_by_formulas  # noqa: E402
from zero_recipes.plan.job import Job  # noqa: E402
from zero_recipes.plan.messages import change_in_words, host_memory  # noqa: E402
from zero_recipes.plan.predict import Predict, Predictor  # noqa: E402
from zero_recipes.plan.recommend import recommend  # noqa: E402
from zero_recipes.plan.rows import make_row  # noqa: E402
from zero_recipes.theory.zero_paper import model_state_bytes  # noqa: E402

PAGE = ROOT / "docs" / "scenarios.md"
RESULT = ROOT / "benchmarks" / "results" / "scenarios.json"
RECIPE = Path("recipes/pythia.yaml")
ENGINE_UP_TO = 100e9  # parameters; larger models are planned by formulas
COUNTS = [2**exponent for exponent in range(14)]
STAGES = ("ddp", "zero0", "zero1", "zero2", "zero3")
OFFLOAD = ("zero2_offload", "zero3_offload")


class Scenario(NamedTuple):
    """A model on a machine, and what is commonly said of it."""

    model: str
    count: int
    gpu: str
    said: str  # in a few words
    strategy: str  # that is commonly named for it


SCENARIOS = [
    Scenario("EleutherAI/pythia-6.9b-deduped", 2, "h100-80gb", "stage 2 is the safe choice, 50 to 60 GB", "zero2"),
    Scenario("EleutherAI/pythia-6.9b-deduped", 2, "b200-192gb", "every stage runs, stage 0 in 80 to 110 GB", "zero0"),
    Scenario("EleutherAI/pythia-2.8b-deduped", 2, "a100-40gb", "the model for two 40 GB cards; ddp below 10B", "ddp"),
    Scenario("meta-llama/Llama-2-7b-hf", 2, "a100-40gb", "ZeRO-2 or ZeRO-3", "zero3"),
    Scenario("meta-llama/Llama-2-13b-hf", 2, "a100-80gb", "ZeRO-2, a tight fit", "zero2"),
    Scenario("meta-llama/Llama-2-13b-hf", 8, "a100-40gb", "ZeRO-2", "zero2"),
    Scenario("meta-llama/Llama-2-70b-hf", 8, "a100-80gb", "ZeRO-3", "zero3"),
    Scenario("meta-llama/Llama-2-70b-hf", 64, "h100-80gb", "ZeRO-3", "zero3"),
    Scenario("gpt3-175b", 4, "h100-80gb", "526 GB a GPU at stage 3 (8 bytes of optimizer counted)", "zero3"),
    Scenario("gpt3-175b", 8, "h100-80gb", "263 GB a GPU at stage 3 (8 bytes of optimizer counted)", "zero3"),
    Scenario("megatron-1t", 16, "h100-80gb", "20 GB of GPU, 400 GB of host memory, 2 TB of NVMe", "zero3_offload"),
    Scenario("megatron-7.5b", 8, "a100-80gb", "120 GB do not fit; stage 1 and above do", "zero1"),
    Scenario("meta-llama/Llama-2-7b-hf", 8, "a100-80gb", "38.5, 26.25 or 14 GB at stage 1, 2 or 3", "zero2"),
    Scenario("meta-llama/Llama-2-7b-hf", 4, "a100-80gb", "ZeRO-1 or ZeRO-2", "zero2"),
    Scenario("gpt3-175b", 16, "h100-80gb", "131 GB a GPU at stage 3 (8 bytes of optimizer counted)", "zero3"),
]
INTRODUCTION = """# Known models on known machines

Made by `python scripts/scenarios.py` from `benchmarks/results/scenarios.json`. Nothing here was measured: it is what
`zero-recipes plan` says. Each row is the job of `recipes/pythia.yaml` (full fine-tuning in bf16 with Adam, micro
batches of 4 sequences of 512 tokens, accumulation 2, no recomputation) with another model and other GPUs.

## What fits, and how fast

- Fits: of ddp and stages 0 to 3 those that fit up to the high end of the estimate; tight: only the low end does.
- Recommended: what the plan would run of these, without offload first: of the fastest within the estimate's error the
  lowest stage that leaves a quarter of the GPU; where none of them does, the one that leaves most.
- On a GPU: allocated peak under the recommended strategy. Host memory: what it keeps there, of one machine.
- Step and tokens/s: of all GPUs together, under the recommended strategy, for rows of {max_length} tokens and
  {tokens:,} tokens a step and GPU. They are estimates from data sheets, 20 to 30 % to either side, more with offload,
  which no GPU has confirmed; real rows are shorter, and `zero-recipes plan` counts those of your data.

{fitting}
## What is commonly said of them

- Takes: allocated peak on one GPU under the strategy that is commonly named, of the memory that it has.
- With offload: the milder of the two that fits, and the host memory that it takes.
- Mildest change: to that strategy on the same GPUs, in the order of recomputation, smaller micro batches, higher stage,
  offload, LoRA; more GPUs last.
- Stage 3 from: the smallest power of two of these GPUs on which stage 3 fits, as the recipe stands / recomputing
  activations.
- By: the engine, simulated, or textbook formulas, which leave out much and are 10 % and more off. Strategies whose
  model states alone are more than the GPU has are by formulas in every row.

{said}"""


def planned(scenario: Scenario, predict: Predict) -> dict[str, Any]:
    """One scenario as JSON: status and need of each strategy, the mildest change, the smallest machine."""
    recipe = jobs.read_recipe(RECIPE, ["--model_name_or_path", scenario.model])
    config, gpu = jobs.model_config(recipe.settings), gpu_named(scenario.gpu, gpus())
    strategies = jobs.read_strategies(recipe, None)

    def job(name: str, count: int = scenario.count) -> Job:
        return jobs.job_of(recipe, config, name, strategies[name], count)

    predict = hopeless_by_formulas(predict, gpu)
    rows = {name: make_row(job(name), gpu, predict, strategies, with_change=False) for name in strategies}
    claimed, advised = rows[scenario.strategy], recommend(list(rows.values()), gpu, gpus()).chosen
    psi = claimed.prediction.parameters
    change = None
    if claimed.fit.status != "fits":
        change = smallest_change(claimed.job, gpu.memory_bytes, predict, strategies)
    return {
        **scenario._asdict(),
        "source": "engine" if any(row.prediction.source == "engine" for row in rows.values()) else "formulas",
        "parameters": psi,
        "gpu_memory_bytes": gpu.memory_bytes,
        "strategies": {
            name: {
                "verdict": row.fit.status,
                "margin_bytes": row.fit.margin,
                "allocated_peak_bytes": row.prediction.allocated_peak_bytes,
                "reserved_bytes": row.prediction.reserved_bytes.model_dump(),
                "model_state_bytes": row.prediction.model_state_bytes.model_dump(),
                "host_bytes": row.prediction.host_bytes.model_dump(),
                "step_seconds": list(row.speed.step_seconds),
            }
            for name, row in rows.items()
        },
        "recommended": advised and advised.job.strategy,
        "cure": change
        and {
            "words": change_in_words(change),
            "host_bytes": {"training": change.prediction.host_bytes.training},
            "command": jobs.run_command(recipe, [], change.job),
        },
        "stage_3_from": stage_3_from(lambda count: job("zero3", count), gpu, predict, psi),
        "stage_3_recomputing_from": stage_3_from(lambda count: recomputing(job("zero3", count)), gpu, predict, psi),
    }


def hopeless_by_formulas(predict: Predict, gpu: Gpu) -> Predict:
    """Where the model states alone are more than the GPU has, the textbook says no as well as the engine."""

    def ask(job: Job) -> Prediction:
        textbook = predict_by_formulas(job)
        return textbook if textbook.state_bytes > gpu.memory_bytes else predict(job)

    return ask


def recomputing(job: Job) -> Job:
    return job.changed(activation_checkpointing=True)


def stage_3_from(job: Callable[[int], Job], gpu: Gpu, predict: Predict, psi: int) -> int | None:
    """The fewest GPUs, a power of two, on which stage 3 fits; counts that the states alone exceed are not tried."""
    for count in COUNTS:
        if model_state_bytes(psi, count, 3).total > gpu.memory_bytes:
            continue
        if fit_of(predict(job(count)), gpu.memory_bytes).status == "fits":
            return count
    return None


def page(content: dict[str, Any]) -> str:
    rows, settings = content["scenarios"], jobs.read_recipe(ROOT / RECIPE, []).settings
    tokens = settings.per_device_train_batch_size * settings.gradient_accumulation_steps * settings.max_length
    fitting = ["Model", "GPUs", "Fits", "Recommended", "On a GPU", "Host memory", "Step", "Tokens/s"]
    said = [
        "Model",
        "GPUs",
        "Commonly said",
        "That is",
        "Takes",
        "With offload",
        "Mildest change",
        "Stage 3 from",
        "By",
    ]
    introduction = INTRODUCTION.format(
        max_length=settings.max_length,
        tokens=tokens,
        fitting=_table(fitting, [[*_machine(row), *_fitting(row, tokens)] for row in rows]),
        said=_table(said, [[*_machine(row), *_said(row)] for row in rows]),
    )
    return introduction + "".join(claims.pages(content))


def _table(headers: list[str], rows: list[list[str]]) -> str:
    return "".join(f"| {' | '.join(line)} |\n" for line in (headers, ["---"] * len(headers), *rows))


def _machine(row: dict[str, Any]) -> Iterator[str]:
    yield f"{row['model'].rpartition('/')[2]} ({parameters(row['parameters'])})"
    yield f"{row['count']} x {row['gpu']}"


def _fitting(row: dict[str, Any], tokens: int) -> Iterator[str]:
    """`tokens`: of one GPU and step."""
    found = row["strategies"]
    named = {status: [name for name in STAGES if found[name]["verdict"] == status] for status in ("fits", "tight")}
    fits, tight = (", ".join(named[status]) for status in ("fits", "tight"))
    yield "; ".join(filter(None, (fits or "none", tight and f"tight: {tight}")))
    yield row["recommended"] or "none"
    if row["recommended"] is None:
        yield from [""] * 4
        return
    chosen = found[row["recommended"]]
    yield size(chosen["allocated_peak_bytes"])
    yield size(chosen["host_bytes"]["training"])
    low, high = chosen["step_seconds"]
    yield f"{significant(low)} to {significant(high)} s"
    yield " to ".join(in_words(row["count"] * tokens / seconds) for seconds in (high, low))


def _said(row: dict[str, Any]) -> Iterator[str]:
    found, named = row["strategies"], row["strategies"][row["strategy"]]
    yield row["said"]
    yield f"{row['strategy']}: {named['verdict']}"
    yield f"{size(named['allocated_peak_bytes'])} of {size(row['gpu_memory_bytes'])}"
    fitting = [name for name in OFFLOAD if found[name]["verdict"] == "fits"]
    yield f"{fitting[0]}: {host_memory(found[fitting[0]]['host_bytes']['training'])}" if fitting else "no"
    change = row["cure"] or {"words": "none was found", "host_bytes": {"training": 0}}
    parts = change["words"], host_memory(change["host_bytes"]["training"])
    yield "none needed" if named["verdict"] == "fits" else ", ".join(filter(None, parts))
    counts = [row[key] for key in ("stage_3_from", "stage_3_recomputing_from")]
    yield " / ".join(f"over {COUNTS[-1]}" if count is None else str(count) for count in counts)
    yield row["source"]


def main(arguments: list[str]) -> int:
    if set(arguments) - {"--quick", "--new", "--check"}:
        print(__doc__)
        return 2
    if "--check" in arguments:
        return int(PAGE.read_text() != page(json.loads(RESULT.read_text())))
    rows, kept = [], json.loads(RESULT.read_text())["scenarios"] if "--new" in arguments else []
    for scenario in SCENARIOS:
        quick = "--quick" in arguments or jobs.known_models()[scenario.model]["parameters"] > ENGINE_UP_TO
        known = next((row for row in kept if scenario._asdict().items() <= row.items()), None)
        if known and known["source"] == "engine":
            rows.append(known)
            continue
        rows.append(planned(scenario, Predictor(quick=quick)))
        print(" | ".join([*_machine(rows[-1]), *_said(rows[-1])]), flush=True)
    content = {"measured": False, "recipe": str(RECIPE), "scenarios": rows, **claims.sections(RECIPE)}
    write_json(RESULT, content)
    PAGE.write_text(page(json.loads(RESULT.read_text())))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
