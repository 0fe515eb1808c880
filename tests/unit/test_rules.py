"""Rules that need a model of their own, and the rehearsal of ds_configs."""

import json
import logging
import os
from functools import partial

import pytest
from transformers import AutoTokenizer

from tests.helpers.faults import TWO, TWO_NODES, ds_config, findings_in, found_in
from tests.helpers.tiny import ROOT, llama_config, write_llama, write_recipe
from zero_recipes.checks.rehearsal import parser_findings
from zero_recipes.checks.rules import Candidate, options
from zero_recipes.config import recipe as recipes
from zero_recipes.config.ds_config import DsConfig
from zero_recipes.config.strategy import Strategy
from zero_recipes.core.findings import Refusal

SHARED = {"sequence_parallel_size": 2, "pad_to_multiple_of": 128, "dataloader_drop_last": True, "max_length": 128}


@pytest.fixture(scope="module")
def found(tmp_path_factory):
    """found_in a quick recipe, with changes."""
    return partial(found_in, write_recipe(tmp_path_factory.mktemp("found")))


EXPERTS = """
from torch import nn
from transformers import GPTNeoXForCausalLM

class OwnSparseMoeBlock(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.experts = nn.ModuleList(nn.Linear(width, width) for _ in range(4))

class OwnForCausalLM(GPTNeoXForCausalLM):
    def __init__(self, config):
        super().__init__(config)
        self.gpt_neox.layers[1].mlp = OwnSparseMoeBlock(config.hidden_size)
"""


def test_experts_that_are_modules_of_their_own(tmp_path):
    """Hung at stage 3, and at stages 1 and 2 with losses unlike those of stage 0, DDP, and stage 3 with leaf modules:
    seen where two ranks used other experts."""
    path = write_recipe(tmp_path, trust_remote_code=True)
    model = tmp_path / "model"
    config = json.loads((model / "config.json").read_text())
    auto_map = {"AutoModelForCausalLM": "modeling_own.OwnForCausalLM"}
    (model / "config.json").write_text(json.dumps(config | {"auto_map": auto_map, "num_experts": 4}))
    (model / "modeling_own.py").write_text(EXPERTS)
    for stage, zero, codes in (
        (3, {}, ["ZR286"]),
        (2, {"round_robin_gradients": True}, ["ZR285"]),
        (3, {"leaf_module": {"classes": ["OwnSparseMoeBlock"]}}, []),
        (3, {"leaf_module": {"name_suffixes": "layers.1.mlp"}}, []),
        (3, {"leaf_module": {"names": ["gpt_neox.layers.0.mlp"]}}, ["ZR286"]),
        (0, {}, []),
    ):
        assert [code for _, code in found_in(path, {"deepspeed": ds_config(stage, **zero)})] == codes, (stage, zero)
    launched = {"WORLD_SIZE": "2", "ACCELERATE_DEEPSPEED_MOE_LAYER_CLS_NAMES": "OwnSparseMoeBlock"}
    assert found_in(path, {"deepspeed": ds_config(3)}, environment=launched) == []


def test_sequences_are_shared_by_groups_and_heads(tmp_path):
    keys = SHARED | {"deepspeed": ds_config(3)}
    with pytest.raises(Refusal, match="sequence_parallel_size 3") as caught:
        found_in(write_recipe(tmp_path), {"sequence_parallel_size": 3, "deepspeed": keys["deepspeed"]})
    assert caught.value.codes == ["ZR243"]
    write_llama(tmp_path / "model", heads=1, keys=1)
    (finding,) = [one for one in findings_in(tmp_path / "recipe.yaml", keys) if one.code == "ZR247"]
    assert "1 attention heads and 1 key-value heads" in finding.what
    write_llama(tmp_path / "model")
    assert found_in(tmp_path / "recipe.yaml", keys, device="cpu") == []


