"""Whether TRL's fused LM head computes the loss of a model's own forward: found by comparing both.

The fused head (trl/trainer/utils.py, `add_fused_lm_head`) replaces the end of a model's forward: it takes the last
hidden states of `base_model`, and scales and caps logits by the names that it knows of a configuration.
"""

import contextlib
from typing import Any

import torch
from transformers import PretrainedConfig

from zero_recipes.engine.linear_attention import computed_in_torch, kernels_of
from zero_recipes.model.miniature import TOKENS, miniature, one_thread

LENGTH = 13
SAME = 1e-4  # of a token's log probability. Logits that are capped or scaled differ by 0.01 and more.


def fused_head_fits(config: Any, trust_remote_code: bool = False) -> bool | None:
    """Whether the fused LM head gives the log probabilities that the model's own logits have.

    Looked up where this process has found it before. None where no small model of the class can be made, and for what
    is no configuration of transformers'.
    """
    if not isinstance(config, PretrainedConfig):
        return None
    key = (type(config), config.to_json_string(use_diff=False), trust_remote_code)
    if key not in _FOUND:
        _FOUND[key] = _fits(config, trust_remote_code)
    return _FOUND[key]


_FOUND: dict[tuple, bool | None] = {}  # the same for every run of this process


def _fits(config: PretrainedConfig, trust_remote_code: bool) -> bool | None:
    from trl.trainer.utils import add_fused_lm_head

    model = miniature(config, trust_remote_code)
    if model is None:
        return None
    ids = torch.tensor([[*TOKENS][:LENGTH]])
    with torch.no_grad(), one_thread(), computed_in_torch(kernels_of(model), LENGTH):
        logits = model(input_ids=ids, use_cache=False).logits
        own = logits[:, :-1].log_softmax(-1).gather(-1, ids[:, 1:, None]).squeeze(-1)
        with contextlib.suppress(Exception):  # it may raise anything in a class of another form
            add_fused_lm_head(model)
            fused = model(input_ids=ids, labels=ids, fused_lm_head=True).log_probs
            return torch.allclose(own, fused, rtol=SAME, atol=SAME)
    return False
