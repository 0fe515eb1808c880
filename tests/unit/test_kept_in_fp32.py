"""What `check` says of parameters that a model's class keeps in fp32, and of LM heads that FSDP2 trains wrongly."""

import json
from functools import partial

import pytest
import torch
from transformers import BertConfig, CTRLConfig, Ernie4_5_MoeConfig, T5Config, T5ForConditionalGeneration

from tests.helpers.faults import MASTERS, NVME, ds_config, findings_in, found_in, zero
from tests.helpers.tiny import llama_config, write_recipe
from zero_recipes.engine.faults.fp32_parameters import fp32_parameters, group_by_dtype
from zero_recipes.engine.faults.stage_3_one_dtype import one_dtype_of_what_trains

SIZES = {"vocab_size": 1031, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "moe_num_experts": 4}
FSDP2 = {"fsdp": True}
HEAD = {"use_peft": True, "lora_target_modules": ["q_proj"], "lora_modules_to_save": ["lm_head"]}
# a final norm that its class's name does not tell
SCALED = """
from torch import nn
from transformers import GPTNeoXForCausalLM

class Scale(nn.LayerNorm):
    pass

class OwnForCausalLM(GPTNeoXForCausalLM):
    def __init__(self, config):
        super().__init__(config)
        self.gpt_neox.final_layer_norm = Scale(config.hidden_size)
        self.post_init()
"""


@pytest.fixture(scope="module")
def ernie(tmp_path_factory):
    """Its routers' weights train, their biases are frozen. Both are in fp32 by the class."""
    path = write_recipe(tmp_path_factory.mktemp("ernie"))
    Ernie4_5_MoeConfig(**SIZES, moe_layer_start_index=0).save_pretrained(path.parent / "model")
    return path


@pytest.mark.parametrize(
    ("keys", "codes"),
    [
        (FSDP2, ["ZR434"]),
        (FSDP2 | {"bf16": False}, []),
        (FSDP2 | {"use_peft": True, "lora_target_modules": ["q_proj"]}, ["ZR434"]),
        (zero(2, MASTERS), ["ZR435"]),
        (zero(2), []),
        (zero(2, MASTERS) | {"use_peft": True, "lora_target_modules": ["q_proj"]}, []),
        (zero(3, offload_param=NVME, offload_optimizer=NVME), ["ZR436"]),
        (zero(3, offload_param={"device": "cpu"}), []),
        ({}, []),
    ],
)
def test_where_parameters_in_fp32_are_rounded(ernie, keys, codes):
    """Only there: ZeRO keeps them otherwise, and DDP is transformers' own."""
    found = [finding for finding in findings_in(ernie, keys) if finding.code in ("ZR434", "ZR435", "ZR436")]
    assert [finding.code for finding in found] == codes
    for finding in found:
        assert "model.layers.*.mlp.gate.weight" in finding.what
        assert ("e_score_correction_bias" in finding.what) == (finding.code != "ZR435"), "which is not trained"


def test_a_model_without_such_parameters(tmp_path):
    path = write_recipe(tmp_path)
    for keys in (FSDP2, zero(2, MASTERS), zero(3, offload_param=NVME, offload_optimizer=NVME)):
        assert not {"ZR434", "ZR435", "ZR436"} & {code for _, code in found_in(path, keys)}


def test_names_are_matched_by_dtype_as_transformers_does():
    """T5 keeps `wo` in fp16 alone."""
    with torch.device("meta"):
        model = T5ForConditionalGeneration(
            T5Config(vocab_size=32, d_model=8, d_kv=4, d_ff=8, num_layers=1, num_heads=2)
        )
    names = {name for name, _ in fp32_parameters(model, torch.float16)}
    assert len(names) == 2 and all(name.endswith(".wo.weight") for name in names)
    assert not list(fp32_parameters(model, torch.bfloat16))


