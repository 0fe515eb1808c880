"""Which checkpoint a run goes on from: whole ones only, and only where the run fits; nothing whole is lost."""

from __future__ import annotations

import copy
import json
import random
import shutil
from pathlib import Path

import pytest
from datasets import Dataset

from tests.helpers.damage import FACTS, ZERO2, refusal_of
from zero_recipes.checkpoint import compatibility
from zero_recipes.checkpoint import resume as resuming
from zero_recipes.checkpoint.compatibility import SAMPLE, SAMPLES, fit_findings, recipe_facts, refuse_other_data
from zero_recipes.checkpoint.resume import checkpoint_to_resume, clear_unfinished, numbered
from zero_recipes.checkpoint.save import (
    begin_checkpoint,
    checkpoint_fault,
    is_unfinished,
    read_manifest,
    write_manifest,
)
from zero_recipes.config.ds_config import DsConfig
from zero_recipes.config.recipe import parse_recipe
from zero_recipes.config.settings import Settings
from zero_recipes.config.strategy import Strategy
from zero_recipes.core.host import library_versions
from zero_recipes.data.prepare import data_sha256
from zero_recipes.training.trainer import rotate


def checkpoint(output_dir: Path, step: int, kind: str = "whole", **facts) -> Path:
    """A checkpoint folder: "whole", "unfinished", "damaged" or "foreign", as plain transformers writes one."""
    folder = output_dir / f"checkpoint-{step}"
    if kind != "foreign":
        begin_checkpoint(folder)
    (folder / f"global_step{step}").mkdir(parents=True)
    (folder / "model.safetensors").write_bytes(b"weights")
    for rank in range(2):
        (folder / f"global_step{step}" / f"{rank}_optim_states.pt").write_bytes(b"states" * step)
    if kind == "foreign":
        (folder / "trainer_state.json").write_text(json.dumps({"global_step": step}))
        (folder / "scheduler.pt").write_bytes(b"s")
    if kind in ("whole", "damaged"):
        write_manifest(folder, {"step": step, "versions": library_versions()} | FACTS | facts)
    if kind == "damaged":
        (folder / "model.safetensors").write_bytes(b"weig")
    return folder


def test_a_manifest_lists_every_file_and_is_written_last(tmp_path):
    folder = checkpoint(tmp_path, 3)
    found = read_manifest(folder)
    states = {f"global_step3/{rank}_optim_states.pt": 18 for rank in range(2)}
    assert found["step"] == 3 and found["files"] == {"model.safetensors": 7} | states
    assert sorted(path.name for path in folder.iterdir()) == ["global_step3", "manifest.json", "model.safetensors"]
    assert checkpoint_fault(folder) is None
    (folder / "unfinished").touch()  # killed between manifest and mark
    assert checkpoint_fault(folder) is None and not is_unfinished(folder)
    begin_checkpoint(folder)  # a new save
    assert is_unfinished(folder) and read_manifest(folder) is None


def test_damage_names_the_first_fault(tmp_path):
    assert "not written to its end" in checkpoint_fault(checkpoint(tmp_path, 1, "unfinished"))
    assert "has no manifest.json" in checkpoint_fault(checkpoint(tmp_path, 2, "foreign"))
    assert "4 bytes; 7 were written" in checkpoint_fault(checkpoint(tmp_path, 3, "damaged"))
    folder = checkpoint(tmp_path, 4)
    (folder / "global_step4" / "0_optim_states.pt").unlink()
    assert "lacks global_step4/0_optim_states.pt" in checkpoint_fault(folder)


def test_true_takes_the_last_whole_one(tmp_path, capsys):
    assert checkpoint_to_resume(tmp_path, None) is None and checkpoint_to_resume(tmp_path, "false") is None
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
    assert checkpoint_to_resume(tmp_path, True, before=10) == str(tmp_path / "checkpoint-2")
    assert len(numbered(tmp_path)) == 4, "looking changes nothing"


