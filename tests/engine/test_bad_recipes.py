"""Faults on two ranks: of every section of tests/helpers/bad_recipes.py, and all that the data's preparation finds."""

from __future__ import annotations

from pathlib import Path

from tests.helpers.bad_recipes import FAULTS
from zero_recipes.config.accelerate import launched_environment

NAMES = (
    "a key that stands twice",
    "a misspelt key",
    "an abbreviated key",
    "a global batch that does not divide",
    "no data",
    "data that is not there",
    "a split that is not there",
    "an evaluation without a split",
    "no Alpaca columns",
    "Alpaca's columns unnamed",
    "sample prompts from no split",
    "sample prompts from no file",
    "a sample prompt without its columns",
    "a row without an answer",
    "rows cut before their answers",
    "a chat template that is not there",
    "an unknown end of text",
    "padding with the end of text",
    "unknown padding",
    "a folder that holds an earlier run",
    "another global batch",
    "two ds_configs",
    "two FSDP configurations",
)


def test_two_ranks_refuse_a_fault_with_the_same_words(two, tmp_path):
    """One job, one run after another: each ends refused, with the same words on both ranks, and leaves no output."""
    faults = [fault for fault in FAULTS if fault.name in NAMES]
    runs = []
    for number, fault in enumerate(faults):
        folder = tmp_path / str(number)
        argv = fault.bad.write(folder)
        file = None if fault.bad.accelerate is None else folder / "accelerate.yaml"
        runs.append({"folder": str(folder), "argv": argv, "environment": launched_environment(file, 2)})
    ranks = two.run("refusals_in", runs=runs)
    assert ranks[0] == ranks[1] and len(ranks[0]) == len(NAMES)
    for number, (fault, refused) in enumerate(zip(faults, ranks[0], strict=True)):
        assert f"[{fault.code}]" in refused and fault.names in refused, (fault.name, refused)
        assert [path.name for path in (tmp_path / str(number) / "out").rglob("*")] == [
            Path(name).name for name in fault.bad.files if name.startswith("out/")
        ], fault.name
