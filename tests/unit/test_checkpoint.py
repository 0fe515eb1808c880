"""Which checkpoint a run goes on from: whole ones only, and only where the run fits; nothing whole is lost."""

import dataclasses
import json
import shutil
from pathlib import Path
from types import MappingProxyType

import pytest
import torch
from deepspeed.runtime.zero.config import ZeroStageEnum
from peft import LoraConfig, get_peft_model
from transformers import AutoModelForCausalLM, TrainerState

from tests.helpers.composites import composite_model
from tests.helpers.seeded import count, draw, grid
from tests.helpers.tiny import llama_config
from tests.helpers.tools import DAMAGES, refusal_of
from zero_recipes.checkpoint import resume, save
from zero_recipes.checkpoint.compatibility import fit_findings, recipe_facts, refuse_misfit, refuse_other_data
from zero_recipes.checkpoint.folders import clear_unfinished, numbered, rotate
from zero_recipes.checkpoint.resume import checkpoint_to_resume, resolve_resume_checkpoint
from zero_recipes.config.ds_config import DsConfig
from zero_recipes.config.read import parse_recipe
from zero_recipes.config.recipe import Recipe
from zero_recipes.config.run import Run
from zero_recipes.config.strategy import Strategy
from zero_recipes.core.run_end import UNFINISHED
from zero_recipes.engine.faults.pickled_code import load_without_code, not_plain
from zero_recipes.model.config import config_of_file

FACTS = {"strategy": "zero2", "zero_stage": 2, "world_size": 2, "micro_batch_size": 2, "gradient_accumulation_steps": 4}


def strategy(name: str = "zero2", stage: int | None = 2, world_size: int = 2, **config) -> Strategy:
    zero = {"stage": stage} | config.pop("zero", {})
    ds_config = None if stage is None else DsConfig({"zero_optimization": zero} | config)
    return Strategy(name, world_size, ds_config, "test")


ZERO2 = strategy()


@pytest.fixture(scope="module")
def recipe(tmp_path_factory) -> Recipe:
    path = tmp_path_factory.mktemp("recipe") / "r.yaml"
    mapping = {"model_name_or_path": "m", "max_steps": 20, "bf16": True, "per_device_train_batch_size": 2}
    path.write_text(json.dumps(mapping))
    return parse_recipe(path, mapping, ["--gradient_accumulation_steps", "4"])


def checkpoint(output_dir: Path, step: int, kind: str = "whole", **facts) -> Path:
    """A checkpoint as a run of ZeRO stage 2 on two processes leaves it: "whole", "unfinished", "damaged" (a file is cut
    off) or "foreign", as plain transformers writes one."""
    folder = output_dir / f"checkpoint-{step}"
    states = folder / f"global_step{step}"
    if kind != "foreign":
        save.begin_checkpoint(folder)
    states.mkdir(parents=True)
    generator = torch.Generator().manual_seed(step)
    for rank in range(2):
        torch.save({"exp_avg": torch.rand(33, generator=generator)}, states / f"zero_pp_rank_{rank}_optim_states.pt")
    torch.save({"lr": [0.1 / step]}, folder / "scheduler.pt")
    (folder / "model.safetensors").write_bytes(bytes([step]) * 500)
    (folder / save.LATEST).write_text(states.name)
    TrainerState(global_step=step, log_history=[{"loss": 2.5, "step": 1}]).save_to_json(str(folder / save.STATE))
    if kind != "foreign":
        (folder / save.HISTORY).write_text(json.dumps({"resumed_at": [1]}))
    if kind in ("whole", "damaged"):
        save.write_manifest(folder, {"step": step, "data_sha256": "d"} | FACTS | facts)
    if kind == "damaged":
        (folder / "model.safetensors").write_bytes(b"weig")
    return folder


@pytest.fixture
def taken(recipe):
    """The checkpoint that a run loads, named or by `true`; None: it starts fresh."""

    def of(output_dir: Path, requested: str = "true", **keys) -> str | None:
        chosen = checkpoint_to_resume(output_dir, requested)
        settings = recipe.settings.replace(resume_from_checkpoint=chosen, trust_checkpoint=True, **keys)
        named = dataclasses.replace(recipe, settings=recipe.settings.replace(resume_from_checkpoint=requested))
        run = Run(named, settings.replace(output_dir=str(output_dir)), MappingProxyType({}), ZERO2, "cpu", {})
        return resolve_resume_checkpoint(run).checkpoint

    return of


