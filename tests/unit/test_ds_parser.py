"""DeepSpeed's own parser, accelerate's plugin and its launch, asked before a run: silent, without traces, and right."""

from __future__ import annotations

import inspect
import json
import logging
import os
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import accelerate
import peft
import pytest
import transformers
import trl
from accelerate.utils import DeepSpeedPlugin
from accelerate.utils.deepspeed import DeepSpeedEngineWrapper
from deepspeed.runtime import config as deepspeed_config
from deepspeed.runtime.engine import DeepSpeedEngine
from deepspeed.runtime.superoffload import superoffload_stage3, superoffload_utils
from deepspeed.runtime.zero import stage3, stage_1_and_2
from deepspeed.runtime.zero.config import DeepSpeedZeroConfig
from zero_recipes.checks.ds_parser import REMOVED, parser_findings

from tests.helpers.accelerate_env import environment_of_launch
from tests.helpers.tiny import write_recipe
from zero_recipes.checks import ds_config_findings
from zero_recipes.cli import main as cli
from zero_recipes.config import accelerate as accelerate_files
from zero_recipes.config import recipe as recipes
from zero_recipes.config import strategy
from zero_recipes.libs.accelerate_launch import launch_findings
from zero_recipes.model import load_config, sizes_of

SOUND = json.loads(Path("ds_configs/zero3.json").read_text())
HALF = {"loss_scale": 0, "hysteresis": 2}
INLINE = "distributed_type: DEEPSPEED\nnum_processes: 4\nmixed_precision: bf16\ndeepspeed_config:\n"


@pytest.fixture(scope="module")
def settings(tmp_path_factory):
    path = write_recipe(tmp_path_factory.mktemp("settings"), gradient_accumulation_steps=4, max_steps=100)
    return recipes.parse_recipe(path, recipes.read_recipe_file(path), []).settings


@pytest.fixture
def asked(settings):
    """[(code, what)] of a ds_config with changes."""
    model = load_config(settings, settings)

    def findings(change, world_size=2, **keys):
        found = parser_findings(SOUND | change, "c.json", settings.replace(**keys), world_size, model)
        return [(finding.code, finding.what) for finding in found]

    return findings


@pytest.mark.private
def test_what_deepspeed_has_removed_is_known_by_name(asked):
    """Fails when DeepSpeed removes another block, or takes one again."""
    assert set(REMOVED) == set(deepspeed_config._REMOVED_TOP_LEVEL_CONFIG_KEYS)
    found = asked({key: {} for key in REMOVED})
    assert sorted(what.partition(" ")[0] for _, what in found) == sorted(REMOVED) and {c for c, _ in found} == {"ZR256"}


@pytest.mark.private
def test_why_frozen_weights_packed_by_deepspeed_are_refused():
    """Fails when a library calls what packs them after they are frozen, or it takes bf16: then look at ZR292 again."""
    folders = [Path(package.__file__).parent for package in (accelerate, peft, trl)]
    transformers_own = Path(transformers.__file__).parent
    for folder in (*folders, transformers_own / "integrations"):
        for path in folder.rglob("*.py"):
            assert "quantize_nontrainable_params" not in path.read_text(), path
    assert "quantize_nontrainable_params" not in (transformers_own / "trainer.py").read_text()
    assert "tensor.dtype == torch.float16" in inspect.getsource(stage3)


@pytest.mark.private
def test_why_superoffload_is_refused():
    """Fails when DeepSpeed saves the moments of its other process, or runs on CPUs: then look at ZR293 again."""
    own = vars(superoffload_stage3.SuperOffloadOptimizer_Stage3)
    assert not {"state_dict", "_rigid_state_dict", "load_state_dict"} & own.keys()
    asked = {key for key in vars(superoffload_utils.TaskKeys) if key.isupper()}
    assert asked == {"PARAM_DATA", "PARAM_GRAD", "PARAM_GROUP_ID", "SUB_GROUP_ID", "ROLLBACK", "LR"}, "or its states?"
    with pytest.raises(AssertionError, match="only supports NVIDIA CUDA"):
        superoffload_stage3._validate_superoffload_accelerator()


