#!/usr/bin/env python
"""Supervised fine-tuning from one recipe, measured: run_sft.py RECIPE.yaml [--key value ...] [--traceback]

Exit codes: 0 done; 2 refused before training, with one message; 1 anything else (accelerate and torchrun make 1 of 2).
"""

import os
import sys

from zero_recipes.config.command_line import split_command_line
from zero_recipes.config.recipe import recipe_in_force
from zero_recipes.core.findings import raise_errors, shown
from zero_recipes.core.process import PhaseClock, age, end_with_launcher, escape_unprintable, say
from zero_recipes.core.run_end import run_to_end
from zero_recipes.engine.warnings import quiet_imports


def main(argv: list[str]) -> None:
    """Train what a command line asks for, on one rank of its launch."""
    clock = PhaseClock(age())
    end_with_launcher()
    escape_unprintable()
    run = read_run(argv)
    from zero_recipes.engine.group import process_group

    with process_group(run):
        trainer = train(run, clock)
        trainer.accelerator.wait_for_everyone()
        trainer.end()


def read_run(argv: list[str]):
    """Resolve what a command line asks for, and refuse what cannot run. Nothing is touched."""
    path, overrides = split_command_line(argv)
    recipe_file = recipe_in_force(path)  # before torch is imported
    with quiet_imports():
        from zero_recipes.checks.preflight import check
        from zero_recipes.checks.resolve import resolve
    resolved = resolve(path, recipe_file, overrides, os.environ)
    findings = check(resolved)
    raise_errors(findings)
    if findings:
        say(shown(findings))
    return resolved.run


def train(run, clock: PhaseClock | None = None):
    """Train one run in its process group. Returns the trainer, its group still alive."""
    from zero_recipes.training.inputs import load_model, prepare_inputs
    from zero_recipes.training.session import Session
    from zero_recipes.training.trainer import ZeroSFTTrainer

    clock = clock or PhaseClock()
    with Session(run, clock) as session:  # the lock on the folder, and the record of a failure
        run = session.choose_checkpoint()
        inputs = prepare_inputs(run, clock)  # the rows, and what the libraries are told
        model = load_model(run, inputs, clock)  # the last that can refuse: nothing on disk is touched so far
        run = session.claim(inputs, model)  # from here on the folder is ours
        trainer = ZeroSFTTrainer.for_run(run, inputs, model, session.metrics, clock)
        session.show_trained(trainer.model)
        trainer.train(run.checkpoint)
        session.save_model(trainer)
        trainer.sample_after()
        session.finish()
        session.push_if_requested(inputs)
    return trainer


if __name__ == "__main__":
    run_to_end(main, sys.argv[1:])
