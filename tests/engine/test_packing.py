"""Packing: which architectures let packed rows attend to each other."""

from __future__ import annotations

import pytest
import torch
from transformers import CONFIG_MAPPING, AutoModelForCausalLM

from tests.helpers.known_bad import found_in
from tests.helpers.tiny import ROOT, write_recipe
from zero_recipes.checks.combinations import LEAKING

SIZES = {"vocab_size": 128, "hidden_size": 32, "num_attention_heads": 2, "num_hidden_layers": 2, "pad_token_id": 1}
SMALL = {
    "llama": {"intermediate_size": 48},
    "opt": {"ffn_dim": 48, "word_embed_proj_dim": 32},
    "mpt": {"d_model": 32, "n_heads": 2, "n_layers": 2, "expansion_ratio": 2},
    "bloom": {"n_layer": 2, "n_head": 2},
    "falcon": {},
}


def tiny_model(kind: str, attention: str):
    """Weights of deviation 0.3: attention matters."""
    config = CONFIG_MAPPING[kind](**(SIZES | SMALL[kind]))
    model = AutoModelForCausalLM.from_config(config, attn_implementation=attention).eval()
    torch.manual_seed(0)
    for p in model.parameters():
        if p.dim() > 1:
            torch.nn.init.normal_(p, 0.0, 0.3)
    return model


def leak(model, boundaries: bool = True) -> float:
    """Largest difference of the logits of two rows packed by TRL's collator and apart, in shares of the largest."""
    from trl.trainer.sft_trainer import DataCollatorForLanguageModeling

    torch.manual_seed(1)
    first, second = (torch.randint(2, 128, (length,)).tolist() for length in (9, 7))
    packed = {"input_ids": first + second} | ({"seq_lengths": [9, 7]} if boundaries else {})
    batch = DataCollatorForLanguageModeling(pad_token_id=1, padding_free=boundaries)([packed])
    batch.pop("labels")
    with torch.no_grad():
        apart = torch.cat([model(torch.tensor([row]), use_cache=False).logits[0] for row in (first, second)])
        together = model(**batch, use_cache=False).logits[0]
    return ((apart - together).abs().max() / apart.abs().max()).item()


@pytest.mark.parametrize(
    "attention",
    ["eager", "sdpa", pytest.param("flex_attention", marks=pytest.mark.grid)],  # flex compiles: 20 s
)
def test_packed_rows_do_not_leak_in_llama_and_gpt_neox(attention):
    neox = AutoModelForCausalLM.from_pretrained(
        ROOT / "tiny_world" / "base", attn_implementation=attention, dtype=torch.float32
    )
    for model in (neox.eval(), tiny_model("llama", attention)):
        assert leak(model) < 1e-4
        assert leak(model, boundaries=False) > 0.1  # packing_strategy: wrapped


@pytest.mark.parametrize("kind", sorted(LEAKING))
def test_packed_rows_leak_where_the_architecture_drops_positions(kind, tmp_path):
    model = tiny_model(kind, "eager")
    assert leak(model) > 0.1, f"{kind} no longer leaks: take it off LEAKING"
    model.config.save_pretrained(tmp_path / kind)
    path = write_recipe(tmp_path)
    assert ("error", "ZR133") in found_in(path, {"packing": True, "model_name_or_path": str(tmp_path / kind)})
    assert ("error", "ZR133") not in found_in(path, {"packing": False, "model_name_or_path": str(tmp_path / kind)})
    assert ("error", "ZR133") not in found_in(path, {"packing": True})  # GPT-NeoX