@pytest.mark.private
def test_why_the_accumulation_is_deepspeeds():
    """Fails when accelerate no longer tells the engine, or the engine lets it: then look at ZR295 again."""
    engine = SimpleNamespace(managed_gradient_accumulation=lambda: False, backward=lambda loss: None)
    engine.set_gradient_accumulation_boundary = partial(DeepSpeedEngine.set_gradient_accumulation_boundary, engine)
    with pytest.raises(AssertionError, match="managed_gradient_accumulation=False"):
        DeepSpeedEngineWrapper(engine).backward(0.0)


@pytest.mark.private
def test_which_gradients_deepspeed_sums_or_scales():
    """Fails when the spelling, the defaults or the stages that refuse change: then look at ZR296 and ZR297 again."""
    assert deepspeed_config.get_gradient_allreduce_op({"gradient_allreduce_op": "SUM"}) == "sum"
    assert deepspeed_config.get_gradient_allreduce_op({}) == "mean" and DeepSpeedZeroConfig().reduce_scatter
    assert not deepspeed_config.get_prescale_gradients({}) and deepspeed_config.get_gradient_predivide_factor({}) == 1
    two, three = inspect.getsource(stage_1_and_2), inspect.getsource(stage3)
    assert "if self.reduce_scatter and self.partition_gradients:" in two
    for source in (two, three):
        assert "assert self.gradient_predivide_factor == 1.0" in source and "assert self.postscale_gradients" in source


@pytest.mark.parametrize("name", [path.stem for path in sorted(Path("ds_configs").glob("*.json"))])
@pytest.mark.parametrize("world_size", [1, 2, 7])
def test_our_own_pass_on_any_number_of_processes(settings, name, world_size):
    config = json.loads(Path(f"ds_configs/{name}.json").read_text())
    assert parser_findings(config, "c.json", settings, world_size, None) == []


def test_each_fault_is_named_with_its_block(asked):
    half = {"enabled": "auto"} | HALF
    change = {"fp16": half, "bf16": half | {"immediate_grad_update": "maybe"}, "compile": {"disable": True}}
    assert asked(change) == [
        ("ZR257", "unknown to DeepSpeed in c.json: bf16.loss_scale, bf16.hysteresis"),
        ("ZR260", "bf16.immediate_grad_update in c.json is 'maybe'"),
        ("ZR257", "unknown to DeepSpeed in c.json: compile.disable"),
    ]
    assert asked({"communication_data_type": "fp8", "checkpoint": {"tag_validation": "Perhaps"}}) != []
    assert asked({"fp16": half, "steps_per_print": 1e5, "wall_clock_breakdown": False}) == []
    ((code, what),) = asked({"gradient_predivide_factor": "auto"})
    assert code == "ZR258" and "gradient_predivide_factor" in what, "nobody fills it in: accelerate stops"


def test_asking_prints_nothing_and_leaves_nothing(asked, capfd, monkeypatch):
    from transformers.integrations import deepspeed as announced

    monkeypatch.setenv("ACCELERATE_CONFIG_DS_FIELDS", "zero_stage,mixed_precision")  # accelerate would stop on them
    before = dict(os.environ), announced._hf_deepspeed_config_weak_ref, logging.getLogger("DeepSpeed").level
    zero = SOUND["zero_optimization"] | {"stage3_gather_fp16_weights_on_model_save": True}
    zero.pop("stage3_gather_16bit_weights_on_model_save")
    assert asked({"zero_optimization": zero, "bf16": {"enabled": "auto", "loss_scale": 0}})[0][0] == "ZR257"
    assert (dict(os.environ), announced._hf_deepspeed_config_weak_ref, logging.getLogger("DeepSpeed").level) == before
    assert capfd.readouterr() == ("", "")


