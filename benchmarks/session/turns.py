"""What programs of benchmarks/gpu_session.py do besides their work: wait for their turn, and do without what their case
names.

The session starts several programs at once. Each imports its libraries and loads its model, then says that it is ready,
and goes on when the session lets it: so what is timed has the machine to itself, and does not wait for imports.
"""

import contextlib
import json
import os
import time
from collections.abc import Iterator
from pathlib import Path
from unittest import mock

GATE = "SESSION_GATE"  # the beginning of two files' names: GATE.RANK.ready by the program, GATE.go by the session
WAY = "SESSION_WAY"  # JSON: a row of `ways` in cases.yaml


def wait_for_turn() -> None:
    gate = os.environ.get(GATE)
    if gate is None:
        return  # started by hand
    Path(f"{gate}.{os.environ.get('RANK', 0)}.ready").touch()
    wait_for(Path(f"{gate}.go"))
    use_cudnn()


def wait_for(file: Path) -> None:
    while not file.exists():  # the session ends a program that waits too long
        time.sleep(0.05)


def use_cudnn() -> None:
    """As the case says, whatever the program has set."""
    import torch

    wanted = json.loads(os.environ.get(WAY, "{}")).get("cudnn")
    if wanted is not None:
        torch.backends.cuda.enable_cudnn_sdp(wanted)


@contextlib.contextmanager
def in_its_way() -> Iterator[None]:
    """Within it, functions that the case does without do nothing. Raises AttributeError for one that is not there."""
    way = json.loads(os.environ.get(WAY, "{}"))
    with contextlib.ExitStack() as off:
        for name in way.get("without", []):
            off.enter_context(mock.patch(name, lambda *_, **__: None))
        yield
