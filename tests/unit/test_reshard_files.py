"""Checkpoints without training: what reshard refuses and leaves behind, and a stranger's code, which is not run."""

import dataclasses
import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tests.helpers.tiny import ROOT, write_recipe
from tests.helpers.tools import contents, plant, refusal_of
from zero_recipes.checkpoint import resharded as copies
from zero_recipes.checkpoint import save
from zero_recipes.checkpoint.resume import resolve_resume_checkpoint
from zero_recipes.checkpoint.save import checkpoint_fault, content_fault, write_manifest
from zero_recipes.checkpoint.saved_model import NotWhole
from zero_recipes.checks.preflight import preflight
from zero_recipes.config import recipe as recipes
from zero_recipes.tools import main as cli
from zero_recipes.tools import reshard as resharding
from zero_recipes.tools.ask import find_target
from zero_recipes.tools.reshard import reshard, strategy_of
from zero_recipes.tools.verify import verify

KINDS = ("zip 2", "zip 4", "legacy", "numpy", "pickle 0", "pickle 2", "pickle 4", "pickle 5")
MODEL, OPTIMIZER = "mp_rank_00_model_states.pt", "zero_pp_rank_{}_mp_rank_00_optim_states.pt"
WORLD, SHAPES = 2, [{"a.weight": (3, 5), "b.weight": (7, 1)}, {"a.bias": (3,)}]


def write_checkpoint(folder: Path, model: dict | None = None, **config) -> Path:
    """A checkpoint as DeepSpeed writes it at stage 3, of two tiny groups; `config` and `model` change what it says."""
    checkpoint = folder / "checkpoint-7"
    states = checkpoint / "global_step7"
    states.mkdir(parents=True)
    best = '{"global_step": 7, "best_model_checkpoint": null}'
    texts = {"latest": "global_step7", "trainer_state.json": best, "scheduler.pt": "s"}
    for name, text in (texts | {f"rng_state_{rank}.pth": chr(rank) for rank in range(WORLD)}).items():
        (checkpoint / name).write_text(text)
    ds_config = {"train_micro_batch_size_per_gpu": 2, "gradient_accumulation_steps": 2}
    ds_config |= {"zero_optimization": {"stage": 3}} | config
    described = {
        "param_shapes": [{name: torch.Size(shape) for name, shape in group.items()} for group in SHAPES],
        "dp_world_size": WORLD,
        "mp_world_size": 1,
        "ds_config": ds_config,
        "lr_scheduler": None,
        **{"global_steps": 7, "global_samples": 56, "skipped_steps": 0},
    }
    torch.save(described | (model or {}), states / MODEL)
    for rank in range(WORLD):
        torch.save({"optimizer_state_dict": rank_states()}, states / OPTIMIZER.format(rank))
    return checkpoint


