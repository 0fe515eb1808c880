"""Each private part has a self-check that passes here and fails where what it relies on has another name."""

from __future__ import annotations

import contextlib
import tomllib
from pathlib import Path
from types import CodeType, SimpleNamespace

import pytest
import torch
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet

from tests.helpers.tiny import ROOT, write_recipe
from zero_recipes.checks.preflight import preflight
from zero_recipes.config import recipe as recipes
from zero_recipes.config.ds_view import DsConfig
from zero_recipes.core.findings import Refusal
from zero_recipes.libs import (
    deepspeed_tensors,
    huggingface,
    parts_of_accelerate,
    parts_of_deepspeed,
    parts_of_huggingface,
    private_part,
    registry,
    torch_internals,
    versions,
)
from zero_recipes.libs.patches import keep_4bit_layout
from zero_recipes.libs.private_part import Exists, Line, Mentions, Takes

PARTS = [part for parts in registry.PARTS.values() for part in parts]
RELIANCES = [
    (part, reliance, name)
    for part in PARTS
    for reliance in part.relies_on
    for name in getattr(reliance, "names", [getattr(reliance, "where", None)])
]


@pytest.mark.private
@pytest.mark.parametrize("part", PARTS, ids=lambda part: part.name)
def test_what_it_relies_on_is_there(part):
    assert part.missing() == []


def rename(monkeypatch, reliance, name: str) -> str:
    """Give what a self-check looks for another name; what it should say is missing."""
    if isinstance(reliance, Exists):
        remove(monkeypatch, private_part.find_part(reliance.where), name)
        return f"{reliance.where} {name}"
    if isinstance(reliance, Mentions):
        owner = private_part.find_part(reliance.where)
        for function in list(private_part.functions(owner)):
            monkeypatch.setattr(function, "__code__", without_name(function.__code__, name))
        if isinstance(owner, type) and hasattr(owner, name):
            remove(monkeypatch, owner, name)
        return f"{reliance.where} {name}"
    if isinstance(reliance, Takes):
        owner, _, method = reliance.where.replace(":", ".").rpartition(".")
        owner = reliance.where.removesuffix(f".{method}").removesuffix(f":{method}")
        monkeypatch.setattr(private_part.find_part(owner), method, lambda another: None)
        return f"{reliance.where} takes (another)"
    assert isinstance(reliance, Line)
    read = Path.read_text
    monkeypatch.setattr(Path, "read_text", lambda path, **given: read(path, **given).replace(reliance.text, "another"))
    return reliance.file


def remove(monkeypatch, owner, name: str) -> None:
    holder = next((cls for cls in getattr(owner, "__mro__", ()) if name in vars(cls)), owner)
    with contextlib.suppress(TypeError):  # a class of torch's C++ code
        monkeypatch.delattr(holder, name)
    if hasattr(owner, name):  # there too, or in a namespace of operators, which makes it anew
        found = private_part.find_part
        monkeypatch.setattr(private_part, "find_part", lambda where: None if found(where) is owner else found(where))


def without_name(code: CodeType, name: str) -> CodeType:
    """The same code, with another name in it and in what is nested in it."""
    nested = [without_name(each, name) if isinstance(each, CodeType) else each for each in code.co_consts]
    return code.replace(
        co_names=tuple("another" if each == name else each for each in code.co_names),
        co_consts=tuple("another" if each == name else each for each in nested),
    )


@pytest.mark.private
@pytest.mark.parametrize(
    "part, reliance, name", RELIANCES, ids=[f"{part.name}-{number}" for number, (part, *_) in enumerate(RELIANCES)]
)
def test_a_renamed_part_is_refused_by_name(monkeypatch, part, reliance, name):
    with monkeypatch.context() as patch:
        missing = rename(patch, reliance, name)
        with pytest.raises(Refusal) as refused:
            part.require()
        findings = [f for f in registry.private_part_findings([part])]
    assert refused.value.codes == ["ZR624"] and missing in refused.value.what
    assert [(f.code, f.level) for f in findings] == [("ZR624", "error")]
    assert findings[0].what.startswith(f"{part.name}: {part.library} ") and part.otherwise in findings[0].why
    assert part.missing() == []


