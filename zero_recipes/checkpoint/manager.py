"""The owner of a training's checkpoints: the trainer calls it, and knows none of the files in a checkpoint."""

import json
import shutil
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from accelerate.utils import wait_for_everyone
from transformers import TrainingArguments
from transformers.trainer_utils import get_last_checkpoint

from zero_recipes.checkpoint.folders import folder_of_step, rotate, whole_checkpoints
from zero_recipes.checkpoint.pickles import refuse_code
from zero_recipes.checkpoint.resharded import forget_resharded, load_resharded
from zero_recipes.checkpoint.save import (
    HISTORY,
    STATE,
    begin_checkpoint,
    checkpoint_fault,
    empty_unfinished,
    is_resharded,
    write_manifest,
)
from zero_recipes.core.files import write_json
from zero_recipes.core.findings import first_line
from zero_recipes.core.run_end import PeerFailed, RunFailed
from zero_recipes.engine.errors import is_disk_full, is_echo, is_out_of_memory, is_unwritten
from zero_recipes.engine.faults.cpu_adam_after_resume import repeat_steps_of_cpu_adam
from zero_recipes.engine.group import agree, once, rank_0_writes


class NotSaved(RunFailed):
    """A checkpoint could not be written, on the rank that raises it. The checkpoints before it are as they were."""

    scope = "rank"


class Carried(NamedTuple):
    """What a checkpoint hands to the run that resumes from it, beside what the libraries load."""

    step: int  # optimizer steps behind it
    history: dict[str, Any]  # as it was given to `save`; empty in another program's