def test_unfinished_ones_are_deleted_damaged_ones_kept_aside_and_links_left_alone(tmp_path):
    out, elsewhere = tmp_path / "out", tmp_path / "elsewhere"
    for step, kind in ((2, "whole"), (3, "damaged"), (4, "unfinished"), (5, "foreign")):
        checkpoint(out, step, kind)
    for step, kind in ((6, "unfinished"), (7, "damaged")):
        (out / f"checkpoint-{step}").symlink_to(checkpoint(elsewhere, step, kind))
    clear_unfinished(out)
    assert [path.name for path in numbered(out)] == [f"checkpoint-{step}" for step in (2, 5, 6, 7)]
    assert (out / "damaged-checkpoint-3" / "model.safetensors").read_bytes() == b"weig"
    assert all((elsewhere / f"checkpoint-{step}" / "model.safetensors").is_file() for step in (6, 7))
    checkpoint(out, 3, "damaged")
    clear_unfinished(out, [out / "checkpoint-2"])
    assert (out / "damaged-checkpoint-3-again").is_dir() and (out / "damaged-checkpoint-2").is_dir()


REFUSED = {
    "another program's": ({4: "foreign"}, "true", "ZR704"),
    "a folder that is not there": ({2: "whole"}, "checkpoint-3", "ZR707"),
    "one without a state": ({2: "no state"}, "checkpoint-2", "ZR707"),
    "an unfinished one": ({2: "whole", 6: "unfinished"}, "checkpoint-6", "ZR707"),
    "a damaged one": ({2: "whole", 8: "damaged"}, "checkpoint-8", "ZR707"),
    "one before another": ({2: "whole", 3: "whole"}, "checkpoint-2", "ZR710"),
    "a model alone": ({}, "true", "ZR705"),
}


@pytest.mark.parametrize(("kinds", "requested", "code"), REFUSED.values(), ids=REFUSED)
def test_a_checkpoint_that_nobody_can_go_on_from(tmp_path, kinds, requested, code):
    (tmp_path / "model.safetensors").write_bytes(b"weights")
    for step, kind in kinds.items():
        folder = checkpoint(tmp_path, step, "foreign" if kind == "no state" else kind)
        if kind == "no state":
            (folder / "trainer_state.json").unlink()
    named = "true" if requested == "true" else str(tmp_path / requested)
    refusal = refusal_of(checkpoint_to_resume, tmp_path, named)
    assert refusal.codes == [code]
    if "whole" in kinds.values() and code == "ZR707":
        assert refusal.fix.endswith("has: checkpoint-2.")


def test_a_checkpoint_named_by_its_path(tmp_path):
    """The last one of its folder, or into another folder; another program's too."""
    for step, kind in ((2, "whole"), (4, "whole"), (5, "unfinished")):
        checkpoint(tmp_path, step, kind)
    foreign = checkpoint(tmp_path / "plain", 7, "foreign")
    for out, path in ((tmp_path, tmp_path / "checkpoint-4"), (tmp_path / "b", tmp_path / "checkpoint-2")):
        assert checkpoint_to_resume(out, str(path)) == str(path)
    assert checkpoint_to_resume(tmp_path, str(foreign)) == str(foreign)


def test_resuming_and_overwriting_contradict_each_other(tmp_path):
    folder = checkpoint(tmp_path / "out", 2)
    for requested in ("true", str(folder)):
        assert refusal_of(checkpoint_to_resume, tmp_path / "out", requested, True).codes == ["ZR703"]
    assert checkpoint_to_resume(tmp_path / "other", str(folder), True) == str(folder)


def test_rotation_keeps_the_newest_and_the_best_and_is_safe_to_kill(tmp_path, monkeypatch):
    folders = {step: checkpoint(tmp_path, step) for step in (2, 9, 10, 11)}
    rotate(tmp_path, None, None)
    assert len(numbered(tmp_path)) == 4
    for limit in (2, 1):
        rotate(tmp_path, limit, str(folders[2]))
        assert numbered(tmp_path) == [folders[2], folders[11]]
    monkeypatch.setattr(shutil, "rmtree", lambda folder: None)  # killed before anything is gone
    rotate(tmp_path, 1, None)
    assert is_unfinished(folders[2]) and checkpoint_fault(folders[11]) is None


# whether the run fits


@pytest.fixture(scope="module")
def values(tmp_path_factory) -> Settings:
    path = tmp_path_factory.mktemp("recipe") / "r.yaml"
    mapping = {"model_name_or_path": "m", "max_steps": 20, "bf16": True, "per_device_train_batch_size": 2}
    path.write_text(json.dumps(mapping))
    return parse_recipe(path, mapping, ["--gradient_accumulation_steps", "4"]).settings