@pytest.mark.parametrize("rounds", [1, grid(7)])
def test_bytes_of_any_file(tmp_path, recipe, taken, rounds):
    """Each file is damaged in each way, the manifest too: the checkpoint before is taken, this one kept aside."""
    out, chance, damaged = tmp_path / "out", draw("damage"), 0
    checkpoint(out, 2, recipe=recipe_facts(recipe.settings, ZERO2))
    whole = checkpoint(tmp_path / "kept", 3, recipe=recipe_facts(recipe.settings, ZERO2))
    names = [path.relative_to(whole) for path in sorted(whole.rglob("*")) if path.is_file()]
    for name in names * rounds:
        for damage in DAMAGES:
            folder = Path(shutil.copytree(whole, out / "checkpoint-3"))
            assert taken(out) == str(folder)
            damage(folder / name, chance)
            if save.read_manifest(folder) != save.read_manifest(whole) or name.name != save.MANIFEST:  # no white space
                assert taken(out) == str(out / "checkpoint-2"), f"{damage.__name__} of {name}"
                damaged += 1
            clear_unfinished(out)
            shutil.rmtree(next(path for path in out.iterdir() if path.name != "checkpoint-2"))
    assert len(names) == 8 and len(numbered(out)) == 1 and damaged >= 28 * rounds
    if rounds > 1:
        count("damage at resume", "every file of a checkpoint", number=damaged)


def test_the_one_before_must_fit_too(tmp_path, taken):
    checkpoint(tmp_path, 2, world_size=4)
    last = checkpoint(tmp_path, 3)
    (last / "scheduler.pt").write_bytes((last / "scheduler.pt").read_bytes()[::-1])
    assert refusal_of(taken, tmp_path).codes == ["ZR722"]


@pytest.mark.parametrize(
    ("name", "text"), [(save.STATE, "{"), (save.HISTORY, "[3]"), (save.LATEST, "../checkpoint-1"), (save.LATEST, "..")]
)
def test_small_files_without_checksums_that_no_resume_could_read(tmp_path, taken, name, text):
    """Another program's checkpoint, and one of a run with skip_checksums."""
    for kind in ("whole",) if name == save.HISTORY else ("foreign", "whole"):
        folder = checkpoint(tmp_path / kind, 2, kind)
        assert taken(tmp_path, str(folder)) == str(folder)
        (folder / name).write_text(text)
        if kind == "whole":
            save.write_manifest(folder, save.read_manifest(folder), with_checksums=False)
        refusal = refusal_of(taken, tmp_path, str(folder))
        assert refusal.codes == ["ZR707"] and f"{name} of {folder} cannot be read" in refusal.why


def test_checksums_may_be_left_out_and_each_rank_looks_at_its_share(tmp_path, taken):
    folder = checkpoint(tmp_path, 2)
    for name in save.read_manifest(folder)["files"]:
        before = (folder / name).read_bytes()
        (folder / name).write_bytes(bytes([before[0] ^ 1]) + before[1:])
        for world in (1, 2, 3, 16):
            faults = [save.content_fault(folder, rank, world) for rank in range(world)]
            wanted = f"{folder / name} was changed after it was written: its checksum differs."
            assert [fault for fault in faults if fault] == [wanted]
        (folder / name).write_bytes(before)
    assert refusal_of(taken, tmp_path, str(folder)) is None
    (folder / "scheduler.pt").write_bytes((folder / "scheduler.pt").read_bytes()[::-1])
    assert refusal_of(taken, tmp_path, str(folder)).codes == ["ZR707"]
    assert taken(tmp_path, str(folder), skip_checksums=True) == str(folder)


