"""Every fault of the table is found, its fixed twin passes; rules that need a model of their own; ignored findings."""

import ast
import json
import logging
import os
import re
from dataclasses import replace
from functools import partial
from types import SimpleNamespace

import pytest
import yaml
from transformers import (
    CONFIG_MAPPING,
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
    FalconConfig,
    GPT2Config,
    GPTNeoXConfig,
    LlamaConfig,
    MixtralConfig,
)

from tests.helpers import faults
from tests.helpers.faults import (
    FAULTS,
    TWO,
    TWO_NODES,
    Side,
    ds_config,
    findings_in,
    findings_of,
    found_in,
    run_of,
    schedule,
)
from tests.helpers.tiny import ROOT, llama_config, settings_with, write_experts, write_llama, write_model, write_recipe
from tests.helpers.tools import refusal_of
from zero_recipes.checks import rules
from zero_recipes.checks.capacity import nvme_findings
from zero_recipes.checks.deepspeed_objects import parser_findings
from zero_recipes.config import recipe as recipes
from zero_recipes.config.ds_config import DsConfig, fill_own_autos
from zero_recipes.config.read import parse_recipe
from zero_recipes.config.run import Run
from zero_recipes.config.strategy import Strategy, resolve_strategy
from zero_recipes.core.findings import Refusal, described, table
from zero_recipes.core.host import Host
from zero_recipes.core.library_errors import library_error_as_finding
from zero_recipes.engine import kernels
from zero_recipes.model.config import load_config
from zero_recipes.model.meta import MetaModel, size_of
from zero_recipes.tools import main as cli


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
        (3, {}, []),  # whole layers
        (3, {"leaf_module": {}}, ["ZR286"]),
        (2, {"round_robin_gradients": True}, ["ZR285"]),
        (3, {"leaf_module": {"classes": ["OwnSparseMoeBlock"]}}, []),
        (0, {}, []),
    ):
        assert [code for _, code in found_in(path, {"deepspeed": ds_config(stage, **zero)})] == codes, (stage, zero)
    launched = {"WORLD_SIZE": "2", "ACCELERATE_DEEPSPEED_MOE_LAYER_CLS_NAMES": "OwnSparseMoeBlock"}
    own = ds_config(3, leaf_module={})
    assert found_in(path, {"deepspeed": own}, environment=launched) == []


def test_a_forward_that_trl_replaces_is_named(tmp_path):
    path = write_recipe(tmp_path, trust_remote_code=True)
    write_experts(tmp_path / "model")
    code = tmp_path / "model" / "modeling_own.py"
    code.write_text(
        code.read_text() + "\n    def forward(self, *words, **more):\n        return super().forward(*words, **more)\n"
    )
    assert found_in(path, {}) == [("warning", "ZR469")]


def test_sequences_are_shared_by_the_heads_of_every_layer(tmp_path):
    """Gemma 4 12B has fewer heads of keys in its layers of full attention."""
    keys = faults.SHARED | {"deepspeed": ds_config(3)}
    path = write_recipe(tmp_path)
    sizes = {"num_hidden_layers": 2, "layer_types": ["sliding_attention", "full_attention"], "head_dim": 8}
    sizes |= {"num_attention_heads": 3, "num_key_value_heads": 1, "sliding_window": 128, "attention_k_eq_v": True}
    for heads_of_layers, refused in (({}, True), ({0: 4, 1: 2}, False), ({0: 4, 1: 3}, True)):
        of_layers = {number: {"num_attention_heads": heads} for number, heads in heads_of_layers.items()}
        AutoConfig.for_model("gemma4_text", **sizes, per_layer_config=of_layers).save_pretrained(tmp_path / "model")
        codes = [one.code for one in findings_in(path, keys)]
        assert ("ZR247" in codes) == refused, heads_of_layers


