"""Cases of tests/helpers/group.py about the output folder: its lock, and what is overwritten in it."""

from __future__ import annotations

from pathlib import Path
from unittest import mock

from torch import distributed

import run_sft
from zero_recipes.checkpoint.output_dir import LOCK, hold_output_dir, refuse_in_use
from zero_recipes.core.findings import Finding, Refusal
from zero_recipes.core.process import rank
from zero_recipes.training.trainer import ZeroSFTTrainer


def held_and_refused(folder: str) -> str:
    """What a second start says while a run of this group holds the folder; then the run is refused itself."""
    said = "not refused"
    try:
        with hold_output_dir(Path(folder)):
            distributed.barrier()
            try:
                refuse_in_use(Path(folder))
            except Refusal as refusal:
                said = str(refusal)
            distributed.barrier()
            raise Refusal([Finding("ZR000", "", "", "")])
    except Refusal:
        distributed.barrier()
        return said


def refused(folder: str) -> str:
    try:
        with hold_output_dir(Path(folder)):
            return "not refused"
    except Refusal as refusal:
        return str(refusal)


class Broken(Exception):
    """A run that is broken on purpose."""


def failure_in_the_first_step(argv: list[str]) -> list[str]:
    """The names in the output folder when the first micro batch begins, of a run that fails there on every rank."""
    found = []

    def training_step(self, *arguments, **keywords):
        distributed.barrier()  # every rank has come, and looks before any fails
        found.extend(sorted(path.name for path in Path(self.args.output_dir).iterdir() if path.name != LOCK))
        distributed.barrier()
        raise Broken(f"rank {rank()}")

    with mock.patch.object(ZeroSFTTrainer, "training_step", training_step):
        try:
            run_sft.train(run_sft.prepare(argv))
        except Broken:
            distributed.barrier()
    return found