def strategy(name: str = "zero2", stage: int | None = 2, world_size: int = 2, **config) -> Strategy:
    zero = {"stage": stage} | config.pop("zero", {})
    ds_config = None if stage is None else DsConfig({"zero_optimization": zero} | config)
    return Strategy(name, world_size, ds_config, "test")


BLOCK = {"scheduler": {"type": "X"}}
MORE_ROWS = {"per_device_train_batch_size": 4, "gradient_accumulation_steps": 2}  # the same in all
FITS = {  # what the run has otherwise than the checkpoint's: (settings, strategy) -> codes, "-" before a warning
    "nothing": ({}, {}, []),
    "keys that decide nothing": (dict(save_steps=7, output_dir="x", report_to="wandb", sample_prompts=None), {}, []),
    "another stage": ({}, dict(name="zero3", stage=3), ["ZR720"]),
    "another world size": (dict(gradient_accumulation_steps=2), dict(world_size=4), ["ZR720"]),
    "without DeepSpeed": ({}, dict(name="ddp", stage=None), ["ZR720"]),
    "onto offload": ({}, dict(name="zero2_offload"), ["ZR721"]),
    "another kernel": ({}, dict(name="zero2_hpz"), ["-ZR721"]),
    "another global batch": (dict(gradient_accumulation_steps=3), {}, ["ZR722"]),
    "the same global batch otherwise": (MORE_ROWS, {}, ["-ZR724"]),
    "another recipe": (dict(learning_rate=1.0, seed=7), {}, ["ZR723"]),
    "another block of the ds_config": ({}, BLOCK, ["ZR723"]),
    "another accelerator_config": (dict(accelerator_config={"split_batches": True}), {}, ["ZR723"]),
    "its defaults": (dict(accelerator_config='{"even_batches": true, "non_blocking": true}'), {}, []),
    "fewer steps than it has": (dict(max_steps=3), {}, ["-ZR724", "ZR725"]),
    "more steps": (dict(max_steps=40), {}, ["-ZR724"]),
    "states on NVMe": ({}, dict(zero={"offload_optimizer": {"device": "nvme"}}), ["ZR719"]),
    "rows that rank 0 hands out": (dict(accelerator_config={"dispatch_batches": True}), {}, ["ZR771", "ZR723"]),
}


@pytest.mark.parametrize(("keys", "launch", "codes"), FITS.values(), ids=FITS)
def test_what_fits_a_checkpoint(tmp_path, values, keys, launch, codes):
    folder = checkpoint(tmp_path, 4, recipe=recipe_facts(values, ZERO2))
    found = list(fit_findings(str(folder), values.replace(**keys), strategy(**launch)))
    assert ["-" * (one.level == "warning") + one.code for one in found] == codes


def test_findings_name_the_command_that_helps(tmp_path, values):
    folder = checkpoint(tmp_path, 4, recipe=recipe_facts(values, ZERO2))
    (stage,) = fit_findings(str(folder), values, strategy("zero3", 3))
    assert stage.what.endswith("zero2 on 2 processes; this run is zero3 on 2")
    assert f"zero-recipes reshard {folder} --world_size 2 --stage 3" in stage.fix
    (batch,) = fit_findings(str(folder), values.replace(gradient_accumulation_steps=3), ZERO2)
    assert "16 sequences per step; this run takes 12" in batch.what and "--gradient_accumulation_steps 4" in batch.fix
    (recipe,) = fit_findings(str(folder), values.replace(learning_rate=1.0, seed=7), strategy(**BLOCK))
    for then in ("seed 42, learning_rate", "the ds_config's scheduler null; this run has"):
        assert then in recipe.what


def test_a_constant_rate_may_go_on_for_longer_and_other_versions_are_a_warning(tmp_path, values, monkeypatch):
    constant = values.replace(lr_scheduler_type="constant")
    folder = checkpoint(tmp_path, 5, recipe=recipe_facts(constant, ZERO2))
    assert list(fit_findings(str(folder), constant.replace(max_steps=30), ZERO2)) == []
    versions = library_versions() | {"deepspeed": "9.9"}
    monkeypatch.setattr(compatibility, "library_versions", lambda: versions)
    (found,) = fit_findings(str(folder), constant, ZERO2)
    assert (found.code, found.level) == ("ZR726", "warning") and found.what.endswith("here is deepspeed 9.9")


