"""The weights of a saved model or adapter as the headers of their files describe them."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from pydantic import BaseModel, ConfigDict, ValidationError
from safetensors import SafetensorError, safe_open

from zero_recipes.checkpoint.documents import first_fault, read_json

SINGLE, INDEX, ADAPTER = "model.safetensors", "model.safetensors.index.json", "adapter_model.safetensors"


class NotWhole(Exception):
    """A saved model that lacks weights. Raised after training, so it is no Refusal."""


@dataclass(frozen=True)
class Entry:
    """One tensor as a header describes it."""

    file: Path
    dtype: str  # "BF16", "F32", ...
    shape: tuple[int, ...]

    @property
    def elements(self) -> int:
        count = 1
        for size in self.shape:
            count *= size
        return count


class _Index(BaseModel):
    model_config = ConfigDict(strict=True)
    weight_map: dict[str, str]


def entries_of(folder: Path) -> dict[str, Entry]:
    """{tensor name: entry}, from one file or from the shards that an index names. Raises NotWhole."""
    if (folder / SINGLE).is_file() and (folder / INDEX).is_file():
        raise NotWhole(
            f"{folder} is not whole: it holds {SINGLE} and {INDEX}, two models. from_pretrained reads the first; "
            "delete the one that is not meant."
        )
    for name in (ADAPTER, SINGLE):
        if (folder / name).is_file():
            return _read_header(folder / name)
    if not (folder / INDEX).is_file():
        return {}
    placed = _placed(folder / INDEX)
    entries: dict[str, Entry] = {}
    for shard in sorted(set(placed.values())):
        if not (folder / shard).is_file():
            raise NotWhole(f"{folder} is not whole: the index names {shard}, which is not there")
        entries |= _read_header(folder / shard)
    astray = sorted(name for name in placed if name not in entries or entries[name].file.name != placed[name])
    strangers = sorted(entries.keys() - placed.keys())
    if astray or strangers:
        first = (
            f"{astray[0]} is not in {placed[astray[0]]}" if astray else f"{strangers[0]} is in no entry of the index"
        )
        raise NotWhole(f"{folder} is not whole: {first} ({len(astray) + len(strangers)} in all)")
    return entries


def strays(folder: Path, entries: dict[str, Entry]) -> list[str]:
    """Files of weights beside those that are read, by name."""
    read = {entry.file.name for entry in entries.values()}
    beside = [*folder.glob("*.safetensors"), *folder.glob("pytorch_model*.bin")]
    return sorted(path.name for path in beside if path.name not in read)


def _placed(index: Path) -> dict[str, str]:
    try:
        return _Index.model_validate(read_json(index)).weight_map
    except ValidationError as error:
        raise NotWhole(f"{index} cannot be read: {first_fault(error)}") from error
    except ValueError as error:
        raise NotWhole(f"{index} cannot be read: {error}") from error


def _read_header(path: Path) -> dict[str, Entry]:
    """safetensors checks that names, shapes and offsets fill the file exactly."""
    try:
        with safe_open(path, "pt") as file:
            slices = {name: file.get_slice(name) for name in file.keys()}  # noqa: SIM118 (no mapping)
            return {name: Entry(path, s.get_dtype(), tuple(s.get_shape())) for name, s in slices.items()}
    except (SafetensorError, OSError) as error:
        raise NotWhole(
            f"{path} is cut off or damaged: {error}. The disk was full or the process was killed while it was written, "
            "or the copy is not complete."
        ) from error
