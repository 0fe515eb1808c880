#!/usr/bin/env python
"""Supervised fine-tuning from one recipe, measured: run_sft.py RECIPE.yaml [--key value ...]

The same under every launcher:

    accelerate launch --config_file accelerate_configs/zero3.yaml run_sft.py recipes/tiny.yaml
    torchrun --nproc_per_node 2 run_sft.py recipes/tiny.yaml --deepspeed ds_configs/zero2.json
    deepspeed --num_gpus 2 run_sft.py recipes/tiny.yaml --deepspeed ds_configs/zero2.json
    python run_sft.py recipes/tiny.yaml

Exit codes: 0 done; 2 refused before training, with one message; 1 anything else (accelerate and torchrun make 1 of 2).
"""

import os
import sys
import time

STARTED = time.perf_counter()

from zero_recipes.config import recipe as recipes  # noqa: E402
from zero_recipes.core.errors import Refusal, say_refused  # noqa: E402
from zero_recipes.core.process import leave, rank  # noqa: E402


def main(argv: list[str]) -> None:
    run = prepare(argv)
    from zero_recipes.distributed import init as launch
    from zero_recipes.distributed.kernels import ops_of

    values = run.recipe.values
    launch.start_process_group(
        run.strategy, run.device, values["ddp_timeout"], ops_of(run.strategy, run.device, values)
    )
    try:
        trainer = train(run)
    except Refusal:
        launch.end_process_group()
        raise
    trainer.accelerator.wait_for_everyone()
    trainer.end()


def prepare(argv: list[str]):
    """Read the recipe, find the strategy, and refuse whatever can be refused without a process group."""
    path, overrides = recipes.split_command_line(argv)
    mapping = recipes.read(path)  # the recipe's `env:` is in force before torch is imported

    from zero_recipes.compat import warnings as calm

    calm.quieten_loggers()
    from zero_recipes.checks.preflight import preflight

    calm.quieten()
    run, findings = preflight(path, mapping, overrides, os.environ)
    if any(finding.level == "error" for finding in findings):
        raise Refusal.of(findings)
    if rank() == 0:
        print(*findings, sep="\n", end="\n" if findings else "", flush=True)
    return run


def train(run):
    """The whole run, with what it swaps to NVMe gone at its end. Returns the trainer, its group still alive."""
    from zero_recipes.distributed import nvme

    with nvme.swap_space(run.strategy) as disks:
        return train_on(run, disks)


