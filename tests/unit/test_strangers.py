"""What a stranger may have put into a checkpoint or a recipe is not run: found by name, refused, nothing created."""

from __future__ import annotations

import dataclasses
import itertools
import json
import os
import shutil
from pathlib import Path

import pytest
import torch

from tests.helpers.checkpoint_files import MODEL, OPTIMIZER, write_checkpoint
from tests.helpers.grid import first
from tests.helpers.strangers import KINDS, plant
from tests.helpers.tiny import ROOT, write_recipe
from zero_recipes.checkpoint import manifest
from zero_recipes.checkpoint.contents import settle_checkpoint
from zero_recipes.checkpoint.reshard.write import reshard
from zero_recipes.checkpoint.verify import NotWhole, verify
from zero_recipes.checks.preflight import preflight
from zero_recipes.cli import main as cli
from zero_recipes.config import recipe as recipes
from zero_recipes.core.findings import Refusal
from zero_recipes.libs.safe_loading import load_without_code, not_plain

BASE = ROOT / "tiny_world" / "base"
PLACES = (f"global_step7/{MODEL}", f"global_step7/{OPTIMIZER.format(1)}", "scheduler.pt", "rng_state_0.pth")
PLACES += ("optimizer.pt", "optimizer.bin", "pytorch_model_fsdp.bin")


@pytest.fixture
def mark(tmp_path) -> Path:
    return tmp_path / "it-was-run"


@pytest.fixture
def stranger(tmp_path) -> Path:
    """A checkpoint with whole pickles and a model, from elsewhere."""
    folder = write_checkpoint(tmp_path / "elsewhere")
    torch.save({"lr": [0.1]}, folder / "scheduler.pt")
    torch.save({"python": [1, 2]}, folder / "rng_state_0.pth")
    torch.save({"python": [1, 2]}, folder / "rng_state_1.pth")
    shutil.copytree(BASE, folder, dirs_exist_ok=True)
    manifest.write(folder, {"step": 7})
    verify(folder)
    return folder


@pytest.fixture
def run(tmp_path, stranger):
    """A run that names the checkpoint, with keys changed."""
    path = write_recipe(tmp_path / "run", output_dir=str(tmp_path / "out"))
    made, _ = preflight(path, recipes.read_recipe_file(path), [], {})

    def with_keys(**keys):
        settings = made.settings.replace(resume_from_checkpoint=str(stranger), **keys)
        return dataclasses.replace(made, settings=settings)

    return with_keys


def manifest_again(folder: Path) -> None:
    """The stranger's manifest fits the stranger's files."""
    manifest.write(folder, {"step": 7})


@pytest.mark.parametrize("kind", KINDS)
def test_the_file_would_be_created(tmp_path, mark, kind):
    """Else the tests below could not fail."""
    plant(tmp_path / "x.pt", mark, kind)
    torch.load(tmp_path / "x.pt", weights_only=False) if "pickle" not in kind else _unpickle(tmp_path / "x.pt")
    assert mark.exists()


def _unpickle(path: Path) -> None:
    import pickle

    pickle.loads(path.read_bytes())


def each_kind_and_each_place() -> list:
    """Every kind once and every place once; all pairs of them under `make grid`."""
    pairs = [(kind, PLACES[n % len(PLACES)]) for n, kind in enumerate(KINDS)]
    return first(len(pairs), pairs + [pair for pair in itertools.product(KINDS, PLACES) if pair not in pairs])


@pytest.mark.parametrize("kind, place", each_kind_and_each_place())
def test_a_planted_pickle_is_refused_and_not_run(stranger, run, mark, place, kind):
    plant(stranger / place, mark, kind)
    manifest_again(stranger)
    assert manifest.damage(stranger) is None and manifest.content_fault(stranger) is None
    with pytest.raises(Refusal) as caught:
        settle_checkpoint(run())
    assert caught.value.codes == ["ZR780"] and place in caught.value.what and "--trust_checkpoint" in caught.value.fix
    with pytest.raises(NotWhole, match=Path(place).name):
        verify(stranger)
    if place.startswith("global_step7"):
        with pytest.raises(Refusal) as caught:
            reshard(stranger, 1, 2)
        assert caught.value.codes == ["ZR780"] and place in caught.value.what
    assert not mark.exists()


def test_what_was_trusted_is_loaded(stranger, run, mark):
    plant(stranger / PLACES[0], mark, "zip")
    manifest_again(stranger)
    assert settle_checkpoint(run(trust_checkpoint=True)).checkpoint == str(stranger)
    assert not mark.exists(), "nothing is read yet"
    reshard(stranger, 1, 2, trusted=True)
    assert mark.exists()


