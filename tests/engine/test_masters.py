"""fp32 master weights begin with the values of the loaded weights, not with those of their 16-bit copies.

Where they begin with the copies, most of an optimizer step of 1e-5 is lost in the next forward pass: the masters lie on
the grid of bf16, and an update smaller than half of its spacing changes no copy until several have added up.
"""

import functools
import json
import shutil
from pathlib import Path

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM, MixtralConfig

from tests.helpers import cases, masters_cases
from tests.helpers.seeded import grid, write_result
from tests.helpers.tiny import arguments, llama_config, write_model, write_recipe
from zero_recipes.engine.huggingface import dtypes_of_the_file

STRATEGIES = ("ddp", "zero0", "zero1", "zero2", "zero3", "zero2_offload", "zero3_offload")
SIZES = {"hidden": 256, "intermediate": 256}
STEPS = 10
TOLERANCE = 2e-3  # of the loss
CHECKPOINTS = {"random": None, "fp16": torch.float16, "bf16": torch.bfloat16}
LEFT_OUT = "zero_recipes.training.masters.set_masters"


def write_masters_recipe(folder: Path, dtype: torch.dtype | None, sizes: dict[str, int], **keys) -> Path:
    """Ten steps at a learning rate of 1e-5 on a GPT-NeoX: a checkpoint of that dtype, or (None) random weights."""
    keys = {"learning_rate": 1.0e-5, "lr_scheduler_type": "constant", "max_steps": STEPS} | keys
    keys = {"max_length": 64} | keys
    recipe = write_recipe(folder, **({"random_weights": dtype is None} | keys))
    write_model(folder / "model", **sizes)
    if dtype is not None:
        torch.manual_seed(0)
        model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(folder / "model"))
        model.to(dtype).save_pretrained(folder / "model")
    return recipe


def losses_of(group, recipe: Path, strategy: str, out: Path, *more: str) -> list[float]:
    argv = arguments(recipe, strategy, out, *more)
    return group.run(cases.train, argv=argv)[0]["metrics"]["loss_history"]


@pytest.fixture(scope="module")
def like_ddp(two, tmp_path_factory):
    """A function: (recipe, the losses of DDP) of random weights or of a checkpoint, a key of CHECKPOINTS."""

    @functools.cache
    def trained(weights: str) -> tuple[Path, list[float]]:
        folder = tmp_path_factory.mktemp("masters")
        recipe = write_masters_recipe(folder, CHECKPOINTS[weights], SIZES)
        return recipe, losses_of(two, recipe, "ddp", folder / "ddp")

    return trained


def places() -> list:
    """Every stage; in every run those of code of their own, and one on random weights."""
    found = [("random", "zero3")]
    for strategy in STRATEGIES[1:]:
        in_every_run = strategy == "zero2"
        found.append(("fp16", strategy) if in_every_run else grid("fp16", strategy))
        if strategy != "zero3":
            found.append(grid("random", strategy))
    return found


@pytest.mark.parametrize("weights, strategy", places())
def test_small_updates_are_not_lost_at_any_stage(two, like_ddp, tmp_path, weights, strategy):
    recipe, wanted = like_ddp(weights)
    found = losses_of(two, recipe, strategy, tmp_path)
    assert found == pytest.approx(wanted, rel=TOLERANCE)


def test_they_are_lost_where_masters_begin_with_16_bit_weights(two, like_ddp, tmp_path):
    recipe, wanted = like_ddp("fp16")
    argv = arguments(recipe, "zero2", tmp_path)
    lost = two.run(cases.train, argv=argv, left_out=LEFT_OUT)[0]
    assert lost["metrics"]["loss_history"] != pytest.approx(wanted, rel=2 * TOLERANCE)


