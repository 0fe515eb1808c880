"""Files that are written whole or not at all, JSON as the standard has it, and the files that the package brings."""

import os
from functools import cache
from importlib import resources
from pathlib import Path
from typing import Any

import yaml
from pydantic_core import to_json

PART = ".zero-recipes.part"  # ends the name of what is not yet written, or not yet deleted, to its end
# links to the repository's folders; in a wheel, copies
FILES = Path(__file__).resolve().parents[1] / "_files"
# files that a model, an adapter or a tokenizer is saved as
SAVED = (
    "*.safetensors",
    "*.index.json",
    "*config.json",
    "tokenizer*",
    "vocab*",
    "merges.txt",
    "spiece.model",
    "special_tokens_map.json",
    "added_tokens.json",
    "chat_template*",
)
# files that one library or another also loads where they lie beside what is saved
ALSO_LOADED = (
    "*.py",
    "*.model",
    "*.spm",
    "*.tiktoken",
    "*.jinja",
    "additional_chat_templates/*",
    "sentencepiece*",
    "encoder.json",
    "pytorch_model*.bin",
    "adapter_model.bin",
    "tf_model.h5",
    "flax_model.msgpack",
)
# what else a run writes into its folder, and never again
RECORDS = (
    "README.md",
    "loss.png",
    "metrics.json",
    "recipe.resolved.yaml",
    "samples.jsonl",
    "training_args.bin",
)
# what a run writes beside what is saved and OURS (checkpoint/output_dir.py)
WRITTEN_BY_A_RUN = (
    "pytorch_model*.bin",
    "config.json",
    "checksums.json",
    "generation_config.json",
    "adapter_config.json",
    "training_args.bin",
    "README.md",
    "samples.jsonl",
    "loss.png",
    "failure.rank*.json",
)
# one of these makes a folder a tokenizer's
TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer.model",
    "vocab.json",
    "vocab.txt",
    "spiece.model",
    "tokenizer_config.json",
)
# of a model or an adapter: they may name folders of this machine
CONFIGS = (
    "config.json",
    "generation_config.json",
    "adapter_config.json",
    "tokenizer_config.json",
)
PICKLES = (".pt", ".pth", ".bin", ".pkl", ".pickle", ".ckpt", ".metadata", ".distcp")  # ends of their names
# what a checkpoint for another number of processes does not keep, besides its manifest and `latest`
NOT_RESHARDED = (
    "global_step*",
    "zero_to_fp32.py",
    "zero_to_torch.py",
    "rng_state*.pth",
)


def at_hand(named: str | Path, folder: str = "") -> Path:
    """Find a file as it is named, in the working directory or in its subfolder `folder`, else in the package.

    Returns `named` as it is where nothing of that name exists.
    """
    for base in (".", FILES):
        for inner in ("", folder):
            path = Path(base, inner, named)
            if os.path.exists(path):  # pathlib raises at a name that is too long
                return path
    return Path(named)


def as_typed(file: str | Path) -> str:
    """Write a file as a user types it. Of one that the package brings the name alone: `at_hand` finds it by that."""
    path = Path(file)
    return path.name if path.is_relative_to(FILES) else str(file)


@cache
def package_yaml(package: str, name: str) -> dict[str, Any]:
    """Read a YAML file beside a package's code, once in this process."""
    return load_yaml(resources.files(package).joinpath(name).read_text(encoding="utf-8"))


def load_yaml(text: str) -> Any:
    """Parse YAML, with libyaml where PyYAML has it."""
    loader = getattr(yaml, "CSafeLoader", yaml.SafeLoader)  # in C it takes a tenth of the time
    return yaml.load(text, loader)


def write_text(path: Path, text: str) -> None:
    """Write a text file whole or not at all: a reader never sees half of it, nor two processes' halves."""
    path.parent.mkdir(parents=True, exist_ok=True)
    unfinished = path.with_name(f"{path.name}.{os.getpid()}{PART}")
    unfinished.write_text(text, encoding="utf-8")
    os.replace(unfinished, path)


def encodable(text: str) -> str:
    """The text with half surrogate pairs, which no file takes, escaped as Python writes them."""
    return text.encode("utf-8", "backslashreplace").decode()


def strict_json(document: Any, indent: int | None = None) -> str:
    """Write a document as standard JSON. A number that is not finite becomes null, for `NaN` is no JSON.

    Letters of every script stay as they are.
    """
    return to_json(document, indent=indent, inf_nan_mode="null").decode()


def write_json(path: Path, document: Any) -> None:
    """Write a document into a JSON file, whole or not at all."""
    write_text(path, strict_json(document, indent=2) + "\n")
