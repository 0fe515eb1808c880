"""A model like the recipe's, made small: fewer layers, narrower, its vocabulary whole, random weights."""

import shutil
from pathlib import Path

from huggingface_hub import snapshot_download
from transformers import PretrainedConfig

from zero_recipes.config.settings import Settings
from zero_recipes.core.library_errors import library_error_as_finding
from zero_recipes.model.config import load_config
from zero_recipes.model.load import load_model
from zero_recipes.model.trained import parameter_counts
from zero_recipes.tools.plan.simulator.layers import entries_by_layer

# of a small model
LAYERS = 2
HEAD_WIDTH = 16
EXPERTS = 4
WIDE_ENOUGH = 128  # a hidden size that is left as it is
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
# keys of a config
WIDTHS = ("intermediate_size", "moe_intermediate_size", "shared_expert_intermediate_size")
NUMBERS_OF_EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts")
GENERATION = "generation_config.json"


def make_small(settings: Settings, folder: Path, layers: int | None) -> str:
    """Write a small model, with the tokenizer and the code of the recipe's. Returns what was cut, in words.

    `layers`: so many, at the model's own width; None makes it narrow, too. Raises Refusal.
    """
    source = files_of(settings)
    shutil.copytree(source, folder, ignore=shutil.ignore_patterns(*NOT_COPIED))
    small = settings.replace(model_name_or_path=str(folder), model_revision=None, random_weights=True)
    config = load_config(small)
    with library_error_as_finding(f"making a smaller {settings.model_name_or_path} (--layers 2 keeps its width)"):
        cuts = cut_layers(config.get_text_config(), layers or LAYERS)
        tower = getattr(config, "vision_config", None)
        if hasattr(tower, "num_hidden_layers"):  # text never reaches it
            cut_layers(tower, 1)
        if layers is None:
            cuts += cut_width(config.get_text_config(), settings.sequence_parallel_size)
        vars(config).pop("quantization_config", None)
        model = load_model(config, small)
    if config.dtype is not None:
        model.to(config.dtype)  # as its files have it
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


def cut_layers(config: PretrainedConfig, layers: int) -> list[str]:
    """Keep so many layers, and one of each kind at least. Returns what was cut."""
    total = config.num_hidden_layers
    per_layer = entries_by_layer(vars(config), total)
    kinds = list(zip(*per_layer.values(), strict=True)) or [()] * total
    of_each_kind = {kinds.index(kind) for kind in kinds}
    others = [number for number in range(total) if number not in of_each_kind]
    kept = sorted([*of_each_kind, *others[: max(0, layers - len(of_each_kind))]])
    config.num_hidden_layers = len(kept)
    for key, value in per_layer.items():
        setattr(config, key, [value[number] for number in kept])
    if getattr(config, "first_k_dense_replace", None):  # DeepSeek: the layers before the first with experts
        config.first_k_dense_replace = 1
    return [f"{len(kept)} of {total} layers"]


def cut_width(config: PretrainedConfig, shares: int) -> list[str]:
    """Make the model narrow. Returns what was cut.

    Heads stay in proportion to key and value heads, other widths to the hidden size.
    `shares`: ranks that share the heads.
    """
    cuts = []
    most = EXPERTS
    for key in NUMBERS_OF_EXPERTS:
        number = getattr(config, key, 0)
        if number > most:
            setattr(config, key, most)
            config.num_experts_per_tok = min(config.num_experts_per_tok, most // 2)
            cuts.append(f"{most} of {number} experts")
    hidden = config.hidden_size
    if hidden <= WIDE_ENOUGH:
        return cuts
    heads = config.num_attention_heads
    keys = getattr(config, "num_key_value_heads", None) or heads
    own_width = getattr(config, "head_dim", None)
    width = own_width or hidden // heads
    new_keys = min(keys, max(2, shares))
    new_heads = heads // keys * new_keys
    new_width = min(width, HEAD_WIDTH)
    rope = getattr(config, "rope_parameters", None) or {}
    if any(isinstance(value, list) for value in rope.values()):  # a number for each of a head's frequencies
        new_width = width
    share = new_heads * new_width / (heads * width)
    config.hidden_size = narrowed(hidden, share)
    config.num_attention_heads = new_heads
    if hasattr(config, "num_key_value_heads"):
        config.num_key_value_heads = new_keys
    if own_width:
        config.head_dim = new_width
    for key in WIDTHS:
        if getattr(config, key, None):
            setattr(config, key, narrowed(getattr(config, key), share))
    return [*cuts, f"hidden size {config.hidden_size:,} of {hidden:,}", f"{new_heads} of {heads} heads"]


def narrowed(value: int, share: float) -> int:
    """Scale a width, to a multiple of 8."""
    return max(8, 8 * round(value * share / 8))
