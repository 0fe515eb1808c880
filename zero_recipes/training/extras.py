"""What a recipe gives a trainer beside TRL's arguments."""

import contextlib
import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from transformers import TrainerCallback

from zero_recipes.checkpoint.compatibility import recipe_facts
from zero_recipes.checkpoint.resume import requested_batch
from zero_recipes.config.run import Run
from zero_recipes.core.process import PhaseClock
from zero_recipes.data.samples import Sample
from zero_recipes.engine.huggingface import rows_are_cut
from zero_recipes.metrics.callback import StageMetricsCallback
from zero_recipes.metrics.scores import load_metrics
from zero_recipes.model.config import config_of_file
from zero_recipes.model.load import loaded_values
from zero_recipes.model.towers import has_text_part, processor_files
from zero_recipes.training.divergence import StopAtDivergence, StopWithoutProgress
from zero_recipes.training.inputs import Inputs
from zero_recipes.training.progress import RunProgress


@dataclass(frozen=True)
class Extras:
    """What ZeroSFTTrainer is told beside TRL's arguments. The defaults are those of a trainer without a recipe.

    Args:
        clock: counts the seconds of the run's phases.
        samples: the prompts that the model answers before and after training.
        max_new_tokens: of an answer to one of them.
        metrics: {name: metric} that answers are scored with.
        saves_on_signals: whether SIGTERM, SIGUSR1 and Ctrl-C save a checkpoint and end the run.
        with_checksums: whether checkpoints and the model get checksums.
        refuses_code: whether a checkpoint is searched for code before it is loaded.
        token_metrics: when entropy and accuracy are brought together: "logging_steps" or "micro_batch".
        loraplus_lr_ratio: LoRA+: the learning rate of the B matrices over that of the A matrices.
        manifest_facts: what the manifest of a checkpoint keeps of the recipe and its rows.
        loaded_values: of a model, read again from its files: (parameter, values) of each.
        building: a context around TRL's own constructor.
        processor_files: copied beside each saved tokenizer.
    """

    clock: PhaseClock = field(default_factory=PhaseClock)
    samples: Sequence[Sample] = ()
    max_new_tokens: int = 0
    metrics: Mapping[str, Any] = field(default_factory=dict)
    saves_on_signals: bool = False
    with_checksums: bool = True
    refuses_code: bool = True
    token_metrics: str = "logging_steps"
    loraplus_lr_ratio: float | None = None
    manifest_facts: Mapping[str, Any] = field(default_factory=dict)
    loaded_values: Callable | None = None
    building: Callable = contextlib.nullcontext
    processor_files: Sequence[Path] = ()


def extras_of(run: Run, inputs: Inputs, clock: PhaseClock) -> Extras:
    """The extras of a recipe's run. `clock`: the session's."""
    settings = run.settings
    facts = {
        "asked": requested_batch(run.recipe.settings),
        "recipe": recipe_facts(settings, run.strategy),
        "recipe_sha256": run.recipe.sha256,
        "data_sha256": inputs.data.data_sha256,
        "evaluation_sha256": inputs.data.evaluation_sha256,
        "model_config": config_of_file(settings),
        "leaves_towers": has_text_part(run.config),
    }
    return Extras(
        clock=clock,
        samples=inputs.data.samples,
        max_new_tokens=settings.sample_max_new_tokens,
        metrics=load_metrics(settings),
        saves_on_signals=run.saves_on_signals,
        with_checksums=not settings.skip_checksums,
        refuses_code=False,  # resolve_resume_checkpoint has looked, before the weights were loaded
        token_metrics=settings.token_metrics,
        loraplus_lr_ratio=settings.loraplus_lr_ratio,
        manifest_facts=facts,
        loaded_values=functools.partial(loaded_values, config=run.config, settings=settings),
        building=functools.partial(rows_are_cut, inputs.arguments),
        processor_files=processor_files(run.config, settings.model_name_or_path, settings.model_revision),
    )


def callbacks_of(run: Run, metrics: StageMetricsCallback) -> list[TrainerCallback]:
    """The callbacks of a recipe's run: its measurements, what ends it before its last step, and what is shown of it."""
    settings = run.settings
    callbacks = [metrics, StopAtDivergence(metrics, settings.stop_after_nonfinite_steps)]
    patience = settings.early_stopping_patience
    if patience is not None:
        callbacks.append(StopWithoutProgress(metrics, patience, settings.early_stopping_threshold))
    callbacks.append(RunProgress(metrics, has_bar=not settings.disable_tqdm))
    return callbacks
