"""A model that does not fit on one GPU otherwise: python -m benchmarks.gpu_offload --nvme_path FOLDER [--steps 2]

A Pythia of 13 billion parameters by its shape (random weights, the tiny world's tokenizer and rows; no network), two
steps under CPU offload and under ZeRO-Infinity at world size 1. Full fine-tuning in bf16 holds 16 bytes a parameter,
210 GB; offloaded to the CPU it takes that much host memory, on NVMe that much disk. A machine with less is refused
before anything is loaded; --layers then makes the model smaller. Keeps each metrics.json under
benchmarks/results/<device>/pythia-13b/<strategy>/. NOT RUN YET on a GPU: no such results are committed.
"""

from __future__ import annotations

import argparse
import json
import shutil
from pathlib import Path

import yaml
from transformers import AutoTokenizer, GPTNeoXConfig

from zero_recipes.cli.sweep import sweep
from zero_recipes.report import write_report

ROOT = Path(__file__).resolve().parents[1]
NAME = "pythia-13b"
# the proportions of Pythia-12b with more layers: 4 h² + 8 h² a layer, and two embeddings
SHAPE = {"hidden_size": 5120, "num_hidden_layers": 40, "num_attention_heads": 40, "intermediate_size": 20480}


def config(**smaller: int) -> GPTNeoXConfig:
    """The model's configuration; `smaller` sizes are for trials."""
    known = {"vocab_size": 50688, "max_position_embeddings": 2048, "bos_token_id": 0, "eos_token_id": 0}
    sizes = SHAPE | known | {"pad_token_id": 1, "architectures": ["GPTNeoXForCausalLM"]}
    return GPTNeoXConfig(**(sizes | smaller))


def shaped_recipe(folder: Path, **smaller: int) -> Path:
    """A recipe on a folder with the config and no weights."""
    model = folder / NAME
    config(**smaller).save_pretrained(model)
    AutoTokenizer.from_pretrained(ROOT / "tiny_world" / "base").save_pretrained(model)
    recipe = yaml.safe_load((ROOT / "recipes" / "tiny.yaml").read_text())
    recipe |= {"model_name_or_path": str(model), "random_weights": True, "dtype": "bfloat16", "learning_rate": 1.0e-5}
    recipe |= {"per_device_train_batch_size": 1, "global_batch_size": 1, "activation_checkpointing": True}
    recipe |= {"eval_strategy": "no", "sample_prompts": None}
    path = folder / f"{NAME}.yaml"
    path.write_text(yaml.safe_dump(recipe, sort_keys=False))
    return path


def main(arguments: list[str] | None = None, **smaller: int) -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--strategies", default="zero3_offload,zero3_infinity")
    parser.add_argument("--steps", default="2")
    parser.add_argument("--layers", type=int, default=SHAPE["num_hidden_layers"])
    parser.add_argument("--nvme_path", type=Path, required=True)
    parser.add_argument("--work", type=Path, default=ROOT / "output" / "gpu_offload")
    parser.add_argument("--results", type=Path, default=ROOT / "benchmarks" / "results")
    given = parser.parse_args(arguments)
    given.work.mkdir(parents=True, exist_ok=True)
    overrides = ["--max_steps", given.steps, "--nvme_path", str(given.nvme_path), "--overwrite", "true"]
    sizes = {"num_hidden_layers": given.layers} | smaller
    for outcome in sweep(shaped_recipe(given.work, **sizes), given.strategies.split(","), 1, given.work, overrides):
        row = json.loads((outcome.folder / "metrics.json").read_text())
        kept = given.results / row.get("device", "unknown").replace(" ", "-") / NAME / outcome.strategy
        kept.mkdir(parents=True, exist_ok=True)
        shutil.copy(outcome.folder / "metrics.json", kept / "metrics.json")
    write_report(given.work)


if __name__ == "__main__":
    main()