def test_unfinished_ones_are_deleted_damaged_ones_kept_aside_and_links_left_alone(tmp_path):
    out, elsewhere = tmp_path / "out", tmp_path / "elsewhere"
    for step, kind in ((2, "whole"), (3, "damaged"), (4, "unfinished"), (5, "foreign")):
        checkpoint(out, step, kind)
    for step, kind in ((6, "unfinished"), (7, "damaged")):
        (out / f"checkpoint-{step}").symlink_to(checkpoint(elsewhere, step, kind))
    (out / "checkpoint-2" / save.UNFINISHED).touch()  # killed between manifest and mark
    clear_unfinished(out)
    assert [path.name for path in numbered(out)] == [f"checkpoint-{step}" for step in (2, 5, 6, 7)]
    assert all((elsewhere / f"checkpoint-{step}" / save.STATE).is_file() for step in (6, 7))
    checkpoint(out, 3, "damaged")
    clear_unfinished(out)
    for name in ("damaged-checkpoint-3", "damaged-checkpoint-3-again"):
        assert (out / name / "model.safetensors").read_bytes() == b"weig"


def test_the_content_of_a_checkpoint_that_was_passed_over_decides_whether_it_stays(tmp_path):
    """The run goes on from step 2, and will write to checkpoint-3 and -4: only damaged ones make room."""
    for step in (2, 3, 4):
        checkpoint(tmp_path, step)
    for step in (2, 4):
        weights = tmp_path / f"checkpoint-{step}" / "model.safetensors"
        weights.write_bytes(bytes(500))  # as many bytes as before
    clear_unfinished(tmp_path, step=2)
    left = sorted(path.name for path in tmp_path.iterdir())
    assert left == ["checkpoint-2", "checkpoint-3", "damaged-checkpoint-4"], "the first was looked at by who loads it"


REFUSED = {
    "another program's": ({4: "foreign"}, "true", "ZR704"),
    "a folder that is not there": ({2: "whole"}, "checkpoint-3", "ZR707"),
    "one without a state": ({2: "no state"}, "checkpoint-2", "ZR707"),
    "an unfinished one": ({2: "whole", 6: "unfinished"}, "checkpoint-6", "ZR707"),
    "a damaged one": ({2: "whole", 8: "damaged"}, "checkpoint-8", "ZR707"),
    "one before another": ({2: "whole", 3: "whole"}, "checkpoint-2", "ZR710"),
    "the last one": ({2: "whole", 4: "whole", 5: "unfinished"}, "checkpoint-4", None),
    "a model alone": ({}, "true", "ZR705"),
}


@pytest.mark.parametrize(("kinds", "requested", "code"), REFUSED.values(), ids=REFUSED)
def test_a_checkpoint_that_nobody_can_go_on_from(tmp_path, kinds, requested, code):
    (tmp_path / "model.safetensors").write_bytes(b"weights")
    for step, kind in kinds.items():
        folder = checkpoint(tmp_path, step, "foreign" if kind == "no state" else kind)
        if kind == "no state":
            (folder / save.STATE).unlink()
    named = "true" if requested == "true" else str(tmp_path / requested)
    assert getattr(refusal_of(checkpoint_to_resume, tmp_path, named), "codes", [None]) == [code]
    assert refusal_of(checkpoint_to_resume, tmp_path, named, True).codes == ["ZR703"], "it would be overwritten"


def test_the_same_command_goes_on_after_a_signal_or_a_kill_and_not_after_an_error(tmp_path, recipe):
    checkpoint(tmp_path, 2)
    go_on = [("preempted", "a signal"), ("running", None), ("failed", f"{UNFINISHED}: nothing is saved")]
    do_not = [("failed", "ValueError: a row"), ("oom", "MemoryError"), ("ok", None)]
    for status, error in go_on + do_not:
        (tmp_path / "metrics.json").write_text(json.dumps({"status": status, "error": error}))
        wanted = "true" if (status, error) in go_on else None
        assert resume.requested_in(tmp_path, recipe.settings) == wanted, status
        overwrites = recipe.settings.replace(overwrite=True)
        assert resume.requested_in(tmp_path, overwrites) is None, status


