"""A model folder and a data folder made in a second, for tests of the engine: odd sizes, rows of very uneven length."""

import dataclasses
import functools
import json
import random
from pathlib import Path

import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer, GPTNeoXConfig, LlamaConfig, PreTrainedTokenizerBase

from zero_recipes.config.keys import dataclasses_of_a_recipe
from zero_recipes.config.settings import Settings

ROOT = Path(__file__).resolve().parents[2]
# so that stage 3 gathers every parameter in forward and in backward, as the paper counts
NEVER_KEPT = {f"stage3_{key}": 0 for key in ("param_persistence_threshold", "max_live_parameters")}
NEVER_KEPT |= {f"stage3_{key}": 0 for key in ("max_reuse_distance", "prefetch_bucket_size")}


TEST_ROWS = 24  # at most


def write_model(
    folder: Path, hidden: int = 64, intermediate: int = 101, vocabulary: int = 1031, layers: int = 2
) -> Path:
    """A GPT-NeoX config (no weights: use random_weights) with the tiny world's tokenizer. Sizes that divide nothing."""
    config = {"vocab_size": vocabulary, "hidden_size": hidden, "intermediate_size": intermediate}
    config |= {"num_hidden_layers": layers, "num_attention_heads": 4, "max_position_embeddings": 256, "bos_token_id": 0}
    config |= {"eos_token_id": 0, "pad_token_id": 1, "hidden_dropout": 0.0, "attention_dropout": 0.0}
    GPTNeoXConfig(architectures=["GPTNeoXForCausalLM"], **config).save_pretrained(folder)
    _tokenizer().save_pretrained(folder)
    return folder


@functools.cache
def _tokenizer() -> PreTrainedTokenizerBase:
    """The tiny world's, to be saved as it is."""
    return AutoTokenizer.from_pretrained(ROOT / "tiny_world" / "base")


def llama_config(**sizes) -> LlamaConfig:
    """A Llama with grouped queries and a gated MLP, for the tiny world's tokenizer; `sizes` override it."""
    config = {"vocab_size": 1031, "hidden_size": 64, "intermediate_size": 101, "num_hidden_layers": 2}
    config |= {"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 256, "bos_token_id": 0}
    config |= {"eos_token_id": 0, "pad_token_id": 1, "tie_word_embeddings": False}
    return LlamaConfig(architectures=["LlamaForCausalLM"], **(config | sizes))


def write_rows(folder: Path, count: int = 240, seed: int = 0) -> Path:
    """Alpaca rows whose answers are 1 to 60 words long; the train split, and a smaller test split: an evaluation of a
    whole one would take longer than three steps."""
    draw = random.Random(seed)
    words = ["red", "blue", "fish", "moss", "cave", "river", "hums", "barks", "fire", "wind", "the", "it", "is", "in"]
    folder.mkdir(parents=True, exist_ok=True)
    for split, number in (("train", count), ("test", min(count, TEST_ROWS))):
        rows = [
            {
                "instruction": f"Say {draw.choice(words)} {i}.",
                "input": draw.choice(["", "now"]),
                "output": " ".join(draw.choices(words, k=draw.choice([1, 2, 5, 20, 60]))),
            }
            for i in range(number)
        ]
        (folder / f"{split}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return folder


def write_recipe(folder: Path, **keys) -> Path:
    """A quick recipe on random weights and uneven rows; `keys` override it."""
    recipe = {
        "model_name_or_path": str(write_model(folder / "model")),
        "dataset_name": str(write_rows(folder / "rows")),
        "dataset_format": "alpaca",
        "random_weights": True,
        "bf16": True,
        "max_length": 128,
        "per_device_train_batch_size": 2,
        "max_steps": 3,
        "learning_rate": 1.0e-3,
        "activation_checkpointing": False,
        "logging_steps": 1,
        "save_strategy": "no",
        "save_model": False,
        "report_to": "none",
    } | keys
    path = folder / "recipe.yaml"
    path.write_text(json.dumps(recipe, indent=2))  # JSON is YAML
    return path


def named(strategy: str) -> list[str]:
    """How the command line asks for a strategy, without a launcher."""
    if strategy in ("single", "ddp"):
        return []
    return ["--fsdp", "true"] if strategy == "fsdp2" else ["--deepspeed", f"ds_configs/{strategy}.json"]


def arguments(recipe: Path, strategy: str, output_dir: Path, *more: str) -> list[str]:
    """Of a run of `strategy`, on the command line of run_sft.py."""
    return [str(recipe), "--output_dir", str(output_dir), *named(strategy), *more]


def write_llama(folder: Path, heads: int = 4, keys: int = 2) -> Path:
    """A Llama with weights, in a folder that has a tokenizer."""
    torch.manual_seed(0)
    config = llama_config(num_attention_heads=heads, num_key_value_heads=keys)
    AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    return folder


# each rank calls half of the experts: what a router does where there are many and few tokens
EXPERTS = """
import torch
from torch import distributed, nn
from transformers import GPTNeoXForCausalLM

class OwnSparseMoeBlock(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.gate = nn.Linear(width, 4)
        self.experts = nn.ModuleList(nn.Linear(width, width) for _ in range(4))

    def forward(self, hidden):
        weights = self.gate(hidden).softmax(-1)
        mine = range(distributed.get_rank(), 4, distributed.get_world_size())
        return sum(weights[..., i : i + 1] * self.experts[i](hidden) for i in mine)

class OwnForCausalLM(GPTNeoXForCausalLM):
    def __init__(self, config):
        super().__init__(config)
        self.gpt_neox.layers[1].mlp = OwnSparseMoeBlock(config.hidden_size)
        self.post_init()
"""


def write_experts(model: Path) -> None:
    """Code of its own for a GPT-NeoX in a folder, whose second layer has experts."""
    config = json.loads((model / "config.json").read_text())
    auto_map = {"AutoModelForCausalLM": "modeling_own.OwnForCausalLM"}
    (model / "config.json").write_text(json.dumps(config | {"auto_map": auto_map, "num_experts": 4}))
    (model / "modeling_own.py").write_text(EXPERTS)


def settings_with(**keys) -> Settings:
    """A run's settings: the defaults of TRL and of zero-recipes, with these keys."""
    values = {}
    for cls in dataclasses_of_a_recipe():
        for field in dataclasses.fields(cls):
            made = field.default_factory is not dataclasses.MISSING
            values[field.name] = field.default_factory() if made else field.default
    return Settings(values | keys)


def weights_apart(found: Path, wanted: Path) -> float:
    """The distance between the weights of two folders' models, in shares of the second's."""
    mine, theirs = (load_file(folder / "model.safetensors") for folder in (found, wanted))
    assert mine.keys() == theirs.keys()
    apart = sum((mine[name].double() - tensor).square().sum() for name, tensor in theirs.items())
    return float(apart / sum(tensor.double().square().sum() for tensor in theirs.values())) ** 0.5
