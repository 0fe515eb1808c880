#!/usr/bin/env python
"""Supervised fine-tuning from one recipe, measured: run_sft.py RECIPE.yaml [--key value ...]

The same under `accelerate launch`, `torchrun`, `deepspeed` and plain `python`:

    accelerate launch --config_file zero3.yaml run_sft.py recipes/tiny.yaml

Exit codes: 0 done; 2 refused before training, with one message; 1 anything else (accelerate and torchrun make 1 of 2).
--traceback shows where a library refused the run.
"""

import os
import sys

from zero_recipes.config import recipe as recipes
from zero_recipes.core.findings import Refusal, RunFailed, print_ending, raise_errors
from zero_recipes.core.phases import CLOCK
from zero_recipes.core.process import imported_for_good, leave, rank


def main(argv: list[str]) -> None:
    run = prepare(argv)
    from zero_recipes.distributed.init import process_group

    with process_group(run):
        trainer = train(run)
        trainer.accelerator.wait_for_everyone()
        trainer.end()


def prepare(argv: list[str]):
    """The RunConfig of a recipe; refuses whatever can be refused without a process group, and touches nothing."""
    path, overrides = recipes.split_command_line(argv)
    mapping = recipes.read_recipe_file(path)  # the recipe's `env:` is in force before torch is imported

    from zero_recipes.libs.warnings import quieten, quieten_loggers

    quieten_loggers()
    with imported_for_good():
        from zero_recipes.checks.preflight import preflight

    quieten()
    with CLOCK.phase("startup"):
        run, findings = preflight(path, mapping, overrides, os.environ)
    raise_errors(findings)
    if rank() == 0:
        print(*findings, sep="\n", end="\n" if findings else "", flush=True)
    return run


def train(run):
    """One run in its process group. Returns the trainer, its group still alive."""
    from trl import get_peft_config

    from zero_recipes.checkpoint.compatibility import refuse_other_data
    from zero_recipes.checkpoint.resume import resolve_resume_checkpoint
    from zero_recipes.checks.predicted import planning
    from zero_recipes.checks.preflight import resolved_ds_config
    from zero_recipes.data.load import load_tokenizer
    from zero_recipes.data.prepare import prepare_rows
    from zero_recipes.distributed import nvme
    from zero_recipes.model import load_config, load_model, refuse_other_keys
    from zero_recipes.training.recorder import RunRecorder
    from zero_recipes.training.trainer import RecipeTrainer, prepare_libraries

    run = resolve_resume_checkpoint(run)
    recorder = RunRecorder(run)
    with nvme.swap_space(run.strategy) as recorder.disks, recorder.on_failure():
        # 1. What may still refuse: nothing on disk is touched.
        script_args, args, model_args, dataset_args, ours = run.trl_arguments()
        recorder.host_threads = prepare_libraries(run, args)
        with recorder.clock.phase("model"):
            config = load_config(model_args, args)
            refuse_other_keys(config, model_args, args, ours)
        with planning(run) as planned, recorder.clock.phase("data"):
            tokenizer = load_tokenizer(model_args, args)
            rows = prepare_rows(script_args, args, dataset_args, ours, tokenizer)
            recorder.predicted = planned(rows)
        refuse_other_data(run.checkpoint, rows.data_sha256)
        with recorder.loading():
            model = load_model(config, model_args, args, ours)  # the last that can refuse

        # 2. The output folder is this run's.
        recorder.claim_output_dir(args, rows, resolved_ds_config(run, rows.rows))
        sft = RecipeTrainer(model, tokenizer, args, rows, run, recorder, get_peft_config(model_args))
        sft.train_to_the_end()
        recorder.progress("the model is not saved")  # what is measured is kept, whatever happens to the rest
        recorder.progress(sft.save_and_verify())
        sft.answer_samples()
        recorder.write_metrics()
        if args.push_to_hub:
            sft.push_to_hub(dataset_name=script_args.dataset_name)
        return sft


if __name__ == "__main__":
    try:
        main(sys.argv[1:])
    except (Refusal, RunFailed) as ending:
        leave(print_ending(ending, tracebacks="--traceback" in sys.argv))
    leave(0)