def test_sequences_are_shared_by_groups_and_heads(tmp_path):
    keys = faults.SHARED | {"deepspeed": ds_config(3)}
    uneven = keys | {"sequence_parallel_size": 3}
    assert refusal_of(found_in, write_recipe(tmp_path), uneven).codes == ["ZR243"]
    write_llama(tmp_path / "model", heads=1, keys=1)
    (finding,) = [one for one in findings_in(tmp_path / "recipe.yaml", keys) if one.code == "ZR247"]
    assert "1 attention heads and 1 key-value heads" in finding.what
    write_llama(tmp_path / "model")
    for multiple, codes in ((128, []), ("128", []), (64, ["ZR251"]), ("auto", ["ZR251"]), (None, ["ZR251"])):
        own = keys | {"pad_to_multiple_of": multiple}  # on the command line it is text
        assert [code for _, code in found_in(tmp_path / "recipe.yaml", own, device="cpu")] == codes
    for layers, window, attention, codes in (
        (["conv", "full_attention"], None, "sdpa", ["ZR298"]),  # LFM2: each part would begin with an empty window
        (["sliding_attention"] * 2, 64, "sdpa", ["ZR298"]),
        (["sliding_attention"] * 2, 128, "sdpa", []),  # max_length
        (["sliding_attention"] * 2, 64, "flash_attention_2", []),
    ):
        llama_config(layer_types=layers, sliding_window=window).save_pretrained(tmp_path / "model")
        found = findings_in(tmp_path / "recipe.yaml", keys | {"attn_implementation": attention})
        assert [one.code for one in found if one.code == "ZR298"] == codes, (layers, window, attention)


@pytest.mark.parametrize("packages, stops", [({"kernels"}, True), (set(), False)])
def test_weights_in_mxfp4_are_not_trained_where_their_kernels_are(packages, stops, monkeypatch):
    monkeypatch.setattr(rules.importlib.util, "find_spec", lambda name: name in packages or None)
    run = Run(None, settings_with(), {}, Strategy("ddp", 1, DsConfig({}), ""), "cuda", {})
    quantized = SimpleNamespace(quantization_config={"quant_method": "mxfp4"})
    holds = rules.recipe_rules.conditions["ZR472"]
    assert holds(replace(run, meta=MetaModel(quantized, run.settings))) == stops
    assert not holds(replace(run, meta=MetaModel(SimpleNamespace(), run.settings)))


@pytest.mark.parametrize("named, in_config, warned", [(None, 0.1, True), (None, 0.099, False), (0.0, 0.1, False)])
def test_a_loud_loss_of_the_routers_is_said(named, in_config, warned):
    settings = settings_with(router_aux_loss_coef=named)
    config = llama_config(router_aux_loss_coef=in_config)
    run = Run(None, settings, {}, Strategy("ddp", 1, DsConfig({}), ""), "cuda", {}, MetaModel(config, settings))
    assert ("ZR466" in [found.code for found in rules.rule_findings(run)]) == warned


def test_packed_rows_by_the_type_of_the_model(found, tmp_path):
    write_model(tmp_path)

    def codes(kind: str, **keys) -> list[str]:
        CONFIG_MAPPING[kind]().save_pretrained(tmp_path)
        given = {"packing": True, "model_name_or_path": str(tmp_path)} | keys
        return [code for _, code in found(given) if code in ("ZR133", "ZR441", "ZR460")]

    assert codes("llama") == codes("bloom", packing=False) == []
    assert codes("bloom") == codes("mamba") == codes("opt", padding_free=True, packing=False) == ["ZR133"]
    assert codes("opt", attn_implementation="kernels-community/flash-attn2") == []
    assert codes("qwen3_5_moe_text") == ["ZR441"] and codes("qwen3_5_moe_text", packing=False) == []
    assert codes("llama", packing=False, padding_free=True) == []
    assert codes("dbrx") == ["ZR460"]


