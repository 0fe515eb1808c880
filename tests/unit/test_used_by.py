"""`accelerate launch --config_file zero3.yaml run_sft.py RECIPE`: accelerate files, links to them, recipes."""

import json
import shutil
from pathlib import Path

import pytest
from accelerate.commands.config.config_args import load_config_from_file

from tests.helpers.launched import environment_of_launch
from zero_recipes.checks.preflight import preflight
from zero_recipes.cli import main as cli
from zero_recipes.config import recipe as recipes
from zero_recipes.config.strategy import resolve_strategy
from zero_recipes.core.findings import Refusal
from zero_recipes.model import sizes_of
from zero_recipes.plan.job import read_strategies

ROOT = Path(__file__).resolve().parents[2]
FILES = sorted(path.name for path in (ROOT / "accelerate_configs").glob("*.yaml"))
LINKS = ("ddp.yaml", "zero1.yaml", "zero2.yaml", "zero3.yaml")


@pytest.fixture
def root(monkeypatch):
    monkeypatch.chdir(ROOT)


@pytest.fixture
def copy(tmp_path, monkeypatch) -> Path:
    """A folder with what a launch reads."""
    for name in ("accelerate_configs", "ds_configs", "recipes"):
        shutil.copytree(ROOT / name, tmp_path / name)
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.parametrize("name", FILES)
def test_a_file_launches_its_strategy(root, name):
    """accelerate's own parser and launch make the environment that a run reads."""
    environment = environment_of_launch(Path("accelerate_configs") / name, None)
    if name in LINKS:
        assert environment == environment_of_launch(Path(name), None)
    recipe = recipes.parse_recipe(
        Path("recipes/pythia.yaml"), recipes.read_recipe_file(Path("recipes/pythia.yaml")), []
    )
    count = load_config_from_file(f"accelerate_configs/{name}").num_processes
    found = resolve_strategy(recipe.settings, environment | {"WORLD_SIZE": str(count)}, sizes_of)
    assert found.name == {"multi_node.yaml": "zero3"}.get(name, Path(name).stem)


def test_check_plan_and_sweep_take_the_file_of_a_launch(root, monkeypatch, capsys, tmp_path):
    out = ["--output_dir", str(tmp_path / "out")]
    assert cli.main(["check", "recipes/tiny.yaml", "--config_file", "zero3.yaml", *out]) == 0
    assert "zero3 (DeepSpeed, ds_configs/zero3.json)" in capsys.readouterr().out
    plan = ["plan", "recipes/tiny.yaml", "--gpus", "2", "--gpu", "h200", "--quick", "--json"]
    assert cli.main([*plan, "--config_file", "zero3.yaml"]) == 0
    assert [row["job"]["strategy"] for row in json.loads(capsys.readouterr().out)["rows"]] == ["zero3"]
    swept = []
    monkeypatch.setattr("zero_recipes.cli.sweep.sweep", lambda recipe, names, *_, **__: swept.append(names) or {})
    for words in (["--config_file", "accelerate_configs/zero3_offload.yaml"], ["--config_file", "ddp.yaml"], []):
        assert cli.main(["sweep", "recipes/tiny.yaml", *words]) == 0
    assert swept == [["zero3_offload"], ["ddp"], ["ddp", "zero0", "zero1", "zero2", "zero3"]]


@pytest.mark.parametrize(
    "text", ["distributed_type: DEEPSPEED\ndeepspeed_config:\n  zero_stage: 3\n", "distributed_type: FSDP\n"]
)
def test_a_strategy_of_ones_own_without_a_ds_config_is_not_planned_as_ddp(copy, text):
    recipe = recipes.parse_recipe(Path("recipes/pythia.yaml"), {}, [])
    Path("accelerate_configs/mine.yaml").write_text(text)
    with pytest.raises(Refusal, match="ZR367"):
        read_strategies(recipe, ["ddp", "mine"])
    assert read_strategies(recipe, ["ddp", "fsdp2"]) == {"ddp": None, "fsdp2": None}


@pytest.mark.parametrize(
    ("launched", "overrides", "code"),
    [
        ("zero2.yaml", [], None),
        ("zero3.yaml", [], "ZR201"),
        ("zero3.yaml", ["--deepspeed", "null"], None),
        ("fsdp2.yaml", [], "ZR311"),
        ("fsdp2.yaml", ["--deepspeed", "null"], None),
        ("ddp.yaml", [], None),
    ],
)
def test_a_recipe_with_a_ds_config_under_accelerate(root, launched, overrides, code):
    """The same ds_config is taken, another refused; where the launch has none, the recipe's counts."""
    path, environment = (
        Path("recipes/pythia-zero2.yaml"),
        environment_of_launch(Path("accelerate_configs", launched), None),
    )
    mapping = recipes.read_recipe_file(path)
    run, findings = preflight(path, mapping, overrides, environment | {"WORLD_SIZE": "2"}, rehearsal=True)
    assert [found.code for found in findings if found.code in ("ZR201", "ZR311")] == ([code] if code else [])
    if code is None:
        assert run.strategy.name == (Path(launched).stem if overrides else "zero2")


@pytest.mark.parametrize(
    ("strategies", "words", "refused"),
    [
        ("ddp", [], True),
        ("zero2,zero3", [], True),
        ("zero2", [], False),
        ("zero2", ["--set", "zero_optimization.reduce_bucket_size=5e5"], True),
        ("ddp,zero3", ["--deepspeed", "null"], False),
        ("zero3", ["--deepspeed", "ds_configs/zero3.json"], False),
    ],
    ids=str,
)
def test_a_sweep_of_a_recipe_with_another_ds_config_is_refused(
    root, tmp_path, monkeypatch, capsys, strategies, words, refused
):
    """Under ddp.yaml it would train at stage 2, in a row that is called ddp."""
    launched = []
    monkeypatch.setattr("zero_recipes.cli.sweep._run", lambda *words: launched.append(words) or (1, ""))
    sweep = ["sweep", "recipes/pythia-zero2.yaml", "--strategies", strategies, "--output_dir", str(tmp_path / "out")]
    assert cli.main([*sweep, *words]) == (2 if refused else 1)
    assert ("ZR366" in capsys.readouterr().err) == refused and bool(launched) != refused
