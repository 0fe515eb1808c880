"""Faults on two ranks: some of each kind in tests/helpers/faults.py."""

from __future__ import annotations

from pathlib import Path

from tests.helpers.faults import FAULTS
from zero_recipes.config.accelerate import launched_environment

NAMES = (
    "a key that stands twice",
    "a misspelt key",
    "an abbreviated key",
    "a global batch that does not divide",
    "no data",
    "a split that is not there",
    "an evaluation without a split",
    "sample prompts from no file",
    "rows cut before their answers",
    "padding with the end of text",
    "torch's optimizer",
    "a value that contradicts the run",
    "a folder that holds an earlier run",
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
