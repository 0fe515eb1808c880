"""Data sets, sound ones and makers of broken ones, and what a run finds in them before it loads a model."""

import io
import json
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet
from transformers import AutoTokenizer
from trl import SFTConfig

from tests.helpers.tiny import settings_with
from zero_recipes.config.trl_arguments import trl_arguments
from zero_recipes.core.findings import Finding, Refusal
from zero_recipes.data.prepare import Prepared, prepare_rows

BASE = Path(__file__).resolve().parents[2] / "tiny_world" / "base"
CHATML = (
    "{% for m in messages %}<{{ m['role'] }}>\n{% if m['role'] == 'assistant' %}{% generation %}{{ m['content'] }}"
    "<|endoftext|>{% endgeneration %}{% else %}{{ m['content'] }}<|endoftext|>{% endif %}\n{% endfor %}"
    "{% if add_generation_prompt %}<assistant>\n{% endif %}"
)
ALPACA = [{"instruction": f"Name fish {i}.", "input": "", "output": f"Red fish {i}."} for i in range(20)]
PAIRS = [{"prompt": f"Say {i}.\n", "completion": f"Word {i}."} for i in range(20)]
TEXTS = [{"text": f"The fish {i} hums."} for i in range(20)]
IDS = [{"input_ids": [5 + i, 6, 7, 0], "labels": [-100, 6, 7, 0]} for i in range(20)]


def chat(number: int, column: str = "messages", who: str = "role", what: str = "content") -> dict[str, Any]:
    return {column: [{who: "user", what: f"Say {number}."}, {who: "assistant", what: f"Word {number}."}]}


CHATS = [chat(i) for i in range(20)]
SHAREGPT = [chat(i, "conversations", "from", "value") for i in range(20)]
SOUND = {"alpaca": ALPACA, "pairs": PAIRS, "texts": TEXTS, "chats": CHATS, "ids": IDS, "sharegpt": SHAREGPT}


def lines(rows: list[Any]) -> bytes:
    return "".join(json.dumps(row) + "\n" for row in rows).encode()


def with_row(rows: list[dict], number: int, **changes: Any) -> list[dict]:
    """`rows` with one of them changed; Ellipsis removes a column."""
    changed = {key: value for key, value in (rows[number] | changes).items() if value is not ...}
    return [*rows[:number], changed, *rows[number + 1 :]]


def parquet(rows: list[dict]) -> bytes:
    columns = {name: None for row in rows for name in row}  # pyarrow takes the first row's alone
    buffer = io.BytesIO()
    pa.parquet.write_table(pa.Table.from_pylist([columns | row for row in rows]), buffer)
    return buffer.getvalue()


def written(folder: Path, files: dict[str, bytes]) -> Path:
    """A data folder."""
    (folder / "data").mkdir()
    for name, content in files.items():
        (folder / "data" / name).write_bytes(content)
    return folder / "data"


ON_CPU = {"use_cpu": True, "bf16": False, "report_to": "none", "activation_checkpointing": False, "max_length": 64}


def arguments(folder: Path, **keys: Any) -> SFTConfig:
    return SFTConfig(output_dir=str(folder / "out"), **(ON_CPU | keys))


def prepared(folder: Path, template: str | None = CHATML, **keys: Any) -> Prepared:
    """The data of a folder, as a run with these keys prepares it. Raises Refusal."""
    tokenizer = AutoTokenizer.from_pretrained(BASE)
    tokenizer.chat_template = template
    settings = settings_with(**ON_CPU | {"dataset_name": str(folder), "output_dir": str(folder / "out")} | keys)
    return prepare_rows(settings, trl_arguments(settings, folder).training, tokenizer)


def found_in(folder: Path, **keys: Any) -> list[Finding]:
    """What a run finds in the data of a folder, whether it is refused or not. Other exceptions go through."""
    try:
        return prepared(folder, **keys).findings
    except Refusal as refusal:
        return refusal.findings
