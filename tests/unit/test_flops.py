"""Model FLOPs and MFU: held against torch's own counter on real models, against papers, and brute force."""

import random
from types import SimpleNamespace

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode
from transformers import AutoConfig, AutoModelForCausalLM
from trl.trainer.sft_trainer import DataCollatorForLanguageModeling

from zero_recipes.metrics.flops import ModelFlops, model_flops, squares
from zero_recipes.metrics.probe import UsedFlops, utilisation
from zero_recipes.metrics.schema import RunIdentity

WIDE = {"vocab_size": 96, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 3}
WIDE |= {"num_attention_heads": 4, "max_position_embeddings": 128, "pad_token_id": 0}
WIDE |= {"bos_token_id": 1, "eos_token_id": 2}
GROUPED = WIDE | {"num_key_value_heads": 2}
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24}
GPT2 = {"vocab_size": 96, "n_embd": 32, "n_layer": 3, "n_head": 4, "n_positions": 128, "bos_token_id": 1}
GPT2 |= {"eos_token_id": 2, "attn_pdrop": 0.0, "embd_pdrop": 0.0, "resid_pdrop": 0.0}
SMALL = {
    "gpt_neox": WIDE | {"tie_word_embeddings": False},
    "gpt2": GPT2,
    "llama": GROUPED | {"tie_word_embeddings": False},
    "gemma3_text": GROUPED | {"head_dim": 16, "sliding_window": 8},
    # heads that are wider in the layers of full attention, and fewer of keys
    "gemma4_text": GROUPED
    | {"head_dim": 8, "global_head_dim": 16, "num_global_key_value_heads": 1, "attention_k_eq_v": True}
    | {"sliding_window": 8, "num_hidden_layers": 6, "hidden_size_per_layer_input": 8, "vocab_size_per_layer_input": 96},
    "qwen3_moe": GROUPED | EXPERTS | {"head_dim": 8},
    "deepseek_v3": WIDE
    | {"num_key_value_heads": 4, "n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24}
    | {"q_lora_rank": 16, "kv_lora_rank": 16, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8, "v_head_dim": 12}
    | {"n_group": 1, "topk_group": 1, "first_k_dense_replace": 1},
}


def small(kind: str):
    config = AutoConfig.for_model(kind, **SMALL[kind])
    model = AutoModelForCausalLM.from_config(config, attn_implementation="eager").float()
    if "experts" in str(model):
        model.set_experts_implementation("eager")
    return model


def counted(model, rows: int, length: int) -> int:
    """What torch counts of a forward and a backward pass of rows of one length."""
    ids = torch.randint(3, 96, (rows, length))
    with FlopCounterMode(display=False) as counter:
        model(input_ids=ids, use_cache=False).logits.sum().backward()
    return counter.get_total_flops()


@pytest.mark.parametrize("kind", SMALL)
def test_torch_counts_the_same_but_for_the_half_that_causal_attention_leaves_out(kind):
    draw = random.Random(kind)
    rows, length = draw.randint(1, 3), draw.randint(9, 40)
    model = small(kind)
    found = model_flops(model)
    tokens, whole_square = rows * length, 2 * rows * length**2  # eager attention computes all of it
    assert counted(model, rows, length) == found.of_step(tokens, [whole_square] * len(found.attention))
    causal = found.of_rows([length] * rows)
    beyond = sum(w * (whole_square - rows * squares(length, window)) for window, w in found.attention.items())
    assert causal == counted(model, rows, length) - 3 * beyond


def test_frozen_weights_take_four_flops_and_an_adapter_six():
    from peft import LoraConfig, get_peft_model

    model = get_peft_model(small("llama"), LoraConfig(r=4, target_modules=["q_proj", "down_proj"]))
    model.enable_input_require_grads()  # else nothing passes back into the first layer's frozen products
    found, length = model_flops(model), 17
    assert 0 < found.trained == sum(p.numel() for p in model.parameters() if p.requires_grad) < found.weights
    assert counted(model, 2, length) == found.of_step(2 * length, [2 * 2 * length**2])
    assert found.of_step(1, [0]) == 4 * found.weights + 2 * found.trained


def used(model: ModelFlops | None) -> UsedFlops:
    identity = RunIdentity(name="r", strategy="ddp", device="cpu", precision="bf16")
    found = UsedFlops(identity)
    found.model = model
    return found


@pytest.mark.parametrize("seed", range(3))
def test_packed_rows_look_at_themselves_alone_and_padding_at_nothing(seed):
    draw = random.Random(seed)
    lengths = [draw.randint(1, 30) for _ in range(draw.randint(1, 6))]
    model = ModelFlops(7, 3, {None: 5, draw.randint(2, 12): 11})
    counts, longest = used(model), max(lengths)
    mask = torch.tensor([[1] * length + [0] * (longest - length) for length in lengths])
    padded = counts.squares({"input_ids": mask}, mask != 0)
    positions = torch.cat([torch.arange(length) for length in lengths])[None]
    packed = counts.squares({"position_ids": positions}, torch.ones_like(positions, dtype=torch.bool))
    halves = [half.squeeze(0) for half in positions.split((positions.shape[1] + 1) // 2, dim=1)]  # of two processes
    shared = [counts.squares({"position_ids": half}, torch.ones_like(half, dtype=torch.bool)) for half in halves]
    summed = [sum(parts) for parts in zip(*shared, strict=True)]
    assert padded == packed == summed
    tokens = torch.tensor([mask.numel(), sum(lengths), 0, *padded])
    assert counts.of(tokens) == pytest.approx(model.of_rows(lengths))
    assert model.of_rows(lengths) == sum(model.of_rows([length]) for length in lengths)
    if len(lengths) > 1:
        assert model.of_rows([sum(lengths)]) > model.of_rows(lengths), "one row of all would look at more"


@pytest.mark.parametrize("multiple", [None, 1, 64])
def test_what_fills_a_line_of_rows_up_is_no_token(multiple):
    draw = random.Random(multiple)
    lengths = [draw.randint(2, 30) for _ in range(5)]
    rows = [{"input_ids": [draw.randint(3, 9) for _ in range(length)]} for length in lengths]
    collate = DataCollatorForLanguageModeling(pad_token_id=0, padding_free=True, pad_to_multiple_of=multiple)
    batch = collate([row | {"labels": row["input_ids"]} for row in rows])
    every, tokens, supervised, *seen = used(ModelFlops(7, 3, {None: 5})).counted(batch, None).tolist()
    assert every == -(-sum(lengths) // (multiple or 1)) * (multiple or 1)
    assert tokens == sum(lengths) and supervised == tokens - len(rows)
    assert seen == [sum(length * length for length in lengths)]


def test_a_model_that_does_not_say_its_heads_has_no_mfu_and_a_line_that_says_so(capsys):
    found = used(None)
    model = torch.nn.Linear(2, 2)
    model.config = SimpleNamespace(get_text_config=lambda: SimpleNamespace(num_attention_heads=[2, 4]))
    found.count(model)
    assert found.model is None and "not counted, no MFU" in capsys.readouterr().out
    assert found.squares({}, torch.ones(2, 2, dtype=torch.bool)) == [] and found.of(torch.ones(3)) == 0
    assert utilisation(0.0, 10, 1.0, 2, 1e12) == {}


def test_fp32_is_held_against_tf32_where_torch_takes_it(monkeypatch):
    in_fp32 = RunIdentity(name="r", strategy="ddp", device="NVIDIA A100-SXM4-80GB", precision="fp32")
    monkeypatch.setattr(torch.backends, "fp32_precision", torch.backends.fp32_precision)  # put back afterwards
    assert UsedFlops(in_fp32).peak == 19.5e12
    torch.backends.fp32_precision = "tf32"  # what transformers' `tf32: true` sets
    assert UsedFlops(in_fp32).peak == 156e12
    assert UsedFlops(in_fp32.model_copy(update={"precision": "bf16"})).peak == 312e12