def test_packed_rows_by_the_type_of_the_model(found, tmp_path):
    kinds = options()["packing"]
    assert not {*kinds["apart"]} & {*kinds["without_positions"], *kinds["recurrent"], *kinds["convolving"]}
    llama_config().save_pretrained(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())

    def codes(kind: str, **keys) -> list[str]:
        (tmp_path / "config.json").write_text(json.dumps(config | {"model_type": kind}))
        given = {"packing": True, "model_name_or_path": str(tmp_path)} | keys
        return [code for _, code in found(given) if code in ("ZR133", "ZR460")]

    assert codes("llama") == codes("bloom", packing=False) == []
    assert codes("bloom") == codes("mamba") == codes("opt", padding_free=True, packing=False) == ["ZR133"]
    assert codes("opt", attn_implementation="kernels-community/flash-attn2") == []
    assert codes("olmo_hybrid") == ["ZR460"]


def test_lora_with_another_tokenizers_chat_template_on_tied_embeddings(found, tmp_path):
    keys = {"use_peft": True, "lora_target_modules": "all-linear", "chat_template_path": str(ROOT / "tiny_world/base")}
    for tied in (True, False):
        llama_config(tie_word_embeddings=tied).save_pretrained(tmp_path)
        AutoTokenizer.from_pretrained(ROOT / "tiny_world" / "base").save_pretrained(tmp_path)
        assert (("error", "lora_template") in found(keys | {"model_name_or_path": str(tmp_path)})) is tied


def test_the_shipped_configurations_have_no_finding(found):
    """On two nodes of two, where ZeRO++ belongs; its quantizer exists for GPUs only, and for sizes that divide."""
    for path in sorted((ROOT / "ds_configs").glob("*.json")):
        changes = {"deepspeed": str(path), "nvme_path": str(ROOT), "bf16": "autocast" not in path.stem}
        for device in ("cpu", "cuda"):
            given = {what for _, what in found(changes, device=device, environment=TWO_NODES)} - {"quantized_sizes"}
            quantizes = "_q" in path.stem or "plus_plus" in path.stem
            assert given == ({"quantized_communication_on_cpu"} if quantizes and device == "cpu" else set()), path


@pytest.fixture(scope="module")
def settings(tmp_path_factory):
    path = write_recipe(tmp_path_factory.mktemp("settings"), gradient_accumulation_steps=4, max_steps=100)
    return recipes.parse_recipe(path, recipes.read_recipe_file(path), []).settings


def parsed(settings, config: dict, world_size: int = 2) -> list:
    strategy = Strategy("zero", world_size, DsConfig(config), "c.json")
    return parser_findings(Candidate(settings, strategy, "cpu", TWO))


@pytest.mark.parametrize("name", [path.stem for path in sorted((ROOT / "ds_configs").glob("*.json"))])
def test_our_own_pass_on_any_number_of_processes(settings, name):
    config = json.loads((ROOT / f"ds_configs/{name}.json").read_text())
    for world_size, steps in ((1, 100), (7, -1)):
        assert parsed(settings.replace(max_steps=steps), config, world_size) == []


def test_what_the_parser_refuses_is_found_without_a_trace(settings, monkeypatch, capfd):
    """Nothing is printed, and neither the environment nor the libraries' state changes."""
    from transformers.integrations import deepspeed as announced

    monkeypatch.setenv("ACCELERATE_CONFIG_DS_FIELDS", "zero_stage,mixed_precision")  # accelerate would stop on them
    before = dict(os.environ), announced._hf_deepspeed_config_weak_ref, logging.getLogger("DeepSpeed").level
    (finding,) = parsed(settings, ds_config(3) | {"bf16": {"enabled": "auto", "loss_scale": 0}})
    assert finding.code == "ZR199" and "loss_scale" in finding.why and "c.json" in finding.what
    assert (dict(os.environ), announced._hf_deepspeed_config_weak_ref, logging.getLogger("DeepSpeed").level) == before
    assert capfd.readouterr() == ("", "")