def test_layers_that_a_gpu_computes_in_plain_torch_are_named():
    settings = settings_with()
    from_the_hub = settings_with(model_init_kwargs={"use_kernels": True})
    run = Run(None, settings, {}, Strategy("ddp", 1, DsConfig({}), ""), "cuda", {})
    (warning,) = rules.slow_layers(replace(run, meta=MetaModel(CONFIG_MAPPING["mamba2"](), settings)))
    assert warning.code == "ZR442" and "causal-conv1d mamba-ssm" in warning.what
    mamba = MetaModel(CONFIG_MAPPING["mamba2"](), settings)
    for other in (
        replace(run, meta=mamba, device="cpu"),
        replace(run, meta=mamba, settings=from_the_hub),
        replace(run, meta=MetaModel(llama_config(), settings)),
    ):
        assert not list(rules.slow_layers(other))


@pytest.mark.parametrize(
    ("keys", "warned"),
    [
        ({}, True),
        ({"per_device_train_batch_size": 1, "max_length": 4096}, False),  # the fix: as many tokens in one sequence
        ({"max_length": 2047}, False),
        ({"max_length": None}, False),
        ({"per_device_train_batch_size": 4, "max_length": 1024}, True),
        ({"packing": False}, False),
        ({"packing": False, "padding_free": True}, True),
        ({"packing_strategy": "wrapped"}, False),
        ({"bf16": True}, False),  # sdpa needs no mask
        ({"attn_implementation": "sdpa", "bf16": True}, False),
        ({"attn_implementation": "eager", "bf16": True}, True),
        ({"attn_implementation": "flex_attention"}, False),
    ],
)
def test_rows_in_one_sequence_under_a_mask_are_named_from_4096_tokens_on(found, keys, warned):
    packed = {"packing": True, "max_length": 2048, "per_device_train_batch_size": 2, "bf16": False}
    assert (("warning", "ZR464") in found(packed | keys)) is warned


def test_lora_with_another_tokenizers_chat_template_on_tied_embeddings(found, tmp_path):
    keys = {"use_peft": True, "lora_target_modules": "all-linear", "chat_template_path": str(ROOT / "tiny_world/base")}
    for tied in (True, False):
        llama_config(tie_word_embeddings=tied).save_pretrained(tmp_path)
        AutoTokenizer.from_pretrained(ROOT / "tiny_world" / "base").save_pretrained(tmp_path)
        assert (("error", "ZR453") in found(keys | {"model_name_or_path": str(tmp_path)})) is tied


def test_lora_with_another_tokenizers_chat_template_on_a_model_without_embed_tokens(found, tmp_path):
    """GPT-NeoX's are embed_in. TRL 1.16 names embed_tokens to PEFT where the template brings tokens of its own."""
    template = tmp_path / "template.jinja"
    template.write_text("{{ messages }}")
    for config, other, stops in (
        (GPTNeoXConfig, ROOT / "tiny_world/base", True),
        (GPTNeoXConfig, template, False),
        (LlamaConfig, ROOT / "tiny_world/base", False),
    ):
        config(vocab_size=99, hidden_size=64, num_hidden_layers=1, num_attention_heads=4).save_pretrained(tmp_path)
        keys = {"use_peft": True, "chat_template_path": str(other), "model_name_or_path": str(tmp_path)}
        assert (("error", "ZR454") in found(keys)) is stops, (config, other)


def test_weights_that_bitsandbytes_passes_over(found, tmp_path):
    """Falcon's linear layers; GPT-2's are Conv1D, which it does replace. Vocabularies do not count."""
    for config, passes in ((FalconConfig, True), (MixtralConfig, False), (GPT2Config, False), (LlamaConfig, False)):
        config(vocab_size=9999, hidden_size=64, num_hidden_layers=1, num_attention_heads=4).save_pretrained(tmp_path)
        keys = faults.FOUR | {"random_weights": False, "model_name_or_path": str(tmp_path)}
        assert (("error", "ZR474") in found(keys)) is passes, config


