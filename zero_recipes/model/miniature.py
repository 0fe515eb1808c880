"""A small model of a configuration's class, with random weights: to find out by trying what the class does.

A few layers, one of each kind at least, run on the CPU in milliseconds. What the class makes of its input (whether
packed rows see each other, which logits it gives) depends on its code and its kinds of layers, not on its size.
"""

import contextlib
import copy
import math
from collections.abc import Callable, Iterator
from typing import Any

import torch
from transformers import PretrainedConfig, PreTrainedModel

from zero_recipes.engine.huggingface import without_deepspeed_announcement
from zero_recipes.engine.linear_attention import computed_in_torch, kernels_of
from zero_recipes.model.build import build_on_meta
from zero_recipes.model.towers import auto_class

VOCABULARY = 128
TOKENS = range(10, 100)  # that a row may have: special tokens are others
MOST_LAYERS = 12
MOST_PARAMETERS = 100_000_000
HEADS = 4
EXPERTS = 4
MLP_WIDTH = 64
NARROW = 128  # a hidden size
# names of the same number in the configurations of transformers 5.23
LAYERS = ("num_hidden_layers", "num_layers", "n_layers", "n_layer", "decoder_layers", "encoder_layers", "depth")
HIDDEN = ("hidden_size", "d_model", "n_embd", "dim", "word_embed_proj_dim", "embed_dim", "embedding_dim", "emb_dim")
HEAD_COUNTS = ("num_attention_heads", "n_head", "n_heads", "decoder_attention_heads", "attention_heads")
MLP_WIDTHS = (
    "intermediate_size",
    "moe_intermediate_size",
    "shared_expert_intermediate_size",
    "moe_shared_expert_intermediate_size",
    "shared_intermediate_size",
    "intermediate_size_mlp",
    "ffn_dim",
    "decoder_ffn_dim",
    "encoder_ffn_dim",
    "n_inner",
    "hidden_size_per_layer_input",
    "expert_ffn_hidden_size",
    "ffn_hidden_size",
    "dense_intermediate_size",
)
EXPERT_COUNTS = (
    "num_experts",
    "num_local_experts",
    "n_routed_experts",
    "moe_num_experts",
    "zero_expert_num",
)
CHOSEN_EXPERTS = ("num_experts_per_tok", "num_experts_per_token", "moe_topk", "moe_k", "top_k_experts", "moe_top_k")
EXPERT_GROUPS = ("n_group", "topk_group", "num_expert_group", "num_expert_groups", "num_limited_groups")
VOCABULARIES = ("vocab_size", "vocab_size_per_layer_input", "n_words")
MAMBA_HEADS = ("mamba_n_heads", "mamba_num_heads", "n_mamba_heads", "num_heads")
OF_ATTENTION = ("attention_hidden_size", "num_query_groups")  # Zamba 2's, which follow from the hidden size
MAMBA_GROUPS = ("mamba_n_groups", "mamba_ngroups", "n_groups")
WINDOWS = ("sliding_window", "attention_chunk_size", "window_size")
SMALL_WINDOW = 6


def miniature(
    config: PretrainedConfig,
    trust_remote_code: bool = False,
    longest: int | None = None,
    attn_implementation: str | None = None,
) -> PreTrainedModel | None:
    """A small model of the configuration's class, in fp32 on the CPU, for evaluation. None where none can be made.

    Args:
        config: of the model itself. It is not changed.
        trust_remote_code: whether code that comes with the model may run.
        longest: tokens of a sequence of the run. Windows that are shorter are made small, too. None: all windows.
        attn_implementation: "sdpa" or "eager". None: what transformers takes.
    """
    with one_thread(), contextlib.suppress(Exception):  # a model's own code may raise anything
        layers = layers_of_each_kind(build_on_meta(config, trust_remote_code))
        for cut_heads in (_cut_all_heads, _cut_heads, _cut_no_heads):  # the first whose widths fit each other
            with contextlib.suppress(Exception):
                small = small_config(config, layers, cut_heads, longest)
                return _with_random_weights(small, trust_remote_code, attn_implementation)
    return None


