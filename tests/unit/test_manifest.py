"""Which checkpoint a run goes on from: whole ones only, and only where the run fits; nothing whole is lost."""

from __future__ import annotations

import copy
import json
import random
import shutil
from pathlib import Path

import pytest
from datasets import Dataset

from zero_recipes.checkpoint import inputs, manifest
from zero_recipes.checkpoint import resume as resuming
from zero_recipes.checkpoint.compatibility import fit_findings, recipe_facts, refuse_other_data
from zero_recipes.checkpoint.inputs import SAMPLE, SAMPLES, input_facts
from zero_recipes.checkpoint.output_dir import claim_output_dir, refuse_occupied
from zero_recipes.checkpoint.resume import checkpoint_to_resume, numbered
from zero_recipes.config.ds_config import DsConfig
from zero_recipes.config.recipe import parse_recipe
from zero_recipes.config.settings import Settings
from zero_recipes.config.strategy import Strategy
from zero_recipes.core import environment
from zero_recipes.core.findings import Refusal
from zero_recipes.data.prepare import data_sha256
from zero_recipes.training.checkpointing import rotate

FACTS = {"strategy": "zero2", "zero_stage": 2, "world_size": 2, "precision": "bf16", "micro_batch_size": 2}
FACTS |= {"gradient_accumulation_steps": 4, "recipe_sha256": "r", "data_sha256": "d", "recipe": {}}


def checkpoint(output_dir: Path, step: int, kind: str = "whole", **facts) -> Path:
    """A checkpoint folder: "whole", "unfinished", "damaged" or "foreign"."""
    folder = output_dir / f"checkpoint-{step}"
    if kind != "foreign":
        manifest.begin(folder)
    (folder / f"global_step{step}").mkdir(parents=True)
    (folder / "model.safetensors").write_bytes(b"weights")
    if kind == "foreign":
        (folder / "trainer_state.json").write_text(json.dumps({"global_step": step}))
    (folder / f"global_step{step}" / "optim_states.pt").write_bytes(b"states" * step)
    if kind in ("whole", "damaged"):
        manifest.write(folder, {"step": step, "versions": environment.versions()} | FACTS | facts)
    if kind == "damaged":
        (folder / "model.safetensors").write_bytes(b"weig")
    return folder


def test_a_manifest_lists_every_file_and_is_written_last(tmp_path):
    folder = checkpoint(tmp_path, 3)
    found = manifest.read(folder)
    assert found["schema"] == 2 and found["step"] == 3
    assert found["files"] == {"model.safetensors": 7, "global_step3/optim_states.pt": 18}
    assert sorted(path.name for path in folder.iterdir()) == ["global_step3", "manifest.json", "model.safetensors"]
    assert manifest.damage(folder) is None


def test_damage_names_the_first_fault(tmp_path):
    assert "not written to its end" in manifest.damage(checkpoint(tmp_path, 1, "unfinished"))
    assert "has no manifest.json" in manifest.damage(checkpoint(tmp_path, 2, "foreign"))
    assert "4 bytes; 7 were written" in manifest.damage(checkpoint(tmp_path, 3, "damaged"))
    folder = checkpoint(tmp_path, 4)
    (folder / "global_step4" / "optim_states.pt").unlink()
    assert "lacks global_step4/optim_states.pt" in manifest.damage(folder)
    (folder / "manifest.json").write_text('{"schema"')
    assert manifest.read(folder) is None and "cannot be read" in manifest.damage(folder)


def test_killed_between_manifest_and_mark_is_whole_and_a_new_save_is_not(tmp_path):
    folder = checkpoint(tmp_path, 3)
    (folder / "unfinished").touch()
    assert manifest.damage(folder) is None and not manifest.is_unfinished(folder)
    manifest.begin(folder)
    assert manifest.is_unfinished(folder) and manifest.read(folder) is None


def test_true_takes_the_last_whole_one(tmp_path, capsys):
    assert checkpoint_to_resume(tmp_path, None) is None
    assert checkpoint_to_resume(tmp_path, "false") is None
    assert checkpoint_to_resume(tmp_path / "new", "true") is None and "starting fresh" in capsys.readouterr().out
    checkpoint(tmp_path, 12, "unfinished")
    assert checkpoint_to_resume(tmp_path, "true") is None
    said = capsys.readouterr().out
    assert "checkpoint-12 was not written to its end" in said and "starting fresh" in said
    for step, kind in ((2, "whole"), (10, "whole"), (11, "damaged")):
        checkpoint(tmp_path, step, kind)
    assert checkpoint_to_resume(tmp_path, True) == str(tmp_path / "checkpoint-10")
    said = capsys.readouterr().out
    assert said.count("passed over") == 2 and f"going on from {tmp_path}/checkpoint-10" in said
    assert len(numbered(tmp_path)) == 4, "looking changes nothing"