def test_other_processes_keep_the_batch(tmp_path):
    asked = [2, 4, None]
    checkpoint(tmp_path, 2, asked=asked)  # of 2 x 4 on 2 processes
    for world_size, accumulation in ((1, 8), (4, 2)):
        wanted = {"per_device_train_batch_size": 2, "gradient_accumulation_steps": accumulation}
        assert resume.batch_kept(tmp_path, "true", asked, world_size) == wanted
    assert resume.batch_kept(tmp_path, "true", [2, 3, None], 4) is None, "the recipe says another"


def test_a_micro_batch_that_does_not_divide_becomes_the_largest_that_does():
    batch = resume.Batch(micro=4, accumulation=2, world_size=3)
    assert batch.over(4) == (3, 2, 4)
    assert batch.over(2) == (4, 3, 2)
    assert batch.over(24) == (1, 1, 24)
    assert refusal_of(batch.over, 5).codes == ["ZR743"]


def test_rotation_keeps_the_newest_and_the_best_and_is_safe_to_kill(tmp_path, monkeypatch):
    folders = {step: checkpoint(tmp_path, step) for step in (2, 9, 10, 11)}
    rotate(tmp_path, None, None)
    assert len(numbered(tmp_path)) == 4
    for limit in (2, 1):
        rotate(tmp_path, limit, str(folders[2]))
        assert numbered(tmp_path) == [folders[2], folders[11]]
    monkeypatch.setattr(shutil, "rmtree", lambda folder: None)  # killed before anything is gone
    rotate(tmp_path, 1, None)
    assert save.is_unfinished(folders[2]) and save.checkpoint_fault(folders[11]) is None


def test_ranks_that_see_different_checkpoints_are_refused(monkeypatch):
    run = type("Run", (), {"checkpoint": "out/checkpoint-2"})
    monkeypatch.setattr(resume, "agree", lambda work: [work(), None])
    assert "rank 1: starts fresh" in refusal_of(resolve_resume_checkpoint, run).why


# whether the run fits

BLOCK = {"scheduler": {"type": "X"}}
MORE_ROWS = {"per_device_train_batch_size": 4, "gradient_accumulation_steps": 2}  # the same in all
BY_LENGTH = {"gradient_accumulation_steps": 2, "train_sampling_strategy": "group_by_length"}
DDP_ON_4 = {"name": "ddp", "stage": None, "world_size": 4}
CONSTANT = {"lr_scheduler_type": "constant"}
FITS = {  # what the run has otherwise than the checkpoint's: (settings, strategy) -> codes, "-" before a warning
    "nothing": ({}, {}, []),
    "keys that decide nothing": (dict(save_steps=7, output_dir="x", report_to="wandb", sample_prompts=None), {}, []),
    "another stage": ({}, dict(name="zero3", stage=3), ["ZR720"]),
    "another world size": (dict(gradient_accumulation_steps=2), dict(world_size=4), ["-ZR882"]),
    "another world size in another order": (
        dict(gradient_accumulation_steps=2),
        dict(world_size=4, zero={"round_robin_gradients": True}),
        ["-ZR882", "ZR715"],
    ),
    "rows by length": (BY_LENGTH, dict(world_size=4), ["-ZR882", "ZR714", "ZR723"]),
    "rows by length, other processes of ddp": (BY_LENGTH, DDP_ON_4, ["ZR720", "ZR714", "ZR723"]),
    "without DeepSpeed": ({}, dict(name="ddp", stage=None), ["ZR720"]),
    "onto offload": ({}, dict(name="zero2_offload"), ["ZR721"]),
    "another kernel": ({}, dict(name="zero2_hpz"), ["-ZR721"]),
    "another global batch": (dict(gradient_accumulation_steps=3), {}, ["ZR722"]),
    "the same global batch otherwise": (MORE_ROWS, {}, ["-ZR724"]),
    "another recipe": (dict(learning_rate=1.0, seed=7), {}, ["ZR723"]),
    "another block of the ds_config": ({}, BLOCK, ["ZR723"]),
    "another accelerator_config": (dict(accelerator_config={"split_batches": True}), {}, ["ZR723"]),
    "its defaults": (dict(accelerator_config={"even_batches": True, "non_blocking": True}), {}, []),
    "more steps": (dict(max_steps=40), {}, ["-ZR724"]),
    "another schedule": (CONSTANT | dict(max_steps=40), {}, ["ZR723"]),
    "states on NVMe": ({}, dict(zero={"offload_optimizer": {"device": "nvme"}}), ["ZR719"]),
    "rows that rank 0 hands out": (dict(accelerator_config={"dispatch_batches": True}), {}, ["ZR771", "ZR723"]),
}


