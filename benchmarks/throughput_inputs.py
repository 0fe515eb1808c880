"""Models, rows and the job of benchmarks/throughput.py: both sides see the same rows in the same number of steps."""

from __future__ import annotations

import json
import random
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer
from trl import pack_dataset

from zero_recipes.data.load import alpaca_row

ROOT = Path(__file__).resolve().parents[1]
OWN = ROOT / "tiny_world"
ALPACA = ROOT.parent / "shared" / "fixtures" / "alpaca_2k.jsonl"
MICRO_BATCH, RANKS = 8, 2  # TRL's default, and the processes
LONGEST = 1024  # tokens of a row: TRL's default max_length, so that nobody cuts one
HELD_OUT = 32  # rows
SHAPES = {  # random weights, for the tokenizer of tiny_world/base
    "gpt_neox-1m": {"hidden_size": 128, "intermediate_size": 512, "num_hidden_layers": 4, "num_attention_heads": 4},
    "gpt_neox-12m": {"hidden_size": 384, "intermediate_size": 1536, "num_hidden_layers": 6, "num_attention_heads": 6},
    "llama-45m": {"hidden_size": 768, "intermediate_size": 2048, "num_hidden_layers": 6, "num_attention_heads": 12},
}


@dataclass(frozen=True)
class Workload:
    """A model and rows, and how the recipe lays these into packs."""

    name: str
    model: str  # "own" (tiny_world/base) or a name of SHAPES
    rows: str  # "own" or "alpaca"
    steps: int
    learning_rate: float
    packs: int = 1  # of a process in a step
    at_once: int = 1  # of them in a micro batch

    @property
    def accumulation(self) -> int:
        return self.packs // self.at_once


def missing(workload: Workload) -> str | None:
    """Why a workload cannot be measured here; None where it can."""
    if workload.rows == "alpaca" and not ALPACA.is_file():
        return f"{ALPACA.name} (2,000 rows of Alpaca, CC BY-NC 4.0) is not part of this repository"
    return None


def job_of(workload: Workload, folder: Path) -> dict[str, Any]:
    """What benchmarks/throughput_programs.py takes, but for the strategy; writes model, rows and recipe to `folder`."""
    folder.mkdir(parents=True, exist_ok=True)
    model = model_folder(workload.model, folder / "model")
    tokenizer = AutoTokenizer.from_pretrained(model)
    rows = [row for row in all_rows(workload.rows) if len(tokens_of(row, tokenizer)["input_ids"]) <= LONGEST]
    held_out, rows = rows[:HELD_OUT], rows[HELD_OUT:]
    lengths = [len(tokens_of(row, tokenizer)["input_ids"]) for row in rows]
    pack, chosen = pack_length(lengths, workload.steps, workload.packs)
    _write_lines(folder / "rows" / "train.jsonl", rows[:chosen])
    (folder / "held_out.json").write_text(json.dumps([tokens_of(row, tokenizer) for row in held_out]))
    same = {"model_name_or_path": str(model), "dataset_name": str(folder / "rows"), "use_cpu": True}
    same |= {"learning_rate": workload.learning_rate, "num_train_epochs": 1, "report_to": "none"}
    same |= {"save_strategy": "no"}
    fast = {"bf16": True, "packing": True, "max_length": pack, "per_device_train_batch_size": workload.at_once}
    fast |= {"gradient_accumulation_steps": workload.accumulation, "activation_checkpointing": False}
    fast |= {"ddp_find_unused_parameters": False}  # the Trainer would look for some after each backward pass
    fast |= {"supervised_logits_only": True}
    fast |= {"save_model": False, "overwrite": True, "skip_plan": True, "logging_steps": 10}
    (folder / "recipe.yaml").write_text(json.dumps(same | fast, indent=2))  # JSON is YAML
    return {
        "folder": str(folder),
        "model": str(model),
        "held_out": str(folder / "held_out.json"),
        "device": "cpu",
        "attention": "sdpa",
        "learning_rate": workload.learning_rate,
        "accumulation": workload.accumulation,
        "trl": same,
        "recipe": {},
        "max_length": pack,
        "rows": chosen,
        "longest_row": max(lengths[:chosen]),
    }


def model_folder(name: str, folder: Path) -> Path:
    """A folder with weights and tokenizer."""
    if name == "own":
        return OWN / "base"
    tokenizer = AutoTokenizer.from_pretrained(OWN / "base")
    kind = name.partition("-")[0]
    known = {"vocab_size": len(tokenizer), "max_position_embeddings": 2048, "bos_token_id": 0, "eos_token_id": 0}
    known |= {"pad_token_id": 1, "attention_dropout": 0.0} | ({"hidden_dropout": 0.0} if kind == "gpt_neox" else {})
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(AutoConfig.for_model(kind, **known, **SHAPES[name])).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def all_rows(name: str) -> list[dict[str, str]]:
    """Prompts and completions, as TRL takes them; this project's own in an order drawn with a seed."""
    path = ALPACA if name == "alpaca" else OWN / "train.jsonl"
    rows = [alpaca_row(json.loads(line)) for line in path.read_text().splitlines()]
    random.Random(0).shuffle(rows)
    return rows


def tokens_of(row: dict[str, str], tokenizer) -> dict[str, list[int]]:
    """input_ids and labels of a row as TRL makes them: the completion ends the text and has the loss."""
    prompt = tokenizer(row["prompt"])["input_ids"]
    ids = tokenizer(row["prompt"] + row["completion"])["input_ids"] + [tokenizer.eos_token_id]
    return {"input_ids": ids, "labels": [-100] * len(prompt) + ids[len(prompt) :]}


def pack_length(lengths: list[int], steps: int, packs: int, ranks: int = RANKS) -> tuple[int, int]:
    """(tokens of a pack, rows): so many rows that TRL's micro batches fill `steps` steps exactly, and the shortest pack
    at which the same rows fill as many steps of `packs` packs a process. Raises ValueError where none is."""
    rows = steps * ranks * MICRO_BATCH
    if rows > len(lengths):
        raise ValueError(f"{steps} steps need {rows} rows, {len(lengths)} are there")
    wanted = steps * ranks * packs
    for length in range(max(max(lengths[:rows]), sum(lengths[:rows]) // wanted), sum(lengths[:rows])):
        made = packs_of(lengths[:rows], length)
        if made == wanted:
            return length, rows
        if made < wanted:
            break
    raise ValueError(f"{rows} rows do not fill {wanted} packs of any length; take fewer packs a step")


def packs_of(lengths: list[int], longest: int) -> int:
    """Packs that TRL makes of rows of these lengths."""
    rows = Dataset.from_dict({"input_ids": [[0] * length for length in lengths]})
    return len(pack_dataset(rows, longest, "bfd"))


def _write_lines(path: Path, rows: list[dict]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
