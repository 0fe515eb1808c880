"""FSDP2: it really shards, its bytes and collectives are those of a count by hand, and it saves, resumes, generates."""

from math import prod

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, GPTNeoXConfig, Qwen3Config

from tests.helpers import cases, family_cases
from tests.helpers.seeded import grid
from tests.helpers.state_terms import fsdp2_terms
from tests.helpers.tiny import arguments, llama_config, named, write_recipe

FSDP = ["--fsdp", "true"]
SIZES = {"vocab_size": 1031, "hidden_size": 64, "intermediate_size": 101, "num_hidden_layers": 2}
SIZES |= {"num_attention_heads": 4, "max_position_embeddings": 256, "bos_token_id": 0, "eos_token_id": 0}
SIZES |= {"pad_token_id": 1}


@pytest.fixture(scope="module")
def recipe(tmp_path_factory):
    return write_recipe(tmp_path_factory.mktemp("fsdp"), eval_strategy="steps", eval_steps=100)


@pytest.mark.parametrize(
    ("world_size", "bf16", "accumulation"), [(2, True, 1), grid(4, False, 1), grid(2, True, 2), (2, False, 2)]
)
def test_it_shards_and_its_bytes_are_those_counted_by_hand(request, recipe, tmp_path, world_size, bf16, accumulation):
    """Collectives: every parameter is gathered forward and backward, those of LM head, final norm and embedding once
    each pass they are used in; all are padded to a whole number of rows for each rank."""
    group = request.getfixturevalue({2: "two", 4: "four"}[world_size])
    argv = arguments(recipe, "fsdp2", tmp_path, "--bf16", str(bf16))
    argv += ["--gradient_accumulation_steps", str(accumulation)]
    results = group.run(cases.train, argv=argv)
    metrics, shapes = results[0]["metrics"], results[0]["shapes"]
    assert (metrics["strategy"], metrics["zero_stage"]) == ("fsdp2", None)
    assert metrics["precision"] == ("bf16" if bf16 else "fp32")
    assert results[0]["placements"] == ["(Shard(dim=0),)"]
    assert sum(map(prod, shapes)) == metrics["parameters"]
    for rank, measured in enumerate(metrics["model_state_bytes"]):
        expected = fsdp2_terms(shapes, world_size, rank, bf16, accumulation > 1)
        assert measured == expected | {"offloaded_host": 0, "offloaded_disk": 0}
    if (bf16, accumulation) == (True, 1):
        sent = metrics["communication_bytes_per_step"]
        padded = sum(2 * -(-shape[0] // 2) * prod(shape[1:]) for shape in shapes)
        assert sent["reduce_scatter"] == 2 * padded and padded < sent["all_gather"] <= 4 * padded
        assert sent["all_reduce"] < 1000, "flags and norms alone"


def test_the_first_loss_in_bf16_is_that_of_zero3(trained):
    """accelerate's own policy rounds the sum of a batch's losses to three digits."""
    fsdp2, zero3 = (trained(strategy).metrics["loss_history"][0] for strategy in ("fsdp2", "zero3"))
    assert fsdp2 == pytest.approx(zero3, rel=2e-4)


@pytest.mark.private
def test_bf16_losses_are_those_of_zero3_and_not_rounded(two, recipe, tmp_path):
    """The last assertion fails when accelerate no longer rounds them: then faults/fsdp_rounded_loss.py may go."""
    runs = ((cases.train, FSDP), (cases.train, named("zero3")), (family_cases.train_as_accelerate, FSDP))
    argvs = [[str(recipe), "--output_dir", str(tmp_path / str(n)), *how] for n, (_, how) in enumerate(runs)]
    fsdp2, zero3, rounded = (
        two.run(case, argv=[*argv, "--max_steps", "10"])[0]["metrics"]["loss_history"]
        for (case, _), argv in zip(runs, argvs, strict=True)
    )
    assert fsdp2 == pytest.approx(zero3, rel=1e-3) != rounded and fsdp2[-1] < fsdp2[0]


@pytest.mark.private
def test_accelerate_alone_does_not_shard_on_a_cpu(two, recipe, tmp_path):
    """Fails when accelerate shards there by itself: then faults/fsdp_on_cpu.py may go."""
    argv = arguments(recipe, "fsdp2", tmp_path)
    ranks = two.run(cases.train, argv=argv, left_out="zero_recipes.engine.faults.fsdp_on_cpu.apply")
    assert [rank["placements"] for rank in ranks] == [["None"]] * 2


def test_a_sharded_model_is_saved_under_the_names_of_its_class(trained):
    names = load_file(trained("fsdp2").folder / "model.safetensors").keys()
    assert "embed_out.weight" in names and "lm_head.weight" not in names


@pytest.mark.private
def test_transformers_alone_would_save_other_names(two, tmp_path):
    """Fails when transformers knows the class of a sharded model: then faults/fsdp_saved_names.py may go."""
    recipe = write_recipe(tmp_path, save_model=True, max_steps=1)
    argv = arguments(recipe, "fsdp2", tmp_path / "out")
    two.run(cases.train, argv=argv, left_out="zero_recipes.engine.faults.fsdp_saved_names.keep_names_of_the_file")
    assert "lm_head.weight" in load_file(tmp_path / "out" / "model.safetensors")


CONFIGS = {
    "llama": llama_config(),
    "qwen3": Qwen3Config(**SIZES, num_key_value_heads=2, head_dim=16, tie_word_embeddings=False),
    "gpt_neox": GPTNeoXConfig(**SIZES, hidden_dropout=0.0, attention_dropout=0.0),
}


@pytest.fixture(scope="module")
def trained_head(tmp_path_factory):
    """Recipes of an adapter with an LM head that is trained whole, on rows of very uneven length."""
    recipes = {}
    for name, config in CONFIGS.items():
        path = tmp_path_factory.mktemp(name)
        target = "query_key_value" if name == "gpt_neox" else "q_proj"
        keys = {"use_peft": True, "lora_r": 4, "lora_dropout": 0.0, "lora_target_modules": [target]}
        keys |= {"lora_modules_to_save": ["lm_head"], "bf16": False, "learning_rate": 0.05, "max_grad_norm": 0.0}
        recipes[name] = write_recipe(path, **keys, random_weights=False, warmup_steps=0)
        torch.manual_seed(0)
        AutoModelForCausalLM.from_config(config).save_pretrained(path / "model")
    return recipes


def losses_and_norms(two, recipe, strategy: str, out, case=cases.train, *words: str) -> list[float]:
    metrics = two.run(case, argv=arguments(recipe, strategy, out, *words))[0]["metrics"]
    return metrics["loss_history"] + metrics["grad_norm_history"]


@pytest.mark.parametrize("name", CONFIGS)
@pytest.mark.parametrize("accumulation", [1, grid(2)])
def test_the_gradient_of_a_trained_head_is_that_of_all_rows(two, trained_head, tmp_path, name, accumulation):
    words = ["--gradient_accumulation_steps", str(accumulation)]
    ddp = losses_and_norms(two, trained_head[name], "ddp", tmp_path / "ddp", cases.train, *words)
    fsdp2 = losses_and_norms(two, trained_head[name], "fsdp2", tmp_path / "fsdp2", cases.train, *words)
    assert fsdp2 == pytest.approx(ddp, rel=1e-4)


@pytest.mark.private
def test_accelerate_alone_does_not_reduce_it(two, trained_head, tmp_path):
    """Fails when a fused LM head in an adapter is right: then remove faults/fsdp_head_of_an_adapter.py."""
    ddp = losses_and_norms(two, trained_head["llama"], "ddp", tmp_path / "ddp")
    case = family_cases.train_as_accelerate_groups
    assert losses_and_norms(two, trained_head["llama"], "fsdp2", tmp_path / "fsdp2", case)[3] > 1.1 * ddp[3]


@pytest.mark.private
def test_an_evaluation_leaves_parameters_gathered(two, recipe, tmp_path):
    """Fails when torch reshards all of them after a forward pass: then engine/fsdp.py reshard_model may go."""
    argv = arguments(recipe, "fsdp2", tmp_path)
    for found in two.run(family_cases.gathered_after_evaluation, argv=argv):
        assert found["before"] and found["after"] == []