def test_unfinished_ones_are_deleted_and_damaged_ones_kept_aside(tmp_path):
    for step, kind in ((2, "whole"), (3, "damaged"), (4, "unfinished"), (5, "foreign")):
        checkpoint(tmp_path, step, kind)
    claim_output_dir(tmp_path, overwrite=False)
    assert [path.name for path in numbered(tmp_path)] == ["checkpoint-2", "checkpoint-5"]
    assert (tmp_path / "damaged-checkpoint-3" / "model.safetensors").read_bytes() == b"weig"
    checkpoint(tmp_path, 3, "damaged")
    claim_output_dir(tmp_path, overwrite=False)
    assert (tmp_path / "damaged-checkpoint-3-again").is_dir()


def refused(*arguments) -> Refusal:
    with pytest.raises(Refusal) as caught:
        checkpoint_to_resume(*arguments)
    return caught.value


def test_what_another_program_wrote_must_be_named(tmp_path):
    """It would be written over otherwise: training makes a folder of the same name."""
    checkpoint(tmp_path, 2)
    foreign = checkpoint(tmp_path, 4, "foreign")
    refusal = refused(tmp_path, "true")
    assert refusal.codes == ["ZR704"] and f"--resume_from_checkpoint {foreign}" in refusal.fix
    assert checkpoint_to_resume(tmp_path, str(foreign)) == str(foreign)
    shutil.rmtree(foreign / "global_step4")
    assert refused(tmp_path, str(foreign)).codes == ["ZR708"]


def test_a_checkpoint_named_by_its_path_must_be_whole_and_the_last(tmp_path):
    for step, kind in ((2, "whole"), (4, "whole"), (6, "unfinished"), (8, "damaged")):
        checkpoint(tmp_path, step, kind)
    assert refused(tmp_path, str(tmp_path / "checkpoint-3")).codes == ["ZR706"]
    for step in (6, 8):
        refusal = refused(tmp_path, str(tmp_path / f"checkpoint-{step}"))
        assert refusal.codes == ["ZR707"] and "checkpoint-2, checkpoint-4" in refusal.fix
    refusal = refused(tmp_path, str(tmp_path / "checkpoint-2"))
    assert refusal.codes == ["ZR710"]
    assert "checkpoint-4" in refusal.what and "step 2" in refusal.what
    for folder, path in ((tmp_path, "checkpoint-4"), (tmp_path / "branch", "checkpoint-2")):
        assert checkpoint_to_resume(folder, str(tmp_path / path)) == str(tmp_path / path)


def test_resuming_and_overwriting_contradict_each_other(tmp_path):
    folder = checkpoint(tmp_path / "out", 2)
    assert refused(tmp_path / "out", "true", True).codes == ["ZR703"]
    assert "would be emptied" in refused(tmp_path / "out", str(folder), True).why
    assert checkpoint_to_resume(tmp_path / "other", str(folder), True) == str(folder)


def test_a_finished_run_without_checkpoints_is_not_replaced_by_a_fresh_one(tmp_path):
    (tmp_path / "model.safetensors").write_bytes(b"weights")
    refuse_occupied(tmp_path, "true", False)
    refuse_occupied(tmp_path, str(tmp_path / "checkpoint-2"), False)
    with pytest.raises(Refusal, match=r"holds model.*ZR702"):
        refuse_occupied(tmp_path, "another/checkpoint-2", False)
    refusal = refused(tmp_path, "true")
    assert refusal.codes == ["ZR705"] and "model.safetensors" in refusal.what and "--overwrite true" in refusal.fix


