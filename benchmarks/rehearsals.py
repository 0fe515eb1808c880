"""Rehearsals of the shipped recipes' shapes: python -m benchmarks.rehearsals [NAME ...]

Models are built from the configs in the package, with the tiny world's tokenizer and a ChatML template. Data is the
tiny world's, in each recipe's form. Each rehearsal is added to results/rehearsals.json when it ends.
"""

import argparse
import json
import os
import resource
import sys
import tempfile
import time
from pathlib import Path

import yaml
from transformers import AutoTokenizer

from zero_recipes.config.accelerate import FOLDER
from zero_recipes.core.files import at_hand, write_json
from zero_recipes.core.findings import Refusal
from zero_recipes.core.measured_on import hardware_facts
from zero_recipes.core.tables import terminal
from zero_recipes.engine.warnings import quieten
from zero_recipes.tools.plan.job import known_models
from zero_recipes.tools.rehearse import launches

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "benchmarks" / "results" / "rehearsals.json"
ROWS = {"train": 400, "test": 40}
GPUS = 2
TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n"
    "{% if message['role'] == 'assistant' %}{% generation %}{{ message['content'] }}<|endoftext|>{% endgeneration %}"
    "{% else %}{{ message['content'] }}<|endoftext|>{% endif %}\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
# recipes of full fine-tuning and LoRA shard everything, those of 4 bit cannot
STRATEGY = "zero3"
FOUR_BIT_STRATEGY = "zero2"
TINY = {
    "tiny zero2": ("zero2", []),
    "tiny zero3": ("zero3", []),
    "tiny ddp": ("ddp", []),
    "tiny fsdp2": ("fsdp2", []),
    "tiny lora zero3": ("zero3", ["--use_peft", "true", "--lora_target_modules", "all-linear"]),
    "tiny packed zero2": ("zero2", ["--packing", "true"]),
    "tiny streamed zero2": ("zero2", ["--dataset_streaming", "true"]),
}


def write_inputs(recipe: dict, folder: Path) -> list[str]:
    """A model and rows of a recipe's form; the overrides that name them."""
    model = folder / "hub"
    tokenizer = AutoTokenizer.from_pretrained(ROOT / "tiny_world" / "base")
    tokenizer.chat_template = TEMPLATE
    tokenizer.save_pretrained(model)
    write_json(model / "config.json", known_models()[name_of_base(recipe)]["config"])
    rows = folder / "rows"
    rows.mkdir()
    for split, count in ROWS.items():
        lines = (ROOT / "tiny_world" / f"{split}.jsonl").read_text().splitlines()[:count]
        if recipe.get("dataset_format") != "alpaca":
            lines = [json.dumps({"messages": turns(json.loads(line))}) for line in lines]
        (rows / f"{split}.jsonl").write_text("\n".join(lines) + "\n")
    words = ["--model_name_or_path", str(model)]
    if recipe.get("packing"):
        words += ["--warmup_steps", "0"]  # so few rows are one step of packs
    if "dataset_config" in recipe:
        words += ["--dataset_config", "null"]
    if "datasets" in recipe:
        return [*words, "--datasets", json.dumps([{"path": str(rows), "split": "train"}])]
    return [*words, "--dataset_name", str(rows)]


def name_of_base(recipe: dict) -> str:
    name = recipe["model_name_or_path"]
    known = known_models()
    for candidate in (name, name.replace("-Instruct", "")):
        if candidate in known:
            return candidate
    raise KeyError(name)


def turns(row: dict) -> list[dict]:
    question = f"{row['instruction']} {row['input']}".strip()
    return [{"role": "user", "content": question}, {"role": "assistant", "content": row["output"]}]


def rehearse(recipe: Path, strategy: str, words: list[str], folder: Path) -> dict:
    arguments = argparse.Namespace(
        recipe=recipe,
        overrides=words,
        gpus=GPUS,
        config_file=at_hand(FOLDER / f"{strategy}.yaml"),
        layers=None,
        full=False,
        rows=None,
    )
    began = time.perf_counter()
    cpu_seconds = cpu_seconds_of_children()
    found = {"recipe": recipe.name, "strategy": strategy, "ranks": GPUS}
    try:
        rehearsal = launches.read_rehearsal(arguments, folder, terminal())
    except Refusal as refusal:
        return found | {"refused": refusal.codes}
    ran = launches.launch_all(rehearsal, folder, terminal())
    phases = {}
    for row in launches.table_of(rehearsal, ran):
        seconds = None if row.seconds is None else round(row.seconds, 1)
        phases[row.phase] = {"result": row.result, "seconds": seconds, "detail": row.detail}
        if row.finding is not None:
            print(row.finding)
    seconds_of = {name: round(one.seconds, 1) for name, one in ran.items()}
    seconds = round(time.perf_counter() - began, 1)
    found |= {"seconds": seconds, "cpu_seconds": round(cpu_seconds_of_children() - cpu_seconds, 1)}
    return found | {"load": round(os.getloadavg()[1], 1), "launches": seconds_of, "phases": phases}


def cpu_seconds_of_children() -> float:
    """Of all launches so far: what two quiet cores need at least, times two, however busy the machine is."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def main(names: list[str]) -> None:
    quieten()
    os.chdir(ROOT)
    jobs = {}
    for name, (strategy, words) in TINY.items():
        jobs[name] = (ROOT / "recipes" / "tiny.yaml", strategy, words)
    for path in sorted((ROOT / "recipes").glob("*.yaml")):
        recipe = yaml.safe_load(path.read_text())
        if path.stem != "tiny":
            strategy = FOUR_BIT_STRATEGY if recipe.get("load_in_4bit") else STRATEGY
            jobs[path.stem] = (path, "ddp" if "deepspeed" in recipe else strategy, None)
    for name in names or jobs:
        path, strategy, words = jobs[name]
        with tempfile.TemporaryDirectory() as temporary:
            folder = Path(temporary)
            recipe = yaml.safe_load(path.read_text())
            if words is None:
                words = write_inputs(recipe, folder)
            found = rehearse(path, strategy, words, folder)
        if "deepspeed" in recipe:
            found["strategy"] = Path(recipe["deepspeed"]).stem
        print(name, json.dumps(found), flush=True)
        document = json.loads(RESULTS.read_text()) if RESULTS.exists() else {"rehearsals": {}}
        document["hardware"] = hardware_facts("cpu")
        document["rehearsals"][name] = found
        write_json(RESULTS, document)


if __name__ == "__main__":
    main(sys.argv[1:])
