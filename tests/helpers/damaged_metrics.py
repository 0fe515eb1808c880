"""Folders of runs in which something is damaged or foreign, drawn by a seed."""

from __future__ import annotations

import json
import math
import random
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from tests.helpers.report_runs import SPEED, metrics, save

VALUES = [
    *(None, True, False, -1, 0, 1, -0.5, math.nan, math.inf, -math.inf, 1e308, -1e308, 10**30, 10**400, 2**63, 1e-320),
    *("", "x", "NaN", "auto", "\ud800", "\x00", "$\\frac{", "[/red]", "<b>", "a\nb", "a|b", "x" * 100_000),
    *([], [None], [1], ["a"], [[]], [{}], {}, {"a": 1}, {"a": {"b": []}}, list(range(2000)), [math.nan] * 5),
    *([1e308] * 5, [-1.0] * 6, [0.0] * 6, [1e-320] * 6, [None] * 6, ["x"] * 6),
]
CONTENTS = [
    *(b"", b"null", b"[]", b"5", b'"x"', b"{", b"{}", b"\xff\xfe{}", b"[{}]", b"NaN", bytes(100), b'{"schema": 1}'),
    *(b'{"schema": "1", "status": "ok"}', b'{"schema": 2, "status": "ok"}', b'\xef\xbb\xbf{"schema": 1}'),
    *(b'{"a": ' + b"[" * 100_000 + b"]" * 100_000 + b"}", b'{"schema": ' + b"9" * 6000 + b"}", b"x" * 1_000_000),
    *(b'{"eval_loss": 1.0, "epoch": 3}', b'{"schema": 1, "status": "ok", "name": "a", "strategy": "zero1"}'),
]
NAMES = [*SPEED, "full", "zero2_offload", "$x_{", "a[b]", "é\n|"]
SAMPLE = {
    **{"prompt": "a", "before": "b", "after": "c", "reference": "d"},
    **{"scores_before": {"token_f1": 0.1, "reference_loss": 2.0}},
    **{"scores_after": {"token_f1": 0.5, "reference_loss": 1.0}},
}
PARTS = ("params", "grads", "optimizer", "activations", "buckets", "loss_head", "other")


def whole(strategy: str) -> dict[str, Any]:
    """A metrics.json in which no part is absent."""
    states = {"params": 1, "grads": 1, "optimizer": 1}
    planned = {"source": "engine", "peak_memory_bytes": 44 * 2**20, "model_state_bytes": states}
    planned |= {"at_peak": dict.fromkeys(PARTS, 5), "reserved_bytes": {"low": 5, "high": 10}}
    found = metrics(strategy, predicted=planned, eval_history=[{"step": 2, "loss": 1.0}], first_step=1, resumed_at=[3])
    found["communication_bytes_between_nodes"] = {"all_gather": 5}
    found["hardware"]["gpu_memory_bytes"] = 80 * 2**30
    failure = {"phase": "train", "rank": 1, "signal": "SIGKILL", "cures": ["a"]}
    return found | {"failure": failure | {"largest_memory": [{"what": "o", "bytes": 5}]}}


def mutated(content: Any, draw: random.Random) -> Any:
    """`content` with one to three of its values replaced, removed or taken from elsewhere in it."""
    for _ in range(draw.choice([1, 1, 1, 2, 3])):
        holder, key = draw.choice(list(_places(content)))
        kind = draw.random()
        if kind < 0.75:
            holder[key] = draw.choice(VALUES)
        elif kind < 0.9:
            del holder[key]
        else:
            holder[key] = json.loads(json.dumps(draw.choice(list(content.values()))))
    return content


def _places(value: Any) -> Iterator[tuple[Any, Any]]:
    for key, inner in value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ():
        yield value, key
        yield from _places(inner)


def damaged_folder(folder: Path, draw: random.Random) -> Path:
    """A folder with one damaged run, and with sound ones or none."""
    for strategy in draw.sample(list(SPEED), draw.randint(0, 3)):
        save(folder / strategy, whole(strategy), [SAMPLE])
    name = draw.choice(NAMES)
    run = folder / name
    shutil.rmtree(run, ignore_errors=True)
    strategy = name if name in SPEED else "zero1"
    save(run, whole(strategy))
    file, kind = (
        run / "metrics.json",
        draw.choice(["raw", "odd", "bytes", "samples", "samples_folder", "value", "value", "value"]),
    )
    if kind == "value":
        content = mutated(whole(strategy), draw)
        file.write_text(json.dumps(content | ({"status": "failed"} if draw.random() < 0.2 else {})))
    elif kind == "raw":
        file.write_bytes(draw.choice(CONTENTS))
    elif kind == "bytes":
        text = bytearray(file.read_bytes())
        place = draw.randrange(len(text))
        text[place] = draw.randrange(256)
        file.write_bytes(text[: draw.choice([place, len(text)])])
    elif kind == "samples":
        lines = "".join(json.dumps(mutated(json.loads(json.dumps(SAMPLE)), draw)) + "\n" for _ in range(3))
        (run / "samples.jsonl").write_bytes(draw.choice([lines.encode(), lines.encode(), draw.choice(CONTENTS)]))
    elif kind == "samples_folder":
        (run / "samples.jsonl").mkdir()
    else:
        file.unlink()
        odd = draw.choice(["folder", "loop", "nowhere"])
        file.mkdir() if odd == "folder" else file.symlink_to(file if odd == "loop" else "nowhere")
    return folder
