"""A model like the recipe's, made small: fewer layers, narrower, its vocabulary whole, random weights."""

import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import torch
from huggingface_hub import snapshot_download
from transformers import PretrainedConfig, PreTrainedModel

from zero_recipes.config.settings import Settings
from zero_recipes.core.library_errors import library_error_as_finding
from zero_recipes.model.build import built_or_none
from zero_recipes.model.config import load_config
from zero_recipes.model.load import load_model
from zero_recipes.model.trained import parameter_counts
from zero_recipes.tools.rehearse.sizes import Sizes

# of a small model
LAYERS = 2
TRIED_TOKENS = 8
MOST_TRIED = 500_000_000  # parameters of a model whose forward pass is tried
# files of a model
NOT_COPIED = (
    "*.safetensors",
    "*.bin",
    "*.pt",
    "*.pth",
    "*.gguf",
    "*.h5",
    "*.msgpack",
    "*.index.json",
    "checkpoint-*",
)
DOWNLOADED = ("*.json", "*.txt", "*.model", "*.jinja", "*.py")
GENERATION = "generation_config.json"


class SmallConfig(NamedTuple):
    """A smaller configuration, and what was cut, in words."""

    config: PretrainedConfig
    cuts: list[str]


def make_small(settings: Settings, folder: Path, layers: int | None) -> str:
    """Write a small model, with the tokenizer and the code of the recipe's. Returns what was cut, in words.

    `layers`: so many, at the model's own width; None makes it narrow, too. Raises Refusal.
    """
    source = files_of(settings)
    shutil.copytree(source, folder, ignore=shutil.ignore_patterns(*NOT_COPIED))
    small = settings.replace(model_name_or_path=str(folder), model_revision=None, random_weights=True)
    config = load_config(small)
    vars(config).pop("quantization_config", None)
    with library_error_as_finding(f"making a smaller {settings.model_name_or_path} (--layers 2 keeps its width)"):
        if layers is None:
            model, cuts = narrowest_that_runs(config, small)
        else:
            config, cuts = with_fewer_layers(config, layers, settings.trust_remote_code)
            model = load_model(config, small)
    if model.config.dtype is not None:
        model.to(model.config.dtype)  # as its files have it
    model.save_pretrained(folder)
    if (source / GENERATION).is_file():
        shutil.copy(source / GENERATION, folder)
    parameters, _ = parameter_counts(model)
    cuts.append(f"the whole vocabulary, random weights: {parameters:,} parameters")
    return f"{type(model).__name__} with {', '.join(cuts)}"


def files_of(settings: Settings) -> Path:
    """The folder with all that a model has but its weights. Raises Refusal."""
    name = str(settings.model_name_or_path)
    if Path(name).is_dir():
        return Path(name)
    with library_error_as_finding(f"downloading the configuration of {name}"):
        return Path(snapshot_download(name, revision=settings.model_revision, allow_patterns=list(DOWNLOADED)))


def narrowest_that_runs(config: PretrainedConfig, settings: Settings) -> tuple[PreTrainedModel, list[str]]:
    """The model of the first smaller configuration whose forward pass runs, and what was cut, in words.

    An error that two widths have alike is not about the width: the narrower of them is taken, and the launches show it.
    Where none runs, the model keeps its width, untried. `settings`: name the model's folder, with random weights.
    Raises what the model's class raises, and Refusal.
    """
    few = with_fewer_layers(config, LAYERS, settings.trust_remote_code)
    failed: dict[str, SmallConfig] = {}
    for narrower in narrower_configs(few, settings.sequence_parallel_size):
        built = built_or_none(narrower.config, settings.trust_remote_code)
        if built is None or built.num_parameters() > MOST_TRIED:
            continue
        try:
            model = load_model(narrower.config, settings)
            try_forward(model)
        except Exception as error:  # a model's own code may raise anything: another width is tried
            if str(error) in failed:
                first = failed[str(error)]
                return load_model(first.config, settings), first.cuts
            failed[str(error)] = narrower
            continue
        return model, narrower.cuts
    model = load_model(few.config, settings)
    return model, [*few.cuts, "its width kept: made narrower it does not run"]


def try_forward(model: PreTrainedModel) -> None:
    """Run a few tokens through a model. Raises what the model raises."""
    tokens = torch.arange(1, 1 + TRIED_TOKENS)[None]
    model.eval()  # in training some classes want to be told which tokens are of images
    with torch.no_grad():
        model(input_ids=tokens, attention_mask=torch.ones_like(tokens), use_cache=False)
    model.train()


def with_fewer_layers(config: PretrainedConfig, layers: int, trust_remote_code: bool = False) -> SmallConfig:
    """Keep so many layers, and more where those lack a kind of module that the whole model has.

    Towers for other inputs than text keep one layer. All layers stay where the class takes no fewer.
    """
    whole = built_or_none(config, trust_remote_code)
    total = Sizes(config).layers()
    while layers < total:
        sizes = Sizes(config)
        cuts = sizes.cut_layers(layers)
        try:
            fewer = sizes.config()
        except Exception:  # a class's own checks may raise anything
            fewer = None
        small = fewer and built_or_none(fewer, trust_remote_code)
        if small is not None and (whole is None or module_classes(small) == module_classes(whole)):
            return SmallConfig(fewer, cuts)
        layers *= 2
    return SmallConfig(config, ["all of its layers"])


def module_classes(model: PreTrainedModel) -> set[type]:
    """The classes of a model's modules."""
    return {type(module) for module in model.modules()}


def narrower_configs(whole: SmallConfig, shares: int) -> Iterator[SmallConfig]:
    """Narrower forms of a configuration, the narrowest first, for a caller that tries which of them run.

    1. Fewer heads, in proportion to the key and value heads, and every other width in proportion to the hidden size.
    2. The same with fewer heads of every kind, those of a state space too.
    3. As many heads, and every width divided by one number: sums and products of widths hold.
    4. The feed-forward layers alone.
    Each with few experts first, then with all.

    `shares`: ranks that share the heads.
    """
    seen = []
    for has_few_experts in (True, False):
        changed = []
        sizes = Sizes(whole.config)
        if has_few_experts:
            changed = sizes.cut_experts()
        elif not Sizes(whole.config).cut_experts():
            return  # it has few, or none: all of these have been tried
        for narrow in sizes.narrowings(shares):
            narrower = sizes.copy()
            cuts = narrow(narrower)
            try:
                config = narrower.config()
            except Exception:  # a class's own checks may raise anything
                continue
            if narrower.values not in seen:  # without other heads the second is the first
                seen.append(narrower.values)
                yield SmallConfig(config, [*whole.cuts, *changed, *cuts])
