"""What the workers of tests/helpers/group.py run. Every case is called on all ranks; arguments and results are JSON."""

import json
import os
import shutil
from contextlib import chdir
from pathlib import Path
from unittest import mock

import run_sft
from tests.helpers.around import before, without, without_rules
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
        run = run_sft.prepare(argv)
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


def train_on_a_filling_disk(argv: list[str], filler: str, left: int) -> dict:
    """`train`, while another program fills the disk of `filler` but for `left` bytes."""

    def fill(*_, **__) -> None:
        Path(filler).write_bytes(bytes(shutil.disk_usage(Path(filler).parent).free - left))

    with before(StageMetricsCallback, "on_train_begin", fill):
        return train(argv)


def checkpoint_gaps(one: str, other: str) -> dict[str, float]:
    """Largest absolute difference of two checkpoints' tensors: {"weights", "states"}, and how many were compared.

    Of every file of tensors: the model or adapter; optimizer, fp32 masters, schedule and random numbers of each rank.
    What the ZeRO stages cut is compared by parameter: the padding of the parts is memory that nobody has written.
    """
    import torch
    from safetensors.torch import load_file

    from zero_recipes.tools.reshard import open_checkpoint, read_parameter

    gaps = {"weights": 0.0, "states": 0.0, "tensors": 0}
    names = [
        {
            p.relative_to(folder).as_posix()
            for p in Path(folder).rglob("*")
            if p.suffix in (".pt", ".pth", ".bin", ".safetensors") and p.name != "training_args.bin"
        }
        for folder in (one, other)
    ]
    assert names[0] == names[1], names
    cut = {name for name in names[0] if name.endswith("_optim_states.pt") and "zero_pp_rank" in name}
    if cut:
        cut |= {name for name in names[0] if "zero_pp_rank" in name}
        mine, wanted = open_checkpoint(Path(one)), open_checkpoint(Path(other))
        assert (mine.adam_step, mine.engine, mine.groups) == (wanted.adam_step, wanted.engine, wanted.groups)
        for name in mine.places:
            states, others = read_parameter(mine, name), read_parameter(wanted, name)
            for key, state in states.items():
                gaps["states"] = max(gaps["states"], (state.double() - others[key].double()).abs().max().item())
                gaps["tensors"] += 1
    for name in sorted(names[0] - cut):
        kind = "weights" if name.endswith(".safetensors") else "states"
        read = load_file if kind == "weights" else lambda path: torch.load(path, weights_only=False, map_location="cpu")
        for mine, wanted in zip(_tensors(read(f"{one}/{name}")), _tensors(read(f"{other}/{name}")), strict=True):
            assert mine.shape == wanted.shape, name
            gap = (mine.double() - wanted.double()).abs().max().item() if mine.numel() else 0.0
            gaps[kind] = max(gaps[kind], gap)
            gaps["tensors"] += 1
    return gaps


def _tensors(value) -> list:
    """Every tensor in a loaded file, numbers as tensors, in the order of the file."""
    import numpy
    import torch
    from torch.utils._pytree import tree_leaves

    numbers = (torch.Tensor, numpy.ndarray, bool, int, float)
    return [torch.as_tensor(leaf) for leaf in tree_leaves(value) if isinstance(leaf, numbers)]


def fresh_adam() -> dict:
    """Adam's step counter and whether the fp32 masters are the weights, though weight decay has shrunk them in
    DeepSpeed's step before training: as DeepSpeed leaves it, and as `fresh_adam_at_stage_0` does."""
    import deepspeed
    import torch

    from zero_recipes.engine.patches import fresh_adam_at_stage_0

    left = {}
    for name in ("unpatched", "fresh"):
        layer = torch.nn.Linear(3, 3)
        _, optimizer, _, _ = deepspeed.initialize(
            model=layer,
            optimizer=torch.optim.AdamW(layer.parameters(), lr=0.1, weight_decay=0.5),
            config={"train_micro_batch_size_per_gpu": 1, "bf16": {"enabled": True}, "zero_optimization": {"stage": 0}},
        )
        if name == "fresh":
            fresh_adam_at_stage_0(optimizer)
        groups = zip(optimizer.fp32_groups, optimizer.fp16_groups, strict=True)
        same = [torch.equal(m, w.float()) for masters, weights in groups for m, w in zip(masters, weights, strict=True)]
        steps = max(float(tensors["step"]) for tensors in optimizer.state.values())
        left[name] = {"steps": steps, "masters_are_the_weights": all(same)}
    return left


def train_and_see_attention(argv: list[str]) -> dict:
    """`train`, and whether sdpa took packs apart."""
    from transformers import AttentionInterface

    from zero_recipes.engine import patches

    return train(argv) | {"by_row": AttentionInterface()["sdpa"] is patches._by_row}


def engine_config(argv: list[str]) -> dict:
    """The configuration that the DeepSpeed engine of a finished run was built from."""
    return json.loads(json.dumps(run_sft.train(run_sft.prepare(argv)).model_wrapped.config, default=str))


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


def refusal_of(argv: list[str]) -> str:
    """What a run is refused for, on this rank."""
    from zero_recipes.core.findings import Refusal

    try:
        train(argv)
        return "not refused"
    except Refusal as refusal:
        return "\n".join(f"{finding.what} [{finding.code}]" for finding in refusal.findings)


def train_unchecked(argv: list[str]) -> dict:
    """`train` with the check of combinations switched off."""
    with without_rules():
        return train(argv)


def plan_for_small_gpus(argv: list[str], program: str, capacities: list[int]) -> dict:
    """What `program`, in the planner's place, makes of a run on each rank where its GPU has so many bytes."""
    import dataclasses

    from zero_recipes.checks import predicted
    from zero_recipes.core.findings import Refusal
    from zero_recipes.core.process import rank

    run = dataclasses.replace(run_sft.prepare(argv), device="cuda")
    planner, started = predicted._planner, []

    def start(*arguments):
        started.append(rank())
        return planner(*arguments)

    card = {"rank": rank(), "total": capacities[rank()], "workspace": 0}
    with (
        mock.patch.object(predicted, "PLANNER", ("-c", program)),
        mock.patch.object(predicted, "_planner", start),
        mock.patch.object(predicted, "card", lambda: card),
    ):
        try:
            with predicted.planning(run) as planned:
                return {"peak": planned().peak_memory_bytes, "refused": None, "started": len(started)}
        except Refusal as refusal:
            return {"peak": None, "refused": refusal.codes, "started": len(started)}


def ended(folder: str, argv: list[str], environment: dict[str, str]) -> str:
    """How one step of a run ends: "ran", or "refused" before the weights are loaded."""
    from zero_recipes import model as models
    from zero_recipes.core.findings import Refusal

    loaded = mock.Mock(wraps=models.load_model)
    with chdir(folder), mock.patch.object(models, "load_model", loaded):
        try:
            train([*argv, "--max_steps", "1"], environment=environment)
            return "ran"
        except Refusal:
            loaded.assert_not_called()
            return "refused"