def test_frozen_weights_in_float32(found):
    """DeepSpeed and FSDP2 convert them, but not the dtype in which 4-bit layers multiply."""
    lora = {"use_peft": True, "bf16": True}
    quantized = lora | {"load_in_4bit": True, "deepspeed": str(ROOT / "ds_configs/zero2.json")}
    assert ("warning", "ZR417") in found(lora) and ("warning", "ZR417") in found(quantized)
    assert ("warning", "ZR417") not in found(quantized | {"dtype": "bfloat16"})
    for changes in (
        {"dtype": "bfloat16"},
        {"dtype": "auto", "model_init_kwargs": {"dtype": "bfloat16"}},
        {"bf16": False},
        {"deepspeed": str(ROOT / "ds_configs/zero2.json")},
        {"use_peft": False},
    ):
        assert ("warning", "ZR417") not in found(lora | changes), changes


def test_the_shipped_configurations_have_no_finding(found):
    """On two nodes of two, where ZeRO++ belongs; its quantizer exists for GPUs only, and for sizes that divide."""
    for path in sorted((ROOT / "ds_configs").glob("*.json")):
        changes = {"deepspeed": str(path), "nvme_path": str(ROOT), "bf16": "autocast" not in path.stem}
        for device in ("cpu", "cuda"):
            codes = {code for _, code in found(changes, device=device, environment=TWO_NODES)} - {"ZR2005"}
            quantizes = "_q" in path.stem or "plus_plus" in path.stem
            assert codes == ({"ZR2004"} if quantizes and device == "cpu" else set()), path


def test_what_the_parser_refuses_is_found_without_a_trace(tmp_path, monkeypatch, capfd):
    """Nothing is printed, and neither the environment nor the libraries' state changes."""
    from transformers.integrations import deepspeed as announced

    def state() -> tuple:
        return dict(os.environ), announced._hf_deepspeed_config_weak_ref, logging.getLogger("DeepSpeed").level

    monkeypatch.setenv("ACCELERATE_CONFIG_DS_FIELDS", "zero_stage,mixed_precision")  # accelerate would stop on them
    path = write_recipe(tmp_path)
    settings, before = parse_recipe(path, recipes.read_recipe_file(path), []).settings, state()
    config = ds_config(3) | {"bf16": {"enabled": "auto", "loss_scale": 0}}
    (finding,) = parser_findings(Run(None, settings, {}, Strategy("zero", 2, DsConfig(config), "c.json"), "cpu", TWO))
    assert finding.code == "ZR199" and "loss_scale" in finding.why and "c.json" in finding.what
    assert state() == before and capfd.readouterr() == ("", "")


def test_an_accelerate_file_that_contradicts_its_ds_config_is_left_to_accelerate(tmp_path, monkeypatch):
    path = write_recipe(tmp_path)
    settings = parse_recipe(path, recipes.read_recipe_file(path), []).settings
    settings = settings.replace(deepspeed=ds_config(2), use_cpu=True)
    strategy = Strategy("zero2", 1, DsConfig(ds_config(2)), "c.json")
    for launched, refuses in (({"ACCELERATE_DEEPSPEED_CONFIG_FILE": "c.json"}, True), ({}, False)):
        monkeypatch.setenv("ACCELERATE_CONFIG_DS_FIELDS", "zero3_init_flag,mixed_precision")
        run = Run(SimpleNamespace(path=path), settings, {}, strategy, "cpu", launched)
        if refuses:
            assert "variables will be ignored" in refusal_of(run.trl_arguments).why
        else:
            assert run.trl_arguments().training.deepspeed


INFINITY = json.loads((ROOT / "ds_configs" / "zero3_infinity.json").read_text())


@pytest.fixture(scope="module")
def large(tmp_path_factory):
    folder = tmp_path_factory.mktemp("large")
    model = write_model(folder / "large", hidden=512, intermediate=4096)
    path = write_recipe(folder, model_name_or_path=str(model))
    return parse_recipe(path, recipes.read_recipe_file(path), []).settings


