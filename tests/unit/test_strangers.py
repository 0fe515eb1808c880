"""What a stranger may have put into a checkpoint or a recipe is not run: found by name, refused, nothing created."""

import dataclasses
import json
import shutil
from pathlib import Path

import pytest
import torch

from tests.helpers.checkpoint_files import MODEL, OPTIMIZER, write_checkpoint
from tests.helpers.damage import refusal_of
from tests.helpers.strangers import KINDS, plant
from tests.helpers.tiny import ROOT, write_recipe
from zero_recipes.checkpoint.reshard import reshard
from zero_recipes.checkpoint.resume import resolve_resume_checkpoint
from zero_recipes.checkpoint.save import NotWhole, checkpoint_fault, content_fault, write_manifest
from zero_recipes.checkpoint.verify import verify
from zero_recipes.checks.preflight import preflight
from zero_recipes.cli import main as cli
from zero_recipes.config import recipe as recipes

PLACES = (f"global_step7/{MODEL}", f"global_step7/{OPTIMIZER.format(1)}", "scheduler.pt", "rng_state_0.pth")
PLACES += ("optimizer.pt", "optimizer.bin", "pytorch_model_fsdp.bin", "best")


@pytest.fixture
def mark(tmp_path) -> Path:
    return tmp_path / "it-was-run"


@pytest.fixture
def stranger(tmp_path) -> Path:
    """A checkpoint with whole pickles and a model, from elsewhere, whose manifest fits its files."""
    folder = write_checkpoint(tmp_path / "elsewhere")
    for name, held in {"scheduler.pt": {"lr": [0.1]}, "rng_state_0.pth": {}, "rng_state_1.pth": {}}.items():
        torch.save(held, folder / name)
    shutil.copytree(ROOT / "tiny_world" / "base", folder, dirs_exist_ok=True)
    write_manifest(folder, {"step": 7})
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


@pytest.mark.parametrize(("kind", "place"), list(zip(KINDS, PLACES, strict=True)))
def test_a_planted_pickle_is_refused_and_not_run(stranger, run, mark, place, kind):
    """Every kind and place once; also in the best checkpoint that it names, which load_best_model_at_end loads."""
    if place == "best":
        (stranger.parent / "best").mkdir()
        plant(stranger.parent / "best" / MODEL, mark, kind)
        state = {"global_step": 7, "best_model_checkpoint": str(stranger.parent / "best")}
        (stranger / "trainer_state.json").write_text(json.dumps(state))
    else:
        plant(stranger / place, mark, kind)
    write_manifest(stranger, {"step": 7})
    assert checkpoint_fault(stranger) is None and content_fault(stranger) is None
    refusal = refusal_of(resolve_resume_checkpoint, run())
    named = MODEL if place == "best" else place
    assert refusal.codes == ["ZR780"] and named in refusal.what and "--trust_checkpoint" in refusal.fix
    if place != "best":
        with pytest.raises(NotWhole, match=Path(place).name):
            verify(stranger)
    if place.startswith("global_step7"):
        assert refusal_of(reshard, stranger, 1, 2).codes == ["ZR780"]
    assert not mark.exists()


def test_what_was_trusted_is_loaded(stranger, run, mark, capsys):
    plant(stranger / PLACES[0], mark, "zip")
    write_manifest(stranger, {"step": 7})
    assert resolve_resume_checkpoint(run(trust_checkpoint=True)).checkpoint == str(stranger)
    command = ["reshard", str(stranger), "--world_size", "1", "--stage", "2"]
    assert cli.main(command) == 2 and "ZR780" in capsys.readouterr().err
    assert cli.main(["verify", str(stranger)]) == 1 and not mark.exists(), "nothing is read yet"
    assert cli.main([*command, "--trust_checkpoint"]) == 0 and mark.exists()


def test_a_folder_outside_the_checkpoint_is_not_followed(stranger, tmp_path, mark):
    """`latest` names DeepSpeed's folder: one elsewhere would be loaded without having been looked at."""
    shutil.copytree(stranger / "global_step7", tmp_path / "planted")
    plant(tmp_path / "planted" / MODEL, mark, "zip")
    (stranger / "latest").write_text("../../planted")
    write_manifest(stranger, {"step": 7})
    assert "is no folder of this checkpoint" in refusal_of(reshard, stranger, 1, 2).what
    assert "is no folder of this checkpoint" in checkpoint_fault(stranger) and not mark.exists()


def test_a_model_s_own_code_is_not_run_by_check(tmp_path, mark, capsys, monkeypatch):
    recipe = write_recipe(tmp_path, trust_remote_code=True, use_cpu=True)
    config = tmp_path / "model" / "config.json"
    values = json.loads(config.read_text())
    values |= {"model_type": "planted", "auto_map": {"AutoConfig": "planted.Config"}}
    config.write_text(json.dumps(values))
    (tmp_path / "model" / "planted.py").write_text(
        f"import pathlib\npathlib.Path({str(mark)!r}).touch()\n"
        "from transformers import GPTNeoXConfig\nclass Config(GPTNeoXConfig):\n    model_type = 'planted'\n"
    )
    monkeypatch.setattr("transformers.dynamic_module_utils.HF_MODULES_CACHE", str(tmp_path / "modules"))
    cli.main(["check", str(recipe), "--output_dir", str(tmp_path / "out")])
    said = capsys.readouterr().out
    assert "[ZR783]" in said and "ZR403" not in said, "what cannot be known without the code is no error"
    assert not mark.exists()
    cli.main(["check", str(recipe), "--output_dir", str(tmp_path / "out"), "--trust_remote_code", "true"])
    assert mark.exists() and "[ZR783]" not in capsys.readouterr().out