def test_parameters_of_each_dtype_have_groups_of_their_own():
    low, high = (torch.nn.Parameter(torch.zeros(2, dtype=dtype)) for dtype in (torch.bfloat16, torch.float32))
    other = torch.nn.Parameter(torch.zeros(2))
    groups = [{"params": [high, low], "lr": 1.0, "weight_decay": 0.1}, {"params": [other], "lr": 2.0}]
    optimizer = torch.optim.AdamW(groups, weight_decay=0.0)
    group_by_dtype(optimizer)
    found = [(group["params"], group["lr"], group["weight_decay"]) for group in optimizer.param_groups]
    assert [(rate, decay) for _, rate, decay in found] == [(1.0, 0.1), (1.0, 0.1), (2.0, 0.0)]
    assert [part[0] for part, *_ in found] == [low, high, other]
    group_by_dtype(optimizer)
    assert len(optimizer.param_groups) == 3


def test_a_trained_head_beside_tied_embeddings(tmp_path):
    path = write_recipe(tmp_path, **HEAD)
    found = partial(found_in, path)
    llama_config(tie_word_embeddings=True).save_pretrained(tmp_path / "model")
    assert ("error", "ZR438") in found(FSDP2) and ("error", "ZR438") not in found({"deepspeed": ds_config(2)})
    assert ("error", "ZR438") not in found(FSDP2 | {"lora_modules_to_save": None})
    assert ("error", "ZR438") in found(FSDP2 | {"lora_modules_to_save": ["embed_tokens"]})
    llama_config(tie_word_embeddings=False).save_pretrained(tmp_path / "model")
    assert not {"ZR437", "ZR438"} & {code for _, code in found(FSDP2)}


def test_a_trained_head_without_a_norm_beside_it(tmp_path):
    path = write_recipe(tmp_path, trust_remote_code=True)
    found = partial(found_in, path)
    assert ("error", "ZR437") not in found(FSDP2)
    config = json.loads((tmp_path / "model" / "config.json").read_text())
    auto_map = {"AutoModelForCausalLM": "modeling_own.OwnForCausalLM"}
    (tmp_path / "model" / "config.json").write_text(json.dumps(config | {"auto_map": auto_map}))
    (tmp_path / "model" / "modeling_own.py").write_text(SCALED)
    assert ("error", "ZR437") in found(FSDP2) and ("error", "ZR437") not in found({})
    lora = {"use_peft": True, "lora_target_modules": ["dense"]}
    assert ("error", "ZR437") not in found(FSDP2 | lora)
    assert ("error", "ZR437") in found(FSDP2 | lora | {"lora_modules_to_save": ["lm_head"]})


@pytest.mark.parametrize(
    ("dtypes", "wanted"),
    [
        ([torch.float32, torch.bfloat16], [torch.bfloat16, torch.bfloat16]),
        ([torch.float32, torch.float32], [torch.float32, torch.float32]),
        ([torch.bfloat16, torch.float16], [torch.bfloat16, torch.float16]),
    ],
)
def test_an_adapters_matrices_take_the_16_bits_of_what_trains_beside_them(dtypes, wanted):
    """What is frozen keeps its dtype."""
    model = torch.nn.ParameterList(torch.nn.Parameter(torch.ones(2, dtype=dtype)) for dtype in dtypes)
    model.append(torch.nn.Parameter(torch.ones(2), requires_grad=False))
    one_dtype_of_what_trains(model)
    assert [p.dtype for p in model] == [*wanted, torch.float32]


def test_a_parameter_that_two_groups_of_fsdp2_would_share(tmp_path):
    """BERT's LM head has its bias under two names; a tied embedding alone is taken care of."""
    path = write_recipe(tmp_path)
    sizes = {"vocab_size": 1031, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4}
    BertConfig(**sizes, intermediate_size=64, is_decoder=True).save_pretrained(tmp_path / "model")
    found = partial(found_in, path)
    assert ("error", "ZR439") in found(FSDP2)
    assert ("error", "ZR439") not in found({"deepspeed": ds_config(3)})
    llama_config(tie_word_embeddings=True).save_pretrained(tmp_path / "model")
    assert ("error", "ZR439") not in found(FSDP2)


def test_a_class_that_cannot_recompute(tmp_path):
    path = write_recipe(tmp_path, activation_checkpointing=True)
    found = partial(found_in, path)
    assert ("error", "ZR440") not in found({})
    CTRLConfig(vocab_size=1031, n_embd=32, dff=64, n_layer=1, n_head=2).save_pretrained(tmp_path / "model")
    assert ("error", "ZR440") in found({})
    assert ("error", "ZR440") not in found({"activation_checkpointing": False})
