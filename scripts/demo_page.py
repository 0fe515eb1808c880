"""The table of docs/demo.md, from docs/demo/report.json."""

import json
from collections.abc import Iterator
from pathlib import Path

REPORT = Path(__file__).resolve().parents[1] / "docs" / "demo" / "report.json"


def demo_rows() -> Iterator[str]:
    """What each strategy stored, sent and took."""
    yield "| strategy | model states | textbook | tokens/s | median step | communication in Φ | paper | final loss |"
    yield "| --- | ---: | ---: | ---: | ---: | ---: | ---: | ---: |"
    for row in json.loads(REPORT.read_text())["rows"]:
        if not row["compared"]:  # the full run
            continue
        cells = (
            row["strategy"],
            megabytes(row["state_bytes"]),
            megabytes(row["textbook_bytes"]),
            f"{row['tokens_per_second']:,.0f}",
            f"{row['step_seconds_median']:.3f} s",
            f"{row['communication_in_phi']:.2f}",
            f"{row['paper_in_phi']:.2f}",
            f"{row['final_loss']:.4f}",
        )
        yield f"| {' | '.join(cells)} |"


def megabytes(size: float) -> str:
    """Three digits of a size in MB."""
    return f"{size / 1e6:.3g} MB"
