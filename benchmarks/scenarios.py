"""Known models on known machines, by the planner's formulas: python -m benchmarks.scenarios

Writes benchmarks/results/scenarios.json, from which docs/plan.md, docs/lesson.md and docs/strategies.md take numbers.
All plans are of recipes/pythia.yaml with another model. Needs no GPU, and takes a minute.
"""

from pathlib import Path
from typing import Any

from zero_recipes.core.files import FILES, write_json
from zero_recipes.core.zero_paper import model_state_bytes
from zero_recipes.engine.warnings import quieten
from zero_recipes.tools.arguments import parse_arguments
from zero_recipes.tools.plan import show
from zero_recipes.tools.plan.command import answer_by, requested
from zero_recipes.tools.plan.predict import Predictor

RESULT = Path(__file__).parent / "results" / "scenarios.json"
RECIPE = FILES / "recipes" / "pythia.yaml"
ALONE = ("ddp", "zero0", "zero1", "zero2", "zero3")  # nothing is offloaded
PYTHIA = "EleutherAI/pythia-6.9b-deduped"
LLAMA_7B, LLAMA_13B, LLAMA_70B = (f"meta-llama/Llama-2-{size}-hf" for size in ("7b", "13b", "70b"))

# model, GPUs, card
SCENARIOS = (
    (PYTHIA, 2, "h100-80gb"),
    (PYTHIA, 2, "b200-192gb"),
    ("EleutherAI/pythia-2.8b-deduped", 2, "a100-40gb"),
    (LLAMA_7B, 2, "a100-40gb"),
    (LLAMA_7B, 4, "a100-80gb"),
    (LLAMA_7B, 8, "a100-80gb"),
    ("megatron-7.5b", 8, "a100-80gb"),
    (LLAMA_13B, 2, "a100-80gb"),
    (LLAMA_13B, 8, "a100-40gb"),
    (LLAMA_70B, 8, "a100-80gb"),
    (LLAMA_70B, 64, "h100-80gb"),
    ("gpt3-175b", 4, "h100-80gb"),
    ("gpt3-175b", 8, "h100-80gb"),
    ("gpt3-175b", 16, "h100-80gb"),
    ("megatron-1t", 16, "h100-80gb"),
)
# with activation checkpointing, under zero3
RECOMPUTING = (
    ("megatron-1t", 512, "h100-80gb"),
    (LLAMA_13B, 8, "a100-40gb"),
    ("gpt3-175b", 64, "a100-80gb"),
    ("gpt3-175b", 64, "h100-80gb"),
    (LLAMA_70B, 32, "a100-80gb"),
    (LLAMA_70B, 32, "h100-80gb"),
)
# who says it, parameters, GPUs, GB of model states at the stages 0 to 3, model, card
STATES = (
    ("ZeRO paper, figure 1", 7.5e9, 64, (120, 31.4, 16.6, 1.9), "megatron-7.5b", "a100-80gb"),
    ("the same on 8 GPUs, by its formulas", 7.5e9, 8, None, "megatron-7.5b", "a100-80gb"),
    ("commonly said", 7e9, 8, (112, 38.5, 26.25, 14), LLAMA_7B, "a100-80gb"),
    ("commonly said", 7e9, 2, (112, 70, 63, 56), LLAMA_7B, "h100-80gb"),
)


def main() -> None:
    quieten()
    document = {
        "measured": False,
        "source": "zero-recipes plan recipes/pythia.yaml --model_name_or_path MODEL --gpus N --gpu CARD --quick",
        "scenarios": [scenario(*asked) for asked in SCENARIOS],
        "states": [states(*asked) for asked in STATES],
        "infinity": of_strategy("megatron-1t", 16, "h100-80gb", "zero3_infinity"),
        "activations": activations(),
        "recomputing": [of_strategy(*asked, "zero3") for asked in RECOMPUTING],
    }
    write_json(RESULT, document)


def planned(model: str, count: int, card: str, *words: str) -> dict[str, Any]:
    """The JSON of a plan."""
    named = ["plan", str(RECIPE), "--gpus", str(count), "--gpu", card, *words, "--model_name_or_path", model]
    arguments = parse_arguments(named)
    return show.document(answer_by(Predictor(quick=True), arguments, requested(arguments, arguments.overrides)))


def scenario(model: str, count: int, card: str) -> dict[str, Any]:
    """Which strategies fit, and what the plan recommends."""
    plan = planned(model, count, card)
    alone = [row for row in plan["rows"] if row["job"]["strategy"] in ALONE]
    found: dict[str, Any] = {"model": model, "count": count, "gpu": card}
    for status in ("fits", "tight"):
        found[status] = [row["job"]["strategy"] for row in alone if row["fit"]["status"] == status]
    if plan["recommendation"] is None or not any(row["fit"]["status"] != "no" for row in plan["rows"]):
        return found | {"recommended": None}
    recommended = plan["recommendation"]["strategy"]
    row = next(row for row in plan["rows"] if row["job"]["strategy"] == recommended)
    return found | {"recommended": recommended} | sizes(row)


def sizes(row: dict[str, Any]) -> dict[str, Any]:
    """What a row of a plan takes, and its speed."""
    prediction, speed = row["prediction"], row["speed"]
    host = prediction["host_bytes"]
    return {
        "status": row["fit"]["status"],
        "peak_bytes": prediction["allocated_peak_bytes"],
        "host_bytes_of_a_node": host["training"],
        "nvme_bytes_of_a_node": prediction["nvme_bytes"],
        "step_seconds": speed["step_seconds"],
        "likely_tokens_per_second": [speed["tokens_per_step"] / seconds for seconds in reversed(speed["likely"])],
    }


def of_strategy(model: str, count: int, card: str, strategy: str) -> dict[str, Any]:
    """One strategy's row, with activation checkpointing."""
    nvme = ("--nvme", "100000") if "infinity" in strategy else ()
    plan = planned(model, count, card, "--strategies", strategy, *nvme, "--activation_checkpointing", "true")
    return {"model": model, "count": count, "gpu": card, "strategy": strategy} | sizes(plan["rows"][0])


def states(who: str, parameters: float, count: int, said: Any, model: str, card: str) -> dict[str, Any]:
    """What is said of model states at the stages 0 to 3, the paper's formulas, and what a run's peak is planned at."""
    rows = planned(model, count, card, "--strategies", ",".join(ALONE[1:]))["rows"]
    return {
        "who": who,
        "parameters": int(parameters),
        "count": count,
        "said_gb": said,
        "formula_bytes": [int(model_state_bytes(int(parameters), count, stage).total) for stage in range(4)],
        "model": model,
        "gpu": card,
        "peak_bytes": [row["prediction"]["allocated_peak_bytes"] for row in rows],
        "fits": [row["fit"]["status"] for row in rows],
    }


def activations() -> dict[str, Any]:
    """What forward keeps of 32 rows of 2,048 tokens, and what is kept where backward computes it again."""
    sequences, tokens, layers, width = 32, 2048, 32, 4096
    found = {"model": LLAMA_7B, "sequences": sequences, "tokens": tokens, "said": "10 to 20 GB"}
    for name, recomputes in (("kept", "false"), ("recomputed", "true")):
        keys = ("--max_length", str(tokens), "--per_device_train_batch_size", str(sequences))
        words = ("--strategies", "zero3", *keys, "--activation_checkpointing", recomputes)
        row = planned(LLAMA_7B, 8, "a100-80gb", *words)["rows"][0]
        found[name] = row["prediction"]["at_peak"]["activations"]
    return found | {"inputs_of_layers": 2 * sequences * tokens * layers * width}


if __name__ == "__main__":
    main()