def rank_states() -> dict:
    flats = [torch.rand(sum(-(-torch.Size(shape).numel() // WORLD) for shape in group.values())) for group in SHAPES]
    moments = [{"exp_avg": flat.clone(), "exp_avg_sq": flat.clone()} for flat in flats]
    adam = {number: {"step": torch.tensor(7.0), **each} for number, each in enumerate(moments)}
    groups = [{"lr": 1e-3, "betas": (0.9, 0.999), "eps": 1e-8, "params": [number]} for number in range(len(flats))]
    return {"zero_stage": 3, "fp32_flat_groups": flats, "optimizer_state_dict": {"state": adam, "param_groups": groups}}


def test_a_whole_checkpoint_is_written_beside_the_old_one(tmp_path):
    checkpoint = write_checkpoint(tmp_path)
    before = contents(checkpoint)
    facts = {"step": 7, "recipe_sha256": "abc", "zero_stage": 3, "world_size": 2}
    save.write_manifest(checkpoint, facts)
    folder, batch = reshard(checkpoint, 4, 2)
    assert (folder.name, tuple(batch)) == ("checkpoint-7-zero2-world4", (2, 1, 4))
    written = save.read_manifest(folder)
    assert save.checkpoint_fault(folder) is None and set(written["files"]) == set(contents(folder)) - {save.MANIFEST}
    kept = {key: written[key] for key in ("step", "recipe_sha256", "zero_stage", "world_size", "strategy")}
    assert kept == facts | {"zero_stage": 2, "world_size": 4, "strategy": "zero2"}
    assert [(folder / f"rng_state_{rank}.pth").read_bytes() for rank in range(4)] == [b"\0", b"\1", b"\0", b"\1"]
    for name in ("trainer_state.json", "scheduler.pt"):
        assert (folder / name).read_bytes() == before[name]
    assert not (folder / "latest").exists(), "transformers would look for DeepSpeed's files"
    bf16, offloaded = BF16_STATES, {"zero_optimization": {"offload_optimizer": {"device": "cpu"}}}
    assert (strategy_of(offloaded, 1), strategy_of(offloaded, 2)) == ("zero1", "zero2_offload")
    assert strategy_of(bf16, 3) == "zero3_bf16_states"
    del (after := contents(checkpoint))[save.MANIFEST]
    assert after == before, "the old checkpoint was touched"


def test_a_killed_reshard_leaves_nothing_half(tmp_path, monkeypatch):
    checkpoint = write_checkpoint(tmp_path)
    before = contents(checkpoint)

    def die(source, name):
        if name == "a.bias":
            raise KeyboardInterrupt
        return original(source, name)

    original = resharding.read_parameter
    monkeypatch.setattr(resharding, "read_parameter", die)
    with pytest.raises(KeyboardInterrupt):
        reshard(checkpoint, 1, 2)
    left = sorted(path.name for path in tmp_path.iterdir())
    assert left == [".checkpoint-7-zero2-world1.zero-recipes.part", "checkpoint-7"], "it looks like a checkpoint"
    monkeypatch.undo()
    folder, _ = reshard(checkpoint, 1, 2)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["checkpoint-7", folder.name]
    assert save.checkpoint_fault(folder) is None and contents(checkpoint) == before


def test_a_copy_that_a_run_made_is_taken_as_long_as_its_checkpoint_is_the_same(tmp_path, monkeypatch):
    """Another run may be reading it."""
    checkpoint = write_checkpoint(tmp_path / "theirs")
    save.write_manifest(checkpoint, {"step": 7})
    target = checkpoint.with_name("checkpoint-7-zero2-world1")
    run = SimpleNamespace(output_dir=tmp_path / "mine", strategy=SimpleNamespace(world_size=1, zero_stage=2))
    made = []

    def command(words, **_):
        made.append(reshard(checkpoint, 1, 2)[0])
        return SimpleNamespace(returncode=0)

    monkeypatch.setattr(copies.subprocess, "run", command)
    for _ in range(2):
        copies._reshard(checkpoint, run, target)
        assert made == [target] and (target / save.OF_A_RUN).is_file() and save.checkpoint_fault(target) is None
    save.begin_checkpoint(target)  # its deletion was cut off
    copies._reshard(checkpoint, run, target)
    save.write_manifest(checkpoint, {"step": 7, "recipe_sha256": "another"})
    copies._reshard(checkpoint, run, target)
    assert len(made) == 3 and save.read_manifest(target)["recipe_sha256"] == "another"


def change_rank(number: int, change: Callable[[dict, dict], Any]) -> Callable[[Path], None]:
    """What lets `change` loose on the states of a rank, and on Adam's among them."""

    def broken(checkpoint: Path) -> None:
        states = rank_states()
        change(states, states["optimizer_state_dict"]["state"])
        torch.save({"optimizer_state_dict": states}, checkpoint / "global_step7" / OPTIMIZER.format(number))

    return broken


BROKEN = {
    "no `latest`": ({}, lambda c: (c / "latest").unlink(), "without DeepSpeed", "ZR731"),
    "a rank": ({}, lambda c: (c / "global_step7" / OPTIMIZER.format(1)).unlink(), "states of 1 of 2 ranks", "ZR729"),
    "the manifest": ({}, lambda c: (c / save.HISTORY).write_text("{}"), "The manifest.json of", "ZR729"),
    "steps": ({}, change_rank(1, lambda _, adam: adam[1]["step"].add_(7)), "step counters differ", "ZR729"),
    "not Adam": (
        {},
        change_rank(1, lambda _, adam: [s.update(momentum_buffer=s.pop("exp_avg")) for s in adam.values()]),
        "than Adam's: exp_avg_sq, momentum_buffer",
        "ZR731",
    ),
    "BF16_Optimizer": ({}, change_rank(0, lambda states, _: states.pop("zero_stage")), "BF16_Optimizer", "ZR731"),
    "model parallel": ({"model": {"mp_world_size": 2}}, None, "model-parallel", "ZR731"),
    "experts": ({"model": {"num_experts": [4]}}, None, "mixture-of-experts", "ZR731"),
    "stage 0": ({"zero_optimization": {"stage": 0}}, None, "ZeRO stage 0", "ZR731"),
    "masters alone in bf16": ({"bf16": {"bf16_master_weights_and_grads": True}}, None, "fp32 states", "ZR731"),
    "NVMe": ({"zero_optimization": {"stage": 3, "offload_optimizer": {"device": "nvme"}}}, None, "on NVMe", "ZR731"),
}


@pytest.mark.parametrize("name", BROKEN)
def test_a_checkpoint_that_cannot_be_read_is_refused_and_nothing_written(tmp_path, name):
    changes, break_it, said, code = BROKEN[name]
    checkpoint = write_checkpoint(tmp_path, **changes)
    if break_it is not None:
        break_it(checkpoint)
    refusal = refusal_of(reshard, checkpoint, 1, 2)
    assert refusal.codes == [code] and said in str(refusal) and refusal.why and refusal.fix
    assert not [path for path in tmp_path.iterdir() if path.name.startswith("checkpoint-7-")]


def test_targets_that_cannot_be(tmp_path):
    checkpoint = write_checkpoint(tmp_path)
    assert re.search("batch of 8 .* by 3 .*ZR743", str(refusal_of(reshard, checkpoint, 3, 2)))
    with pytest.raises(SystemExit):
        cli.main(["reshard", str(checkpoint), "--world_size", "1", "--stage", "0"])
    folder, _ = reshard(checkpoint, 1, 2)
    assert refusal_of(reshard, checkpoint, 1, 2).codes == ["ZR741"]
    assert refusal_of(reshard, folder, 2, 2).codes == ["ZR731"]
    assert refusal_of(reshard, tmp_path / "checkpoint-8", 1, 2).codes == ["ZR731"]


def test_a_checkpoint_without_a_manifest_gets_no_checksums(tmp_path, capsys):
    checkpoint = write_checkpoint(tmp_path)
    save.write_manifest(checkpoint, {"step": 7})
    assert save.read_manifest(reshard(checkpoint, 1, 2)[0])["checksums"]
    (checkpoint / save.MANIFEST).unlink()
    assert not save.read_manifest(reshard(checkpoint, 2, 3)[0])["checksums"] and "ZR772" in capsys.readouterr().out


BF16_STATES = {"bf16": {"enabled": True, "bf16_master_weights_and_grads": True, "bf16_optimizer_states": True}}


@pytest.fixture(scope="module")
def resharded(tmp_path_factory) -> dict[str, Path]:
    """{dtype of the states: checkpoint for one process}; and one whose best checkpoint was written before."""
    folder = tmp_path_factory.mktemp("resharded")
    configs = {"fp32": {}, "bf16": BF16_STATES}
    found = {name: reshard(write_checkpoint(folder / name, **config), 1, 2)[0] for name, config in configs.items()}
    found["best"] = Path(shutil.copytree(found["fp32"], folder / "best" / found["fp32"].name))
    (found["best"] / save.STATE).write_text('{"global_step": 7, "best_model_checkpoint": "out/checkpoint-5"}')
    save.write_manifest(found["best"], save.read_manifest(found["fp32"]))
    return found


BEST = ("--load_best_model_at_end", "true", "--eval_strategy", "steps", "--save_strategy", "best")
ROUND_ROBIN = {"zero_optimization": {"stage": 2, "round_robin_gradients": True}}
WIDE_GRADIENTS = {"zero_optimization": {"stage": 1}, "data_types": {"grad_accum_dtype": "fp32"}}
LAUNCHES = {  # (states, DeepSpeed's configuration, other keys, the codes of what is refused)
    "stage 3": ("fp32", "zero3", (), []),
    "another batch": ("fp32", "zero2", ("--gradient_accumulation_steps", "2"), ["ZR722"]),
    "stage 0": ("fp32", "zero0", (), ["ZR712"]),
    "no stage": ("fp32", None, (), ["ZR712"]),
    "rows by length": ("fp32", "zero2", ("--train_sampling_strategy", "group_by_length"), ["ZR714"]),
    "other rows are dropped": ("fp32", "zero2", ("--dataloader_drop_last", "true"), ["ZR714"]),
    "round robin": ("fp32", ROUND_ROBIN, (), ["ZR715"]),
    "fp32 gradients": ("fp32", WIDE_GRADIENTS, (), ["ZR715"]),
    "an earlier best": ("best", "zero2", BEST, ["ZR717"]),
    "an earlier best that is not loaded": ("best", "zero2", (), []),
    "narrower states": ("fp32", "zero3_bf16_states", ("--bf16", "true"), ["ZR289"]),
    "narrow states": ("bf16", "zero3_bf16_states", ("--bf16", "true"), []),
    "wider states": ("bf16", "zero1", ("--bf16", "true"), []),
}


@pytest.mark.parametrize(("states", "config", "keys", "codes"), LAUNCHES.values(), ids=LAUNCHES)
def test_a_launch_that_would_be_another_run_is_refused(resharded, tmp_path, monkeypatch, states, config, keys, codes):
    monkeypatch.chdir(ROOT)
    recipe = write_recipe(tmp_path, bf16=False, gradient_accumulation_steps=4, max_steps=9)
    argv = ["--resume_from_checkpoint", str(resharded[states]), "--output_dir", str(tmp_path / "out"), *keys]
    if isinstance(config, dict):
        config = json.dumps(json.loads((ROOT / "ds_configs" / "zero2.json").read_text()) | config)
    if config is not None:
        argv += ["--deepspeed", config if config.startswith("{") else f"ds_configs/{config}.json"]
    _, findings = preflight(recipe, recipes.read_recipe_file(recipe), argv, {}, starts_now=False)
    assert [finding.code for finding in findings if finding.level == "error"] == codes


# a stranger's code

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
    named = MODEL if place == "best" else place
    for output_dir in (stranger.parent, stranger.parent.with_name("out")):  # a downloaded folder is resumed in place
        refusal = refusal_of(resolve_resume_checkpoint, run(output_dir=str(output_dir)))
        assert refusal.codes == ["ZR780"] and named in refusal.what and "--trust_checkpoint" in refusal.fix
    if place != "best":
        for deep in (False, True):
            with pytest.raises(NotWhole, match=Path(place).name):
                verify(stranger, deep=deep)
        assert refusal_of(find_target, stranger, None, []).codes == ["ZR787"], "ask and export begin with it"
    if place.startswith("global_step7"):
        assert refusal_of(reshard, stranger, 1, 2).codes == ["ZR780"]
    assert not mark.exists()


def test_what_was_trusted_is_resumed_and_not_resharded(stranger, run, mark, capsys):
    plant(stranger / PLACES[0], mark, "zip 2")
    write_manifest(stranger, {"step": 7})
    assert resolve_resume_checkpoint(run(trust_checkpoint=True)).checkpoint == str(stranger)
    command = ["reshard", str(stranger), "--world_size", "1", "--stage", "2"]
    assert cli.main(command) == 2 and "ZR780" in capsys.readouterr().err
    assert cli.main(["verify", str(stranger)]) == 1 and not mark.exists(), "nothing is read yet"


def test_pickles_behind_links_and_in_what_latest_names(stranger, run, tmp_path, mark):
    """A load follows links to folders, and DeepSpeed `latest` of the best checkpoint, too."""
    shutil.copytree(stranger / "global_step7", tmp_path / "planted")
    plant(tmp_path / "planted" / MODEL, mark, "zip 2")
    (stranger / "more").symlink_to(tmp_path / "planted")
    (stranger / "around").symlink_to(stranger)
    assert refusal_of(resolve_resume_checkpoint, run()).codes == ["ZR780"]
    (stranger / "more").unlink()
    assert resolve_resume_checkpoint(run()).checkpoint == str(stranger)
    best = stranger.parent / "best"
    best.mkdir()
    (stranger / "trainer_state.json").write_text(json.dumps({"global_step": 7, "best_model_checkpoint": str(best)}))
    write_manifest(stranger, {"step": 7})
    for name in ("latest", "latest_universal"):
        (best / name).write_text("../../planted")
        assert refusal_of(resolve_resume_checkpoint, run()).codes == ["ZR707"]
        (best / name).unlink()
    assert resolve_resume_checkpoint(run()).checkpoint == str(stranger) and not mark.exists()


def test_a_folder_outside_the_checkpoint_is_not_followed(stranger, tmp_path, mark):
    """`latest` names DeepSpeed's folder: one elsewhere would be loaded without having been looked at."""
    shutil.copytree(stranger / "global_step7", tmp_path / "planted")
    plant(tmp_path / "planted" / MODEL, mark, "zip 2")
    (stranger / "latest").write_text("../../planted")
    write_manifest(stranger, {"step": 7})
    assert "is not a folder of this checkpoint" in refusal_of(reshard, stranger, 1, 2).what
    assert "is not a folder of this checkpoint" in checkpoint_fault(stranger) and not mark.exists()


def test_a_model_s_own_code_is_not_run_by_check(tmp_path, mark, capsys):
    recipe = write_recipe(tmp_path, trust_remote_code=True, use_cpu=True)
    config = tmp_path / "model" / "config.json"
    values = json.loads(config.read_text())
    values |= {"model_type": "planted", "auto_map": {"AutoConfig": "planted.Config"}}
    config.write_text(json.dumps(values))
    (tmp_path / "model" / "planted.py").write_text(
        f"import pathlib\npathlib.Path({str(mark)!r}).touch()\n"
        "from transformers import GPTNeoXConfig\nclass Config(GPTNeoXConfig):\n    model_type = 'planted'\n"
    )
    cli.main(["check", str(recipe), "--output_dir", str(tmp_path / "out")])
    said = capsys.readouterr().out
    assert "[ZR783]" in said
    assert "reading the configuration" not in said, "what cannot be known without the code is no error"
    assert not mark.exists()
    cli.main(["check", str(recipe), "--output_dir", str(tmp_path / "out"), "--trust_remote_code", "true"])
    assert mark.exists() and "[ZR783]" not in capsys.readouterr().out
