"""The output folder of a run: one run at a time, never what another run saved or this run reads.

`--overwrite true` renames the whole folder to `<output_dir>.previous`, and deletes the one before.
A folder without anything saved is not kept: a run that fails at once does not push out the last results.
"""

import json
import os
import shutil
from collections.abc import Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from functools import partial
from pathlib import Path

from torch.utils._pytree import tree_leaves  # noqa: PLC2701 - torch has no public place for it

from zero_recipes.checkpoint.checksums import forget_records
from zero_recipes.checkpoint.compatibility import refuse_misfit
from zero_recipes.checkpoint.folders import clear_unfinished, numbered
from zero_recipes.checkpoint.resume import checkpoint_to_resume, requested_in, resumes_in
from zero_recipes.checkpoint.save import is_foreign
from zero_recipes.config.run import Run
from zero_recipes.config.settings import Settings
from zero_recipes.core.files import PART, SAVED, WRITTEN_BY_A_RUN
from zero_recipes.core.findings import Refusal, refusal
from zero_recipes.core.folder_lock import LOCK, held
from zero_recipes.core.process import rank, say
from zero_recipes.engine.group import agree, once

OURS = ("recipe.resolved.yaml", "metrics.json")  # a run leaves at least one of them
PREVIOUS = ".previous"  # ends the name under which --overwrite true keeps a folder
NAME_MAX = 255  # bytes of a name, on ext4, XFS, Btrfs, Lustre and NFS
UNFINISHED_STATUS = ("running", "failed", "oom", "diverged", "preempted", "refused")  # of metrics.json
# what a run writes into its folder, beside OURS
WRITTEN = {*SAVED, *WRITTEN_BY_A_RUN} - {"*config.json"}
DATA = ("dataset_name", "datasets", "sample_prompts")  # keys
NOT_READ = {"output_dir", "run_name", "dataset_train_split", "dataset_test_split"}  # keys that name no path to read

Inputs = Iterable[tuple[str, Path]]  # what a run reads: (what names it, an existing path)


def saved_in(output_dir: Path) -> list[Path]:
    """What an earlier run saved in the folder; in another program's folder, all that a run overwrites."""
    patterns: Iterable[str] = WRITTEN
    if _is_ours(output_dir):
        patterns = ("*.safetensors", "pytorch_model*.bin")
    files: set[Path] = set()
    for pattern in patterns:
        files.update(output_dir.glob(pattern))
    found = [*numbered(output_dir), *sorted(files)]
    if _is_finished(output_dir / "metrics.json"):
        found.append(output_dir / "metrics.json")
    return found


def _is_ours(folder: Path) -> bool:
    if any((folder / name).exists() for name in OURS):
        return True
    return not all(map(is_foreign, numbered(folder)))


def _is_finished(metrics: Path) -> bool:
    """Whether metrics.json is of a run that has ended well. One that cannot be read is kept."""
    try:
        return json.loads(metrics.read_text())["status"] not in UNFINISHED_STATUS
    except (FileNotFoundError, NotADirectoryError):
        return False
    except (OSError, ValueError, TypeError, KeyError):
        return True


def inputs_of(settings: Settings, recipe: Path, environment: Mapping[str, str]) -> Inputs:
    """What a run reads: its recipe, and whatever else a key or the environment names that exists."""
    named = {key: value for key, value in settings.as_dict().items() if key not in NOT_READ}
    named["the recipe"] = str(recipe)
    named["the working directory"] = str(Path.cwd())
    named["the DeepSpeed configuration"] = environment.get("ACCELERATE_DEEPSPEED_CONFIG_FILE", "")
    for key, value in named.items():
        for text in tree_leaves(value):
            if not isinstance(text, str):
                continue
            with suppress(OSError, ValueError):  # too long, or a NUL: no path
                path = Path(text.partition("*")[0]).expanduser()  # of a pattern its folder
                if text and path.exists():
                    yield key, path


def refuse_long_name(output_dir: Path) -> None:
    """Refuse an output folder whose name is too long for the file system, where it cannot even be looked up.

    `_going` has the longest name beside the folder. Touches nothing.
    """
    *above, name = output_dir.resolve().parts
    limits = [(part, NAME_MAX) for part in above]
    limits.append((name, NAME_MAX - len(f"{PREVIOUS}{PART}")))
    for part, most in limits:
        count = len(os.fsencode(part))
        if count > most:
            raise refusal("ZR798", start=part[:20], count=count, most=most)