@pytest.mark.grid
@pytest.mark.timeout(3600)
def test_the_first_losses_with_and_without_own_values(two, tmp_path):
    """Writes benchmarks/results/master_weights.json, then asserts. A bf16 checkpoint's own values are the weights."""
    runs = []
    for name, dtype in CHECKPOINTS.items():
        recipe = write_masters_recipe(tmp_path / name, dtype, SIZES)
        for strategy in STRATEGIES:
            for left_out in (None, LEFT_OUT):
                if left_out and (strategy == "ddp" or name == "bf16"):
                    continue
                argv = arguments(recipe, strategy, tmp_path / f"{name}-{strategy}-{left_out}")
                found = two.run(cases.train, argv=argv, left_out=left_out)[0]["metrics"]["loss_history"]
                runs.append({"weights": name, "strategy": strategy, "own_values": left_out is None, "losses": found})
    for run in runs:
        ddp = next(other for other in runs if (other["weights"], other["strategy"]) == (run["weights"], "ddp"))
        gaps = [abs(a - b) / b for a, b in zip(run["losses"], ddp["losses"], strict=True)]
        run["gap_to_ddp"] = max(gaps)
    document = {
        "what": "losses of the first steps in bf16, with fp32 masters that begin with the loaded weights' own values "
        "and with DeepSpeed's, which begin with the weights in bf16; gap_to_ddp: the largest, in shares of the loss",
        "model": {"kind": "GPT-NeoX", "layers": 2} | SIZES,
        "learning_rate": 1e-5,
        "world_size": 2,
        "runs": runs,
    }
    write_result("master_weights.json", document)
    for run in runs:
        assert (run["gap_to_ddp"] <= TOLERANCE) == run["own_values"], run


# where each master begins


def beginning(group, recipe: Path, strategy: str, out: Path, *more: str) -> dict:
    """Of each rank, where all must be the same but at the borders of partitions."""
    found = group.run(masters_cases.beginning, argv=arguments(recipe, strategy, out, *more))
    assert all(rank["weights"] == [] for rank in found), found
    return found[0]


@pytest.fixture(scope="module")
def fp16(tmp_path_factory) -> Path:
    """A recipe of one step on a checkpoint in fp16, whose sizes no two processes divide."""
    return write_masters_recipe(tmp_path_factory.mktemp("fp16"), torch.float16, {}, max_steps=1)


LORA = ("--use_peft", "true", "--lora_r", "3")


@pytest.mark.parametrize(
    "strategy, more",
    [
        ("zero0", ()),
        grid("zero1", ()),
        grid("zero2_offload", ()),
        ("zero3", ()),
        grid("zero3_offload", ()),
        grid("zero0", LORA),
        ("zero2", LORA),
        ("zero3_hpz", ()),
    ],
)
def test_masters_are_the_loaded_values(two, fp16, tmp_path, strategy, more):
    found = beginning(two, fp16, strategy, tmp_path, *more)
    assert found["masters"] == [] and found["exact"] is True and found["trained"]


@pytest.mark.parametrize("patched", [True, pytest.param(False, marks=pytest.mark.private)])
def test_an_adapter_at_stage_3_is_not_rounded_by_peft(two, fp16, tmp_path, patched):
    """Fails without the patch no more when PEFT has fixed it: keep_precision_of_new_adapters may go. The engine leaves
    what PEFT adds to a partitioned model in fp32."""
    argv = arguments(fp16, "zero3", tmp_path, *LORA)
    found = two.run(masters_cases.beginning, argv=argv, patched=patched)[0]
    assert found["masters"] == [] and (found["lossy"] > 0) == patched


def test_gradients_in_fp32_at_stage_1(two, fp16, tmp_path):
    """DeepSpeed's BF16_Optimizer."""
    config = json.loads(Path("ds_configs/zero1.json").read_text()) | {"data_types": {"grad_accum_dtype": "fp32"}}
    (tmp_path / "ds.json").write_text(json.dumps(config))
    found = beginning(two, fp16, "ddp", tmp_path / "out", "--deepspeed", str(tmp_path / "ds.json"))
    assert found["masters"] == [] and found["exact"] is True