def test_rotation_keeps_the_newest_and_the_best_and_is_safe_to_kill(tmp_path, monkeypatch):
    folders = {step: checkpoint(tmp_path, step) for step in (2, 9, 10, 11)}
    rotate(tmp_path, None, None)
    assert len(numbered(tmp_path)) == 4
    rotate(tmp_path, 2, str(folders[2]))
    assert numbered(tmp_path) == [folders[2], folders[11]]
    rotate(tmp_path, 1, str(folders[2]))
    assert numbered(tmp_path) == [folders[2], folders[11]]
    monkeypatch.setattr(
        "zero_recipes.training.checkpointing.shutil.rmtree", lambda folder: None
    )  # killed before anything is gone
    rotate(tmp_path, 1, None)
    assert manifest.is_unfinished(folders[2]) and manifest.damage(folders[11]) is None


@pytest.fixture(scope="module")
def values(tmp_path_factory):
    path = tmp_path_factory.mktemp("recipe") / "r.yaml"
    mapping = {"model_name_or_path": "m", "max_steps": 20, "bf16": True, "per_device_train_batch_size": 2}
    path.write_text(json.dumps(mapping))
    return parse_recipe(path, mapping, ["--gradient_accumulation_steps", "4"]).settings


def findings(folder: Path, values: Settings, strategy=("zero2", 2, 2), **other) -> list:
    name, stage, world_size = strategy
    config = None if stage is None else DsConfig({"zero_optimization": {"stage": stage}})
    return list(fit_findings(str(folder), values.replace(**other), Strategy(name, world_size, config, "test")))


def test_what_fits_has_no_finding(tmp_path, values):
    folder = checkpoint(tmp_path, 4, recipe=recipe_facts(values))
    assert findings(folder, values) == []
    free = dict(save_steps=7, logging_steps=9, output_dir="elsewhere", report_to="wandb", sample_prompts=None)
    assert findings(folder, values, **free) == []
    constant = values.replace(lr_scheduler_type="constant")
    folder = checkpoint(tmp_path, 5, recipe=recipe_facts(constant))
    assert findings(folder, constant, max_steps=30) == []


def test_another_stage_or_world_size_names_the_command(tmp_path, values):
    folder = checkpoint(tmp_path, 4, recipe=recipe_facts(values))
    (finding,) = findings(folder, values, ("zero3", 3, 2))
    assert (finding.code, finding.level) == (
        "ZR720",
        "error",
    ) and "zero2 on 2 processes; this run is zero3" in finding.what
    assert f"zero-recipes reshard {folder} --world_size 2 --stage 3" in finding.fix
    (finding,) = findings(folder, values, ("zero2", 2, 4), gradient_accumulation_steps=2)
    assert f"zero-recipes reshard {folder} --world_size 4 --stage 2" in finding.fix
    (finding,) = findings(folder, values, ("ddp", None, 2))
    assert finding.fix == "Launch zero2 on 2 processes again."
    (finding,) = findings(folder, values, ("zero2_offload", 2, 2))
    assert finding.level == "error" and "bias_correction" in finding.why
    folder = checkpoint(tmp_path, 5, recipe=recipe_facts(values), strategy="zero2_offload")
    (finding,) = findings(folder, values)
    assert finding.level == "warning" and "another kernel" in finding.why


def test_another_global_batch_names_the_accumulation(tmp_path, values):
    folder = checkpoint(tmp_path, 4, recipe=recipe_facts(values))
    (finding,) = findings(folder, values, gradient_accumulation_steps=3)
    assert finding.code == "ZR722" and "16 sequences per step; this run takes 12" in finding.what
    assert "--gradient_accumulation_steps 4" in finding.fix
    same = dict(per_device_train_batch_size=4, gradient_accumulation_steps=2)
    assert [finding.level for finding in findings(folder, values, **same)] == ["warning"]


def test_another_recipe_is_refused_where_it_is_another_training(tmp_path, values):
    folder = checkpoint(tmp_path, 4, recipe=recipe_facts(values))
    (finding,) = findings(folder, values, learning_rate=1.0, seed=7)
    assert (
        (finding.code, finding.level) == ("ZR723", "error")
        and "seed 42, learning_rate" in finding.what
        and "--seed 42" in finding.fix
    )
    shorter = [finding for finding in findings(folder, values, max_steps=3) if finding.level == "error"]
    assert [one.code for one in shorter] == ["ZR725"] and "has 4 steps behind it; max_steps is 3" in shorter[0].what
    (finding,) = findings(folder, values, max_steps=40)
    assert finding.level == "warning" and "The schedule is computed anew" in finding.why