@pytest.mark.parametrize(("keys", "launch", "codes"), FITS.values(), ids=FITS)
def test_what_fits_a_checkpoint(tmp_path, recipe, keys, launch, codes):
    folder = checkpoint(tmp_path, 4, recipe=recipe_facts(recipe.settings, ZERO2))
    found = list(fit_findings(str(folder), recipe.settings.replace(**keys), strategy(**launch)))
    assert ["-" * (one.level == "warning") + one.code for one in found] == codes


OTHER_RUN = [
    "model_name_or_path", "model_revision", "dtype", "load_in_4bit", "load_in_8bit", "use_peft", "use_dora",
    "use_rslora", "lora_alpha", "lora_dropout", "lora_modules_to_save", "lora_r", "lora_target_modules",
    "peft_config", "loraplus_lr_ratio", "seed", "data_seed", "train_sampling_strategy", "dataloader_drop_last",
    "ignore_data_skip", "average_tokens_across_devices", "loss_type", "neftune_noise_alpha",
    "label_smoothing_factor", "optim", "optim_args", "optim_target_modules", "learning_rate", "weight_decay",
    "adam_beta1", "adam_beta2", "adam_epsilon", "max_grad_norm", "lr_scheduler_type", "lr_scheduler_kwargs",
    "warmup_steps",
]  # fmt: skip
OTHER_ROUNDING = ["attn_implementation", "activation_checkpointing", "padding_free", "torch_compile", "tf32"]
LONGER = ["max_steps", "num_train_epochs"]


@pytest.mark.parametrize(
    ("key", "code"),
    [
        *((key, "ZR723") for key in OTHER_RUN),
        *((key, "-ZR724") for key in [*OTHER_ROUNDING, *LONGER]),
    ],
)
def test_each_key_that_makes_another_run_is_named_with_both_values(tmp_path, recipe, key, code):
    folder = checkpoint(tmp_path, 4, recipe=recipe_facts(recipe.settings, ZERO2))
    value = 30 if key in LONGER else 0.25
    found = list(fit_findings(str(folder), recipe.settings.replace(**{key: value}), ZERO2))
    assert ["-" * (one.level == "warning") + one.code for one in found] == [code]
    assert f"{key} {getattr(recipe.settings, key)}" in found[0].what and f"{key} {value}" in found[0].what


def test_a_checkpoint_without_a_manifest_must_have_the_states_that_a_resume_loads(tmp_path, recipe):
    """transformers and DeepSpeed would begin with fresh ones, silently."""
    folder, ddp = checkpoint(tmp_path, 4, "foreign"), strategy("ddp", None)

    def codes(how: Strategy) -> list[str]:
        return [found.code for found in fit_findings(str(folder), recipe.settings, how)]

    assert codes(ZERO2) == ["ZR718"] and codes(ddp) == ["ZR718", "ZR769"] == codes(strategy(stage=0))
    (folder / "optimizer.pt").write_bytes(b"states")
    assert codes(ddp) == ["ZR718"]
    (folder / "global_step4" / "zero_pp_rank_1_optim_states.pt").unlink()
    assert codes(ZERO2) == ["ZR718", "ZR769"]
    (folder / "scheduler.pt").unlink()
    assert codes(ddp) == ["ZR718", "ZR769"] and codes(strategy(stage=2, world_size=1, **BLOCK)) == ["ZR718"]