def test_the_flat_master_of_stage_0(two):
    assert two.run(masters_cases.flat_masters_at_stage_0)[0] == {"exact": True, "same": True}


@pytest.mark.parametrize("strategy", [grid("zero2"), "zero3"])
def test_a_checkpoint_in_bf16_needs_nothing(two, tmp_path, strategy):
    recipe = write_masters_recipe(tmp_path, torch.bfloat16, {}, max_steps=1)
    found = beginning(two, recipe, strategy, tmp_path / "out")
    assert found["masters"] == [] and found["exact"] is True and found["set"] == 0


FAMILIES = {
    "tied": llama_config(tie_word_embeddings=True),
    "experts": MixtralConfig(
        architectures=["MixtralForCausalLM"], vocab_size=1031, hidden_size=64, intermediate_size=32,
        num_hidden_layers=1, num_attention_heads=4, num_key_value_heads=2, num_local_experts=4, bos_token_id=0,
        eos_token_id=0, pad_token_id=1,
    ),
}  # fmt: skip


@pytest.mark.parametrize("strategy", [grid("zero2"), "zero3"])
@pytest.mark.parametrize("family", FAMILIES)
def test_names_that_a_checkpoint_has_otherwise(two, tmp_path, family, strategy):
    """transformers saves a tied head once, and each expert as a tensor of its own."""
    recipe = write_masters_recipe(tmp_path, None, {}, max_steps=1, random_weights=False)
    AutoModelForCausalLM.from_config(FAMILIES[family]).save_pretrained(tmp_path / "model")
    found = beginning(two, recipe, strategy, tmp_path / "out")
    assert found["masters"] == [] and found["exact"] is True


@pytest.mark.parametrize("dtype, exact", [(torch.float16, False), (torch.bfloat16, True)])
def test_masters_in_bf16_say_what_they_have_lost(two, tmp_path, dtype, exact):
    recipe = write_masters_recipe(tmp_path, dtype, {}, max_steps=1)
    argv = arguments(recipe, "zero2_bf16_states", tmp_path / "out")
    assert two.run(cases.train, argv=argv)[0]["metrics"]["exact_master_weights"] is exact


@pytest.mark.parametrize("strategy", [grid("zero0"), "zero3"])
def test_a_resumed_run_says_how_it_began_and_keeps_its_masters(two, fp16, tmp_path, strategy):
    argv = arguments(fp16, strategy, tmp_path, "--max_steps", "2", "--save_strategy", "steps", "--save_steps", "1")
    whole = two.run(cases.train, argv=argv)[0]["metrics"]
    shutil.rmtree(tmp_path / "checkpoint-2")
    resumed = two.run(cases.train, argv=[*argv, "--resume_from_checkpoint", "true"])[0]["metrics"]
    assert resumed["resumed_at"] == [1] and resumed["exact_master_weights"] is True
    assert resumed["loss_history"] == whole["loss_history"]


@pytest.mark.private
def test_transformers_casts_what_it_loads(tmp_path):
    """Fails when `dtypes_of_the_file` has no effect any more, or from_pretrained can be asked for the file's dtypes."""
    config = llama_config()
    model = AutoModelForCausalLM.from_config(config).half()
    model.lm_head.float()
    model.save_pretrained(tmp_path)
    cast = AutoModelForCausalLM.from_pretrained(tmp_path, dtype="auto")
    assert cast.lm_head.weight.dtype == torch.float16
    with dtypes_of_the_file("bf16"):
        kept = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32)
    assert {kept.lm_head.weight.dtype, kept.model.norm.weight.dtype} == {torch.float32, torch.float16}
    with dtypes_of_the_file("fp16"):
        unread = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert torch.equal(unread.lm_head.weight, model.lm_head.weight) and unread.model.norm.weight.is_meta
