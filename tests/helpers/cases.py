"""Cases of tests/helpers/group.py: whole runs of run_sft.py. The files beside this one have those of one topic.

Every case is called on all ranks; arguments and results are JSON.
"""

import json
import os
from unittest import mock

import run_sft
from tests.helpers.tools import before, without, without_rules
from zero_recipes.metrics.callback import StageMetricsCallback


def train(argv: list[str], left_out: str | None = None, environment: dict[str, str] | None = None) -> dict:
    """One whole run of run_sft.py in this process group; what the engine really was, and metrics.json.

    `left_out`: the dotted name of a function that does nothing meanwhile; `environment`: what a launcher sets.
    """
    os.environ.update(environment or {})
    seen: dict[str, list] = {}

    def look(*_, model, **__) -> None:
        seen["shapes"] = [list(p.shape) for p in model.parameters()]
        seen["placements"] = sorted({str(getattr(p, "placements", None)) for p in model.parameters()})

    with without(left_out), before(StageMetricsCallback, "on_train_begin", look):
        run = run_sft.read_run(argv)
        trainer = run_sft.train(run)
    trainer.accelerator.wait_for_everyone()  # rank 0 writes the files
    engine = trainer.model_wrapped
    optimizer = getattr(engine, "optimizer", None)
    return seen | {
        "engine": type(engine).__name__,
        "optimizer": type(optimizer).__name__,
        "stage": engine.zero_optimization_stage() if hasattr(engine, "zero_optimization_stage") else None,
        "world_size": trainer.accelerator.num_processes,
        "metrics": json.loads((run.output_dir / "metrics.json").read_text()),
        "groups": parameter_groups(trainer),
        # at stage 3, [number of groups that hold the model whole, ranks in each] of all parameters
        "hpz_groups": sorted(
            {
                (p.ds_secondary_tensor_num_of_groups, p.ds_secondary_tensor_group_size)
                for p in trainer.model.parameters()
                if hasattr(p, "ds_id")
            }
        ),
    }


def parameter_groups(trainer) -> list[list[int]]:
    """Sizes (elements) of the trainable tensors by the Trainer's optimizer groups: weight decay, then none."""
    names = set(trainer.get_decay_parameter_names(trainer.model))
    groups: tuple[list[int], list[int]] = ([], [])
    for name, p in trainer.model.named_parameters():
        if p.requires_grad:
            groups[name not in names].append(getattr(p, "ds_numel", p.numel()))
    return list(groups)


def train_counted(argv: list[str]) -> dict:
    """`train`, with the step (from 0) of every call of training_step, one a micro batch."""
    from zero_recipes.training.trainer import ZeroSFTTrainer

    steps = []
    with before(ZeroSFTTrainer, "training_step", lambda self, *_: steps.append(self.state.global_step)):
        return train(argv) | {"calls": steps}


def train_unchecked(argv: list[str]) -> dict:
    """`train` with the check of combinations switched off."""
    with without_rules():
        return train(argv)


def train_and_count_graphs(argv: list[str]) -> dict:
    """`train_unchecked`, and how many graphs torch.compile has made."""
    from torch._dynamo import reset
    from torch._dynamo.utils import counters

    reset()  # of an earlier run in this process
    counters.clear()
    return train_unchecked(argv) | {"graphs": counters["stats"]["unique_graphs"]}


def engine_config(argv: list[str]) -> dict:
    """The configuration that the DeepSpeed engine of a finished run was built from."""
    return json.loads(json.dumps(run_sft.train(run_sft.read_run(argv)).model_wrapped.config, default=str))


def splits_tokenised(argv: list[str], cache: str) -> int:
    """How many splits this process tokenised in one run, with the datasets library's cache in `cache`."""
    import datasets

    from zero_recipes.data import masks

    with (
        mock.patch.object(masks, "tokenise_as_written", wraps=masks.tokenise_as_written) as tokenise,
        mock.patch.object(datasets.config, "HF_DATASETS_CACHE", cache),
    ):
        train(argv)
        return tokenise.call_count