def test_trust_is_a_key_and_an_option(stranger, mark, capsys):
    plant(stranger / PLACES[1], mark, "zip")
    manifest_again(stranger)
    command = ["reshard", str(stranger), "--world_size", "1", "--stage", "2"]
    assert cli.main(command) == 2 and "posix.system" in capsys.readouterr().err and not mark.exists()
    assert cli.main(["verify", str(stranger)]) == 1 and not mark.exists()
    assert cli.main([*command, "--trust_checkpoint"]) == 0 and mark.exists()


def test_the_best_checkpoint_that_it_names_is_looked_at_too(stranger, run, mark, tmp_path):
    """load_best_model_at_end would load it."""
    best = tmp_path / "best"
    (best / "global_step1").mkdir(parents=True)
    plant(best / "global_step1" / MODEL, mark, "zip")
    state = {"global_step": 7, "best_model_checkpoint": str(best)}
    (stranger / "trainer_state.json").write_text(json.dumps(state))
    manifest_again(stranger)
    with pytest.raises(Refusal, match=MODEL):
        settle_checkpoint(run())
    assert not mark.exists()


def test_a_file_of_tensors_in_another_program_s_format_is_refused(stranger, run):
    """torch.distributed.checkpoint's .metadata is a pickle that torch.load cannot read as data."""
    (stranger / ".metadata").write_bytes(b"\x80\x04N.")
    manifest_again(stranger)
    with pytest.raises(Refusal, match=r"\.metadata"):
        settle_checkpoint(run())


def test_a_folder_outside_the_checkpoint_is_not_followed(stranger, tmp_path, mark):
    """`latest` names DeepSpeed's folder: one elsewhere would be loaded without having been looked at."""
    shutil.copytree(stranger / "global_step7", tmp_path / "planted")
    plant(tmp_path / "planted" / MODEL, mark, "zip")
    (stranger / "latest").write_text("../../planted")
    manifest_again(stranger)
    with pytest.raises(Refusal, match="no folder of this checkpoint"):
        reshard(stranger, 1, 2)
    assert "no folder of this checkpoint" in manifest.damage(stranger) and not mark.exists()


@pytest.mark.private
def test_deepspeed_still_loads_what_runs_code():
    """Fails when DeepSpeed loads with weights_only=True: then contents.settle_checkpoint need not look at its files."""
    import inspect

    from deepspeed.runtime.checkpoint_engine.torch_checkpoint_engine import TorchCheckpointEngine

    assert "weights_only=False" in inspect.getsource(TorchCheckpointEngine.load)


def test_a_model_s_own_code_and_preloaded_libraries_are_not_run_by_check(tmp_path, mark, capsys, monkeypatch):
    recipe = write_recipe(
        tmp_path,
        trust_remote_code=True,
        use_cpu=True,
        env={"LD_PRELOAD": "/nowhere/lib.so", "PYTHONSTARTUP": "/nowhere/x.py", "HARMLESS": "1"},
    )
    config = tmp_path / "model" / "config.json"
    values = json.loads(config.read_text())
    values |= {"model_type": "planted", "auto_map": {"AutoConfig": "planted.Config"}}
    config.write_text(json.dumps(values))
    (tmp_path / "model" / "planted.py").write_text(
        f"import pathlib\npathlib.Path({str(mark)!r}).touch()\n"
        "from transformers import GPTNeoXConfig\nclass Config(GPTNeoXConfig):\n    model_type = 'planted'\n"
    )
    monkeypatch.setattr("transformers.dynamic_module_utils.HF_MODULES_CACHE", str(tmp_path / "modules"))
    monkeypatch.setenv("PYTHONSTARTUP", "mine")
    cli.main(["check", str(recipe), "--output_dir", str(tmp_path / "out")])
    said = capsys.readouterr().out
    assert "sets LD_PRELOAD, PYTHONSTARTUP" in said and "[ZR782]" in said and "[ZR783]" in said
    assert "ZR403" not in said, "what cannot be known without the code is no error"
    assert "LD_PRELOAD" not in os.environ and os.environ["PYTHONSTARTUP"] == "mine" and os.environ["HARMLESS"] == "1"
    assert not mark.exists()
    cli.main(["check", str(recipe), "--output_dir", str(tmp_path / "out"), "--trust_remote_code", "true"])
    assert mark.exists() and "[ZR783]" not in capsys.readouterr().out


def test_plain_files_are_read(tmp_path):
    torch.save({"a": torch.ones(3), "b": [1, "x", None]}, tmp_path / "a.pt")
    assert load_without_code(tmp_path / "a.pt")["a"].tolist() == [1, 1, 1] and not_plain(tmp_path / "a.pt") is None
    assert not_plain(tmp_path / "nothing.txt") is None
