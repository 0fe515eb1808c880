"""What is filled in, checked and built for the family's members before anything starts; no launch in here."""

import json
from pathlib import Path
from types import SimpleNamespace

import pytest
from transformers import AutoModelForCausalLM

from tests.helpers.tiny import ROOT, write_model, write_recipe
from zero_recipes.checks.capacity import nvme_findings
from zero_recipes.config import recipe as recipes
from zero_recipes.config.ds_config import fill_own_autos
from zero_recipes.config.recipe import RunConfig
from zero_recipes.config.strategy import resolve_strategy
from zero_recipes.core.host import Host
from zero_recipes.distributed import kernels
from zero_recipes.model import local_config, parameter_sizes, sizes_of

INFINITY = json.loads((ROOT / "ds_configs" / "zero3_infinity.json").read_text())


@pytest.fixture(scope="module")
def settings(tmp_path_factory):
    folder = tmp_path_factory.mktemp("large")
    model = write_model(folder / "large", hidden=512, intermediate=4096)
    path = write_recipe(folder, model_name_or_path=str(model))
    return recipes.parse_recipe(path, recipes.read_recipe_file(path), []).settings


@pytest.mark.parametrize("world_size", [1, 2, 4])
def test_the_buffer_takes_the_models_largest_part_and_no_more(settings, world_size):
    filled = fill_own_autos(INFINITY, None, world_size, {}, sizes_of(settings))
    largest = max(p.numel() for p in AutoModelForCausalLM.from_config(local_config(settings)).parameters())
    assert filled["zero_optimization"]["offload_param"]["buffer_size"] == -(-largest // world_size)
    assert INFINITY["zero_optimization"]["offload_param"]["buffer_size"] == "auto", "a copy is filled"


def test_a_resolved_recipe_goes_with_the_accelerate_file_that_it_was_launched_with(settings, tmp_path):
    filled = fill_own_autos(INFINITY, str(tmp_path), 2, {}, sizes_of(settings))
    resolved = settings.replace(deepspeed=filled, nvme_path=str(tmp_path))
    launched = {"ACCELERATE_USE_DEEPSPEED": "true", "WORLD_SIZE": "2"}
    launched["ACCELERATE_DEEPSPEED_CONFIG_FILE"] = str(ROOT / "ds_configs" / "zero3_infinity.json")
    assert resolve_strategy(resolved, launched, sizes_of).name == "zero3_infinity"


def found(settings, folder: Path, free: int = 10**15, world: int = 2, **block) -> list[tuple[str, str, str]]:
    config = fill_own_autos(INFINITY, str(folder), world, {}, sizes_of(settings))
    config["zero_optimization"]["offload_param"] |= block
    changed = settings.replace(deepspeed=config)
    strategy = resolve_strategy(changed, {"WORLD_SIZE": str(world)}, sizes_of)
    host = Host(statvfs=lambda path: SimpleNamespace(f_bavail=free, f_frsize=1))
    sizes = parameter_sizes(local_config(settings), False)
    given = list(nvme_findings(RunConfig(None, changed, {}, strategy, "cpu", folder), sizes, world, host))
    assert all(finding.why and finding.fix for finding in given)
    return [(finding.code, finding.level, finding.what) for finding in given]


def test_room_and_buffers_of_nvme(settings, tmp_path):
    assert found(settings, tmp_path) == []
    ((code, level, what),) = found(settings, tmp_path, free=10**6)
    assert (code, level) == ("ZR619", "error") and f"to {tmp_path}, which has 1.00 MB free" in what
    ((code, level, what),) = found(settings, tmp_path, buffer_size=1000)
    assert (code, level) == ("ZR620", "error") and "buffer_size 1,000" in what


def test_async_io_is_left_out_by_name_where_libaio_is_missing(monkeypatch, capsys):
    monkeypatch.setattr(Host, "libaio_headers", lambda self: False)
    monkeypatch.setattr(kernels, "missing", lambda names, device: names)
    monkeypatch.setattr(kernels, "build", lambda names: print("building", names))
    kernels.main(["cpu_adam", "async_io"])
    said = capsys.readouterr().out
    assert "apt-get install libaio-dev" in said and "building ['cpu_adam']" in said