@contextlib.contextmanager
def one_thread() -> Iterator[None]:
    """Compute on one core in this block: small tensors are slower on several."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def _with_random_weights(
    config: PretrainedConfig, trust_remote_code: bool, attn_implementation: str | None = None
) -> PreTrainedModel:
    """Raises what the class raises, and ValueError where the model would not be small."""
    parameters = build_on_meta(config, trust_remote_code).num_parameters()
    if parameters > MOST_PARAMETERS:
        raise ValueError(f"{parameters} parameters")
    with torch.random.fork_rng(devices=[]), without_deepspeed_announcement():
        torch.default_generator.manual_seed(0)  # torch.manual_seed would seed GPUs, too
        model = (
            auto_class(config)
            .from_config(
                config,
                trust_remote_code=trust_remote_code,
                dtype=torch.float32,
                attn_implementation=attn_implementation,
            )
            .eval()
        )
        for parameter in model.parameters():
            parameter.requires_grad_(False)
            if parameter.dim() > 1:  # larger than the class draws them: attention is to matter
                torch.nn.init.normal_(parameter, 0.0, math.sqrt(3 / parameter.shape[-1]))
        _run_once(model)
    return model


def _run_once(model: PreTrainedModel) -> None:
    """Raises what the forward raises: widths that do not fit each other show here."""
    ids = torch.tensor([[*TOKENS][:5]])
    with torch.no_grad(), computed_in_torch(kernels_of(model), ids.shape[1]):
        logits = model(input_ids=ids, use_cache=False).logits
    if not torch.isfinite(logits).all():
        raise ValueError("its logits are not finite")


# ---- layers


def layers_of_each_kind(model: PreTrainedModel) -> int:
    """How many of a model's first layers have one of each kind. At least 2, at most MOST_LAYERS."""
    total = getattr(model.config.get_text_config(), "num_hidden_layers", 0)
    lists = [module for module in model.modules() if isinstance(module, torch.nn.ModuleList) and len(module) == total]
    if not lists:
        return 2
    seen = set()
    last_new = 0
    for number, layer in enumerate(lists[0]):
        kind = kind_of_layer(layer)
        if kind not in seen:
            seen.add(kind)
            last_new = number
    return min(max(2, last_new + 1), MOST_LAYERS)


def kind_of_layer(layer: torch.nn.Module) -> tuple:
    """What tells a kind of layer from another: the classes of its modules, and their settings that are no numbers."""
    parts = []
    for name, module in layer.named_modules():
        settings = []
        for key, value in vars(module).items():
            if isinstance(value, bool | str | None):
                settings.append((key, value))
        parts.append((name, type(module).__name__, tuple(sorted(settings, key=str))))
    return tuple(parts)


# ---- the configuration


def small_config(
    config: PretrainedConfig, layers: int, cut_heads: Callable[[dict[str, Any]], None], longest: int | None
) -> PretrainedConfig:
    """A configuration of the same class with so many layers, a small vocabulary, few and narrow experts.

    `cut_heads`: one of the functions below that make a hidden size small. Raises what the class raises.
    """
    values = copy.deepcopy(config.to_dict())
    values.pop("quantization_config", None)
    text = _values_of(config.get_text_config(), config, values)
    for part in _parts(config, values):
        kept = layers if part is values or part is text else 1  # of a tower, which rows of text never reach
        _shorten(part, min(kept, _layers(part) or kept))
        _cut_vocabulary(part)
        _cut_mlp(part)
        _cut_windows(part, longest)
    cut_heads(text)
    return type(config).from_dict(values)