LORA = {"use_peft": True, "lora_r": 4, "lora_alpha": 8, "lora_target_modules": ["q_proj"]}
WEIGHTS = {  # of another program's checkpoint: (sizes of its model, its adapter, the run's keys) -> what is said
    "the same": ({}, None, {}, None),
    "wider": ({"hidden_size": 128}, None, {}, "Mismatched keys: lm_head.weight"),
    "a larger vocabulary": ({"vocab_size": 1040}, None, {}, "Mismatched keys: lm_head.weight"),
    "deeper": ({"num_hidden_layers": 3}, None, {}, "Unexpected keys: model.layers.2."),
    "less deep": ({"num_hidden_layers": 1}, None, {}, "Missing keys: model.layers.1."),
    "an adapter": ({}, {"r": 4, "lora_alpha": 8, "target_modules": ["q_proj"]}, LORA, None),
    "an adapter with embeddings": (
        {},
        {"r": 4, "lora_alpha": 8, "target_modules": ["q_proj"], "modules_to_save": ["lm_head"]},
        LORA | {"lora_modules_to_save": ["lm_head"]},
        None,
    ),
    "another rank": ({}, {"r": 8, "lora_alpha": 8, "target_modules": ["q_proj"]}, LORA, "has r 8; this run's has r 4"),
    "another scale": ({}, {"r": 4, "lora_alpha": 16, "target_modules": ["q_proj"]}, LORA, "lora_alpha 16"),
    "other targets": ({}, {"r": 4, "lora_alpha": 8, "target_modules": ["v_proj"]}, LORA, "Missing keys: base_model"),
    "more targets": (
        {},
        {"r": 4, "lora_alpha": 8, "target_modules": ["q_proj", "v_proj"]},
        LORA,
        "Unexpected keys: base_model",
    ),
    "an adapter of a wider model": (
        {"hidden_size": 128},
        {"r": 4, "lora_alpha": 8, "target_modules": ["q_proj"]},
        LORA,
        "Mismatched keys: base_model",
    ),
    "an adapter for a whole model": ({}, {"r": 4, "target_modules": ["q_proj"]}, {}, "It holds an adapter"),
    "a whole model for an adapter": ({}, None, LORA, "It holds a whole model"),
}


def foreign_weights(folder: Path, sizes: dict, adapter: dict | None) -> Path:
    model = AutoModelForCausalLM.from_config(llama_config(**sizes))
    if adapter is not None:
        model = get_peft_model(model, LoraConfig(task_type="CAUSAL_LM", **adapter))
    model.save_pretrained(folder)
    TrainerState(global_step=4).save_to_json(str(folder / save.STATE))
    return folder


@pytest.mark.parametrize(("sizes", "adapter", "keys", "said"), WEIGHTS.values(), ids=WEIGHTS)
def test_the_weights_of_another_programs_checkpoint_must_be_the_runs(tmp_path, recipe, sizes, adapter, keys, said):
    """Their names and shapes, by the headers of their files: the run would die once the model is loaded."""
    folder = foreign_weights(tmp_path / "checkpoint-4", sizes, adapter)
    settings = recipe.settings.replace(**keys)
    found = fit_findings(str(folder), settings, strategy("ddp", None), llama_config())
    named = [one.why for one in found if one.code == "ZR756"]
    assert (named == []) if said is None else (len(named) == 1 and said in named[0]), named


def test_a_composite_model_goes_on_with_what_it_trained(tmp_path, recipe):
    """Earlier versions gave the towers to the optimizer, and to adapters on "all-linear"."""
    model = composite_model("gemma3")
    lora = {"use_peft": True, "lora_r": 8, "lora_alpha": 8, "model_name_or_path": "m"}

    def codes(settings, number: int, targets: str | None = None, **facts) -> list[str]:
        folder = checkpoint(tmp_path, number, recipe=recipe_facts(settings, ZERO2), **facts)
        if targets is not None:
            (folder / "model.safetensors").unlink()
            adapter = LoraConfig(task_type="CAUSAL_LM", lora_alpha=8, target_modules=targets)
            get_peft_model(composite_model("gemma3"), adapter).save_pretrained(folder)
        return [one.code for one in fit_findings(str(folder), settings, ZERO2, model.config)]

    assert codes(recipe.settings, 1) == ["ZR492"] and codes(recipe.settings, 2, leaves_towers=True) == []
    every = recipe.settings.replace(**lora, lora_target_modules="all-linear")
    assert codes(every, 3, "all-linear") == ["ZR492"]
    kept_out = r".*language_model.*\.(q|v)_proj"
    own = recipe.settings.replace(**lora, lora_target_modules=kept_out)
    assert codes(own, 4, kept_out) == []


