"""`overwrite: true`: what an earlier run of ours left goes aside, and is deleted once the new run has taken a step.

    output_dir/overwritten-1/           moved aside: put back where the run ends before its first step
    output_dir/overwritten-1.deleting/  renamed so at the first step: from then on it is only to be deleted

Every step of it is one rename, so that a run that is killed anywhere leaves one of the two, and the next start of the
same command goes on from there (`recover`). Nothing else in the folder is touched: neither files of other names nor
links, nor what another program wrote into a checkpoint; where a new run would mix with those it is refused.
"""

from __future__ import annotations

import json
import re
import shutil
from contextlib import suppress
from pathlib import Path

from zero_recipes.checkpoint import manifest
from zero_recipes.checkpoint.resume import numbered
from zero_recipes.checkpoint.saved_files import CHECKSUMS
from zero_recipes.config.paths_read import Input
from zero_recipes.core.files import write_json
from zero_recipes.core.findings import refusal

FAILED = ("failed", "oom", "diverged", "refused")  # metrics.schema.Status, of what is not finished; a list is none
RESULTS = ("metrics.json", "samples.jsonl", "recipe.resolved.yaml")
# what transformers 5.23 and PEFT save of a model ...
WEIGHTS = re.compile(r"(adapter_)?model(-\d{5}-of-\d{5})?\.safetensors(\.index\.json)?")
# ... and beside it, with the tokenizers' own files: without weights nobody can say whose they are
BESIDE = {
    CHECKSUMS,
    "config.json",
    "generation_config.json",
    "adapter_config.json",
    "training_args.bin",
    "chat_template.jinja",
}
BESIDE |= {"tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json", "merges.txt"}
BESIDE |= {"vocab.json", "vocab.txt", "tokenizer.model", "spiece.model", "sentencepiece.bpe.model"}
ASIDE, DELETING, MOVED = re.compile(r"overwritten-\d+"), ".deleting", ".moved.json"


def to_replace(output_dir: Path) -> list[Path]:
    """What a run of ours left in the folder, results last. Raises Refusal for what a new run would mix with."""
    checkpoints = [path for path in numbered(output_dir) if any(path.iterdir())]
    strangers = [path for checkpoint in checkpoints for path in _strangers(checkpoint)]
    names = sorted(path.name for path in output_dir.iterdir()) if output_dir.is_dir() else []
    weights = [output_dir / name for name in names if WEIGHTS.fullmatch(name)]
    results = [output_dir / name for name in RESULTS if name in names]
    trained_here = results or interrupted(output_dir) or set(checkpoints) - set(strangers)
    strangers += [] if trained_here else weights
    beside = [output_dir / name for name in names if weights and name in BESIDE]
    files = [*weights, *beside, *results]
    strangers += [path for path in files if path not in strangers and (path.is_symlink() or not path.is_file())]
    if strangers:
        raise refusal("ZR750", output_dir=output_dir, strangers=_listed(strangers))
    return [*checkpoints, *files]


def _strangers(checkpoint: Path) -> list[Path]:
    """What in a folder checkpoint-N is not of our save: all of it without a manifest or mark, links, added files."""
    written = manifest.read(checkpoint)
    if checkpoint.is_symlink() or (written is None and not manifest.is_unfinished(checkpoint)):
        return [checkpoint]
    known = None if written is None else {*written["files"], manifest.MANIFEST, manifest.UNFINISHED}
    found = []
    for path in sorted(checkpoint.rglob("*")):
        name = path.relative_to(checkpoint).as_posix()
        if path.is_symlink() or (known is not None and not path.is_dir() and name not in known):
            found.append(path)
    return found


def is_finished(output_dir: Path) -> bool:
    """Whether metrics.json is there and does not say that its run has failed."""
    try:
        return json.loads((output_dir / "metrics.json").read_text())["status"] not in FAILED
    except FileNotFoundError:
        return False
    except (OSError, ValueError, TypeError, KeyError, RecursionError):
        return True  # it cannot be read: then it is kept


