"""Data sets that are wrong inside, each with the code and the words of what it is refused for."""

from __future__ import annotations

import io
import json
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pyarrow as pa
import pyarrow.parquet
from transformers import AutoTokenizer
from trl import DatasetMixtureConfig, ScriptArguments, SFTConfig

from zero_recipes.core.findings import Finding, Refusal
from zero_recipes.data.prepare import prepare_rows

BASE = Path(__file__).resolve().parents[2] / "tiny_world" / "base"
CHATML = (
    "{% for m in messages %}<{{ m['role'] }}>\n{{ m['content'] }}<|endoftext|>\n{% endfor %}"
    "{% if add_generation_prompt %}<assistant>\n{% endif %}"
)
ALPACA = [{"instruction": f"Name fish {i}.", "input": "", "output": f"Red fish {i}."} for i in range(20)]
PAIRS = [{"prompt": f"Say {i}.\n", "completion": f"Word {i}."} for i in range(20)]
TEXTS = [{"text": f"The fish {i} hums."} for i in range(20)]
CHATS = [
    {"messages": [{"role": "user", "content": f"Say {i}."}, {"role": "assistant", "content": f"Word {i}."}]}
    for i in range(20)
]
IDS = [{"input_ids": [5 + i, 6, 7, 0], "labels": [-100, 6, 7, 0]} for i in range(20)]
SHAREGPT = [
    {"conversations": [{"from": "user", "value": f"Say {i}."}, {"from": "assistant", "value": f"Word {i}."}]}
    for i in range(20)
]
SOUND = {"alpaca": ALPACA, "pairs": PAIRS, "texts": TEXTS, "chats": CHATS, "ids": IDS, "sharegpt": SHAREGPT}


@dataclass(frozen=True)
class BadData:
    """Files of a data folder, the recipe's keys beside the sound ones, and what is found."""

    name: str
    files: dict[str, bytes]
    code: str
    said: tuple[str, ...]  # in the finding's first sentence
    keys: dict[str, Any] = field(default_factory=dict)
    level: str = "error"


def lines(rows: list[Any]) -> bytes:
    return "".join(json.dumps(row) + "\n" for row in rows).encode()


def with_row(rows: list[dict], number: int, **changes: Any) -> list[dict]:
    """`rows` with one of them changed; Ellipsis removes a column."""
    changed = {key: value for key, value in (rows[number] | changes).items() if value is not ...}
    return [*rows[:number], changed, *rows[number + 1 :]]


def parquet(rows: list[dict], schema: pa.Schema | None = None) -> bytes:
    buffer = io.BytesIO()
    pa.parquet.write_table(pa.Table.from_pylist(rows, schema), buffer)
    return buffer.getvalue()


def prepared(
    folder: Path, dataset_format: str | None = None, template: str | None = CHATML, **keys: Any
) -> list[Finding]:
    """What a run finds in the data of a folder before it loads a model, whether it is refused or not.

    Any other exception than a Refusal goes through.
    """
    script = {"dataset_train_split", "dataset_test_split", "dataset_streaming", "dataset_config"}
    ours = SimpleNamespace(
        dataset_format=dataset_format, sample_prompts=keys.pop("sample_prompts", None), ignore=keys.pop("ignore", None)
    )
    mixture = DatasetMixtureConfig(datasets=keys.pop("datasets", []))
    script_args = ScriptArguments(dataset_name=str(folder), **{key: keys.pop(key) for key in script & keys.keys()})
    sound = {"use_cpu": True, "bf16": False, "report_to": "none", "max_length": 64, "activation_checkpointing": False}
    training_args = SFTConfig(output_dir=str(folder / "out"), **(sound | keys))
    tokenizer = AutoTokenizer.from_pretrained(BASE)
    tokenizer.chat_template = template
    try:
        return prepare_rows(script_args, training_args, mixture, ours, tokenizer).findings
    except Refusal as refusal:
        return refusal.findings