class CheckpointManager:
    """Chooses, writes, rotates and loads the checkpoints of one trainer.

    A checkpoint is whole or it is not there: a mark comes before its first file, and the manifest, which names every
    file, after the last one of all ranks. One that a kill or a full disk has cut off keeps the mark.

    Args:
        args: the trainer's arguments. `output_dir`, `save_total_limit` and the ranks are read at each call.
        with_checksums: whether a manifest has the checksums of all files, beside their sizes.
        refuses_code: whether `choose` looks for code in the pickles of a checkpoint, which DeepSpeed would run.
    """

    def __init__(self, args: TrainingArguments, with_checksums: bool = True, refuses_code: bool = True):
        self.args = args
        self.with_checksums = with_checksums
        self.refuses_code = refuses_code

    @property
    def folder(self) -> Path:
        """Where the checkpoints are."""
        return Path(self.args.output_dir)

    def of_step(self, step: int) -> Path:
        """The folder of the checkpoint after that step, whether it is there or not."""
        return folder_of_step(self.folder, step)

    # to go on from one

    def choose(self, requested: str | bool | None) -> str | bool | None:
        """Choose the checkpoint that a training resumes from. Collective.

        Args:
            requested: as Trainer.train takes it: a path, or True for the newest whole one of the output folder.

        Returns:
            What Trainer.train is to be given; True where no checkpoint of the folder is whole.

        Raises:
            Refusal: on all ranks, where one of its pickles would run code.
        """
        if requested is True:
            requested = next(map(str, whole_checkpoints(self.folder)), True)
        if self.refuses_code and requested:
            checkpoint = requested
            if requested is True:  # transformers takes the last one, whatever it is
                checkpoint = self.folder.is_dir() and get_last_checkpoint(str(self.folder))
            if checkpoint:
                agree(partial(refuse_code, Path(checkpoint), self.args.process_index, self.args.world_size))
        return requested

    def carried(self, checkpoint: str | bool | None) -> Carried | None:
        """What a checkpoint carries for the run that resumes from it; None of a fresh start, and of weights alone."""
        folder = Path(str(checkpoint))
        if not (folder / STATE).is_file():
            return None
        history = {}
        if (folder / HISTORY).is_file():  # another program's has none
            history = json.loads((folder / HISTORY).read_text())
        return Carried(json.loads((folder / STATE).read_text())["global_step"], history)

    def is_resharded(self, checkpoint: str | None) -> bool:
        """Whether `load` brings all states of a checkpoint: a resharded one has no files that DeepSpeed could load."""
        return checkpoint is not None and is_resharded(checkpoint)

    def load(self, checkpoint: str, engine: Any, optimizer: Any) -> None:
        """Load what transformers and DeepSpeed do not, after them and before the first step. Collective.

        That is the states of a resharded checkpoint, parameter by parameter, and the steps that CPU Adam counts.
        Raises Refusal on all ranks where a resharded one has other parameters, or other groups of them.
        """
        if self.is_resharded(checkpoint):
            load_resharded(engine, checkpoint)
        repeat_steps_of_cpu_adam(optimizer)

    # to write one

    def save(self, step: int, write: Callable[[], dict[str, Any]], facts: Mapping[str, Any]) -> None:
        """Write the checkpoint after `step`, whole or not at all. Collective.

        Args:
            step: optimizer steps behind it.
            write: writes the libraries' files on every rank, and returns the history that a resumed run is handed.
            facts: what its manifest keeps for comparison with the run that resumes.

        Raises:
            NotSaved: on a rank that could not write. The files so far are emptied where the disk is full.
            PeerFailed: on the others.
        """
        checkpoint = self.of_step(step)
        try:
            if self.args.should_save:
                begin_checkpoint(checkpoint)
            wait_for_everyone()  # no rank writes before the mark is there
            history = write()
            wait_for_everyone()  # all ranks have written
            with rank_0_writes():
                if self.args.should_save:
                    write_json(checkpoint / HISTORY, history)
                    write_manifest(checkpoint, dict(facts), self.with_checksums)
        except Exception as error:
            failure = not_saved(checkpoint, error)
            if failure is error:
                raise
            raise failure from error

    def rotate(self, best: str | None) -> None:
        """Delete what the newest checkpoint makes needless, once it is whole. Collective.

        That is all but `save_total_limit`, the newest and the `best`, and what a run has resharded for itself.

        transformers 5.23 deletes the oldest checkpoints while other ranks still write their files: a run killed there
        has lost the last whole one under save_total_limit: 1.
        """
        with rank_0_writes():
            if self.args.should_save:
                rotate(self.folder, self.args.save_total_limit, best)
                forget_resharded(self.folder)

    def is_saved(self, step: int, carries: Mapping[str, Any]) -> bool:
        """Whether the checkpoint after `step` is whole and its history has these values. Collective."""

        def look() -> bool:
            checkpoint = self.of_step(step)
            if not (checkpoint / HISTORY).is_file() or checkpoint_fault(checkpoint) is not None:
                return False
            history = json.loads((checkpoint / HISTORY).read_text())
            return all(history.get(key) == value for key, value in carries.items())

        return once(look, "looks at the checkpoint")


def not_saved(checkpoint: Path, error: Exception) -> Exception:
    """What a failed save ends the run with: the error itself where neither files nor other ranks are its cause."""
    said = first_line(error)
    if is_out_of_memory(error):
        return error
    if is_echo(error):
        return PeerFailed(
            f"{checkpoint} is not saved, because another rank failed, was killed, or did not answer ({said}). "
            "Earlier checkpoints are unchanged, and the same command resumes."
        )
    if is_disk_full(error, checkpoint.parent):
        free = shutil.disk_usage(checkpoint.parent).free
        empty_unfinished(checkpoint)  # the record of the failure needs room
        return NotSaved(
            f"{checkpoint} could not be saved: its disk is full ({type(error).__name__}: {said}). {free:,} bytes were "
            "free. What was written of it is emptied, and earlier checkpoints are unchanged. Free some space first; "
            "save_total_limit: 1 keeps only the newest checkpoint. The same command resumes."
        )
    if is_unwritten(error):
        return NotSaved(
            f"{checkpoint} could not be saved: {type(error).__name__}: {said}. Earlier checkpoints are unchanged, and "
            "the same command resumes."
        )
    return error
