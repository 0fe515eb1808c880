"""Of this process, without importing torch: its rank, and a port that is free."""

from __future__ import annotations

import os
import socket


def rank() -> int:
    """The launcher's RANK; 0 in a single process."""
    return int(os.environ.get("RANK", 0))


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]