@pytest.mark.private
def test_a_part_that_is_gone_altogether_is_missing():
    assert Exists("transformers.no_such_module", ("name",)).missing() == ["transformers.no_such_module name"]
    assert Mentions("transformers.trainer:Trainer.no_such_method", ("name",)).missing()
    assert Takes("transformers.trainer:Trainer.no_such_method", ("self",)).missing()
    assert Line("deepspeed", "deepspeed/no_such_file.py", "text").missing()


# one run


def findings_of(tmp_path, **keys) -> list:
    path = write_recipe(tmp_path, **keys)
    found = preflight(path, recipes.read_recipe_file(path), [], {})[1]
    return [finding for finding in found if finding.code in ("ZR624", "ZR625")]


def test_nothing_is_said_about_tested_versions(tmp_path):
    assert findings_of(tmp_path) == findings_of(tmp_path, deepspeed="ds_configs/zero3.json") == []


def test_a_run_is_refused_for_a_part_that_it_uses_and_for_no_other(monkeypatch, tmp_path):
    monkeypatch.delattr("transformers.trainer.Trainer._save_checkpoint")
    monkeypatch.delattr("deepspeed.comm.comm.cdb")
    assert [finding.what.partition(":")[0] for finding in findings_of(tmp_path)] == ["checkpoints"]
    with_deepspeed = findings_of(tmp_path, deepspeed="ds_configs/zero3.json")
    assert [finding.what.partition(":")[0] for finding in with_deepspeed] == ["checkpoints", "deepspeed_collectives"]


def test_an_untested_version_is_said_once_with_the_names_of_its_parts(monkeypatch, tmp_path):
    monkeypatch.setitem(versions.TESTED, "transformers", ">=5.1,<5.2")
    (warning,) = findings_of(tmp_path)
    assert warning.code == "ZR625" and warning.level == "warning"
    assert warning.what.startswith(f"transformers {versions.installed('transformers')} is not a tested version")
    for part in registry.EVERY_RUN:
        assert (part.name in warning.what) == (part.library == "transformers")
    assert "names_of_the_file" not in warning.what  # FSDP2's


def test_an_untested_version_with_a_changed_part_is_refused(monkeypatch, tmp_path):
    monkeypatch.setitem(versions.TESTED, "transformers", ">=5.1,<5.2")
    monkeypatch.delattr("transformers.trainer.Trainer._save_checkpoint")
    error, warning = findings_of(tmp_path)
    assert (error.level, warning.level) == ("error", "warning")
    assert error.what.startswith("checkpoints: ") and "checkpoints" not in warning.what


@pytest.mark.parametrize(
    "stage, config, groups",
    [
        (0, {}, {"DeepSpeed", "DeepSpeed, stage 0"}),
        (2, {}, {"DeepSpeed"}),
        (3, {}, {"DeepSpeed", "DeepSpeed, stage 3"}),
        (3, {"zero_quantized_gradients": True}, {"DeepSpeed", "DeepSpeed, stage 3", "zero_quantized_gradients"}),
        (None, None, {"neither DeepSpeed nor FSDP2"}),
        ("fsdp", None, {"FSDP2", "FSDP2 on CPUs"}),
    ],
)
def test_a_run_is_asked_for_the_parts_that_it_uses(stage, config, groups):
    strategy = SimpleNamespace(
        is_deepspeed=config is not None,
        is_fsdp=stage == "fsdp",
        zero_stage=stage,
        ds_config=None if config is None else DsConfig({"zero_optimization": {"stage": stage, **config}}),
    )
    plain = {"load_in_4bit": False, "padding_free": False, "packing": False, "max_length": 8}
    plain["supervised_logits_only"] = False
    used = registry.parts_in_use(strategy, SimpleNamespace(**plain), "cpu")
    assert used == [p for group, parts in registry.PARTS.items() if group in groups | {"every run"} for p in parts]
    with_4_bit = registry.parts_in_use(strategy, SimpleNamespace(**plain | {"load_in_4bit": True}), "cuda")
    assert set(registry.FOUR_BIT) <= set(with_4_bit) and not set(registry.FSDP2_ON_CPU) & set(with_4_bit)
    cut = SimpleNamespace(**plain | {"padding_free": True})
    assert set(registry.parts_in_use(strategy, cut, "cpu")) == {*used, *registry.PADDING_FREE}
    supervised = SimpleNamespace(**plain | {"supervised_logits_only": True})
    assert set(registry.parts_in_use(strategy, supervised, "cpu")) == {*used, *registry.SUPERVISED_LOGITS}