def test_other_versions_are_a_warning_and_other_data_is_refused(tmp_path, values, monkeypatch):
    folder = checkpoint(tmp_path, 4, recipe=recipe_facts(values))
    versions = environment.versions() | {"deepspeed": "9.9"}
    monkeypatch.setattr("zero_recipes.checkpoint.compatibility.environment.versions", lambda: versions)
    (finding,) = findings(folder, values)
    assert (finding.code, finding.level) == ("ZR726", "warning") and finding.what.endswith("here is deepspeed 9.9")
    refuse_other_data(str(folder), "d")
    refuse_other_data(None, "d")
    with pytest.raises(Refusal, match="ZR727"):
        refuse_other_data(str(folder), "e")
    with pytest.raises(Refusal, match="ZR727"):
        refuse_other_data(str(folder), None)


def foreign(output_dir: Path) -> Path:
    """As plain transformers writes one under ZeRO stage 2 on two processes."""
    folder = checkpoint(output_dir, 4, "foreign")
    names = [f"global_step4/bf16_zero_pp_rank_{rank}_mp_rank_00_optim_states.pt" for rank in range(2)]
    for name in ("scheduler.pt", "rng_state_0.pth", "rng_state_1.pth", *names):
        (folder / name).write_bytes(b"states")
    return folder


def test_a_checkpoint_without_a_manifest_is_taken_with_a_warning(tmp_path, values):
    (finding,) = findings(foreign(tmp_path), values)
    assert (finding.code, finding.level) == ("ZR718", "warning")


@pytest.mark.parametrize(
    ("lost", "code", "level"),
    [
        ("scheduler.pt", "ZR769", "error"),
        ("global_step4/bf16_zero_pp_rank_1_mp_rank_00_optim_states.pt", "ZR769", "error"),
        ("rng_state_1.pth", "ZR770", "warning"),
    ],
)
def test_a_state_that_a_resume_would_go_on_without_is_named(tmp_path, values, lost, code, level):
    folder = foreign(tmp_path)
    (folder / lost).unlink()
    _, finding = findings(folder, values)
    assert (finding.code, finding.level) == (code, level) and "lacks" in finding.what


def test_ddp_loads_no_optimizer_where_the_schedule_is_missing(tmp_path, values):
    """And transformers says nothing: either file is enough to be refused for."""
    ddp = ("ddp", None, 2)
    folder = foreign(tmp_path)
    assert [f.code for f in findings(folder, values, ddp)] == ["ZR718", "ZR769"]
    (folder / "optimizer.pt").write_bytes(b"states")
    assert [f.code for f in findings(folder, values, ddp)] == ["ZR718"]
    (folder / "scheduler.pt").unlink()
    assert [f.code for f in findings(folder, values, ddp)] == ["ZR718", "ZR769"]


def with_inputs(output_dir: Path, settings: Settings, ds_config: dict) -> tuple[Path, Strategy]:
    """A checkpoint of a run at stage 2 with this ds_config, and that run's strategy."""
    strategy = Strategy("zero2", 2, DsConfig({"zero_optimization": {"stage": 2}} | ds_config), "test")
    facts = {"recipe": recipe_facts(settings), "inputs": input_facts(settings, strategy)}
    return checkpoint(output_dir, 4, **facts), strategy


@pytest.mark.parametrize("block", ["optimizer", "scheduler", "gradient_clipping"])
def test_another_block_of_the_ds_config_is_refused(tmp_path, values, block):
    one, two = ({block: {"type": "X", "params": {"lr": lr}}} for lr in (1e-3, 2e-3))
    folder, strategy = with_inputs(tmp_path, values, one)
    assert list(fit_findings(str(folder), values, strategy)) == []
    for other in (two, {}):
        changed = Strategy("zero2", 2, DsConfig({"zero_optimization": {"stage": 2}} | other), "test")
        (finding,) = fit_findings(str(folder), values, changed)
        assert (finding.code, finding.level) == ("ZR767", "error") and f"the ds_config's {block}" in finding.what


def test_another_accelerator_config_is_refused_and_its_defaults_are_none(tmp_path, values):
    given = values.replace(accelerator_config={"split_batches": True})
    folder, strategy = with_inputs(tmp_path, given, {})
    file = tmp_path / "accelerator.json"
    file.write_text('{"split_batches": true, "even_batches": true}')
    for same in ('{"split_batches": true, "non_blocking": true}', str(file)):
        assert list(fit_findings(str(folder), values.replace(accelerator_config=same), strategy)) == []
    (finding,) = fit_findings(str(folder), values, strategy)
    assert finding.code == "ZR767" and '"split_batches": false' in finding.what


