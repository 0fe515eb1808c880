"""Checkpoints that are whole or recognised as not: written between a mark and a manifest, older ones deleted after."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

from transformers.trainer import TRAINER_STATE_NAME
from transformers.trainer_utils import sort_checkpoints
from trl import SFTTrainer

from zero_recipes.checkpoint import manifest
from zero_recipes.checkpoint.compatibility import recipe_facts
from zero_recipes.checkpoint.manifest import HISTORY
from zero_recipes.checkpoint.resume import numbered
from zero_recipes.config.run import RunConfig
from zero_recipes.core import environment
from zero_recipes.core.files import write_json
from zero_recipes.core.findings import first_line
from zero_recipes.distributed.writer import rank_0_writes
from zero_recipes.libs.patches import without_aliases
from zero_recipes.metrics.failure import is_out_of_memory


class NotSaved(Exception):
    """A checkpoint could not be written. The run ends; the checkpoints before it are as they were."""


class CheckpointingSFTTrainer(SFTTrainer):
    """SFTTrainer whose checkpoints carry the run's history and a manifest.

    transformers 5.23, trainer.py `_save_checkpoint` deletes the oldest checkpoints (`rotate_checkpoints`) when rank 0
    has written its own files, before `on_save` and while other ranks still write theirs: a run killed there has lost
    the last whole checkpoint under save_total_limit: 1. Here rotation comes after the manifest.
    """

    checkpoint_facts: dict[str, Any]
    with_checksums: bool
    checkpoint_history: Callable[[], dict[str, Any]]  # collective

    def _run_epoch(self, *arguments, **keywords) -> None:
        """Nothing where no step is left.

        transformers 5.23, trainer.py `_run_epoch` looks at max_steps after a step only: a run resumed from its last
        step within an epoch takes one more, with a learning rate of 0 or past the schedule.
        """
        if self.state.global_step >= self.state.max_steps:
            self.control.should_training_stop = True
        else:
            super()._run_epoch(*arguments, **keywords)

    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        with rank_0_writes():
            super().save_model(output_dir, _internal_call=_internal_call)

    def _save(self, output_dir=None, state_dict=None) -> None:
        super()._save(output_dir, without_aliases(self.model, state_dict))

    def _save_checkpoint(self, model, trial) -> None:
        if self.args.save_only_model:  # nothing goes on from it
            return super()._save_checkpoint(model, trial)
        folder = Path(self._get_output_dir(trial=trial))
        checkpoint = folder / f"checkpoint-{self.state.global_step}"
        limit, self.args.save_total_limit = self.args.save_total_limit, None
        try:
            if self.args.should_save:
                manifest.begin(checkpoint)
            self.accelerator.wait_for_everyone()  # no rank writes before the mark stands
            super()._save_checkpoint(model, trial)
            history = self.checkpoint_history()
            self.accelerator.wait_for_everyone()  # all ranks have written
            with rank_0_writes():
                if self.args.should_save:
                    write_json(checkpoint / HISTORY, history)
                    facts = {"step": self.state.global_step, **self.checkpoint_facts}
                    manifest.write(checkpoint, facts, self.with_checksums)
        except Exception as error:
            if is_out_of_memory(error):
                raise
            raise NotSaved(_not_saved(checkpoint, error)) from error
        finally:
            self.args.save_total_limit = limit
        with rank_0_writes():
            if self.args.should_save:
                rotate(folder, limit, self.state.best_model_checkpoint)
        self.accelerator.wait_for_everyone()


def rotate(folder: Path, limit: int | None, best: str | None) -> None:
    """Delete the oldest checkpoints beyond `limit`; never the newest, nor the best.

    By step, where transformers goes by time, and each one's manifest first: one that is half deleted is unfinished.
    """
    if limit is None or limit <= 0:
        return
    kept = {path.name for path in numbered(folder)}
    ordered = [Path(p) for p in sort_checkpoints(str(folder), best_model_checkpoint=best) if Path(p).name in kept]
    for checkpoint in ordered[: -max(limit, 2 if best is not None and Path(best) != ordered[-1] else 1)]:
        manifest.retire(checkpoint)
        shutil.rmtree(checkpoint)


def carry_on(trainer: CheckpointingSFTTrainer, run: RunConfig, data_sha256: str | None, answers, measurements) -> None:
    """Let the trainer's checkpoints carry manifest and history, and take up the history of the one it goes on from.

    `answers`: generation.AnswersBeforeTraining; `measurements`: metrics.StageMetricsCallback.
    """
    identity, checkpoint = measurements.identity, trainer.args.resume_from_checkpoint
    keys = ("strategy", "zero_stage", "world_size", "precision", "micro_batch_size", "gradient_accumulation_steps")
    trainer.checkpoint_facts = {key: getattr(identity, key) for key in keys} | {
        "versions": environment.versions(),
        "recipe_sha256": run.recipe.sha256,
        "data_sha256": data_sha256,
        "recipe": recipe_facts(run.settings, run.strategy),
    }
    trainer.with_checksums = not run.settings.skip_checksums
    trainer.checkpoint_history = lambda: measurements.history() | {"answers_before": answers.history()}
    if checkpoint is None:
        return
    path = Path(checkpoint) / HISTORY
    history = json.loads(path.read_text()) if path.is_file() else {}  # another program writes none
    state = json.loads((Path(checkpoint) / TRAINER_STATE_NAME).read_text())
    measurements.take_up(history, state["global_step"])
    answers.take_up(history.get("answers_before") or {})


def _not_saved(checkpoint: Path, error: Exception) -> str:
    whole = [p for p in numbered(checkpoint.parent) if manifest.damage(p) is None]
    free = shutil.disk_usage(checkpoint.parent).free
    size = sum(manifest.read(whole[-1])["files"].values()) if whole else None
    then = "No checkpoint was written before it."
    if whole:
        then = f"{whole[-1]} is whole ({size:,} bytes): --resume_from_checkpoint true goes on from it."
    return (
        f"{checkpoint} could not be saved: {type(error).__name__}: {first_line(error)}. {free:,} bytes are "
        f"free on its disk. {then}"
        " Make room first; save_total_limit: 1 keeps the newest alone."
    )