@pytest.mark.parametrize("world_size", [1, 2, 4])
def test_the_buffer_takes_the_models_largest_part_and_no_more(large, world_size):
    filled = fill_own_autos(INFINITY, large, world_size, {}, lambda: size_of(large))
    largest = max(p.numel() for p in AutoModelForCausalLM.from_config(load_config(large)).parameters())
    assert filled["zero_optimization"]["offload_param"]["buffer_size"] == -(-largest // world_size)
    assert INFINITY["zero_optimization"]["offload_param"]["buffer_size"] == "auto", "a copy is filled"


def test_a_resolved_recipe_goes_with_the_accelerate_file_that_it_was_launched_with(large, tmp_path):
    filled = fill_own_autos(INFINITY, large.replace(nvme_path=str(tmp_path)), 2, {}, lambda: size_of(large))
    resolved = large.replace(deepspeed=filled, nvme_path=str(tmp_path))
    launched = {"ACCELERATE_USE_DEEPSPEED": "true", "WORLD_SIZE": "2"}
    launched["ACCELERATE_DEEPSPEED_CONFIG_FILE"] = str(ROOT / "ds_configs" / "zero3_infinity.json")
    assert resolve_strategy(resolved, launched, size_of).name == "zero3_infinity"
    elsewhere = resolve_strategy(resolved.replace(use_cpu=not large.use_cpu), launched, size_of)
    assert elsewhere.ds.zero["reduce_bucket_size"] != filled["zero_optimization"]["reduce_bucket_size"], (
        "not sized anew"
    )
    other = resolved.replace(deepspeed=filled | {"gradient_clipping": 0.5})
    assert refusal_of(resolve_strategy, other, launched, size_of).codes == ["ZR201"]


def test_room_and_buffers_of_nvme(large, tmp_path):
    def findings(free: int = 10**15, **block) -> list:
        config = fill_own_autos(INFINITY, large.replace(nvme_path=str(tmp_path)), 2, {}, lambda: size_of(large))
        config["zero_optimization"]["offload_param"] |= block
        changed = large.replace(deepspeed=config)
        run = Run(None, changed, {}, resolve_strategy(changed, {"WORLD_SIZE": "2"}, size_of), "cpu", {})
        host = Host(statvfs=lambda path: SimpleNamespace(f_bavail=free, f_frsize=1))
        return list(nvme_findings(run, [size_of(large)[1]], 2, host))

    assert findings() == []
    ((full,), (narrow,)) = findings(free=10**6), findings(buffer_size=1000)
    assert (full.code, full.level) == ("ZR619", "error") and f"to {tmp_path}, which has only 1.00 MB free" in full.what
    assert (narrow.code, narrow.level) == ("ZR620", "error") and "buffer_size 1,000" in narrow.what


def test_async_io_is_left_out_by_name_where_libaio_is_missing(monkeypatch, capsys):
    monkeypatch.setattr(Host, "libaio_headers", lambda self: False)
    monkeypatch.setattr(kernels, "missing", lambda names, device: names)
    monkeypatch.setattr(kernels, "build", lambda names: print("building", names))
    kernels.main(["cpu_adam", "async_io"])
    said = capsys.readouterr().out
    assert "apt-get install libaio-dev" in said and "building ['cpu_adam']" in said


def test_a_run_without_mixed_precision_computes_in_the_dtype_of_its_weights(tmp_path):
    recipe = write_recipe(tmp_path)
    halved = {"dtype": "bfloat16", "bf16": False}
    computed = {}
    for stage in (None, 1, 3):
        keys = halved if stage is None else halved | {"deepspeed": ds_config(stage)}
        computed[stage] = run_of(recipe, keys).precision
    assert computed == {None: "bf16", 1: "bf16", 3: "fp32"}, "zero.Init makes fp32 weights"
    assert run_of(recipe, {"bf16": False}).precision == "fp32"
    run = run_of(recipe, halved)
    assert "bf16, the dtype of the weights" in str(run.strategy.described(run.device, run.settings, run.precision))


SOUND: set[tuple[str, bool]] = set()  # twins without a finding


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.name)
def test_the_fault_is_found_and_its_fixed_twin_passes(fault, tmp_path):
    data = fault.code.startswith("ZR5")  # what is found in rows and splits
    found = findings_of(fault.bad, tmp_path / "bad", data)
    assert all(finding.why and finding.fix for finding in found)
    named = [f for f in found if f.code == fault.code and f.level == fault.level and fault.names in f.what]
    assert named, [str(finding) for finding in found]
    if (repr(fault.fixed), data) not in SOUND:  # many faults have the same twin
        fixed = findings_of(fault.fixed, tmp_path / "fixed", data)
        fixed = [found for found in fixed if found.code != "ZR914"]  # of what this machine has compiled
        whole = fault.fixed.keys is None  # elsewhere other rules may find something about the GPUs that are not here
        assert fixed == [] if whole else [f for f in fixed if f.what == named[0].what] == [], [str(f) for f in fixed]
        SOUND.add((repr(fault.fixed) if whole else "", data))
    if fault.bad.keys is None:
        assert {f.code for f in found if f.level == fault.level} == {fault.code}, [str(finding) for finding in found]


