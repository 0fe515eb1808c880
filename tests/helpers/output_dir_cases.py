"""Cases of tests/helpers/group.py about the output folder: its lock, and what is overwritten in it."""

from __future__ import annotations

import fcntl
import json
import os
from pathlib import Path
from unittest import mock

from torch import distributed

import run_sft
from tests.helpers.cases import train
from zero_recipes.checkpoint import lock
from zero_recipes.core.findings import Finding, Refusal
from zero_recipes.training.trainer import RecipeTrainer


def held_by(folder: str) -> int:
    """How many ranks the lock of a run names, once each of them holds it; the run is refused then."""
    named = 0
    try:
        with lock.hold_output_dir(Path(folder)):
            distributed.barrier()
            named = len(json.loads((Path(folder) / lock.LOCK).read_text()))
            handle = os.open(Path(folder) / lock.LOCK, os.O_RDWR)
            try:
                fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
                return -1
            except BlockingIOError:
                os.close(handle)
            distributed.barrier()
            raise Refusal([Finding("ZR000", "", "", "")])
    except Refusal:
        distributed.barrier()
        return named


def refused(folder: str) -> str:
    lock.PATIENCE_SECONDS = 0.05
    try:
        with lock.hold_output_dir(Path(folder)):
            return "not refused"
    except Refusal as refusal:
        return str(refusal)
    finally:
        lock.PATIENCE_SECONDS = 1.0


class Broken(Exception):
    """A run that is broken on purpose."""


def failure_in_the_first_step(argv: list[str]) -> list[str]:
    """The folders aside when the first micro batch begins, of a run that fails there on every rank."""
    found = []

    def training_step(self, *arguments, **keywords):
        distributed.barrier()  # every rank has come, and looks before any fails
        found.extend(sorted(path.name for path in self.run_config.output_dir.glob("overwritten-*")))
        distributed.barrier()
        raise Broken

    with mock.patch.object(RecipeTrainer, "training_step", training_step):
        try:
            run_sft.train(run_sft.prepare(argv))
        except Broken:
            distributed.barrier()
    return found


def train_and_look(argv: list[str], folder: str) -> list[list[str]]:
    """The names in the output folder at the begin of each step of a whole run."""
    found, original = [], RecipeTrainer.training_step

    def training_step(self, *arguments, **keywords):
        found.append(sorted(path.name for path in Path(folder).iterdir() if path.name != lock.LOCK))
        return original(self, *arguments, **keywords)

    with mock.patch.object(RecipeTrainer, "training_step", training_step):
        train(argv)
    return found
