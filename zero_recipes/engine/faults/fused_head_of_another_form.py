"""'MoeCausalLMOutputWithPast' object has no attribute 'last_hidden_state', or another loss, silently.

TRL's fused LM head puts the end of a forward together by itself. It takes `base_model` for what comes before the head,
which in Llama4ForCausalLM is the whole model. It caps logits wherever the configuration has final_logit_softcapping;
transformers' Gemma3ForConditionalGeneration does not. Heads with layers of their own (BERT) lose them.

Library: TRL 1.16, trainer/utils.py (`add_fused_lm_head`).
Upstream: none found.
Here: both are compared in a small model of the class (model/fused_head.py). Where they differ, the model's own forward
    computes the logits, of all positions at once.

See it: one CPU

    import torch
    from transformers import Gemma3Config, Gemma3ForConditionalGeneration
    from trl.trainer.utils import add_fused_lm_head

    text = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1, "head_dim": 16}
    text |= {"num_attention_heads": 2, "num_key_value_heads": 1, "final_logit_softcapping": 1.0}
    vision = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 1}
    config = Gemma3Config(text_config=text, vision_config=vision, image_token_index=60)
    torch.manual_seed(0)
    model = Gemma3ForConditionalGeneration(config).eval()
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, 0.0, 0.3)
    ids = torch.arange(4, 20)[None]
    own = model(input_ids=ids, labels=ids).loss
    add_fused_lm_head(model)
    assert abs(model(input_ids=ids, labels=ids, fused_lm_head=True).loss - own) > 0.01
"""

import functools
import types

import torch
from torch.nn.functional import cross_entropy
from transformers import PreTrainedModel

from zero_recipes.engine.replacing import replaces


def apply(fits: bool) -> None:
    """Let SFTTrainer use TRL's fused LM head; `fits` false: the model's own forward. The last call counts."""
    from trl.trainer import sft_trainer

    @replaces(sft_trainer, "add_fused_lm_head")
    def add_head(add_fused_lm_head, model, *arguments, **keywords):
        if fits:
            add_fused_lm_head(model, *arguments, **keywords)
        else:
            add_own_lm_head(model)


def add_own_lm_head(model: PreTrainedModel) -> None:
    """Let a model answer calls with `fused_lm_head=True` as TRL's fused head does, from its own logits."""
    from trl.trainer.utils import FusedCausalLMOutput

    own_forward = model.forward

    @functools.wraps(type(model).forward)  # `generate` looks at its parameters
    def forward(self, *arguments, fused_lm_head=False, labels=None, shift_labels=None, **keywords):
        if not fused_lm_head:
            given = {"labels": labels, "shift_labels": shift_labels}
            given = {name: value for name, value in given.items() if value is not None}
            return own_forward(*arguments, **given, **keywords)
        count = keywords.pop("num_items_in_batch", None)
        keywords["use_cache"] = False
        outputs = own_forward(*arguments, **keywords)
        logits = outputs.logits
        if shift_labels is None:
            logits = logits[:, :-1]
            shift_labels = labels[:, 1:]
        shift_labels = shift_labels.to(logits.device)
        mask = shift_labels != -100
        scored = logits[mask].float()
        wanted = shift_labels[mask]
        log_probs = -cross_entropy(scored, wanted, reduction="none")
        with torch.no_grad():
            is_top1 = (scored.argmax(-1) == wanted).to(log_probs.dtype)
            entropy = torch.distributions.Categorical(logits=scored).entropy()
        log_probs = _placed(log_probs, mask)
        loss = -log_probs.sum() / (mask.sum().clamp(min=1) if count is None else count)
        aux_loss = getattr(outputs, "aux_loss", None)
        if aux_loss is None:  # TRL expects one wherever the configuration has its keys: Llama 4's forward has none
            aux_loss = loss.new_zeros(())
        return FusedCausalLMOutput(
            loss=loss,
            log_probs=log_probs,
            entropy=_placed(entropy, mask),
            is_top1=_placed(is_top1, mask),
            label_mask=mask,
            aux_loss=aux_loss,
        )

    model.forward = types.MethodType(forward, model)


def _placed(values: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """Values of the positions that count, at their places, with zeros elsewhere."""
    return torch.zeros(mask.shape, device=mask.device).masked_scatter(mask, values)