# where the parts are applied


def deepspeed_optimizer(path: str) -> torch.nn.Module:
    """One of DeepSpeed's optimizers without its __init__, with a tensor of 64 bytes in each place that is read."""
    cls = private_part.find_part(path)
    made = object.__new__(cls)
    for names in deepspeed_tensors._LAYOUTS[cls.__name__].values():
        for name in names:
            setattr(made, name, [torch.zeros(16)])
    made.partition_gradients, made.ipg_buckets = False, {}
    made.optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))])
    return made


ZERO = [getattr(parts_of_deepspeed, name) for name in ("STAGE_1_AND_2", "STAGE_3", "FUSED", "UNFUSED", "BF16")]


@pytest.mark.private
@pytest.mark.parametrize("path", ZERO, ids=lambda path: path.rpartition(":")[2])
def test_a_renamed_tensor_of_deepspeed_is_not_counted_as_0_bytes(path):
    layout = deepspeed_tensors._LAYOUTS[path.rpartition(":")[2]]
    counted = deepspeed_tensors.state_bytes(torch.nn.Module(), [], deepspeed_optimizer(path), False, False)
    assert counted["optimizer"] == 64 and counted["grads"] == 64 * len(layout["gradients"])
    assert counted["params"] == 64 * len(layout["weights"])
    for name in (name for names in layout.values() for name in names):
        optimizer = deepspeed_optimizer(path)
        delattr(optimizer, name)
        with pytest.raises(Refusal, match=name) as refused:
            deepspeed_tensors.state_bytes(torch.nn.Module(), [], optimizer, False, False)
        assert refused.value.codes == ["ZR624"]
        assert any(name in reliance.names for reliance in parts_of_deepspeed.MODEL_STATES.relies_on)


@pytest.mark.private
def test_a_parameter_without_its_partition_is_not_counted_as_0_bytes():
    p = torch.nn.Parameter(torch.zeros(0))
    with pytest.raises(Refusal, match="ds_tensor"):
        deepspeed_tensors.state_bytes(
            torch.nn.Module(), [p], deepspeed_optimizer(parts_of_deepspeed.STAGE_3), False, False
        )


def test_an_optimizer_that_is_not_known_is_not_counted_as_0_bytes():
    class Unknown:
        optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))])

    with pytest.raises(Refusal, match="Unknown is none of DeepSpeedZeroOptimizer"):
        deepspeed_tensors.state_bytes(torch.nn.Module(), [], Unknown(), False, False)


@pytest.mark.parametrize(
    "read, owner, part",
    [
        (huggingface.count_tokens_with_loss, SimpleNamespace(model_accepts_loss_kwargs=False), "token_weights"),
        (huggingface.attention_in_force, SimpleNamespace(config=SimpleNamespace()), "attention_in_force"),
        (huggingface.kept_in_fp32, SimpleNamespace(_keep_in_fp32_modules=None), "modules_kept_in_fp32"),
        (huggingface.fingerprint, SimpleNamespace(), "fingerprint_of_rows"),
        (torch_internals.ddp_bucket_bytes, SimpleNamespace(), "gradient_buckets"),
    ],
)
def test_an_attribute_that_is_gone_is_refused_where_it_is_read(read, owner, part):
    with pytest.raises(Refusal) as refused:
        read(owner)
    assert refused.value.codes == ["ZR624"] and refused.value.what.startswith(f"{part}: ")


