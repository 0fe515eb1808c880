"""Models, rows and the job of benchmarks/throughput.py: both sides see the same rows in the same number of steps."""

import json
import random
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer
from trl import pack_dataset

from zero_recipes.data.forms import alpaca_row

ROOT = Path(__file__).resolve().parents[1]
OWN = ROOT / "tiny_world"
MODELS = ROOT / "zero_recipes" / "tools" / "plan" / "models"
ALPACA = ROOT.parent / "shared" / "fixtures" / "alpaca_2k.jsonl"
MICRO_BATCH = 8  # TRL's default
LONGEST = 1024  # tokens of a row: TRL's default max_length, so that nobody cuts one
HELD_OUT = 32  # rows
SHAPES = {  # random weights, for the tokenizer of tiny_world/base
    "gpt_neox-12m": {"hidden_size": 384, "intermediate_size": 1536, "num_hidden_layers": 6, "num_attention_heads": 6},
    "llama-45m": {"hidden_size": 768, "intermediate_size": 2048, "num_hidden_layers": 6, "num_attention_heads": 12},
}


@dataclass(frozen=True)
class Workload:
    """A model and rows, and how the recipe lays these into packs."""

    name: str
    model: str  # "own" (tiny_world/base), a name of SHAPES or of zero_recipes/tools/plan/models/
    rows: str  # "own", "alpaca", or "drawn": as uneven as Alpaca's, of any number
    steps: int
    learning_rate: float
    packs: int = 2  # of a process in a step
    at_once: int = 1  # of them in a micro batch
    ranks: int = 2
    device: str = "cpu"
    recipe: dict[str, Any] = field(default_factory=dict)  # keys laid over the fast recipe

    @property
    def accumulation(self) -> int:
        return self.packs // self.at_once


def job_of(workload: Workload, folder: Path) -> dict[str, Any]:
    """What benchmarks/throughput_programs.py takes, but for the strategy; writes model, rows and recipe to `folder`."""
    folder.mkdir(parents=True, exist_ok=True)
    model = model_folder(workload.model, folder / "model", workload.device)
    tokenizer = AutoTokenizer.from_pretrained(model)
    rows = [row for row in all_rows(workload.rows) if len(tokens_of(row, tokenizer)["input_ids"]) <= LONGEST]
    held_out, rows = rows[:HELD_OUT], rows[HELD_OUT:]
    lengths = [len(tokens_of(row, tokenizer)["input_ids"]) for row in rows]
    count = workload.steps * workload.ranks * MICRO_BATCH
    pack = pack_length(lengths[:count], workload.steps * workload.ranks * workload.packs)
    (folder / "rows").mkdir()
    (folder / "rows" / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows[:count]))
    (folder / "held_out.json").write_text(json.dumps([tokens_of(row, tokenizer) for row in held_out]))
    same = {"model_name_or_path": str(model), "dataset_name": str(folder / "rows"), "num_train_epochs": 1}
    same |= {"learning_rate": workload.learning_rate, "report_to": "none", "save_strategy": "no"}
    same |= {"use_cpu": True} if workload.device == "cpu" else {}
    tuned = {"packing": True, "max_length": pack, "per_device_train_batch_size": workload.at_once}
    tuned |= {"gradient_accumulation_steps": workload.accumulation, "activation_checkpointing": False}
    # without ddp_find_unused_parameters: the Trainer would look for some after each backward pass
    fast = {"bf16": True, "ddp_find_unused_parameters": False, "supervised_logits_only": True, "save_model": False}
    fast |= {"overwrite": True, "skip_plan": True, "logging_steps": 10}
    recipe = same | tuned | fast | workload.recipe
    (folder / "recipe.yaml").write_text(json.dumps(recipe, indent=2))  # JSON is YAML
    tuned = {key: recipe[key] for key in tuned}
    return {
        "folder": str(folder),
        "model": str(model),
        "held_out": str(folder / "held_out.json"),
        "attention": workload.recipe.get("attn_implementation", "sdpa"),
        **{key: getattr(workload, key) for key in ("device", "learning_rate", "accumulation")},
        "trl": same,
        "trl_tuned": same | tuned,
        "recipe": {},
        "max_length": pack,
        "rows": count,
        "longest_row": max(lengths[:count]),
    }


def model_folder(name: str, folder: Path, device: str) -> Path:
    """A folder with weights and tokenizer; random weights are fp32, drawn on the device."""
    if name == "own":
        return OWN / "base"
    tokenizer = AutoTokenizer.from_pretrained(OWN / "base")
    if name in SHAPES:
        kind, shape = name.partition("-")[0], SHAPES[name] | {"vocab_size": len(tokenizer), "attention_dropout": 0.0}
        shape |= {"max_position_embeddings": 2048, "bos_token_id": 0, "eos_token_id": 0, "pad_token_id": 1}
        shape |= {"hidden_dropout": 0.0} if kind == "gpt_neox" else {}
    else:
        shape = json.loads((MODELS / f"{name}.json").read_text())["config"]
        kind = shape.pop("model_type")
    torch.manual_seed(0)
    with torch.device(device):
        model = AutoModelForCausalLM.from_config(AutoConfig.for_model(kind, **shape), dtype=torch.float32)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def all_rows(name: str) -> list[dict[str, str]]:
    """Prompts and completions, as TRL takes them; this project's own in an order drawn with a seed."""
    draw = random.Random(0)
    if name == "drawn":
        words = ["the", "red", "fish", "hums", "in", "the", "cave", "by", "the", "river", "."] * LONGEST
        lengths = [int(200 * draw.lognormvariate(0, 0.7)) for _ in range(1000)]
        return [{"prompt": "Go on:", "completion": " ".join(words[:length])} for length in lengths]
    path = ALPACA if name == "alpaca" else OWN / "train.jsonl"
    rows = [alpaca_row(json.loads(line)) for line in path.read_text().splitlines()]
    draw.shuffle(rows)
    return rows


def tokens_of(row: dict[str, str], tokenizer) -> dict[str, list[int]]:
    """input_ids and labels of a row as TRL makes them: the completion ends the text and has the loss."""
    prompt = tokenizer(row["prompt"])["input_ids"]
    ids = tokenizer(row["prompt"] + row["completion"])["input_ids"] + [tokenizer.eos_token_id]
    return {"input_ids": ids, "labels": [-100] * len(prompt) + ids[len(prompt) :]}


def pack_length(lengths: list[int], packs: int) -> int:
    """The shortest pack at which these rows fill exactly so many. Raises ValueError where there is none."""
    rows = Dataset.from_dict({"input_ids": [[0] * length for length in lengths]})
    for length in range(max(max(lengths), sum(lengths) // packs), sum(lengths)):
        made = len(pack_dataset(rows, length, "bfd"))
        if made == packs:
            return length
        if made < packs:
            break
    raise ValueError(f"{len(lengths)} rows do not fill {packs} packs of any length; take fewer packs a step")
