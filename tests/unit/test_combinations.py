"""Known-bad combinations: each is found, its fixed twin is not, and the lines that the findings cite still stand."""

from __future__ import annotations

import json
import os
import tomllib
from functools import partial
from pathlib import Path

import pytest
import torch
from packaging.requirements import Requirement
from packaging.version import Version
from transformers import AutoTokenizer
from zero_recipes.checks.chat import template_findings
from zero_recipes.checks.versions import FLOORS, installed_versions, version_findings
from zero_recipes.checks.zero_options import RACES, zero_option_findings

from tests.helpers.known_bad import (
    CASES,
    ENDLESS,
    MARKED,
    SHARED,
    TWO_NODES,
    UNMARKED,
    ds_config,
    findings_in,
    found_in,
)
from tests.helpers.tiny import ROOT, write_llama, write_recipe
from zero_recipes.checks.preflight import preflight
from zero_recipes.config import recipe as recipes
from zero_recipes.config.ds_config import DsConfig
from zero_recipes.config.settings import Settings
from zero_recipes.core.findings import Refusal

SITE = Path(os.path.dirname(torch.__file__)).parent


@pytest.fixture(scope="module")
def found(tmp_path_factory):
    """found_in a quick recipe, with changes."""
    return partial(found_in, write_recipe(tmp_path_factory.mktemp("found")))


@pytest.mark.parametrize("name", CASES)
def test_a_bad_recipe_is_found_and_its_fixed_twin_is_not(found, name):
    bad, fixed, code, *rest = CASES[name]
    where = rest[0] if rest else {}
    keywords = {key: where[key] for key in ("environment", "device") if key in where}
    findings = findings_in(found.args[0], bad, **keywords)
    beside = {other for _, other in found(fixed, **keywords)}
    assert {finding.code for finding in findings} - beside == {code}
    named = [finding for finding in findings if finding.code == code]
    assert {finding.level for finding in named} == {where.get("level", "error")}
    assert any(where.get("names", "") in finding.what for finding in named), named
    assert code not in beside


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
    found = {
        str(zero): found_in(path, {"deepspeed": ds_config(stage, **zero)})
        for stage, zero in (
            (3, {}),
            (2, {"round_robin_gradients": True}),
            (3, {"leaf_module": {"classes": ["OwnSparseMoeBlock"]}}),
            (3, {"leaf_module": {"name_suffixes": ["layers.1.mlp"]}}),
            (3, {"leaf_module": {"names": ["gpt_neox.layers.0.mlp"]}}),
        )
    }
    assert list(found.values()) == [[("error", "ZR286")], [("error", "ZR285")], [], [], [("error", "ZR286")]]
    assert found_in(path, {"deepspeed": ds_config(0)}) == []
    launched = {"WORLD_SIZE": "2", "ACCELERATE_DEEPSPEED_MOE_LAYER_CLS_NAMES": "OwnSparseMoeBlock"}
    assert found_in(path, {"deepspeed": ds_config(3)}, environment=launched) == []


def test_sequences_are_shared_by_groups_and_heads(tmp_path):
    with pytest.raises(Refusal, match="groups of sequence_parallel_size 3") as caught:
        found_in(write_recipe(tmp_path), {"sequence_parallel_size": 3, "deepspeed": SHARED["deepspeed"]})
    assert caught.value.codes == ["ZR243"]
    write_llama(tmp_path / "model", heads=1, keys=1)
    (finding,) = [one for one in findings_in(tmp_path / "recipe.yaml", SHARED) if one.code == "ZR247"]
    assert "1 attention heads and 1 key-value heads" in finding.what
    write_llama(tmp_path / "model")
    assert found_in(tmp_path / "recipe.yaml", SHARED, device="cpu") == []


def test_quantisation_needs_its_package(found, monkeypatch):
    import importlib.util

    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    assert ("error", "ZR409") in found({"load_in_4bit": True})
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: name)
    assert ("error", "ZR409") not in found({"load_in_4bit": True})


def test_the_shipped_configurations_have_no_finding(found):
    """On two nodes of two, where ZeRO++ belongs; its quantiser exists for GPUs only."""
    for path in sorted((ROOT / "ds_configs").glob("*.json")):
        changes = {"deepspeed": str(path), "nvme_path": str(ROOT), "bf16": "autocast" not in path.stem}
        for device in ("cpu", "cuda"):
            given = found(changes, device=device, environment=TWO_NODES)
            quantizes = "_q" in path.stem or "plus_plus" in path.stem
            assert {code for _, code in given} == ({"ZR227"} if quantizes and device == "cpu" else set()), path
            assert len(given) == (quantizes and device == "cpu"), path


