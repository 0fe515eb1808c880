"""run_sft.py, and beside it all that plain torch needs to take the same steps: weights, micro batches, learning rates.

    accelerate launch ... observed.py RECIPE.yaml [--key value ...]

It writes `observed/` into output_dir. zero_recipes/tools/rehearse/plain.py reads that.
"""

import contextlib
import functools
import importlib.util
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

FOLDER = "observed"
START = "start.safetensors"  # all weights before the first step
END = "end.safetensors"  # those that are trained, after the last one
FACTS = "facts.json"
ROW_KEYS = ("input_ids", "labels", "attention_mask", "position_ids")


def batches_file(rank: int) -> str:
    """The name of a rank's file of micro batches: a list of {"step", and tensors of ROW_KEYS}."""
    return f"batches{rank}.pt"


@contextlib.contextmanager
def observing() -> Iterator[None]:
    """Observe trainings inside: they write down what they start from, what they are given, and what they come to."""
    from unittest.mock import patch

    from zero_recipes.training.trainer import ZeroSFTTrainer

    take_step = ZeroSFTTrainer.training_step
    train = ZeroSFTTrainer.train
    hold_optimizer = ZeroSFTTrainer.hold_optimizer

    @functools.wraps(hold_optimizer)
    def observed_optimizer(trainer, *arguments, **keywords):
        hold_optimizer(trainer, *arguments, **keywords)
        trainer.observer = Observer(trainer)

    @functools.wraps(take_step)
    def observed_step(trainer, model, inputs, *arguments, **keywords):
        trainer.observer.keep_batch(inputs)
        return take_step(trainer, model, inputs, *arguments, **keywords)

    @functools.wraps(train)
    def observed_train(trainer, *arguments, **keywords):
        trained = train(trainer, *arguments, **keywords)
        trainer.observer.finish()
        return trained

    with (
        patch.object(ZeroSFTTrainer, "hold_optimizer", observed_optimizer),
        patch.object(ZeroSFTTrainer, "training_step", observed_step),
        patch.object(ZeroSFTTrainer, "train", observed_train),
    ):
        yield


class Observer:
    """Writes down one training on every rank. Collective."""

    def __init__(self, trainer):
        self.trainer = trainer
        self.folder = Path(trainer.args.output_dir, FOLDER)
        self.folder.mkdir(parents=True, exist_ok=True)
        self.batches: list[dict[str, Any]] = []
        self.rates: list[dict[str, float]] = []  # {parameter: learning rate} of each step
        self._write(START, trained_only=False)

    def keep_batch(self, inputs: dict[str, Any]) -> None:
        """Keep the rows of a micro batch. `inputs`: as the trainer is given them."""
        from zero_recipes.engine.optimizers import current_rates

        step = self.trainer.state.global_step
        kept = {key: inputs[key].detach().cpu().clone() for key in ROW_KEYS if inputs.get(key) is not None}
        self.batches.append({"step": step, **kept})
        if len(self.rates) == step:
            self.rates.append(current_rates(self.trainer.optimizer, self.trainer.model))

    def finish(self) -> None:
        """Write what the training has come to."""
        import torch

        from zero_recipes.engine.optimizers import trained_names

        rank = self.trainer.args.process_index
        torch.save(self.batches, self.folder / batches_file(rank))
        self._write(END, trained_only=True)
        if rank == 0:
            metrics = self.trainer.stage_metrics
            facts = {
                "losses": metrics.losses_so_far(),
                "norms": metrics.grad_norms,
                "rates": self.rates,
                "trained": sorted(trained_names(self.trainer.model)),
                "ranks": self.trainer.args.world_size,
                "ds_config": metrics.strategy.ds.raw,  # "auto" included
            }
            (self.folder / FACTS).write_text(json.dumps(facts))
        self.trainer.accelerator.wait_for_everyone()

    def _write(self, name: str, trained_only: bool) -> None:
        """Whole weights, in fp32, by rank 0."""
        from safetensors.torch import save_file

        whole = {}
        for parameter_name, tensor in whole_weights(self.trainer.model, trained_only):
            if self.trainer.args.process_index == 0:
                whole[parameter_name] = tensor
        if self.trainer.args.process_index == 0:
            save_file(whole, self.folder / name)


def whole_weights(model, trained_only: bool) -> Iterator[tuple[str, Any]]:
    """Gather each parameter, whatever shards it: its name, and the whole tensor on the CPU in fp32. Collective."""
    import torch
    from torch.distributed.tensor import DTensor

    from zero_recipes.engine.deepspeed import is_partitioned
    from zero_recipes.engine.optimizers import plain_name

    for name, parameter in model.named_parameters():
        if trained_only and not parameter.requires_grad:
            continue
        gathered = contextlib.nullcontext()
        if is_partitioned(parameter):
            import deepspeed

            gathered = deepspeed.zero.GatheredParameters(parameter)
        with gathered, torch.no_grad():
            whole = parameter.full_tensor() if isinstance(parameter, DTensor) else parameter
            yield plain_name(name), whole.detach().to("cpu", torch.float32).clone()


def load_run_sft() -> ModuleType:
    """Load the program run_sft.py as a module."""
    from zero_recipes.core.files import at_hand

    spec = importlib.util.spec_from_file_location("run_sft", at_hand("run_sft.py"))
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def main(argv: list[str]) -> None:
    """Run run_sft.py with an observer in its trainer. `argv`: as run_sft.py's."""
    run_sft = load_run_sft()
    train = run_sft.train

    def observed(*arguments, **keywords):
        with observing():
            return train(*arguments, **keywords)

    run_sft.train = observed
    run_sft.main(argv)


if __name__ == "__main__":
    from zero_recipes.core.run_end import run_to_end

    run_to_end(main, sys.argv[1:])
