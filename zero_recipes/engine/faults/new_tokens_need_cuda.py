"""LoRA with `trainable_token_indices` at stage 3 ends on CPUs: "Torch not compiled with CUDA enabled".

PEFT asks for the current CUDA device to receive rank 0's rows, once the weights are loaded. The gathered weight is
whole on every rank and needs no message.

Library: PEFT 0.21, tuners/trainable_tokens/layer.py (`TrainableTokensLayer._collect_token_weights`).
Upstream: none found; the method comes from huggingface/peft#2605.
Here: every rank reads the rows of the gathered weight.

See it: one CPU, without CUDA

    import torch
    from peft.tuners.trainable_tokens.layer import TrainableTokensLayer

    try:
        TrainableTokensLayer._collect_token_weights(None, torch.zeros(2, 2), [0], 2)
        raise SystemExit("no fault")
    except (AssertionError, RuntimeError) as error:
        print(error)
"""

import torch

from zero_recipes.engine.replacing import replaces


def apply() -> None:
    """Let the embeddings of new tokens be read on any device."""
    from peft.tuners.trainable_tokens.layer import TrainableTokensLayer
    from peft.utils.integrations import gather_params_ctx

    @replaces(TrainableTokensLayer, "_collect_token_weights")
    def collect_token_weights(faulty, self, weight, rows, embed_dim):
        with gather_params_ctx([weight], modifier_rank=None), torch.no_grad():
            return weight[rows].clone()
