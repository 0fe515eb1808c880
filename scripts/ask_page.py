"""Write the generated part of docs/ask.md: what `zero-recipes ask` prints of the demo. --check: is it up to date?

From docs/demo/full/samples.jsonl, the demo's own answers: `ask` gives the same (tests/engine/test_ask.py). ROUGE and
perplexity are computed here, as `ask` computes them.
"""

from __future__ import annotations

import io
import sys
from pathlib import Path

from rich.console import Console
from transformers import AutoTokenizer

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from zero_recipes.ask.answers import Asked, compare  # noqa: E402
from zero_recipes.ask.show import show  # noqa: E402
from zero_recipes.data.samples import Sample  # noqa: E402
from zero_recipes.metrics.read_runs import SampleRow, read_samples  # noqa: E402
from zero_recipes.training.samples import Answers, question  # noqa: E402

PAGE = ROOT / "docs" / "ask.md"
ROWS = ROOT / "docs" / "demo" / "full" / "samples.jsonl"
BEGIN, END = "<!-- ask: begin (scripts/ask_page.py) -->", "<!-- ask: end -->"
TALK_BEGIN, TALK_END = "<!-- talk: begin (scripts/ask_page.py) -->", "<!-- talk: end -->"
SHOWN = 2


def asked_again(rows: list[SampleRow]) -> Asked:
    """The demo's answers, scored as `ask` scores them."""
    tokenizer = AutoTokenizer.from_pretrained(ROOT / "tiny_world" / "base")
    samples = []
    for row in rows:
        answer = tokenizer(row.reference + tokenizer.eos_token)["input_ids"]
        samples.append(Sample(row.prompt, row.reference, labels=(-100, *answer)))
    before = Answers([row.before for row in rows], [row.scores_before["reference_loss"] for row in rows])
    after = Answers([row.after for row in rows], [row.scores_after["reference_loss"] for row in rows])
    return compare(samples, before, after)


def printed(rows: list[SampleRow]) -> str:
    console = Console(width=80, file=io.StringIO())
    show(asked_again(rows), console, "base", "model", most=SHOWN)
    lines = (line.rstrip() for line in console.file.getvalue().strip().splitlines())
    return "```text\n" + "\n".join(lines) + "\n```"


def talk(rows: list[SampleRow]) -> str:
    turns = [f"you> {question(row.prompt)}\nbase> {row.before}\nmodel> {row.after}" for row in rows[:SHOWN]]
    return "```text\n" + "\n\n".join(turns) + "\n```"


def with_parts(page: str) -> str:
    rows = read_samples(ROWS)
    for begin, end, part in ((BEGIN, END, printed(rows)), (TALK_BEGIN, TALK_END, talk(rows))):
        before, rest = page.split(begin)
        page = f"{before}{begin}\n\n{part}\n\n{end}{rest.split(end)[1]}"
    return page


def main(arguments: list[str]) -> int:
    page = PAGE.read_text()
    wanted = with_parts(page)
    if "--check" in arguments:
        return int(page != wanted)
    PAGE.write_text(wanted)
    print(f"written: {PAGE.relative_to(ROOT)}")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
