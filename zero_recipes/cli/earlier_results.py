"""What an earlier run left in the folder of a run to come: kept, and kept apart from the new run's row."""

from __future__ import annotations

import itertools
from pathlib import Path

from zero_recipes.checkpoint import overwrite
from zero_recipes.metrics.schema import FILE


class EarlierResults:
    """What an earlier run left of its numbers in a folder, so that they neither become a new run's row nor are lost.

    They stay in their place while the new run is at work: with `overwrite` it moves them aside and back itself.
    """

    def __init__(self, folder: Path):
        self.folder = folder
        self.kept_in: Path | None = None
        self._is_finished = overwrite.is_finished(folder)
        self._seen = {path: _identity(path) for path in self._files()}

    def _files(self) -> list[Path]:
        return [path for path in (self.folder / FILE, *self.folder.glob("failure.rank*.json")) if path.is_file()]

    def move_aside(self) -> None:
        """Once the new run is over: what it has left untouched goes out of the way, a finished run's numbers into
        FOLDER/earlier-N."""
        untouched = [path for path in self._files() if self._seen.get(path) == _identity(path)]
        if untouched and self._is_finished:
            number = next(n for n in itertools.count(1) if not (self.folder / f"earlier-{n}").exists())
            self.kept_in = self.folder / f"earlier-{number}"
            self.kept_in.mkdir()
        for path in untouched:
            if self.kept_in is None:
                path.unlink()  # of a run that failed or was refused: its row gives way, as in the run itself
            else:
                path.rename(self.kept_in / path.name)


def _identity(path: Path) -> tuple[int, int, int]:
    """Another one after the file was written anew."""
    found = path.stat()
    return found.st_ino, found.st_mtime_ns, found.st_size
