#!/usr/bin/env python
"""Supervised fine-tuning from one recipe, measured: run_sft.py RECIPE.yaml [--key value ...] [--traceback]

Exit codes: 0 done; 2 refused before training, with one message; 1 anything else (accelerate and torchrun make 1 of 2).
"""

import os
import sys

from zero_recipes.config import recipe as recipes
from zero_recipes.core.findings import print_ending, raise_errors, shown
from zero_recipes.core.process import leave, say
from zero_recipes.engine.warnings import quiet_imports


def main(argv: list[str]) -> None:
    run = prepare(argv)
    from zero_recipes.engine.group import session

    with session(run):
        trainer = train(run)
        trainer.accelerator.wait_for_everyone()
        trainer.end()


def prepare(argv: list[str]):
    """The RunConfig of a recipe; refuses what can be refused without a process group, and touches nothing."""
    path, overrides = recipes.split_command_line(argv)
    mapping = recipes.read_recipe_file(path)  # the recipe's `env:` is in force before torch is imported
    with quiet_imports():
        from zero_recipes.checks.preflight import preflight
    run, findings = preflight(path, mapping, overrides, os.environ)
    raise_errors(findings)
    if findings:
        say(shown(findings))
    return run


def train(run):
    """One run in its process group. Returns the trainer, its group still alive."""
    from zero_recipes.checks.predicted import planning
    from zero_recipes.checks.preflight import resolved_ds_config
    from zero_recipes.engine.nvme import swap_space
    from zero_recipes.training.output import RecipeRun
    from zero_recipes.training.trainer import ZeroSFTTrainer

    with RecipeRun.hold(run) as recipe_run, swap_space(run.strategy):
        run = recipe_run.choose_checkpoint()
        recipe_run.prepare_libraries()
        with planning(run) as planned:
            recipe_run.prepare_data()
            predicted = planned()
        model = recipe_run.load_model()  # the last that can refuse: nothing on disk is touched so far
        recipe_run.claim(predicted, resolved_ds_config(run, recipe_run.data.rows))
        trainer = ZeroSFTTrainer.of_recipe(model, recipe_run)
        trainer.train(recipe_run.run.checkpoint)
        recipe_run.progress("the model is not saved")  # what is measured is kept, whatever fails from here on
        recipe_run.progress(trainer.save_verified())
        trainer.sample_after()
        recipe_run.finish()
        recipe_run.push_if_requested()
    return trainer


if __name__ == "__main__":
    try:
        main(sys.argv[1:])
    except Exception as ending:  # the interpreter's own end may wait in NCCL for ranks that are in a collective
        leave(print_ending(ending, tracebacks="--traceback" in sys.argv))
    leave(0)