@pytest.mark.private
def test_a_4_bit_layer_without_the_switch_is_refused():
    nn = pytest.importorskip("bitsandbytes.nn")
    layer = nn.Linear4bit(8, 8)
    keep_4bit_layout(layer)
    assert layer.support_avx512bf16_for_cpu is False
    del layer.support_avx512bf16_for_cpu
    with pytest.raises(Refusal, match="layout_of_4_bit"):
        keep_4bit_layout(layer)


@pytest.mark.private
def test_the_whole_size_of_a_part_is_never_that_of_the_part():
    p = torch.nn.Parameter(torch.zeros(0))
    assert deepspeed_tensors.whole_size(p) == 0 and deepspeed_tensors.whole_shape(p) == (0,)
    p.ds_id = 1
    for read in (deepspeed_tensors.whole_size, deepspeed_tensors.whole_shape):
        with pytest.raises(Refusal, match="partitioned_parameters"):
            read(p)


@pytest.mark.private
def test_what_transformers_knew_of_deepspeed_it_knows_again():
    from transformers.integrations import deepspeed

    config = deepspeed.HfDeepSpeedConfig({"zero_optimization": {"stage": 3}})
    try:
        assert deepspeed.is_deepspeed_zero3_enabled()
        with huggingface.without_deepspeed_announcement():
            assert not deepspeed.is_deepspeed_zero3_enabled()
            deepspeed.HfDeepSpeedConfig({"zero_optimization": {"stage": 2}})
        assert deepspeed.deepspeed_config() is config.config
    finally:
        deepspeed.unset_hf_deepspeed_config()


# what is written about them


def test_the_tested_versions_are_those_of_pyproject_and_of_the_lock():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    named = [*project["dependencies"], *project["optional-dependencies"]["qlora"]]
    required = {r.name: r.specifier for r in map(Requirement, named)}
    lock = (ROOT / "requirements.lock").read_text().lower()
    locked = dict(line.split("==") for line in lock.splitlines() if "==" in line)
    for library, tested in versions.TESTED.items():
        assert required[library] == SpecifierSet(tested) and locked[library] in SpecifierSet(tested)
    for library, specifier in required.items():
        assert locked[library] in specifier


def test_every_part_names_a_library_and_has_a_name_of_its_own():
    assert len({part.name for part in PARTS}) == len(PARTS)
    modules = (parts_of_accelerate, parts_of_deepspeed, parts_of_huggingface, registry.pt, registry.trl)
    written = {id(v) for m in modules for v in vars(m).values() if isinstance(v, private_part.PrivatePart)}
    assert written == set(map(id, PARTS))
    for part in PARTS:
        assert part.library in versions.TESTED and part.relies_on
        assert (ROOT / "zero_recipes" / part.used_by.partition(",")[0].partition(";")[0]).is_file()


def test_the_counted_operators_are_those_of_the_record():
    from zero_recipes.metrics.communication import _OPERATORS

    named = {f"{r.where.rpartition('.')[2]}::{name}" for r in registry.pt.OPERATORS.relies_on for name in r.names}
    assert set(_OPERATORS) == named


def test_private_names_stay_where_their_records_are():
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["ruff"]["lint"]
    excepted = {path for path, codes in settings["per-file-ignores"].items() if "SLF001" in codes}
    assert "SLF001" in settings["select"]
    assert excepted == {"zero_recipes/libs/*", "zero_recipes/plan/simulator/*", "tests/*"}
    assert not [path for path in (ROOT / "zero_recipes").rglob("*.py") if "noqa: SLF001" in path.read_text()]
