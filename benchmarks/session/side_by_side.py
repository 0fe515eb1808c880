"""`trl sft` with its defaults, the recipe and a bare loop, one after the other: side_by_side.py STRATEGY RECIPE FOLDER

The programs of benchmarks/throughput.py in one process. All train on the same rows from the same random weights: rows
of max_length tokens, 8 a step; for a recipe with `packing`, rows of very uneven length in as many steps. Writes
FOLDER/beside.json and the recipe's metrics.json. A program that fails leaves its error there, and the next begins.
"""

from __future__ import annotations

import json
import os
import random
import shutil
import sys
from pathlib import Path

import yaml

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

WORDS = "the red fish hums in the cave by the river . "
OURS = ("random_weights", "max_steps", "model_name_or_path", "dataset_name", "output_dir")


def main(strategy: str, path: Path, folder: Path) -> None:
    recipe = yaml.safe_load(path.read_text())
    device = "cpu" if recipe.get("use_cpu") else "cuda"
    from zero_recipes.core.process import free_port, leave

    os.environ |= {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "LOCAL_WORLD_SIZE": "1"}
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    if device == "cpu":
        os.environ["DS_ACCELERATOR"] = "cpu"
    import deepspeed

    deepspeed.init_distributed("gloo" if device == "cpu" else "nccl", auto_mpi_discovery=False, verbose=False)
    import torch

    from benchmarks import throughput_programs
    from tests.helpers.forget import forget_last_run

    job = job_of(strategy, recipe, folder, device)
    found = {}
    environment = dict(os.environ)
    for program in ("trl", "recipe", "engine"):
        os.environ.clear()  # accelerate leaves the last run's plugins there
        os.environ.update(environment)
        forget_last_run()
        try:
            ran = throughput_programs.run(program, job)
            found[program] = ran | {"accumulation": 1 if program == "trl" else job["accumulation"]}
        except Exception as error:  # `trl sft` out of memory is a result
            found[program] = {"error": f"{type(error).__name__}: {error}"[:2000]}
        (folder / "beside.json").write_text(json.dumps({"programs": found}))
        if device == "cuda":
            torch.cuda.empty_cache()
    if "error" not in found["recipe"]:
        shutil.copy(folder / "recipe" / "metrics.json", folder / "metrics.json")
    leave(1 if "error" in found["recipe"] else 0)


def job_of(strategy: str, recipe: dict, folder: Path, device: str) -> dict:
    """What benchmarks/throughput_programs.py takes; writes weights, rows and recipe to `folder`."""
    from transformers import AutoTokenizer

    from benchmarks.throughput_inputs import MICRO_BATCH, pack_length

    tokenizer = AutoTokenizer.from_pretrained(recipe["model_name_or_path"])
    weights = write_weights(recipe["model_name_or_path"], folder / "weights", tokenizer, device)
    steps, longest, micro = recipe["max_steps"], recipe["max_length"], recipe["per_device_train_batch_size"]
    accumulation = recipe["gradient_accumulation_steps"]
    packs = steps * micro * accumulation if recipe.get("packing") else None
    texts = texts_of(steps * MICRO_BATCH, longest, packs, tokens_per_word(tokenizer))
    packed = {}
    if recipe.get("packing"):
        lengths = [len(tokenizer(text)["input_ids"]) + 1 for text in texts]
        packed["max_length"] = pack_length(lengths, steps, micro * accumulation, ranks=1)[0]
    rows = folder / "rows"
    rows.mkdir(parents=True, exist_ok=True)
    (rows / "train.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    held_out = [tokenizer(text)["input_ids"][:longest] for text in texts[:4]]
    (folder / "held_out.json").write_text(json.dumps([{"input_ids": ids, "labels": ids} for ids in held_out]))
    same = {"model_name_or_path": str(weights), "dataset_name": str(rows), "num_train_epochs": 1}
    same |= {"learning_rate": recipe["learning_rate"], "report_to": "none", "save_strategy": "no"}
    same |= {"use_cpu": True} if device == "cpu" else {}
    ours = {key: value for key, value in recipe.items() if key not in OURS}
    (folder / "recipe.yaml").write_text(yaml.safe_dump(ours | same | packed))
    return {
        "folder": str(folder),
        "model": str(weights),
        "held_out": str(folder / "held_out.json"),
        "device": device,
        "attention": recipe.get("attn_implementation", "sdpa"),
        "learning_rate": recipe["learning_rate"],
        "accumulation": accumulation,
        "strategy": strategy,
        "trl": same | {"max_length": longest},  # its default of 1,024 would cut rows
        "recipe": {},
    }


def texts_of(count: int, longest: int, packs: int | None, per_word: float) -> list[str]:
    """Texts of more than `longest` tokens each; with `packs`, of Alpaca's spread, and as many as fill these packs."""
    draw = random.Random(0)
    words = WORDS.split() * longest
    if packs is None:
        return [" ".join(words[: 2 * longest])] * count
    drawn = [draw.lognormvariate(0, 0.7) for _ in range(count)]
    most, scale = 0.9 * longest, 1.0
    while sum(min(scale * each, most) for each in drawn) < 0.94 * packs * longest:
        scale *= 1.01
    return [" ".join(words[: max(1, int(min(scale * each, most) / per_word))]) for each in drawn]


def tokens_per_word(tokenizer) -> float:
    return len(tokenizer(WORDS * 20)["input_ids"]) / len(WORDS.split() * 20)


def write_weights(shape: str, folder: Path, tokenizer, device: str) -> Path:
    """Random weights in fp32, drawn on the device: all programs read these."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    torch.manual_seed(0)
    with torch.device(device):
        AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(shape), dtype=torch.float32).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]), Path(sys.argv[3]))