def refuse_occupied(output_dir: Path, resume: object, overwrite: bool, inputs: Inputs = ()) -> None:
    """Refuse an output folder with what is not this run's to write over. Touches nothing. That is:

    - a folder with what an earlier run or another program saved, unless the recipe resumes or overwrites its own;
    - to overwrite what the run reads;
    - to write among the data.
    """
    inputs = list(inputs)
    folder = output_dir.resolve()
    found = saved_in(output_dir)
    for key, path in inputs:
        data = path.resolve()
        if key in DATA and (data.is_relative_to(folder) or folder.is_relative_to(data)):
            raise refusal("ZR753", output_dir=output_dir, key=key, path=path)
    if found and overwrite:
        _refuse_foreign(output_dir)
        to_delete = set()
        for each in (folder, previous_of(output_dir)):
            for path in (each, *each.rglob("*")):
                if path.exists():
                    to_delete.add(_identity(path.lstat()))
        for key, path in inputs:
            if _identity(path.stat()) in to_delete:  # through mounts and links, too
                raise refusal("ZR751", path=path.resolve(), key=key, read=path)
    elif found and not (resumes_in(output_dir, resume) and (_is_ours(output_dir) or numbered(output_dir))):
        listed = ", ".join(path.name for path in found[:4])
        if len(found) > 4:
            listed += " ..."
        raise refusal("ZR702", output_dir=output_dir, found=listed, previous=previous_of(output_dir))


def _identity(stat: os.stat_result) -> tuple[int, int]:
    return stat.st_dev, stat.st_ino


def _refuse_foreign(output_dir: Path) -> None:
    for folder in (output_dir, previous_of(output_dir)):
        if folder.exists() and not _is_ours(folder):
            raise _not_kept(output_dir, f"{folder} has no run of zero-recipes")


def refuse_taken(run: Run) -> None:
    """Refuse a run whose folder has what another run has saved, or what this one reads. Touches nothing."""
    settings = run.recipe.settings
    inputs = inputs_of(settings, run.recipe.path, run.environment)
    refuse_occupied(run.output_dir, requested_in(run.output_dir, settings), settings.overwrite, inputs)


@contextmanager
def hold_output_dir(output_dir: Path) -> Iterator[None]:
    """Hold the lock of the output folder within it, on rank 0. Collective.

    Raises Refusal on all ranks where another process writes into the folder, or it cannot be written.
    A run that is refused inside leaves no empty folder.
    """
    agree(lambda: None)  # a rank that is still in `refuse_in_use` would take this run for another
    with ExitStack() as holding:
        once(lambda: holding.enter_context(held(output_dir, "a run")), "locks the output folder")
        yield


def look_again(run: Run) -> Run:
    """Return the run with the checkpoint that is there now: another run may have trained in the folder before.

    The caller holds the folder. Collective. Touches nothing. Raises Refusal.
    """
    checkpoint = agree(partial(_checkpoint_now, run))[rank()]
    if checkpoint != run.checkpoint:
        say(f"{run.output_dir} has changed: resuming from {checkpoint or 'no checkpoint'}")
    return run.resuming_from(checkpoint)


def _checkpoint_now(run: Run) -> str | None:
    """The checkpoint that the run resumes from, looked for again as `preflight` does."""
    refuse_taken(run)
    settings = run.recipe.settings
    requested = requested_in(run.output_dir, settings)
    checkpoint = checkpoint_to_resume(run.output_dir, requested, settings.overwrite, silent=True)
    if checkpoint not in (None, run.checkpoint):
        refuse_misfit(checkpoint, run.settings, run.strategy, run.config)
    return checkpoint


def claim_output_dir(output_dir: Path, overwrite: bool, step: int = 0) -> Path | None:
    """Make the folder this run's, on rank 0, which holds it. Raises Refusal.

    An earlier run's failure files go. `step`: see `clear_unfinished`.
    Under `overwrite` the old folder is kept beside it, and returned.
    """
    previous = None
    if overwrite and saved_in(output_dir):
        previous = _keep_previous(output_dir)
    forget_records(output_dir)
    clear_unfinished(output_dir, step)
    cut_off = [*output_dir.glob("failure.rank[0-9]*.json"), *output_dir.glob(f"*{PART}")]
    if previous_of(output_dir).exists():
        cut_off.append(_going(output_dir))
    for path in cut_off:
        if path.is_dir():
            shutil.rmtree(path, ignore_errors=True)
        else:
            path.unlink(missing_ok=True)
    return previous


def _keep_previous(output_dir: Path) -> Path:
    """Rename the folder and make it anew. A lock in it goes on in the new one."""
    _refuse_foreign(output_dir)
    previous = previous_of(output_dir)
    try:
        if previous.exists():  # renamed first: a kill in between leaves no half of it under its name
            shutil.rmtree(_going(output_dir), ignore_errors=True)
            previous.rename(_going(output_dir))
        output_dir.resolve().rename(previous)
        output_dir.resolve().mkdir()
        if (previous / LOCK).exists():
            (previous / LOCK).rename(output_dir / LOCK)
    except OSError as error:
        raise _not_kept(output_dir, f"{error.strerror}: {error.filename}") from None
    return previous


def previous_of(output_dir: Path) -> Path:
    """Where `--overwrite true` keeps the folder; of a link, beside its target."""
    folder = output_dir.resolve()
    return folder.with_name(f"{folder.name}{PREVIOUS}")


def _going(output_dir: Path) -> Path:
    """What was kept before, while it is deleted."""
    previous = previous_of(output_dir)
    return previous.with_name(f"{previous.name}{PART}")


def _not_kept(output_dir: Path, reason: str) -> Refusal:
    return refusal("ZR752", output_dir=output_dir, previous=previous_of(output_dir), reason=reason)