# What is cited and cannot be run here (GPUs, NVMe, bitsandbytes): (file, a line that says so)
CITED = [
    ("deepspeed/runtime/engine.py", "if load_zero_checkpoint and not self.zero_nvme_offload_optimizer():"),
    ("deepspeed/runtime/zero/stage3.py", "if self.all2all_process_group is not None and num_nodes > 1:"),
    ("deepspeed/runtime/zero/stage3.py", 'raise ValueError("Muon and reduce scatter cannot be used together")'),
    ("deepspeed/runtime/superoffload/superoffload_stage3.py", "SuperOffload only supports NVIDIA CUDA GPUs"),
    ("deepspeed/runtime/zero/stage3.py", "os.makedirs(nvme_swap_folder, exist_ok=True)"),
    ("deepspeed/runtime/swap_tensor/partitioned_param_swapper.py", "os.makedirs(self.swap_folder, exist_ok=True)"),
    ("deepspeed/runtime/zero/partition_parameters.py", "device=self.remote_device)"),
    ("deepspeed/runtime/zero/stage_1_and_2.py", "offload_optimizer_config.device != OffloadDeviceEnum.none:"),
    ("deepspeed/runtime/engine.py", "Data inconsistency within the TP group."),
    ("transformers/modeling_utils.py", "if not is_quantized and not _is_ds_init_called:"),
    ("transformers/trainer_utils.py", "You cannot perform fine-tuning on purely quantized models."),
    ("transformers/quantizers/quantizer_bnb_4bit.py", "4-bit quantization requires bitsandbytes"),
    ("transformers/trainer.py", "`auto_find_batch_size` isn't supported yet with DeepSpeed Zero-3."),
    ("deepspeed/runtime/sequence_parallel/ulysses_sp.py", "kv_head_count=arch_cfg.num_key_value_heads,"),
    ("deepspeed/runtime/sequence_parallel/ulysses_sp.py", "attention_mask = None"),
    ("deepspeed/runtime/engine.py", "executing without DeepCompile until compile() runs."),
    (
        "deepspeed/runtime/pipe/engine.py",
        'assert isinstance(self.module, PipelineModule), "model must base PipelineModule"',
    ),
    ("transformers/training_args.py", 'self.mixed_precision = os.environ.get("ACCELERATE_MIXED_PRECISION", "no")'),
    ("accelerate/utils/fsdp_utils.py", "Exclude non-floating frozen Params4bit from FSDP sharding."),
    ("deepspeed/runtime/engine.py", "if p.dtype in CASTABLE_DTYPES and p.dtype != param_dtype:"),
    ("accelerate/data_loader.py", "and new_dataset.n_shards >= num_processes"),
    ("trl/trainer/sft_trainer.py", "When `padding_free=True` without packing, `max_length` is not enforced."),
    ("trl/trainer/sft_trainer.py", 'inputs["use_cache"] = False'),  # else transformers would not look for boundaries
    ("trl/trainer/sft_trainer.py", "You set `assistant_only_loss=True`, but the dataset is not conversational."),
    ("trl/trainer/utils.py", "with autocast_ctx, maybe_gather_lm_head_ctx(weight, bias):"),  # once, not by chunk
]


@pytest.mark.parametrize("file, line", CITED, ids=[file for file, _ in CITED])
def test_the_cited_lines_still_stand(file, line):
    assert line in (SITE / file).read_text(), f"{file} has changed: look whether the rule is still needed"


def test_floors_have_their_faults_and_are_those_of_pyproject(tmp_path, monkeypatch):
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    required = {r.name: r for r in map(Requirement, project["dependencies"])}
    sound = installed_versions()
    assert list(version_findings(sound)) == []
    for package, (floor, fault) in FLOORS.items():
        assert f">={floor}" in str(required[package].specifier).split(",")
        (finding,) = version_findings(sound | {package: f"{floor}.dev0"})
        assert finding.what == f"{package} {floor}.dev0 is older than {floor}" and finding.why == fault
    monkeypatch.setattr("zero_recipes.checks.preflight.installed_versions", lambda: sound | {"trl": "1.9.0"})
    path = write_recipe(tmp_path)
    run, findings = preflight(path, recipes.read_recipe_file(path), [], {})
    assert run is None and [finding.code for finding in findings] == ["ZR601"]
    assert findings[0].what == "trl 1.9.0 is older than 1.16"


