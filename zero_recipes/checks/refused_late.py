"""What TRL, transformers and torch refuse once the model has been loaded, or never: said by the recipe's own keys."""

from __future__ import annotations

import importlib.util
import math
from collections.abc import Iterator

from huggingface_hub import constants, get_token

from zero_recipes.config.settings import Settings
from zero_recipes.config.strategy import Strategy
from zero_recipes.core.findings import Finding, finding


def late_findings(settings: Settings, strategy: Strategy | None, device: str) -> list[Finding]:
    """All findings about single keys in force."""
    return [
        *_length_of_training(settings),
        *_intervals(settings),
        *_rows(settings),
        *_packages(settings, device),
        *_hub(settings),
        *_preemption(settings),
        *_backend(settings, strategy, device),
    ]


def _length_of_training(settings: Settings) -> Iterator[Finding]:
    epochs = settings.num_train_epochs
    if settings.max_steps > 0:
        return
    if settings.dataset_streaming or settings.streaming:
        yield finding("ZR161")
    if not 0 < epochs < math.inf:
        yield finding(
            "ZR162",
            epochs=epochs,
            max_steps=settings.max_steps,
            why="Such a run takes no step, and saves the model as it was." if epochs <= 0 else "Such a run has no end.",
        )


def _intervals(settings: Settings) -> Iterator[Finding]:
    if named(settings.save_strategy) == "steps" and settings.save_steps <= 0:
        yield finding("ZR163", save_steps=settings.save_steps)
    if settings.eval_on_start and not settings.evaluates:
        yield finding("ZR164")


def _rows(settings: Settings) -> Iterator[Finding]:
    packs = settings.packing or (settings.eval_packing and settings.evaluates)
    if packs and settings.max_length is None:
        yield finding("ZR165", what="packing" if settings.packing else "eval_packing")


def _packages(settings: Settings, device: str) -> Iterator[Finding]:
    if settings.use_liger_kernel and importlib.util.find_spec("liger_kernel") is None:
        yield finding("ZR425")
    if settings.activation_offloading and device == "cpu":
        yield finding("ZR426")


def _hub(settings: Settings) -> Iterator[Finding]:
    if not settings.push_to_hub:
        return
    if constants.is_offline_mode():
        yield finding("ZR167")
    elif not (settings.hub_token or get_token()):
        yield finding("ZR168")


def _preemption(settings: Settings) -> Iterator[Finding]:
    if settings.enable_jit_checkpoint:
        yield finding("ZR188")


def _backend(settings: Settings, strategy: Strategy | None, device: str) -> Iterator[Finding]:
    if settings.ddp_backend is None or strategy is None:
        return
    right = {"cpu": "gloo", "cuda": "nccl"}[device] if strategy.world_size > 1 or strategy.is_deepspeed else None
    if settings.ddp_backend != right:
        yield finding("ZR346", ddp_backend=settings.ddp_backend, right=right or "none")


def named(choice) -> str:
    """The text of a choice, which may be an enumeration's member; YAML's bare `no` is False."""
    text = str(getattr(choice, "value", choice))
    return "no" if text == "False" else text
