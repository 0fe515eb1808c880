"""A model without its weights: its modules, names and shapes, on torch's meta device."""

import copy
from functools import cached_property
from pathlib import Path

import torch
from transformers import PretrainedConfig, PreTrainedModel
from transformers.pytorch_utils import Conv1D
from transformers.quantizers.base import get_keys_to_not_convert

from zero_recipes.config.ds_config import ModelSize
from zero_recipes.config.settings import Settings
from zero_recipes.core.findings import Refusal
from zero_recipes.engine.huggingface import without_deepspeed_announcement
from zero_recipes.model.build import built_or_none, from_config, from_pretrained
from zero_recipes.model.config import load_config


class MetaModel:
    """A recipe's model without its weights, built once for everything that is asked of it.

    Args:
        config: the model's configuration.
        settings: the recipe's, for the dtype, the attention and the code that the model is loaded with.
    """

    def __init__(self, config: PretrainedConfig, settings: Settings):
        self.config = config
        self.settings = settings

    @cached_property
    def model(self) -> PreTrainedModel | None:
        """The model, which nobody changes. None where its class raises: making TRL's trainer reports that."""
        if self._as_asked is not None:
            return self._as_asked
        return built_or_none(self.config, self.settings.trust_remote_code)

    @cached_property
    def size(self) -> ModelSize | None:
        """Sizes that a ds_config's "auto" depends on. None where the model cannot be built."""
        if self.model is None:
            return None
        hidden = getattr(self.config.get_text_config(), "hidden_size", 0)
        sizes = [p.numel() for p in self.model.parameters()]
        return ModelSize(hidden, max(sizes), decoder_layers(self.model), sum(sizes))

    def copy(self) -> PreTrainedModel:
        """A model of one's own, to be changed, as `load_model` makes it. Raises what its class raises."""
        settings = self.settings
        is_folder = Path(str(settings.model_name_or_path)).is_dir()
        if is_folder and settings.model_init_kwargs and not settings.random_weights:
            with without_deepspeed_announcement():  # one rank alone may build it
                return from_pretrained(self.config, settings, device_map="meta")[0]
        if self._as_asked is None:
            return self._build()
        return copy.deepcopy(self._as_asked)

    @cached_property
    def _as_asked(self) -> PreTrainedModel | None:
        try:
            return self._build()
        except Exception:  # a model's own code may raise anything
            return None

    def _build(self) -> PreTrainedModel:
        """Build the model with the recipe's dtype, attention and `model_init_kwargs`."""
        with torch.device("meta"), without_deepspeed_announcement():  # one rank alone may build it
            return from_config(self.config, self.settings)


def size_of(settings: Settings) -> ModelSize | None:
    """The size of a recipe's model. None where there is no model, which is refused elsewhere."""
    try:
        config = load_config(settings)
    except Refusal:
        return None
    return MetaModel(config, settings).size


def decoder_layers(model: PreTrainedModel) -> tuple[str, ...]:
    """Names of the classes of the layers that a decoder repeats.

    Empty where layers share weights, whose gradients come later.
    """
    count = getattr(model.config.get_text_config(), "num_hidden_layers", 0)
    for module in model.get_decoder().children():
        if isinstance(module, torch.nn.ModuleList) and len(module) == count:
            named = list(module.named_parameters(remove_duplicate=False))
            is_shared = len(named) > len(list(module.parameters()))
            return () if is_shared else tuple(sorted({type(layer).__name__ for layer in module}))
    return ()


def packed_elements(model: PreTrainedModel) -> int:
    """How many weights bitsandbytes packs: those of torch's linear layers and Conv1D, without the LM head's."""
    kept = get_keys_to_not_convert(model)
    others = [module for name, module in model.named_modules() if name not in kept]
    return sum(module.weight.numel() for module in others if type(module) in (torch.nn.Linear, Conv1D))


def packed_share(model: PreTrainedModel) -> float:
    """The share of a model's weights that bitsandbytes packs, 0 to 1.

    Embeddings and LM head, which are most of a small model, do not count.
    """
    ends = {end.weight for end in (model.get_input_embeddings(), model.get_output_embeddings()) if end is not None}
    return packed_elements(model) / (model.num_parameters() - sum(weight.numel() for weight in ends))