def test_no_pickle_is_opened_and_a_damaged_header_is_said(tmp_path, recipe):
    def codes() -> list[str]:
        found = fit_findings(str(folder), recipe.settings, strategy("ddp", None), llama_config())
        return [one.code for one in found if one.code == "ZR756"]

    folder = tmp_path / "checkpoint-4"
    folder.mkdir()
    torch.save({"w": Attribute(Path, "touch")}, folder / "pytorch_model.bin")
    assert codes() == []
    (folder / "model.safetensors").write_bytes(b"weights")
    assert codes() == ["ZR756"]


def test_a_model_whose_configuration_has_changed_is_another_one(tmp_path, recipe):
    model = tmp_path / "model"
    llama_config().save_pretrained(model)
    settings = recipe.settings.replace(model_name_or_path=str(model))
    facts = {"recipe": recipe_facts(settings, ZERO2), "model_config": config_of_file(settings)}
    folder = checkpoint(tmp_path, 4, **facts)

    def found() -> list[tuple[str, str]]:
        return [(one.code, one.why) for one in fit_findings(str(folder), settings, ZERO2)]

    assert found() == []
    written = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(json.dumps(written | {"transformers_version": "9"}, sort_keys=True))
    assert found() == [], "the same in other words"
    (model / "config.json").write_text(json.dumps(written | {"rms_norm_eps": 0.1}))
    ((code, why),) = found()
    assert code == "ZR758" and "rms_norm_eps 1e-06" in why and "rms_norm_eps 0.1" in why
    assert refusal_of(refuse_misfit, str(folder), settings, ZERO2).codes == ["ZR758"]
    refuse_misfit(str(folder), settings.replace(ignore=["ZR758"]), ZERO2)
    without = checkpoint(tmp_path, 5, recipe=recipe_facts(settings, ZERO2))  # by an earlier version
    assert list(fit_findings(str(without), settings, ZERO2)) == []


@pytest.mark.parametrize(
    ("written", "now", "ignore", "codes"),
    [
        ({"evaluation_sha256": "e"}, ("d", "e"), None, None),
        ({"evaluation_sha256": "e"}, ("d", "f"), None, ["ZR759"]),
        ({"evaluation_sha256": "e"}, ("c", "f"), None, ["ZR727", "ZR759"]),
        ({"evaluation_sha256": "e"}, ("d", "f"), ["ZR759"], None),
        ({"evaluation_sha256": "e"}, ("d", None), None, None),  # nothing is evaluated any more
        ({"evaluation_sha256": None}, ("d", "f"), None, None),
        ({}, ("d", "f"), None, None),  # by an earlier version
        ({}, ("c", None), None, ["ZR727"]),
    ],
)
def test_a_resume_on_other_rows_is_refused(tmp_path, recipe, written, now, ignore, codes):
    folder = checkpoint(tmp_path, 4, **written)
    settings = recipe.settings.replace(ignore=ignore)
    if codes is None:
        refuse_other_data(str(folder), settings, *now)
    else:
        assert refusal_of(refuse_other_data, str(folder), settings, *now).codes == codes


class Attribute:
    """Pickled as Python 3.11.2 pickles a member of an enum."""

    def __init__(self, kind: type, name: str):
        self.named = kind, name

    def __reduce__(self):
        return getattr, self.named


def test_a_stage_is_data_however_python_pickles_it_and_another_attribute_is_code(tmp_path):
    torch.save({"stage": Attribute(ZeroStageEnum, "gradients")}, tmp_path / "stage.pt")
    torch.save({"code": Attribute(torch.Tensor, "data")}, tmp_path / "code.pt")
    assert load_without_code(tmp_path / "stage.pt") == {"stage": ZeroStageEnum.gradients}
    assert not_plain(tmp_path / "stage.pt") is None and "WeightsUnpickler" in not_plain(tmp_path / "code.pt")
