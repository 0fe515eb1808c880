"""The loss that trains is that of the model's own forward, whether TRL's fused LM head computes it or not."""

import pytest
import torch
from transformers import CONFIG_MAPPING, Gemma3Config
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from tests.helpers import cases
from tests.helpers.seeded import grid
from tests.helpers.tiny import arguments, write_recipe
from zero_recipes.engine.faults.fused_head_of_another_form import add_own_lm_head, apply
from zero_recipes.engine.linear_attention import computed_in_torch, kernels_of
from zero_recipes.model.fused_head import fused_head_fits
from zero_recipes.model.miniature import miniature

LENGTH = 13
# logits as they are, divided, multiplied, capped; a base model of another name; capped by a name that TRL does not know
QUICK = ("llama", "granite", "cohere", "gemma2", "llama4_text", "recurrent_gemma")
SMALL = {"vocab_size": 1031, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2}
SMALL |= {"num_attention_heads": 4, "num_key_value_heads": 2, "bos_token_id": 0, "eos_token_id": 0, "pad_token_id": 1}
LLAMA_4 = SMALL | {"head_dim": 16, "intermediate_size_mlp": 96, "num_local_experts": 2, "interleave_moe_layer_step": 2}


def capped_gemma() -> Gemma3Config:
    """Gemma 3 with a vision tower, whose forward does not cap logits though its configuration says so."""
    text = SMALL | {"num_hidden_layers": 1, "head_dim": 16, "final_logit_softcapping": 1.0}
    vision = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 1}
    return Gemma3Config(text_config=text, vision_config=vision, image_token_index=60)


def assert_trains_its_own_loss(config) -> None:
    """The fused head where it fits, or its stand-in, against the model's own loss."""
    from trl.trainer.utils import add_fused_lm_head

    model = miniature(config)
    ids = torch.arange(10, 10 + LENGTH)[None]
    labels = ids.clone()
    labels[0, :5] = -100  # a prompt
    with torch.no_grad(), computed_in_torch(kernels_of(model), LENGTH):
        own = model(input_ids=ids, labels=labels, use_cache=False).loss
        add_head = add_fused_lm_head if fused_head_fits(config) else add_own_lm_head
        add_head(model)
        found = model(input_ids=ids, labels=labels, fused_lm_head=True)
    assert found.loss.item() == pytest.approx(own.item(), rel=1e-4)
    assert found.label_mask.sum() == LENGTH - 5


@pytest.mark.parametrize("kind", [kind if kind in QUICK else grid(kind) for kind in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES])
def test_every_class_trains_the_loss_of_its_own_forward(kind):
    if kind not in CONFIG_MAPPING or fused_head_fits(CONFIG_MAPPING[kind]()) is None:
        pytest.skip("no small model can be made of the type's defaults")
    assert_trains_its_own_loss(CONFIG_MAPPING[kind]())


def test_a_cap_that_the_forward_does_not_have_is_not_trained():
    assert fused_head_fits(capped_gemma()) is False
    assert_trains_its_own_loss(capped_gemma())
    uncapped = capped_gemma()
    uncapped.text_config.final_logit_softcapping = None
    assert fused_head_fits(uncapped)


def test_the_stand_in_says_of_tokens_what_the_fused_head_says():
    from trl.trainer import sft_trainer

    ids = torch.arange(10, 10 + LENGTH).repeat(2, 1)
    labels = ids.masked_fill(torch.arange(LENGTH) < 4, -100)
    outputs = []
    try:
        for fits in (True, False):
            model = miniature(CONFIG_MAPPING["llama"]())
            apply(fits)
            sft_trainer.add_fused_lm_head(model, outputs=("log_probs", "entropy", "is_top1"))
            outputs.append(model(input_ids=ids, labels=labels, fused_lm_head=True))
    finally:
        apply(True)
    for name in ("loss", "log_probs", "entropy", "is_top1", "label_mask"):
        torch.testing.assert_close(outputs[1][name].float(), outputs[0][name].float(), rtol=1e-4, atol=1e-5)


def test_llama_4_trains_with_its_own_head_the_same_at_stage_3(two, tmp_path):
    """Its first step raised: 'MoeCausalLMOutputWithPast' object has no attribute 'last_hidden_state'."""
    recipe = write_recipe(tmp_path, bf16=False)
    CONFIG_MAPPING["llama4_text"](**LLAMA_4).save_pretrained(tmp_path / "model")
    losses = []
    for strategy in ("ddp", "zero3"):
        metrics = two.run(cases.train, argv=arguments(recipe, strategy, tmp_path / strategy))[0]["metrics"]
        losses.append(metrics["loss_history"])
        assert len(losses[-1]) == 3 and 5 < losses[-1][0] < 9
    assert losses[1] == pytest.approx(losses[0], rel=1e-5)