@pytest.mark.parametrize(
    "name", ["stage3_gather_16bit_weights_on_model_save", "gather_16bit_weights_on_model_save",
             "stage3_gather_fp16_weights_on_model_save"],
)  # fmt: skip
@pytest.mark.parametrize("value, saves", [(True, True), ("true", True), (False, False), ("auto", False)])
def test_the_gather_of_stage_3_by_each_of_its_names(settings, name, value, saves):
    config = {"zero_optimization": {"stage": 3, name: value}}
    found = settings.replace(deepspeed=config, save_model=True)
    assert strategy.resolve_strategy(found, {"WORLD_SIZE": "2"}, sizes_of).zero_stage == 3
    codes = {finding.code for finding in ds_config_findings(config, "c.json", found, 2, "cpu")}
    auto = value == "auto" and name.startswith("stage3_gather_16bit")
    assert codes & {"ZR259", "ZR206"} == (set() if saves else {"ZR259" if auto else "ZR206"})


INLINES = [
    "  zero_stage: 1\n  gradient_accumulation_steps: 4\n  zero3_init_flag: false\n",
    "  zero_stage: 2\n  offload_optimizer_device: cpu\n  gradient_clipping: 1.0\n",
    "  zero_stage: 3\n  zero3_save_16bit_model: true\n  offload_param_device: CPU\n  zero3_init_flag: true\n",
    "  gradient_clipping: auto\n  deepspeed_multinode_launcher: standard\n",
]


@pytest.mark.parametrize("text", INLINES)
def test_an_inline_description_becomes_what_accelerate_makes_of_it(settings, tmp_path, monkeypatch, text):
    """`check` predicts the launch's variables; from either, the run's own included, comes accelerate's ds_config."""
    file = tmp_path / "a.yaml"
    file.write_text(INLINE + text)
    predicted, real = accelerate_files.launched_environment(file, None), environment_of_launch(file, None)
    of_deepspeed = {name for name in real if name.startswith("ACCELERATE_DEEPSPEED") or "GRADIENT" in name}
    for name in (*of_deepspeed, "ACCELERATE_USE_DEEPSPEED", "ACCELERATE_MIXED_PRECISION", accelerate_files.DS_FIELDS):
        assert predicted[name] == real[name], name
    for name, value in predicted.items():
        monkeypatch.setenv(name, value)
    plugin = DeepSpeedPlugin()
    plugin.set_mixed_precision("bf16")
    wanted = {key: value for key, value in plugin.deepspeed_config.items() if key != "steps_per_print"}
    for environment in (predicted, real, os.environ):
        found = strategy.resolve_strategy(settings, environment, sizes_of)
        assert found.ds_config.raw == wanted and found.source == strategy.INLINE_SOURCE
    assert os.environ["ACCELERATE_USE_DEEPSPEED"] == "true", "asking has changed the environment"


def test_the_made_ds_config_is_shown(tmp_path, capsys):
    (tmp_path / "a.yaml").write_text(INLINE + INLINES[2])
    recipe = write_recipe(tmp_path)
    assert cli.main(["check", str(recipe), "--config_file", str(tmp_path / "a.yaml")]) == 0
    said = capsys.readouterr().out
    shown = json.loads(next(line for line in said.splitlines() if line.startswith("ds_config")).partition("  ")[2])
    assert shown["zero_optimization"]["stage3_gather_16bit_weights_on_model_save"] is True
    assert shown["zero_optimization"]["offload_param"]["device"] == "cpu" and shown["bf16"] == {"enabled": True}


def test_files_that_launch_have_no_finding():
    assert list(launch_findings(None)) == []
    for path in Path("accelerate_configs").glob("*.yaml"):
        several = ["ZR344"] if path.stem == "multi_node" else []
        assert [found.code for found in launch_findings(path)] == several


def test_a_key_that_accelerate_would_drop_is_refused(tmp_path):
    (tmp_path / "a.yaml").write_text(INLINE + "  zero_stge: 3\n  zero_stage: 2\n")
    (finding,) = launch_findings(tmp_path / "a.yaml")
    assert finding.code == "ZR343" and "zero_stge" in finding.what and finding.level == "error"