def test_other_rows_are_refused(tmp_path):
    folder = str(checkpoint(tmp_path, 4))
    for where, rows, codes in (
        (folder, "d", None),
        (None, "e", None),
        (folder, "e", ["ZR727"]),
        (folder, None, ["ZR727"]),
    ):
        assert getattr(refusal_of(refuse_other_data, where, rows), "codes", None) == codes


def test_a_checkpoint_without_a_manifest_must_have_the_states_that_a_resume_loads(tmp_path, values):
    """transformers and DeepSpeed would begin with fresh ones, silently."""
    folder, ddp = checkpoint(tmp_path, 4, "foreign"), strategy("ddp", None)

    def codes(how: Strategy) -> list[str]:
        return [found.code for found in fit_findings(str(folder), values, how)]

    assert codes(ZERO2) == ["ZR718"] and codes(ddp) == ["ZR718", "ZR769"] == codes(strategy(stage=0))
    (folder / "optimizer.pt").write_bytes(b"states")
    assert codes(ddp) == ["ZR718"]
    (folder / "global_step4" / "1_optim_states.pt").unlink()
    assert codes(ZERO2) == ["ZR718", "ZR769"]
    (folder / "scheduler.pt").unlink()
    assert codes(ddp) == ["ZR718", "ZR769"]


def test_other_base_weights_under_an_adapter_are_refused(tmp_path, values):
    """Whatever of a file changes: its end, its name; a small file is read whole, of a large one pieces."""
    base, draw = tmp_path / "base", random.Random(5)
    base.mkdir()
    (base / "model-00001-of-00002.safetensors").write_bytes(draw.randbytes(SAMPLES * SAMPLE + 3 * SAMPLE))
    (base / "model-00002-of-00002.safetensors").write_bytes(draw.randbytes(1000))
    lora = values.replace(use_peft=True, random_weights=False, model_name_or_path=str(base))
    folder = checkpoint(tmp_path / "out", 4, recipe=recipe_facts(lora, ZERO2))
    assert list(fit_findings(str(folder), lora, ZERO2)) == []
    for path in sorted(base.iterdir()):
        whole = path.read_bytes()
        for changed in (bytes(byte ^ 1 for byte in whole), whole[:-1], whole[:-1] + bytes([whole[-1] ^ 1])):
            path.write_bytes(changed)
            assert [found.code for found in fit_findings(str(folder), lora, ZERO2)] == ["ZR768"]
        path.write_bytes(whole)
    assert list(fit_findings(str(folder), lora, ZERO2)) == []
    full = lora.replace(use_peft=False)  # its checkpoint holds all weights
    assert recipe_facts(full, ZERO2)["base_weights"] is None


def test_a_base_of_the_hub_is_known_by_its_commit(tmp_path, values, monkeypatch):
    snapshot = str(tmp_path / "models--a--b" / "snapshots" / "0123abc" / "config.json")
    monkeypatch.setattr(compatibility, "try_to_load_from_cache", lambda name, *_, **__: {"a/b": snapshot}.get(name))
    assert compatibility.base_weights(values.replace(model_name_or_path="a/b")) == "commit 0123abc"
    assert compatibility.base_weights(values.replace(model_name_or_path="never/fetched")) is None


def test_ranks_that_see_different_checkpoints_are_refused(monkeypatch):
    run = type("Run", (), {"checkpoint": "out/checkpoint-2"})
    monkeypatch.setattr(resuming, "agree", lambda work: [work(), None])
    assert "rank 1: starts fresh" in refusal_of(resuming.resolve_resume_checkpoint, run).why


def test_the_hash_of_rows_is_that_of_their_content_and_order():
    rows = [{"input_ids": list(range(i % 7)), "labels": [i] * (i % 7)} for i in range(2500)]
    whole = Dataset.from_list(rows)
    assert data_sha256(whole) == data_sha256(Dataset.from_list(copy.deepcopy(rows)))
    assert data_sha256(whole) == data_sha256(whole.select(range(2499, -1, -1)).select(range(2499, -1, -1)))
    assert data_sha256(whole) != data_sha256(whole.select(range(2499, -1, -1)))
    rows[1700]["labels"][0] += 1
    assert data_sha256(whole) != data_sha256(Dataset.from_list(rows))
