"""Pickles as a stranger may plant them: each would create a file if it were unpickled."""

import os
import pickle
from pathlib import Path
from typing import Any

import torch


class Planted:
    """Unpickling it runs a command."""

    def __init__(self, mark: Path):
        self.mark = mark

    def __reduce__(self):
        return os.system, (f"touch {self.mark}",)


def plant(path: Path, mark: Path, kind: str) -> None:
    """Let the pickle at `path` hold what it held, and a command; `kind`: of the file's format."""
    held: Any = {}
    if path.is_file():
        held = torch.load(path, weights_only=False)
    held = {**held, "planted": Planted(mark)} if isinstance(held, dict) else [held, Planted(mark)]
    if kind == "zip":
        torch.save(held, path)
    elif kind == "zip, protocol 4":
        torch.save(held, path, pickle_protocol=4)
    elif kind == "legacy":
        torch.save(held, path, _use_new_zipfile_serialization=False)
    elif kind == "numpy":  # a class that may be read, with one inside that may not
        import numpy

        torch.save({**held, "planted": numpy.array([Planted(mark)], dtype=object)}, path)
    else:
        path.write_bytes(pickle.dumps(held["planted"], protocol=int(kind.rpartition(" ")[2])))


KINDS = ("zip", "zip, protocol 4", "legacy", "numpy", "pickle 0", "pickle 2", "pickle 4", "pickle 5")