def refuse_deleting_inputs(output_dir: Path, inputs: list[Input]) -> None:
    """Refuse to overwrite what the run reads. Raises the Refusal of `to_replace` too; touches nothing."""
    going = [path.resolve() for path in [*to_replace(output_dir), *interrupted(output_dir)]]
    for used in inputs if going else ():
        deleted = used.first_of(going)
        if deleted is not None:
            raise refusal(
                "ZR751",
                deleted=deleted,
                key=used.key,
                path=used.path,
                why=f" is {used.path.resolve()}." if used.path.is_symlink() else ".",
            )


def move_aside(output_dir: Path) -> Path | None:
    """Move what `to_replace` finds into a folder of its own, which is returned; None where nothing is to be kept."""
    going = to_replace(output_dir)
    if not is_finished(output_dir) and {path.name for path in going} <= set(RESULTS):
        return None  # of a run that saved nothing: the new results take their place
    number = 1
    while any((output_dir / f"overwritten-{number}{end}").exists() for end in ("", DELETING)):
        number += 1
    aside = output_dir / f"overwritten-{number}"
    try:
        aside.mkdir()
        write_json(aside / MOVED, [path.name for path in going])
        for path in going:
            path.rename(aside / path.name)
    except OSError as error:
        recover(output_dir)
        raise refusal("ZR752", filename=error.filename, aside=aside, strerror=error.strerror) from None
    return aside


def put_back(aside: Path) -> list[str]:
    """Undo `move_aside`; the results of the run that ended too early give way. Returns the names that stay aside,
    because something else stands in their place."""
    names = json.loads((aside / MOVED).read_text())
    for name in reversed(names):
        old, place = aside / name, aside.parent / name
        gives_way = name in RESULTS and place.is_file() and not place.is_symlink()
        if _stands(old) and (gives_way or not _stands(place)):
            old.replace(place)
    left = [name for name in names if _stands(aside / name)]
    if not left:
        _remove_folder(aside)
    return left


def delete(aside: Path) -> None:
    """Delete what was moved aside; killed on the way, the folder's name says that it is to be deleted."""
    if not aside.name.endswith(DELETING):
        aside = aside.rename(aside.with_name(aside.name + DELETING))
    for name in json.loads((aside / MOVED).read_text()):
        path = aside / name
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path)
        else:
            path.unlink(missing_ok=True)
    _remove_folder(aside)


def interrupted(output_dir: Path) -> list[Path]:
    """The folders of runs that were killed before their first step, the newest first."""
    found = [path for path in output_dir.glob("overwritten-*") if _is_ours(path, "")]
    return sorted(found, key=lambda path: -int(path.name.partition("-")[2]))


def recover(output_dir: Path) -> None:
    """Finish what killed runs began: put back what they had moved aside, delete what they had replaced."""
    for aside in interrupted(output_dir):
        left = put_back(aside)
        print(f"put back from {aside}, where a run was killed before its first step" + _still(left, aside), flush=True)
    for path in sorted(output_dir.glob(f"overwritten-*{DELETING}")):
        if _is_ours(path, DELETING):
            delete(path)


def _still(left: list[str], aside: Path) -> str:
    return f"; still in {aside}, for something else stands in its place: {', '.join(left)}" if left else ""


def _is_ours(path: Path, end: str) -> bool:
    if not path.name.endswith(end) or not ASIDE.fullmatch(path.name.removesuffix(end)) or path.is_symlink():
        return False
    return (path / MOVED).is_file()


def _remove_folder(aside: Path) -> None:
    (aside / MOVED).unlink()
    with suppress(OSError):  # somebody has put something there
        aside.rmdir()


def _stands(path: Path) -> bool:
    return path.exists() or path.is_symlink()


def _listed(paths: list[Path]) -> str:
    return ", ".join(path.name for path in paths[:4]) + (f" and {len(paths) - 4} more" if len(paths) > 4 else "")
