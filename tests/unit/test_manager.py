"""CheckpointManager: a save is whole or was never there, and what is gone on from is whole and runs no code."""

import errno
import json
from collections.abc import Callable
from fractions import Fraction
from pathlib import Path

import pytest
import torch
from datasets import Dataset
from transformers import AutoTokenizer, LlamaForCausalLM, TrainerState
from trl import SFTConfig

from tests.helpers.bad_data import BASE
from tests.helpers.tiny import llama_config
from tests.helpers.tools import plant, refusal_of
from zero_recipes.checkpoint import save
from zero_recipes.checkpoint.folders import numbered
from zero_recipes.checkpoint.manager import Carried, CheckpointManager, NotSaved
from zero_recipes.training.extras import Extras
from zero_recipes.training.trainer import ZeroSFTTrainer

ROWS = [{"input_ids": [5, 6, 7], "labels": [5, 6, 7]}] * 8
HISTORY = {"resumed_at": [], "evaluation_due": False}


def arguments(folder: Path, **keys) -> SFTConfig:
    keys = {"max_steps": 2, "save_steps": 1, "per_device_train_batch_size": 1} | keys
    return SFTConfig(str(folder), use_cpu=True, bf16=False, report_to=[], **keys)


def write_states(checkpoint: Path, step: int) -> dict:
    """As the libraries do."""
    TrainerState(global_step=step).save_to_json(str(checkpoint / save.STATE))
    torch.save({"lr": [0.1]}, checkpoint / "scheduler.pt")
    return HISTORY


def saved(manager: CheckpointManager, step: int) -> Path:
    checkpoint = manager.of_step(step)
    manager.save(step, lambda: write_states(checkpoint, step), {"step": step, "world_size": 1})
    return checkpoint


def failing(error: Exception, checkpoint: Path) -> Callable:
    def write() -> dict:
        (checkpoint / "model.safetensors").write_bytes(b"half of it")
        raise error

    return write


def test_a_save_is_whole_and_hands_on_what_it_was_given(tmp_path):
    manager = CheckpointManager(arguments(tmp_path))
    checkpoint = saved(manager, 3)
    assert checkpoint == tmp_path / "checkpoint-3" and save.checkpoint_fault(checkpoint) is None
    written = save.read_manifest(checkpoint)
    assert (written["step"], written["world_size"]) == (3, 1) and len(written["checksums"]) == 3
    assert manager.carried(str(checkpoint)) == Carried(3, HISTORY)
    bare = CheckpointManager(arguments(tmp_path), with_checksums=False)
    assert save.read_manifest(saved(bare, 4))["checksums"] == {}


def test_what_another_program_and_a_fresh_start_carry(tmp_path):
    manager = CheckpointManager(arguments(tmp_path))
    foreign = tmp_path / "checkpoint-5"
    foreign.mkdir()
    write_states(foreign, 5)
    assert manager.carried(str(foreign)) == Carried(5, {})
    (tmp_path / "weights").mkdir()
    assert [manager.carried(each) for each in (None, True, str(tmp_path / "weights"))] == [None] * 3


@pytest.mark.parametrize(
    ("error", "raised", "left"),
    [
        (OSError(errno.ENOSPC, "No space left on device"), NotSaved, b""),
        (OSError(errno.EIO, "Input/output error"), NotSaved, b"half of it"),
        (torch.OutOfMemoryError("CUDA out of memory"), torch.OutOfMemoryError, b"half of it"),
        (OSError(errno.ENOMEM, "Cannot allocate memory"), OSError, b"half of it"),  # memory's fault, not the disk's
        (KeyError("a fault"), KeyError, b"half of it"),
    ],
)
def test_a_save_that_fails_leaves_an_unfinished_one_and_those_before(tmp_path, error, raised, left):
    manager = CheckpointManager(arguments(tmp_path))
    before = saved(manager, 1)
    checkpoint = manager.of_step(2)
    with pytest.raises(raised):
        manager.save(2, failing(error, checkpoint), {"step": 2})
    assert save.is_unfinished(checkpoint) and (checkpoint / "model.safetensors").read_bytes() == left
    assert save.checkpoint_fault(before) is None and save.content_fault(before) is None
    assert manager.choose(True) == str(before), "it goes on from the whole one"


def test_a_checkpoint_is_marked_as_unfinished_before_the_libraries_write(tmp_path):
    manager = CheckpointManager(arguments(tmp_path))
    checkpoint = saved(manager, 2)
    seen = []

    def write() -> dict:
        seen.append(save.is_unfinished(checkpoint))
        return write_states(checkpoint, 2)

    manager.save(2, write, {"step": 2})  # once more, over a whole one
    assert seen == [True] and save.checkpoint_fault(checkpoint) is None


