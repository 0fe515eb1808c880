"""A checkpoint as DeepSpeed writes it, without a run."""

from pathlib import Path

import torch

MODEL, OPTIMIZER = "mp_rank_00_model_states.pt", "zero_pp_rank_{}_mp_rank_00_optim_states.pt"
WORLD, SHAPES = 2, [{"a.weight": (3, 5), "b.weight": (7, 1)}, {"a.bias": (3,)}]


def write_checkpoint(folder: Path, model: dict | None = None, **config) -> Path:
    """A checkpoint as DeepSpeed writes it at stage 3, of two tiny groups; `config` and `model` change what it says."""
    checkpoint = folder / "checkpoint-7"
    states = checkpoint / "global_step7"
    states.mkdir(parents=True)
    (checkpoint / "latest").write_text("global_step7")
    (checkpoint / "trainer_state.json").write_text('{"global_step": 7, "best_model_checkpoint": null}')
    (checkpoint / "scheduler.pt").write_bytes(b"s")
    for rank in range(WORLD):
        (checkpoint / f"rng_state_{rank}.pth").write_bytes(bytes([rank]))
    ds_config = {
        "train_micro_batch_size_per_gpu": 2,
        "gradient_accumulation_steps": 2,
        "zero_optimization": {"stage": 3},
    } | config
    described = {
        "param_shapes": [{name: torch.Size(shape) for name, shape in group.items()} for group in SHAPES],
        "dp_world_size": WORLD,
        "mp_world_size": 1,
        "ds_config": ds_config,
        "lr_scheduler": None,
        **{"global_steps": 7, "global_samples": 56, "skipped_steps": 0},
    }
    torch.save(described | (model or {}), states / MODEL)
    for rank in range(WORLD):
        torch.save({"optimizer_state_dict": rank_states()}, states / OPTIMIZER.format(rank))
    return checkpoint


def rank_states() -> dict:
    flats = [torch.rand(sum(-(-torch.Size(shape).numel() // WORLD) for shape in group.values())) for group in SHAPES]
    adam = {
        number: {"step": torch.tensor(7.0), "exp_avg": flat.clone(), "exp_avg_sq": flat.clone()}
        for number, flat in enumerate(flats)
    }
    groups = [{"lr": 1e-3, "betas": (0.9, 0.999), "eps": 1e-8, "params": [number]} for number in range(len(flats))]
    return {
        "zero_stage": 3,
        "fp32_flat_groups": flats,
        "optimizer_state_dict": {"state": adam, "param_groups": groups},
    }