def test_races_of_overlap_comm_by_version(found):
    """Streams of a GPU: the lines that mended them are in the installed DeepSpeed, so the rule is for older ones."""

    def races(version: str, stage: int = 2, compiled: bool = False, overlap: bool = True) -> int:
        values = {
            "torch_compile_backend": None,
            "torch_compile_mode": None,
            "torch_compile": compiled,
            "bf16": True,
            "fp16": False,
            "resume_from_checkpoint": None,
        }
        config = {"zero_optimization": {"stage": stage, "overlap_comm": overlap}}
        return len(zero_option_findings(DsConfig(config), Settings(values), 2, 2, "cuda", version))

    assert races("0.18.9") == 1 and races("0.18.9", compiled=True) == 2
    assert races("0.19.2") == 0 and races("0.19.2", compiled=True) == 1
    assert races("0.19.3", compiled=True) == races("0.18.9", overlap=False) == races("0.18.9", stage=3) == 0
    source = (SITE / "deepspeed/runtime/zero/stage_1_and_2.py").read_text()
    assert "allreduced.record_stream(self.reduction_stream)" in source  # 0.19.0
    assert "bucket.copy_streams.add(get_accelerator().current_stream())" in source  # 0.19.3
    assert all(Version(mended) <= Version(installed_versions()["deepspeed"]) for mended, *_ in RACES)


def test_chat_templates_without_marks(found, tmp_path):
    from trl.chat_template_utils import get_training_chat_template, has_generation_markers

    tokenizer = AutoTokenizer.from_pretrained(ROOT / "tiny_world" / "base")

    def said(template: str | None) -> list[tuple[str, str]]:
        tokenizer.chat_template = template
        return [(finding.level, finding.code) for finding in template_findings(tokenizer)]

    assert said(MARKED) == []
    assert said(UNMARKED) == [("error", "ZR420")]
    with pytest.raises(ValueError, match="not training-compatible"):  # what TRL does, once the model has been loaded
        get_training_chat_template(tokenizer)
    assert said(None) == [("error", "ZR419")]
    with pytest.raises(TypeError):
        has_generation_markers(tokenizer.chat_template)
    assert said(ENDLESS) == [("warning", "ZR421")]

    # in a recipe: the tokenizer's own template, and a file's instead of it
    tokenizer.chat_template = UNMARKED
    tokenizer.save_pretrained(tmp_path)
    (tmp_path / "config.json").write_text((ROOT / "tiny_world/base/config.json").read_text())
    recipe = {"assistant_only_loss": True, "dataset_format": None, "model_name_or_path": str(tmp_path)}
    assert found(recipe)[0] == ("error", "ZR420")
    (tmp_path / "marked.jinja").write_text(MARKED)
    assert found(recipe | {"chat_template_path": str(tmp_path / "marked.jinja")}) == []
    assert found(recipe | {"model_name_or_path": "nobody/has-this"}) == []  # not at hand: the run says so


def test_a_mixture_of_experts_by_code_of_its_own_is_warned_of_at_stage_3(tmp_path):
    path = write_recipe(tmp_path)
    model = tmp_path / "model"
    config = json.loads((model / "config.json").read_text())
    own = {"auto_map": {"AutoModelForCausalLM": "modeling_own.OwnForCausalLM"}, "num_experts": 4}
    zero3 = {"deepspeed": ds_config(3), "trust_remote_code": True}
    (model / "config.json").write_text(json.dumps(config | own))
    assert ("warning", "ZR191") in found_in(path, zero3)
    named = ds_config(3, leaf_module={"classes": ["OwnSparseMoeBlock"]})
    others = (
        (own, zero3 | {"deepspeed": ds_config(2)}, {}),
        (own, zero3 | {"deepspeed": named}, {}),
        (own, zero3, {"ACCELERATE_DEEPSPEED_MOE_LAYER_CLS_NAMES": "OwnSparseMoeBlock"}),
        (own, zero3 | {"trust_remote_code": False}, {}),
        ({"num_experts": 4}, zero3, {}),
        ({"auto_map": own["auto_map"]}, zero3, {}),
    )
    for keys, changes, more in others:
        (model / "config.json").write_text(json.dumps(config | keys))
        environment = {"WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2"} | more
        assert "ZR191" not in [code for _, code in found_in(path, changes, environment=environment)]
