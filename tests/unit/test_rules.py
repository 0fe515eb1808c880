"""Rules that need a model of their own, the rehearsal of ds_configs, and ZeRO-Infinity's buffers."""

import json
import logging
import os
from functools import partial
from types import SimpleNamespace

import pytest
from transformers import AutoModelForCausalLM, AutoTokenizer

from tests.helpers.faults import TWO, TWO_NODES, ds_config, findings_in, found_in
from tests.helpers.tiny import ROOT, llama_config, write_experts, write_llama, write_model, write_recipe
from zero_recipes.checks.capacity import nvme_findings
from zero_recipes.checks.rehearsal import parser_findings
from zero_recipes.checks.rules import Candidate, options
from zero_recipes.config import recipe as recipes
from zero_recipes.config.ds_config import DsConfig, fill_own_autos
from zero_recipes.config.recipe import RunConfig
from zero_recipes.config.strategy import Strategy, resolve_strategy
from zero_recipes.core.findings import Refusal
from zero_recipes.core.host import Host
from zero_recipes.distributed import kernels
from zero_recipes.model import local_config, sizes_of

SHARED = {"sequence_parallel_size": 2, "pad_to_multiple_of": 128, "dataloader_drop_last": True, "max_length": 128}


@pytest.fixture(scope="module")
def found(tmp_path_factory):
    """found_in a quick recipe, with changes."""
    return partial(found_in, write_recipe(tmp_path_factory.mktemp("found")))


def test_experts_that_are_modules_of_their_own(tmp_path):
    """Hung at stage 3, and at stages 1 and 2 with losses unlike those of stage 0, DDP, and stage 3 with leaf modules:
    seen where two ranks used other experts."""
    path = write_recipe(tmp_path, trust_remote_code=True)
    write_experts(tmp_path / "model")
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


def test_what_the_parser_refuses_is_found_without_a_trace(tmp_path, monkeypatch, capfd):
    """Nothing is printed, and neither the environment nor the libraries' state changes."""
    from transformers.integrations import deepspeed as announced

    def state() -> tuple:
        return dict(os.environ), announced._hf_deepspeed_config_weak_ref, logging.getLogger("DeepSpeed").level

    monkeypatch.setenv("ACCELERATE_CONFIG_DS_FIELDS", "zero_stage,mixed_precision")  # accelerate would stop on them
    path = write_recipe(tmp_path)
    settings, before = recipes.parse_recipe(path, recipes.read_recipe_file(path), []).settings, state()
    config = ds_config(3) | {"bf16": {"enabled": "auto", "loss_scale": 0}}
    (finding,) = parser_findings(Candidate(settings, Strategy("zero", 2, DsConfig(config), "c.json"), "cpu", TWO))
    assert finding.code == "ZR199" and "loss_scale" in finding.why and "c.json" in finding.what
    assert state() == before and capfd.readouterr() == ("", "")


INFINITY = json.loads((ROOT / "ds_configs" / "zero3_infinity.json").read_text())


@pytest.fixture(scope="module")
def large(tmp_path_factory):
    folder = tmp_path_factory.mktemp("large")
    model = write_model(folder / "large", hidden=512, intermediate=4096)
    path = write_recipe(folder, model_name_or_path=str(model))
    return recipes.parse_recipe(path, recipes.read_recipe_file(path), []).settings


@pytest.mark.parametrize("world_size", [1, 2, 4])
def test_the_buffer_takes_the_models_largest_part_and_no_more(large, world_size):
    filled = fill_own_autos(INFINITY, None, world_size, {}, sizes_of(large))
    largest = max(p.numel() for p in AutoModelForCausalLM.from_config(local_config(large)).parameters())
    assert filled["zero_optimization"]["offload_param"]["buffer_size"] == -(-largest // world_size)
    assert INFINITY["zero_optimization"]["offload_param"]["buffer_size"] == "auto", "a copy is filled"


def test_a_resolved_recipe_goes_with_the_accelerate_file_that_it_was_launched_with(large, tmp_path):
    filled = fill_own_autos(INFINITY, str(tmp_path), 2, {}, sizes_of(large))
    resolved = large.replace(deepspeed=filled, nvme_path=str(tmp_path))
    launched = {"ACCELERATE_USE_DEEPSPEED": "true", "WORLD_SIZE": "2"}
    launched["ACCELERATE_DEEPSPEED_CONFIG_FILE"] = str(ROOT / "ds_configs" / "zero3_infinity.json")
    assert resolve_strategy(resolved, launched, sizes_of).name == "zero3_infinity"


def test_room_and_buffers_of_nvme(large, tmp_path):
    def findings(free: int = 10**15, **block) -> list:
        config = fill_own_autos(INFINITY, str(tmp_path), 2, {}, sizes_of(large))
        config["zero_optimization"]["offload_param"] |= block
        changed = large.replace(deepspeed=config)
        run = RunConfig(None, changed, {}, resolve_strategy(changed, {"WORLD_SIZE": "2"}, sizes_of), "cpu", tmp_path)
        host = Host(statvfs=lambda path: SimpleNamespace(f_bavail=free, f_frsize=1))
        return list(nvme_findings(run, sizes_of(large), 2, host))

    assert findings() == []
    ((full,), (narrow,)) = findings(free=10**6), findings(buffer_size=1000)
    assert (full.code, full.level) == ("ZR619", "error") and f"to {tmp_path}, which has 1.00 MB free" in full.what
    assert (narrow.code, narrow.level) == ("ZR620", "error") and "buffer_size 1,000" in narrow.what


def test_async_io_is_left_out_by_name_where_libaio_is_missing(monkeypatch, capsys):
    monkeypatch.setattr(Host, "libaio_headers", lambda self: False)
    monkeypatch.setattr(kernels, "missing", lambda names, device: names)
    monkeypatch.setattr(kernels, "build", lambda names: print("building", names))
    kernels.main(["cpu_adam", "async_io"])
    said = capsys.readouterr().out
    assert "apt-get install libaio-dev" in said and "building ['cpu_adam']" in said
