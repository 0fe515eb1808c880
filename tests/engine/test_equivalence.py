"""ddp, FSDP2 and every ZeRO stage give what a plain PyTorch loop in fp32 gives: the same losses and the same weights.

The reference takes the token-weighted mean over the global batch in one forward pass. Rows are of very uneven length,
the loss is on the completion alone, gradients are clipped at 1.0. The whole grid: pytest tests/engine -m grid
"""

from pathlib import Path

import pytest

from tests.helpers.equivalence_grid import EXAMPLES, PART_STEPS, PLACES, STEPS, STRATEGIES, TOLERANCE, reference_of, run
from tests.helpers.seeded import count
from zero_recipes.core.files import write_json
from zero_recipes.core.host import hardware_facts, library_versions

ROOT = Path(__file__).resolve().parents[2]
RESULT = ROOT / "benchmarks" / "results" / "equivalence.json"
NAMES = {1: "one", 2: "two", 4: "four"}
# (strategy, world size, accumulation): each strategy but one and each accumulation in every run, four processes in the
# grid; tests/engine/test_reshard.py and test_ulysses.py compare losses on four in every run
PART = [*((strategy, 2, 2) for strategy in STRATEGIES if strategy != "zero3_offload"), ("zero2", 1, 4)]
# Keys' biases have no gradient where no rotary embedding turns the keys: they add the same to a query's score of every
# key, and softmax does not see it. What is left is rounding, which Adam scales up to a step.
WITHOUT_GRADIENT = {f"gpt_neox.layers.{layer}.attention.query_key_value.bias" for layer in range(2)}


@pytest.fixture(scope="module")
def subject(one, tmp_path_factory):
    return reference_of(one, tmp_path_factory.mktemp("subject"), PART_STEPS)


def assert_equal(found: dict) -> None:
    assert found["first_loss_delta"] <= TOLERANCE, found
    assert found["loss_delta"] <= TOLERANCE, found
    assert found["weight_delta"] <= TOLERANCE, found
    assert set(found["tensors_further_apart"]) <= WITHOUT_GRADIENT, found
    assert all(apart < 1e-3 for apart in found["tensors_further_apart"].values()), found


@pytest.mark.parametrize("strategy, world, accumulation", PART)
def test_a_part_of_the_grid(request, subject, tmp_path, strategy, world, accumulation):
    group = request.getfixturevalue(NAMES[world])
    assert_equal(run(group, subject, tmp_path / "out", strategy, accumulation))


@pytest.mark.grid
@pytest.mark.timeout(3600)
def test_the_whole_grid(request, one, tmp_path):
    """Writes benchmarks/results/equivalence.json, then asserts."""
    subject = reference_of(one, tmp_path / "subject", STEPS)
    runs = [
        run(request.getfixturevalue(NAMES[world]), subject, tmp_path / f"{strategy}-{world}-{steps}", strategy, steps)
        for strategy, world, steps in sorted(PLACES, key=lambda place: place[1])
    ]
    deltas = {
        column: {
            strategy: max(found[f"{column}_delta"] for found in runs if found["strategy"] == strategy)
            for strategy in STRATEGIES
        }
        for column in ("loss", "weight")
    }
    document = {
        "what": "distance from a plain PyTorch loop in fp32 with the token-weighted mean over the global batch",
        "examples_per_step": EXAMPLES,
        "steps": STEPS,
        "tolerance": TOLERANCE,
        "tensors_without_gradient": sorted(WITHOUT_GRADIENT),
        "deltas": deltas,
        "runs": runs,
        "versions": library_versions(),
        "hardware": hardware_facts("cpu"),
    }
    write_json(RESULT, document)
    assert len(runs) == len(PLACES)
    for found in runs:
        assert_equal(found)
    largest = {column: max(by_strategy.values()) for column, by_strategy in deltas.items()}
    count("loss equality", "every strategy", number=len(runs), **largest)
