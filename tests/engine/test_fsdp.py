"""FSDP2: it really shards, its bytes and collectives are those of a count by hand, and it saves, resumes, generates."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from math import prod

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from tests.helpers.grid import grid
from tests.helpers.resuming import EXACT, LORA, compare
from tests.helpers.tiny import ROOT, write_recipe
from zero_recipes.checkpoint.reshard import reshard
from zero_recipes.checkpoint.verify import verify
from zero_recipes.config import recipe as recipes
from zero_recipes.config.accelerate import launched_environment
from zero_recipes.config.strategy import resolve_strategy
from zero_recipes.core.findings import Refusal
from zero_recipes.core.process import free_port
from zero_recipes.libs.deepspeed import STATE_PARTS
from zero_recipes.model import sizes_of
from zero_recipes.theory.deepspeed import fsdp2_terms

FSDP = ["--fsdp", "true"]


@pytest.fixture(scope="module")
def recipe(tmp_path_factory):
    return write_recipe(tmp_path_factory.mktemp("fsdp"), eval_strategy="steps", eval_steps=100)


@pytest.mark.parametrize(
    ("world_size", "bf16", "accumulation"), [(2, True, 1), grid(4, False, 1), (2, True, 2), (2, False, 2)]
)
def test_it_shards_and_its_bytes_are_those_counted_by_hand(request, recipe, tmp_path, world_size, bf16, accumulation):
    group = request.getfixturevalue({2: "two", 4: "four"}[world_size])
    argv = [str(recipe), "--output_dir", str(tmp_path), *FSDP, "--bf16", str(bf16)]
    argv += ["--gradient_accumulation_steps", str(accumulation)]
    results = group.run("fsdp_cases.train_and_keep_shapes", argv=argv)
    metrics, shapes = results[0]["metrics"], results[0]["shapes"]
    assert (metrics["strategy"], metrics["zero_stage"], results[0]["engine"]) == (
        "fsdp2",
        None,
        "FSDPGPTNeoXForCausalLM",
    )
    assert metrics["precision"] == ("bf16" if bf16 else "fp32")
    assert set(metrics["gradient_dtypes"].values()) == {metrics["precision"]}
    assert results[0]["placements"] == ["(Shard(dim=0),)"]
    odd = "gpt_neox.embed_in.weight"
    assert [found["rows_here"][odd][0] for found in results] == (
        [516, 515] if world_size == 2 else [258, 258, 258, 257]
    )
    assert sum(map(prod, shapes)) == metrics["parameters"]
    for rank, measured in enumerate(metrics["model_state_bytes"]):
        terms = fsdp2_terms(shapes, world_size, rank, bf16, accumulation > 1)
        assert {part: measured[part] for part in STATE_PARTS} == {
            part: sum(terms[part].values()) for part in STATE_PARTS
        }, terms
        assert measured["offloaded_host"] == measured["offloaded_disk"] == 0


def test_its_collectives_are_two_gathers_and_a_reduction_in_bf16(two, recipe, tmp_path):
    """Every parameter is gathered forward and backward, but those of the LM head, final norm and embedding once each
    pass they are used in; all are padded to a whole number of rows for each rank."""
    argv = [str(recipe), "--output_dir", str(tmp_path), *FSDP]
    result = two.run("fsdp_cases.train_and_keep_shapes", argv=argv)[0]
    sent = result["metrics"]["communication_bytes_per_step"]
    padded = sum(2 * -(-shape[0] // 2) * prod(shape[1:]) for shape in result["shapes"])
    assert sent["reduce_scatter"] == 2 * padded
    assert padded < sent["all_gather"] <= 4 * padded
    assert sent["all_reduce"] < 1000, "flags and norms alone"


def apart(losses: list[float], wanted: list[float]) -> float:
    return max(abs(a - b) / b for a, b in zip(losses, wanted, strict=True))


@pytest.mark.private
def test_bf16_losses_are_those_of_zero3_and_not_rounded(two, recipe, tmp_path):
    """The last assertion fails when accelerate no longer rounds them: then libs/fsdp.py mixed_precision may go."""

    def argv(name: str, *how: str) -> list[str]:
        return [str(recipe), "--output_dir", str(tmp_path / name), "--max_steps", "10", *how]

    fsdp2, zero3 = (
        two.run("train", argv=argv(name, *how))[0]["metrics"]["loss_history"]
        for name, how in (("fsdp2", FSDP), ("zero3", ["--deepspeed", "ds_configs/zero3.json"]))
    )
    assert apart(fsdp2, zero3) < 1e-3 and fsdp2[-1] < fsdp2[0]
    rounded = two.run("fsdp_cases.losses_by_accelerate", argv=argv("rounded", *FSDP))[0]
    assert apart(rounded, zero3) > 1e-3


@pytest.mark.private
def test_accelerate_alone_does_not_shard_on_a_cpu(two, recipe, tmp_path):
    """Fails when accelerate shards there by itself: then libs/fsdp.py shard_on_cpu may go."""
    argv = [str(recipe), "--output_dir", str(tmp_path), *FSDP]
    for said in two.run("fsdp_cases.train_without_the_patch", argv=argv):
        assert said.startswith("FSDP2 was requested and does not shard: ")


@pytest.mark.private
def test_transformers_alone_would_save_other_names(two, tmp_path):
    """Fails when transformers knows the class of a sharded model: then libs/fsdp.py keep_names_of_the_file may go."""
    recipe = write_recipe(tmp_path, save_model=True, max_steps=1)
    two.run("fsdp_cases.train_without_names", argv=[str(recipe), "--output_dir", str(tmp_path / "out"), *FSDP])
    assert "lm_head.weight" in load_file(tmp_path / "out" / "model.safetensors")


@pytest.mark.private
def test_an_evaluation_leaves_parameters_gathered(two, recipe, tmp_path):
    """Fails when torch reshards all of them after a forward pass: then libs/fsdp.py reshard_model may go."""
    argv = [str(recipe), "--output_dir", str(tmp_path), *FSDP]
    for found in two.run("fsdp_cases.gathered_after_evaluation", argv=argv):
        assert found["before"] and found["after"] == []


@pytest.fixture(scope="module")
def saved(two, tmp_path_factory):
    """One run each, saved, with samples of uneven length before and after: folders by strategy."""
    folder = tmp_path_factory.mktemp("saved")
    path = write_recipe(folder, save_model=True, eval_strategy="steps", eval_steps=2, bf16=False, max_steps=4)
    ways = {"ddp": [], "fsdp2": FSDP}
    for name, how in ways.items():
        samples = ["--sample_prompts", "5", "--sample_max_new_tokens", "7", "--per_device_eval_batch_size", "2"]
        two.run("train", argv=[str(path), "--output_dir", str(folder / name), *how, *samples])
    return {name: folder / name for name in ways}


def test_the_saved_model_is_whole_and_that_of_ddp(saved):
    assert verify(saved["fsdp2"], deep=True)["parameters"] == 192_074
    weights, wanted = (load_file(saved[name] / "model.safetensors") for name in ("fsdp2", "ddp"))
    assert {name: (t.shape, t.dtype) for name, t in weights.items()} == {
        name: (t.shape, t.dtype) for name, t in wanted.items()
    }
    apart = sum((weights[name] - wanted[name]).square().sum() for name in wanted)
    assert (apart / sum(t.square().sum() for t in wanted.values())) ** 0.5 < 1e-5
    AutoModelForCausalLM.from_pretrained(saved["fsdp2"], dtype=torch.float32)


def test_samples_and_evaluations_are_those_of_ddp(saved):
    rows = {
        name: [json.loads(line) for line in (folder / "samples.jsonl").read_text().splitlines()]
        for name, folder in saved.items()
    }
    assert len(rows["fsdp2"]) == 5
    for mine, wanted in zip(rows["fsdp2"], rows["ddp"], strict=True):
        assert (mine["prompt"], mine["before"], mine["after"]) == (wanted["prompt"], wanted["before"], wanted["after"])
        for key in ("scores_before", "scores_after"):
            assert mine[key]["reference_loss"] == pytest.approx(wanted[key]["reference_loss"], rel=1e-4)
    evaluations = [
        [entry["loss"] for entry in json.loads((folder / "metrics.json").read_text())["eval_history"]]
        for folder in saved.values()
    ]
    assert evaluations[0] == pytest.approx(evaluations[1], rel=1e-5) and len(evaluations[0]) == 2


@pytest.mark.parametrize(("bf16", "lora"), [(True, False), (False, True)])
def test_a_resumed_run_is_the_uninterrupted_one_bit_for_bit(two, tmp_path, bf16, lora):
    assert compare(two, tmp_path, "fsdp2", bf16=bf16, **(LORA if lora else {})) == EXACT


def test_the_best_model_is_the_one_that_is_saved(two, tmp_path):
    keys = {"eval_strategy": "steps", "eval_steps": 1, "save_strategy": "steps", "save_steps": 1, "max_steps": 3}
    keys |= {"load_best_model_at_end": True, "learning_rate": 3.0, "warmup_steps": 2, "bf16": False}
    path = write_recipe(tmp_path, save_model=True, **keys)
    metrics = two.run("train", argv=[str(path), "--output_dir", str(tmp_path / "out"), *FSDP])[0]["metrics"]
    losses = [evaluation["loss"] for evaluation in metrics["eval_history"]]
    best = losses.index(min(losses)) + 1
    assert best < 3, losses
    ours, wanted, last = (
        load_file(folder / "model.safetensors")
        for folder in (tmp_path / "out", *(tmp_path / "out" / f"checkpoint-{step}" for step in (best, 3)))
    )
    assert all(torch.equal(ours[name], wanted[name]) for name in wanted)
    assert not torch.equal(ours["embed_out.weight"], last["embed_out.weight"])


def test_the_accelerate_file_means_what_accelerate_makes_of_it(tmp_path):
    """What `zero-recipes check` foretells of it, and the environment that accelerate starts a rank with."""
    file = ROOT / "accelerate_configs" / "fsdp2.yaml"
    command = [sys.executable, "-m", "accelerate.commands.launch", "--config_file", str(file), "--no_python", "env"]
    ended = subprocess.run(
        [*command[:-2], "--main_process_port", str(free_port()), *command[-2:]],
        capture_output=True,
        text=True,
        timeout=120,
        env={key: value for key, value in os.environ.items() if key not in ("RANK", "WORLD_SIZE", "MASTER_ADDR")},
    )
    assert ended.returncode == 0, ended.stderr[-2000:]
    real = dict(line.split("=", 1) for line in ended.stdout.splitlines() if "=" in line)
    path = write_recipe(tmp_path)
    found = [
        resolve_strategy(recipes.parse_recipe(path, recipes.read_recipe_file(path), []).settings, environment, sizes_of)
        for environment in (real, launched_environment(file, None))
    ]
    assert {(strategy.name, strategy.world_size) for strategy in found} == {("fsdp2", 2)}
    common = {"version": 2, "auto_wrap_policy": "TRANSFORMER_BASED_WRAP", "reshard_after_forward": True}
    common |= {"state_dict_type": "FULL_STATE_DICT", "cpu_offload": False, "cpu_ram_efficient_loading": False}
    for strategy in found:
        assert strategy.fsdp_config | {"min_num_params": 0} == common | {
            "activation_checkpointing": False,
            "min_num_params": 0,
        }


def test_a_checkpoint_of_fsdp2_fits_no_other_strategy(two, tmp_path):
    path = write_recipe(tmp_path, save_strategy="steps", save_steps=2)
    argv = [str(path), "--output_dir", str(tmp_path / "out")]
    two.run("train", argv=[*argv, *FSDP])
    resume = ["--resume_from_checkpoint", "true"]
    for said in two.run("refusal_of", argv=[*argv, *resume]):
        assert said.endswith("was written by fsdp2 on 2 processes; this run is ddp on 2 [ZR720]")
    with pytest.raises(Refusal):
        reshard(tmp_path / "out" / "checkpoint-2", 1, 2)


def test_the_resolved_recipe_runs_again(two, saved):
    resolved = saved["fsdp2"] / "recipe.resolved.yaml"
    argv = [str(resolved), "--output_dir", str(saved["fsdp2"].parent / "again"), "--save_model", "false"]
    again = two.run("train", argv=argv)[0]["metrics"]
    first = json.loads((saved["fsdp2"] / "metrics.json").read_text())
    assert (again["strategy"], again["loss_history"]) == ("fsdp2", first["loss_history"])