def train_on(run, disks: list[dict]):
    """Data, model, samples before, training, samples after, saving. `disks`: what nvme.swap_space has measured."""
    from transformers.integrations.deepspeed import unset_hf_deepspeed_config
    from trl import get_peft_config

    from zero_recipes.checkpoint.compatibility import refuse_other_data
    from zero_recipes.checkpoint.output_dir import clear_earlier_run
    from zero_recipes.checkpoint.resume import refuse_apart
    from zero_recipes.checkpoint.verify import verify
    from zero_recipes.checks.preflight import resolved_ds_config
    from zero_recipes.compat.patches import FreshAdamAtStage0, patch_quantized_gradients
    from zero_recipes.data.load import load_tokenizer
    from zero_recipes.data.prepare import prepare as prepare_rows
    from zero_recipes.distributed import bandwidth, fsdp, init, nvme, ulysses
    from zero_recipes.metrics import callback as metrics_metrics
    from zero_recipes.metrics.failure import if_the_disk_takes_it, write_failure
    from zero_recipes.metrics.timers import PhaseClock
    from zero_recipes.models.load import load_config, load_model, refuse_other_keys
    from zero_recipes.planner.gate import plan
    from zero_recipes.trainer import checkpointing
    from zero_recipes.trainer import samples as generation
    from zero_recipes.trainer import trainer as metrics

    recipe, output_dir = run.recipe, run.output_dir
    clock, stage_metrics = PhaseClock(), None
    script_args, training_args, model_args, dataset_args, ours = recipes.instances(recipe)
    main_process, checkpoint = training_args.process_index == 0, training_args.resume_from_checkpoint
    if run.strategy.is_fsdp:
        fsdp.mend(training_args, run.device)
    threads = init.set_host_threads(run.strategy, run.device, os.environ)
    ulysses.share_sequences(training_args, run.strategy.sequence_parallel, model_args.attn_implementation)
    clock.seconds["imports"] = time.perf_counter() - STARTED
    try:
        with clock.phase("model"):
            config = load_config(model_args, training_args)
            refuse_other_keys(config, model_args, training_args, ours)
            predicted = plan(run)
        with clock.phase("data"):
            tokenizer = load_tokenizer(model_args, training_args)
            prepared = prepare_rows(script_args, training_args, dataset_args, ours, tokenizer)
            samples = prepared.samples
        refuse_apart(checkpoint)
        refuse_other_data(checkpoint, prepared.data_sha256)

        links = bandwidth.measure_network(run.device)

        # nothing is refused from here on; what stands in the folder may be touched
        link = bandwidth.measure_host_link(run.strategy, run.device)
        if main_process:
            clear_earlier_run(output_dir, ours.overwrite)
            header = [*run.strategy.described(run.device, training_args), *bandwidth.network_header(links)]
            header += [*nvme.described(disks), *bandwidth.host_link_header(link), *init.host_threads_header(threads)]
            header.append(str(prepared.audit))
            print(*header, *prepared.findings, sep="\n", flush=True)
            ds_config = resolved_ds_config(run, prepared.rows) if run.strategy.is_deepspeed else None
            recipes.write_resolved(recipe, output_dir / "recipe.resolved.yaml", header, ds_config)
        training_args.distributed_state.wait_for_everyone()

        patch_quantized_gradients()  # before DeepSpeed takes the function
        with clock.phase("model"):
            model = load_model(config, model_args, training_args, ours)

        stage_metrics = metrics_metrics.StageMetricsCallback(
            run, training_args, model, clock, disks=disks, link=link, links=links, predicted=predicted
        )
        before = generation.AnswersBeforeTraining(samples, ours.sample_max_new_tokens, clock)
        sharded = []
        if run.strategy.is_fsdp:
            fsdp.keep_names_of_the_file(model)
            sharded = [fsdp.RefuseUnsharded()]
        with clock.phase("data"):
            trainer = metrics.MeasuredSFTTrainer(
                model=model,
                args=training_args,
                train_dataset=prepared.train,
                eval_dataset=prepared.evaluation,
                processing_class=tokenizer,
                peft_config=get_peft_config(model_args),
                callbacks=[*sharded, FreshAdamAtStage0(bool(checkpoint)), before, stage_metrics],
            )
        before.trainer = trainer
        stage_metrics.watch(trainer)
        checkpointing.carry_on(trainer, run, prepared.data_sha256, before, stage_metrics)
        stage_metrics.write(output_dir, "failed", "the run has not finished")  # what a killed run leaves

        with clock.phase("train"):
            trainer.train(resume_from_checkpoint=checkpoint)
            stage_metrics.end_steps()
        stage_metrics.write(output_dir)  # what is measured is kept, whatever happens to the rest

        with clock.phase("samples_after"):
            after = generation.answer(trainer, samples, ours.sample_max_new_tokens)
        if main_process and samples:
            rows = generation.write_samples(output_dir / "samples.jsonl", samples, before.answers, after)
            generation.show_samples(rows)

        with clock.phase("save"):
            if ours.save_model:
                trainer.save_model(str(output_dir))
                unset_hf_deepspeed_config()  # from_pretrained would take the check for a collective load
                if main_process:
                    whole = verify(output_dir)
                    print(
                        f"saved {output_dir}: whole, {whole['tensors']} tensors, {whole['bytes']:,} bytes", flush=True
                    )
        stage_metrics.write(output_dir)
        if training_args.push_to_hub:
            trainer.push_to_hub(dataset_name=script_args.dataset_name)
        return trainer
    except Refusal:
        raise
    except Exception as error:
        states = {} if stage_metrics is None else stage_metrics.states_so_far()
        failure = write_failure(output_dir, clock.failed or clock.current, error, states)
        if stage_metrics is not None:
            with if_the_disk_takes_it():
                stage_metrics.write(output_dir, status=failure.status, error=failure.error)
        raise


if __name__ == "__main__":
    try:
        main(sys.argv[1:])
        code = 0
    except Refusal as refusal:
        code = say_refused(refusal)
    leave(code)
