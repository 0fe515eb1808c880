"""What may lie in the place of a metrics.json and is none."""

from __future__ import annotations

CONTENTS = [
    *(b"", b"null", b"[]", b"5", b'"x"', b"{", b"{}", b"\xff\xfe{}", b"[{}]", b"NaN", bytes(100), b'{"schema": 1}'),
    *(b'{"schema": "1", "status": "ok"}', b'{"schema": 2, "status": "ok"}', b'\xef\xbb\xbf{"schema": 1}'),
    *(b'{"a": ' + b"[" * 100_000 + b"]" * 100_000 + b"}", b'{"schema": ' + b"9" * 6000 + b"}", b"x" * 1_000_000),
    *(b'{"eval_loss": 1.0, "epoch": 3}', b'{"schema": 1, "status": "ok", "name": "a", "strategy": "zero1"}'),
]