def _parts(config: PretrainedConfig, values: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """The configuration's values, and those of the configurations in it."""
    yield values
    for key in getattr(config, "sub_configs", {}):
        if isinstance(values.get(key), dict):
            yield from _parts(getattr(config, key), values[key])


def _values_of(part: PretrainedConfig, config: PretrainedConfig, values: dict[str, Any]) -> dict[str, Any]:
    """The values of a configuration that may be one in `config`."""
    if part is config:
        return values
    for key in getattr(config, "sub_configs", {}):
        if getattr(config, key) is part and isinstance(values.get(key), dict):
            return values[key]
    return values


def _number(values: dict[str, Any], names: tuple[str, ...]) -> int | None:
    """The first of these that the configuration has."""
    for name in names:
        if isinstance(values.get(name), int):
            return values[name]
    return None


def _layers(values: dict[str, Any]) -> int | None:
    return _number(values, LAYERS)


def _shorten(values: dict[str, Any], layers: int) -> None:
    """Keep the first layers: of every list and text with an entry for each of them, too."""
    total = _layers(values)
    if total is None:
        return
    for key, value in values.items():
        is_by_layer = isinstance(value, list) or (isinstance(value, str) and "pattern" in key)
        if is_by_layer and len(value) == total and total > layers:
            values[key] = value[:layers]
        elif isinstance(value, dict) and value and all(str(entry).isdigit() for entry in value):
            values[key] = {entry: of_layer for entry, of_layer in value.items() if int(entry) < layers}
        elif key in LAYERS:
            values[key] = min(value, layers)
        elif "shared_layers" in key and value:  # the last of them
            values[key] = 0
        elif key.endswith("_layers") and isinstance(value, int) and not isinstance(value, bool) and value >= layers:
            values[key] = layers - 1


def _cut_vocabulary(values: dict[str, Any]) -> None:
    for key, value in values.items():
        if key in VOCABULARIES and isinstance(value, int):
            values[key] = VOCABULARY
        elif key.endswith(("_token_id", "_token_index", "_token_ids")):
            values[key] = _known_token(value)


def _known_token(value: Any) -> Any:
    """A token of the small vocabulary that no row has."""
    if isinstance(value, list):
        return [_known_token(entry) for entry in value]
    if isinstance(value, int) and value >= TOKENS.start:
        return TOKENS.stop + value % (VOCABULARY - TOKENS.stop)
    return value


def _cut_mlp(values: dict[str, Any]) -> None:
    """Narrow layers after attention, few experts."""
    for key, value in values.items():
        if key in MLP_WIDTHS and isinstance(value, list):  # a width for each layer
            values[key] = [MLP_WIDTH] * len(value)
        if not isinstance(value, int) or isinstance(value, bool):
            continue
        if key in MLP_WIDTHS:
            values[key] = min(value, MLP_WIDTH)
        elif key in EXPERT_COUNTS:
            values[key] = min(value, EXPERTS)
        elif key in CHOSEN_EXPERTS:
            values[key] = min(value, 2)
        elif key in EXPERT_GROUPS:
            values[key] = min(value, 1)


def _cut_windows(values: dict[str, Any], longest: int | None) -> None:
    for key in WINDOWS:
        window = values.get(key)
        if isinstance(window, int) and 0 < window < (longest or math.inf):
            values[key] = SMALL_WINDOW


def _cut_no_heads(_: dict[str, Any]) -> None:
    """Leave the hidden size as it is: all widths fit each other then."""


def _cut_all_heads(values: dict[str, Any]) -> None:
    """Few heads, also of layers that are no attention: as many times fewer as the hidden size is smaller."""
    before = _number(values, HIDDEN)
    _cut_heads(values)
    after = _number(values, HIDDEN)
    if not before:
        return
    for key in OF_ATTENTION:
        if isinstance(values.get(key), int):
            values[key] = values[key] * after // before
    for key in MAMBA_HEADS:
        if isinstance(values.get(key), int):
            values[key] = max(1, values[key] * after // before)
            for groups in MAMBA_GROUPS:
                if isinstance(values.get(groups), int):
                    values[groups] = 1


def _cut_heads(values: dict[str, Any]) -> None:
    """Few heads of their own size, and a hidden size for so many of them."""
    hidden = _number(values, HIDDEN)
    heads = _number(values, HEAD_COUNTS)
    if not hidden:
        return
    narrow = NARROW
    if heads and not isinstance(values.get("head_dim"), int):  # the size of heads follows from it
        narrow = HEADS * max(1, hidden // heads)
    for key in HIDDEN:
        if values.get(key) == hidden:
            values[key] = min(narrow, hidden)
    if heads and heads > HEADS:
        for key in HEAD_COUNTS:
            if values.get(key) == heads:
                values[key] = HEADS
        shared = values.get("num_key_value_heads")
        if isinstance(shared, int):
            values["num_key_value_heads"] = HEADS if shared == heads else min(shared, 2)
