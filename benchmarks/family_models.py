"""A small model with random weights of any type that transformers trains as a causal one."""

import copy
import functools
import re
from pathlib import Path
from typing import Any, NamedTuple

import torch
import yaml
from transformers import AutoConfig, AutoTokenizer, PretrainedConfig
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from tests.helpers.tiny import settings_with
from zero_recipes.model.build import build_on_meta
from zero_recipes.tools.plan.job import known_models
from zero_recipes.tools.rehearse import small
from zero_recipes.tools.rehearse.equality import RANDOM

ROOT = Path(__file__).resolve().parents[1]
TOKENIZER = ROOT / "tiny_world" / "base"
DATA = Path(__file__).with_name("families.yaml")
TYPES = tuple(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)
VOCABULARY = 1391  # more than the tokenizer's, and no multiple of the ranks
DEFAULTS = "its class's defaults"
MOST_PARAMETERS = 100_000_000
SEED = 0
CHUNK = re.compile(r"^(mamba_)?chunk_size$")  # tokens of a step of a state space, which changes no result
SMALL_CHUNK = 16  # the reference kernels' memory grows with its square


class FamilyModel(NamedTuple):
    """What was written: the class, which configuration it was made from, what was cut, and its size."""

    name: str
    source: str
    cuts: list[str]
    parameters: int


class Unsupported(Exception):
    """transformers itself cannot build a type here."""


@functools.cache
def board_data() -> dict[str, Any]:
    """Read families.yaml: what is known of each type, and of errors."""
    return yaml.safe_load(DATA.read_text())


def write_family(kind: str, folder: Path) -> FamilyModel:
    """Write a small model of a type, with weights and the tiny world's tokenizer. Raises Unsupported."""
    source, config = whole_config(kind)
    config = with_small_vocabulary(config)
    settings = settings_with(model_name_or_path=str(folder), random_weights=True, dtype="float32")
    try:
        build_on_meta(config)
    except Exception as error:  # a class may raise anything
        raise Unsupported(in_a_line(error)) from error
    torch.manual_seed(SEED)
    model, cuts = small.narrowest_that_runs(config, settings)
    model.save_pretrained(folder)
    AutoTokenizer.from_pretrained(TOKENIZER).save_pretrained(folder)
    return FamilyModel(type(model).__name__, source, cuts, model.num_parameters())


def whole_config(kind: str) -> tuple[str, PretrainedConfig]:
    """A configuration of a type, and where it is from: a real model, else its class's defaults. Raises Unsupported."""
    entry = board_data()["types"].get(kind, {})
    if "config" in entry:
        source = entry.get("source", DEFAULTS)
        values = entry["config"]
    else:
        of_kind = [known for known in known_models().values() if known["config"]["model_type"] == kind]
        source = of_kind[0]["model"] if of_kind else DEFAULTS
        values = of_kind[0]["config"] if of_kind else {}
    values = {key: value for key, value in values.items() if key != "model_type"}
    try:
        return source, AutoConfig.for_model(kind, **copy.deepcopy(values))
    except Exception as error:  # a class may raise anything
        raise Unsupported(in_a_line(error)) from error


def with_small_vocabulary(config: PretrainedConfig) -> PretrainedConfig:
    """The same model for the tiny world's tokenizer, without what draws random numbers.

    Classes of encoders are asked to look at what came before alone (`is_decoder`).
    """
    values = config.to_dict()
    values["dtype"] = "float32"
    values.pop("quantization_config", None)
    change_part(values)
    if values.get("vocab_size", VOCABULARY) < VOCABULARY:  # a class that reads bytes
        values["vocab_size"] = VOCABULARY
    return type(config).from_dict(values)


def change_part(values: dict[str, Any]) -> None:
    """`with_small_vocabulary` for one part of a configuration and its own parts."""
    special = {"pad_token_id": 1, "bos_token_id": 0, "eos_token_id": 0}
    others = 0
    for key, value in values.items():
        if isinstance(value, dict):
            change_part(value)
        elif not isinstance(key, str):
            continue
        elif key in special:
            values[key] = special[key]
        elif key.endswith(("_token_id", "_token_index")) and isinstance(value, int) and value >= VOCABULARY:
            others += 1
            values[key] = VOCABULARY - others  # a token that no row has
        elif "vocab" in key and type(value) is int and value > VOCABULARY:
            values[key] = VOCABULARY
        elif CHUNK.search(key) and isinstance(value, int):
            values[key] = min(value, SMALL_CHUNK)
        elif RANDOM.search(key) and isinstance(value, float):
            values[key] = 0.0
        elif key == "is_decoder":
            values[key] = True
        elif key == "dtype":
            values[key] = "float32"


def in_a_line(error: BaseException) -> str:
    """An error's name and the beginning of its text."""
    text = " ".join(str(error).split())
    return f"{type(error).__name__}: {text}"[:300]