def test_rows_that_rank_0_hands_out_are_not_resumed(tmp_path, values):
    """TRL sets dispatch_batches to false for a stream, and one process takes all rows itself."""
    given = values.replace(accelerator_config={"dispatch_batches": True})
    folder, strategy = with_inputs(tmp_path, given, {})
    (finding,) = fit_findings(str(folder), given, strategy)
    assert (finding.code, finding.level) == ("ZR771", "error")
    assert list(fit_findings(str(folder), given.replace(dataset_streaming=True), strategy)) == []
    assert "ZR771" not in [f.code for f in findings(folder, given, ("zero2", 2, 1))]


def test_an_older_manifest_says_nothing_of_its_inputs_and_is_taken(tmp_path, values):
    folder = checkpoint(tmp_path, 4, recipe=recipe_facts(values))
    changed = values.replace(accelerator_config={"split_batches": True})
    assert findings(folder, changed) == []


def test_other_base_weights_under_an_adapter_are_refused(tmp_path, values):
    """Whatever of a file changes: its end, its middle, its name; a small file is read whole."""
    base = tmp_path / "base"
    base.mkdir()
    draw = random.Random(5)
    large = bytearray(draw.randbytes(SAMPLES * SAMPLE + 3 * SAMPLE))
    (base / "model-00001-of-00002.safetensors").write_bytes(large)
    (base / "model-00002-of-00002.safetensors").write_bytes(draw.randbytes(1000))
    lora = values.replace(use_peft=True, random_weights=False, model_name_or_path=str(base))
    folder, strategy = with_inputs(tmp_path / "out", lora, {})
    assert list(fit_findings(str(folder), lora, strategy)) == []
    for name in sorted(path.name for path in base.iterdir()):
        whole = (base / name).read_bytes()
        for changed in (bytes(byte ^ 1 for byte in whole), whole[:-1], whole[:-1] + bytes([whole[-1] ^ 1])):
            (base / name).write_bytes(changed)
            (finding,) = fit_findings(str(folder), lora, strategy)
            assert (finding.code, finding.level) == ("ZR768", "error")
        (base / name).write_bytes(whole)
    assert list(fit_findings(str(folder), lora, strategy)) == []
    full = lora.replace(use_peft=False)  # its checkpoint holds all weights
    assert input_facts(full, strategy)["base_weights"] is None


def test_a_base_of_the_hub_is_known_by_its_commit(tmp_path, values, monkeypatch):
    snapshot = tmp_path / "models--a--b" / "snapshots" / "0123abc" / "config.json"
    monkeypatch.setattr(inputs, "try_to_load_from_cache", lambda name, file, revision: {"a/b": str(snapshot)}.get(name))
    lora = values.replace(use_peft=True, random_weights=False, model_name_or_path="a/b", model_revision="main")
    assert inputs.base_weights(lora) == "commit 0123abc"
    assert inputs.base_weights(lora.replace(model_name_or_path="never/fetched")) is None


def test_ranks_that_see_different_checkpoints_are_refused(monkeypatch):
    monkeypatch.setattr(resuming, "gathered", lambda mine: [mine, None])
    with pytest.raises(Refusal) as caught:
        resuming.refuse_different_checkpoints("out/checkpoint-2")
    assert "rank 1: starts fresh" in caught.value.why
    monkeypatch.setattr(resuming, "gathered", lambda mine: [mine] * 2)
    resuming.refuse_different_checkpoints("out/checkpoint-2")


def test_the_hash_of_rows_is_that_of_their_content_and_order():
    rows = [{"input_ids": list(range(i % 7)), "labels": [i] * (i % 7)} for i in range(2500)]
    whole = Dataset.from_list(rows)
    assert data_sha256(whole) == data_sha256(Dataset.from_list(copy.deepcopy(rows)))
    assert data_sha256(whole) == data_sha256(whole.select(range(2499, -1, -1)).select(range(2499, -1, -1)))
    assert data_sha256(whole) != data_sha256(whole.select(range(2499, -1, -1)))
    rows[1700]["labels"][0] += 1
    assert data_sha256(whole) != data_sha256(Dataset.from_list(rows))