@pytest.mark.parametrize(
    ("error", "ends_as"),
    [
        (RuntimeError("CUDA out of memory. Tried to allocate 2.00 GiB"), RuntimeError),
        (MemoryError("no room"), MemoryError),
        (RuntimeError("the memory of this model has another format"), Refusal),
    ],
)
def test_memory_that_is_not_enough_is_not_refused_as_a_fault_of_the_recipe(error, ends_as):
    """A sweep's row is then "oom", and its next strategy takes less."""
    with pytest.raises(ends_as), library_error_as_finding("loading the model"):
        raise error


def test_the_net_has_the_librarys_message_the_key_and_the_traceback(tmp_path, monkeypatch, capsys):
    Side(recipe="dataloader_persistent_workers: true\noptim_args: sparkle").write(tmp_path)
    monkeypatch.chdir(tmp_path)
    assert cli.main(["check", "recipe.yaml"]) == 2
    plain = capsys.readouterr().out
    assert plain.count("[ZR199]") == 2 and "Traceback" not in plain
    assert "persistent_workers option needs num_workers > 0" in plain
    assert cli.main(["check", "recipe.yaml", "--traceback"]) == 2
    whole = capsys.readouterr().out
    assert whole.count("Traceback") == 2 and "torch/utils/data/dataloader.py" in whole
    (finding,) = findings_of(Side(recipe="packing: true\nmax_length: null"), tmp_path / "packing")
    assert finding.key in ("packing", "max_length") and "`max_length` can't be `None`" in finding.why


def test_check_tokenizes_the_samples_as_a_run_does(tmp_path):
    """A chat template that takes the prompt, and not what follows it."""
    template = "{% for m in messages %}{{ m.content if loop.first or m.role != 'user' else raise_exception('no!') }}"
    template += "<|endoftext|>{% endfor %}"
    ask = {"role": "user", "content": "Where?"}
    files = {"chat.jinja": template, "asked.jsonl": json.dumps({"messages": [ask, ask]})}
    side = Side("chat_template_path: chat.jinja\nsample_prompts: asked.jsonl", files=files)
    (found,) = findings_of(side, tmp_path / "case")
    assert found.code == "ZR199" and "sample_prompts" in found.what and "no!" in found.why
    assert findings_of(replace(side, files=files | {"asked.jsonl": ""}), tmp_path / "none") == []


def test_a_token_that_the_model_has_no_embedding_for_is_found(tmp_path):
    """On a GPU it would be a device-side assert, once the weights are loaded."""
    row = json.dumps({"input_ids": [5, 1381, 0], "labels": [5, 1381, 0]}) + "\n"
    for size, codes in ((1381, ["ZR557"]), (1382, [])):
        llama_config(vocab_size=size).save_pretrained(tmp_path)
        AutoTokenizer.from_pretrained(ROOT / "tiny_world" / "base").save_pretrained(tmp_path)
        side = Side(f"model_name_or_path: {tmp_path}", files={"rows/train.jsonl": row * 4})
        assert [finding.code for finding in findings_of(side, tmp_path / "case")] == codes, size