def test_rotation_keeps_as_many_as_the_arguments_say_and_drops_resharded_copies(tmp_path):
    manager = CheckpointManager(arguments(tmp_path, save_total_limit=2))
    for step in (1, 2, 3):
        saved(manager, step)
    copy = tmp_path / "checkpoint-1-zero2-world1"
    copy.mkdir()
    (copy / save.OF_A_RUN).touch()
    manager.rotate(str(tmp_path / "checkpoint-1"))
    assert numbered(tmp_path) == [manager.of_step(1), manager.of_step(3)] and not copy.exists()
    manager.args.save_total_limit = 1
    manager.rotate(None)
    assert numbered(tmp_path) == [manager.of_step(3)]


def test_whether_a_signal_finds_its_step_saved(tmp_path):
    manager = CheckpointManager(arguments(tmp_path))
    assert not manager.is_saved(2, {"evaluation_due": False})
    checkpoint = saved(manager, 2)
    assert manager.is_saved(2, {"evaluation_due": False}) and not manager.is_saved(2, {"evaluation_due": True})
    (checkpoint / "scheduler.pt").unlink()
    assert not manager.is_saved(2, {"evaluation_due": False})


def test_the_newest_whole_one_is_chosen_and_a_path_is_taken_as_it_is(tmp_path):
    manager = CheckpointManager(arguments(tmp_path / "out"))
    assert manager.choose(True) is True and manager.choose(None) is None, "there is no folder"
    whole = saved(manager, 2)
    saved(manager, 10)
    assert manager.choose(True) == str(manager.of_step(10))
    (manager.of_step(10) / "scheduler.pt").unlink()
    save.begin_checkpoint(manager.of_step(11))
    assert manager.choose(True) == str(whole) == manager.choose(str(whole))


def trainer(folder: Path, **keywords) -> ZeroSFTTrainer:
    """As in a program of somebody's own."""
    torch.manual_seed(7)
    model = LlamaForCausalLM(llama_config(num_hidden_layers=1))
    tokenizer = AutoTokenizer.from_pretrained(BASE)
    rows = Dataset.from_list(ROWS)
    keys = {"max_steps": 4} if folder.exists() else {}
    return ZeroSFTTrainer(model, arguments(folder, **keys), train_dataset=rows, processing_class=tokenizer, **keywords)


@pytest.fixture
def trained(tmp_path) -> Path:
    trainer(tmp_path / "out").train()
    return tmp_path / "out"


@pytest.mark.parametrize("named", [True, False])
def test_a_program_of_ones_own_refuses_code_before_anything_is_loaded(trained, tmp_path, named):
    """DeepSpeed 0.19.8 would run it: it loads its files with weights_only=False."""
    last, mark = trained / "checkpoint-2", tmp_path / "it-was-run"
    states = last / "global_step2" / "mp_rank_00_model_states.pt"
    states.parent.mkdir()
    plant(states, mark, "zip 2")
    save.write_manifest(last, save.read_manifest(last))
    resumed = trainer(trained)
    before = [p.detach().clone() for p in resumed.model.parameters()]
    refused = refusal_of(resumed.train, resume_from_checkpoint=str(last) if named else True)
    assert refused.codes == ["ZR780"] and "mp_rank_00_model_states.pt" in refused.what
    assert resumed.state.global_step == 0 and not mark.exists()
    assert all(map(torch.equal, before, resumed.model.parameters()))
    states.unlink()
    save.write_manifest(last, save.read_manifest(last))
    resumed.train(resume_from_checkpoint=str(last) if named else True)
    history = json.loads((trained / "checkpoint-4" / save.HISTORY).read_text())
    assert resumed.state.global_step == 4 and history["resumed_at"] == [2]


def test_the_last_one_of_another_program_is_searched_too(trained, tmp_path):
    """transformers takes it under `True` where no checkpoint is whole."""
    for checkpoint in numbered(trained):
        for name in (save.MANIFEST, save.HISTORY):
            (checkpoint / name).unlink()
    plant(trained / "checkpoint-2" / "more.pt", tmp_path / "it-was-run", "pickle 4")
    assert refusal_of(trainer(trained).train, resume_from_checkpoint=True).codes == ["ZR780"]
    trainer(trained).train(resume_from_checkpoint=str(trained / "checkpoint-1"))


def test_classes_that_a_program_names_are_data_and_a_recipe_s_run_has_looked_before(trained):
    last = trained / "checkpoint-2"
    torch.save({"share": Fraction(1, 3)}, last / "own.pt")
    assert refusal_of(trainer(trained).train, str(last)).codes == ["ZR780"]
    with torch.serialization.safe_globals([Fraction]):
        trainer(trained).train(str(last))
    trainer(trained, extras=Extras(refuses_code=False)).train(str(last))