def test_all_findings_come_at_once_with_their_lines(tmp_path, monkeypatch, capsys):
    keys = {"torch_dtype": "bfloat16", "learning_rate": [1e-5], "lerning_rate": 1e-5, "global_batch_size": 7}
    Side(recipe=yaml.safe_dump(keys, sort_keys=False), without=("gradient_accumulation_steps",)).write(tmp_path)
    monkeypatch.chdir(tmp_path)
    assert cli.main(["check", "recipe.yaml", "--num_processes", "2"]) == 2
    lines = capsys.readouterr().out.splitlines()
    for code, line in (("ZR101", 12), ("ZR107", 13), ("ZR103", 15), ("ZR121", None)):
        (text,) = [text for text in lines if text.endswith(f"[{code}]")]
        assert line is None or f"recipe.yaml:{line}" in text, text
    assert lines[0] == "recipe.yaml cannot run: 4 errors, 0 warnings"


def test_each_code_is_made_in_one_place_which_fills_in_its_placeholders():
    calls = []  # (code, names that its call fills in)
    for path in sorted((ROOT / "zero_recipes").rglob("*.py")):
        for call in ast.walk(ast.parse(path.read_text())):
            code = getattr(call.args[0], "value", None) if isinstance(call, ast.Call) and call.args else None
            if isinstance(code, str) and re.fullmatch(r"ZR\d{3,4}", code):
                calls.append((code, {keyword.arg for keyword in call.keywords}))
    assert sorted(code for code, _ in calls) == sorted(table())
    for code, filled in calls:
        text = " ".join(table()[code][part] for part in ("what", "why", "fix")).replace("{{", "")
        named = set(re.findall(r"{(\w+)[^{}]*}", text))
        passed_on = None in filled or "cause" in named  # by `**values`
        assert passed_on or named == filled - {"level", "scope", "recipe_key"}, code


def test_explain_prints_what_why_fix_and_an_example(capsys):
    assert cli.main(["explain", "zr226"]) == 0
    row, text = described("ZR226"), capsys.readouterr().out
    assert all(row[part] in text for part in ("area", "what", "why", "fix", "ignore"))
    assert "zero_quantized_weights" in text and "{" not in row["what"] + row["why"] + row["fix"]


@pytest.mark.parametrize(
    "given, code",
    [
        ({"ds": schedule(1000), "recipe": "warmup_steps: 1000\nignore: [ZR217, ZR174]"}, "ZR217"),
        ({"ds": {"pipeline": {"stages": 2}}, "recipe": "ignore: ZR239"}, "ZR239"),
        ({"ds": {"pipeline": {"stages": 2}}, "overrides": ("--ignore", "zr239,ZR608")}, "ZR239"),
        ({"ds": {"pipeline": {"stages": 2}}, "overrides": ("--ignore", "ZR608", "ZR239")}, "ZR239"),
        ({"recipe": "early_stopping_threshold: 0.1\nignore: zr827", "ds": {}}, "ZR827"),
    ],
    ids=["a list", "text", "by comma", "several words", "a rule without effect"],
)
def test_a_run_goes_on_with_what_its_recipe_ignores(tmp_path, given, code):
    (found,) = findings_of(Side(**given), tmp_path / "case")
    assert (found.code, found.level, found.ignored) == (code, "warning", True)
    others = findings_of(Side(**given | {"ds": {"bf16": {"enabled": None}}}), tmp_path / "other")
    assert [one.code for one in others if one.level == "error"] == ["ZR213"], "and with nothing else"


def test_what_cannot_be_ignored_is_refused_whatever_the_recipe_ignores_beside_it(tmp_path):
    found = findings_of(Side(recipe="ignore: [ZR143, ZR206]", ds={}), tmp_path / "case")
    assert [(one.code, one.level) for one in found] == [("ZR143", "error")] * 2
