"""The plan's formulas against numbers worked out by hand, and what must hold for every size."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as draw
from pydantic import ValidationError

from tests.helpers.plan_jobs import GB, ROOT, job
from zero_recipes.checks.lower_bounds import checkpoint_bytes
from zero_recipes.config.settings import Settings
from zero_recipes.config.strategy import Strategy
from zero_recipes.core.findings import Refusal
from zero_recipes.metrics.prediction import PARTS, Prediction
from zero_recipes.plan.formulas import predict as formulas
from zero_recipes.plan.formulas.predict import predict_by_formulas
from zero_recipes.plan.formulas.shape import shape_of
from zero_recipes.plan.jobs import known_models

PSI = 6_857_302_016  # EleutherAI/pythia-6.9b
TOKENS = 4 * 512  # recipes/pythia.yaml: four sequences of 512


@pytest.mark.parametrize("name", sorted({entry["model"] for entry in known_models().values()}))
def test_a_known_config_builds_the_model_that_was_published(name):
    entry = known_models()[name]
    counted = shape_of(entry["config"], Settings({"use_peft": False}))
    assert counted.parameters == counted.trainable == entry["parameters"]
    assert entry["source"]


def test_every_recipe_names_a_known_model_or_a_folder_here():
    for path in (ROOT / "recipes").glob("*.yaml"):
        name = next(line.split()[1] for line in path.read_text().splitlines() if line.startswith("model_name_or_path"))
        assert name in known_models() or (ROOT / name / "config.json").is_file()


@pytest.mark.parametrize(
    ("strategy", "params", "grads", "optimizer"),
    [("ddp", 4, 4, 8), ("zero0", 2, 2, 12), ("zero1", 2, 2, 6), ("zero2", 2, 1, 6), ("zero3", 1, 1, 6)],
)
def test_model_states_are_the_textbooks(strategy, params, grads, optimizer):
    states = predict_by_formulas(job(strategy)).model_state_bytes
    assert states.params == params * PSI and states.grads == grads * PSI
    assert states.optimizer == optimizer * PSI and states.offloaded_host == 0


@pytest.mark.parametrize(
    ("strategy", "precision", "each", "saved"),
    [
        ("zero2_bf16_states", "bf16", (2, 1, 3), 2 + 2 + 6),
        ("zero3_bf16_states", "bf16", (1, 1, 3), 2 + 6),
        ("zero2_autocast", "fp32", (4, 2, 6), 4 + 4 + 12),
        ("zero0", "fp32", (4, 4, 8), 4 + 4 + 8),
        ("zero1", "fp32", (4, 4, 6), 4 + 4 + 12),
    ],
)
def test_model_states_of_other_precisions_are_deepspeeds(strategy, precision, each, saved):
    """Per parameter on one of two ranks, by zero_recipes/theory/deepspeed_memory.py, which the engine is held to."""
    one = job("zero2", bf16=precision == "bf16")
    one = replace(one, strategy=strategy, ds_config=json.loads((ROOT / "ds_configs" / f"{strategy}.json").read_text()))
    found = predict_by_formulas(one)
    states = found.model_state_bytes
    assert (states.params, states.grads, states.optimizer) == tuple(PSI * width for width in each)
    assert found.checkpoint_bytes.resumable == saved * PSI


def test_offload_leaves_the_gpu_and_lands_in_the_host():
    two, three = predict_by_formulas(job("zero2_offload")), predict_by_formulas(job("zero3_offload"))
    assert two.model_state_bytes.model_dump() == {
        "params": 2 * PSI, "grads": 0, "optimizer": 0, "offloaded_host": 6 * PSI, "offloaded_disk": 0
    }  # fmt: skip
    assert three.model_state_bytes.params == 0 and three.model_state_bytes.offloaded_host == 7 * PSI
    # both ranks of the node: optimizer parts, an fp32 gradient beside each, the weights in 16 bits on their way back,
    # and the gradients of two micro steps (the engine's simulation: 20.1 bytes a parameter with what Python holds)
    assert two.host_bytes.training == 2 * (6 + 2 + 1 + 1) * PSI
    once = predict_by_formulas(job("zero2_offload", gradient_accumulation_steps=1))
    assert once.host_bytes.training == 2 * (6 + 2 + 1) * PSI
    assert three.host_bytes.training == 2 * (7 + 2 + 1) * PSI


def test_activations_are_korthikantis_without_dropout():
    """34sbh + 5as²b of arXiv:2205.05198, less the masks: 2sbh and as²b."""
    h, heads, layers, s = 4096, 32, 32, 512
    shape = shape_of(job("zero3").config, Settings({"use_peft": False}))

    def kept(**values):
        return formulas.activation_bytes(job("zero3", **values), shape)

    scores, fused = 4 * heads * TOKENS * s, 4 * heads * TOKENS
    assert kept(attn_implementation="eager") == layers * (32 * TOKENS * h + scores) + 2 * 2 * TOKENS * h
    assert kept() == layers * (32 * TOKENS * h + fused) + 2 * 2 * TOKENS * h
    assert kept(activation_checkpointing=True) == layers * 2 * TOKENS * h + 32 * TOKENS * h + fused
    assert kept(activation_checkpointing=None) == kept(activation_checkpointing=True)  # TRL's default is to recompute


def test_grouped_queries_and_gated_mlps_count_by_their_own_widths():
    config = known_models()["meta-llama/Meta-Llama-3-8B"]["config"]
    shape = shape_of(config, Settings({"use_peft": False}))
    assert (shape.query_width, shape.kv_width, shape.ffn, shape.gated) == (4096, 1024, 14336, True)
    per_token = formulas.layer_bytes(shape, 2, 1, 0)
    # input, queries, keys, values, output; one sum per head; input, gate, up, SiLU, product; two norms
    assert per_token == 2 * (4096 + 4096 + 2 * 1024 + 4096) + 4 * 32 + 2 * (4096 + 4 * 14336) + 2 * 2 * 4096


def test_deepspeeds_own_copies_show_in_the_step():
    """20Ψ at stage 0 and not 16Ψ; stages 1 and 2 hold the same at their fullest (theory/deepspeed_memory.py)."""
    zero0 = predict_by_formulas(job("zero0"))
    assert zero0.peak_phase == "step" and zero0.allocated_peak_bytes == 20 * PSI
    one, two = predict_by_formulas(job("zero1")), predict_by_formulas(job("zero2"))
    assert one.allocated_peak_bytes == two.allocated_peak_bytes == 12 * PSI


def test_ddp_holds_buckets_and_autocast_copies_beside_its_16_bytes():
    at_peak = predict_by_formulas(job("ddp")).at_peak
    assert at_peak["buckets"] == 4 * PSI and at_peak["other"] == 2 * PSI
    alone = predict_by_formulas(job("ddp", ranks=1))
    assert alone.strategy == "single" and alone.at_peak["buckets"] == 0
    assert alone.communication_bytes_per_step == {}


def test_lora_trains_only_its_adapter():
    found = predict_by_formulas(job("zero2", use_peft=True))
    adapter = 32 * 16 * (4096 + 3 * 4096)  # layers x rank x (in + out) of query_key_value
    assert found.trainable_parameters == adapter and found.parameters == PSI + adapter
    assert found.model_state_bytes.params == 2 * (PSI + adapter)
    assert found.model_state_bytes.optimizer == 6 * adapter
    assert found.checkpoint_bytes.weights == 2 * adapter
    assert found.checkpoint_bytes.resumable == (2 + 2 + 12) * adapter  # DeepSpeed's file leaves out the frozen weights
    assert found.at_peak["loss_head"] == 4 * TOKENS * 4096  # no gradient for the head's frozen weight


def test_flops_are_six_per_weight_and_token_and_eight_with_recomputation():
    multiplied, tokens = PSI - 50432 * 4096, 2 * TOKENS  # without the embedding's rows; two accumulations
    attention = 12 * 32 * 512 * 4096 * tokens
    assert predict_by_formulas(job("zero3")).flops_per_step == 6 * multiplied * tokens + attention
    again = predict_by_formulas(job("zero3", activation_checkpointing=True)).flops_per_step
    assert again == 8 * multiplied * tokens + attention * 4 // 3


@pytest.mark.parametrize(
    ("kind", "sizes", "layers_of_mlp"),
    [
        ("mixtral", {"num_local_experts": 8, "num_experts_per_tok": 2, "intermediate_size": 48}, 2 * 48),
        (
            "qwen2_moe",
            {"num_experts": 6, "num_experts_per_tok": 3, "moe_intermediate_size": 20, "intermediate_size": 48}
            | {"shared_expert_intermediate_size": 28},
            3 * 20 + 28,
        ),
    ],
)
def test_a_token_takes_the_flops_and_the_activations_of_the_experts_that_it_goes_to(kind, sizes, layers_of_mlp):
    """Against the model's own modules (theory/flops.py), and the same weights with every expert at work."""
    config = {"model_type": kind, "vocab_size": 96, "hidden_size": 32, "num_hidden_layers": 3}
    config |= {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8, "max_position_embeddings": 128}
    asked = replace(job("zero3", max_length=64), config=config | sizes)
    shape = shape_of(asked.config, asked.settings)
    tokens = 64 * asked.settings.per_device_train_batch_size * asked.settings.gradient_accumulation_steps
    attention = 12 * 3 * 64 * 32 * tokens
    found = predict_by_formulas(asked).flops_per_step - attention
    assert found == pytest.approx(6 * shape.flops.weights * tokens, rel=0.02)  # norms have no product
    assert found < 0.8 * 6 * shape.multiplied * tokens
    assert shape.ffn == layers_of_mlp and shape.gated
    every = next(key for key in sizes if key.startswith("num_"))
    busy = replace(asked, config=config | sizes | {"num_experts_per_tok": sizes[every]})
    assert predict_by_formulas(busy).flops_per_step - attention == 6 * shape.multiplied * tokens


@pytest.mark.parametrize(
    ("strategy", "moved"),
    [
        ("ddp", {"all_reduce": 4 * PSI}),
        ("zero0", {"all_reduce": 2 * PSI}),
        ("zero1", {"all_reduce": 2 * PSI, "all_gather": 2 * PSI}),
        ("zero2", {"all_reduce": 2 * 2 * PSI, "all_gather": 2 * PSI}),  # reduced in each of two passes
        ("zero3", {"all_gather": 2 * 2 * 2 * PSI, "reduce_scatter": 2 * 2 * PSI}),
    ],
)
def test_collectives(strategy, moved):
    assert predict_by_formulas(job(strategy)).communication_bytes_per_step == moved


@pytest.mark.parametrize("strategy", ["ddp", "zero0", "zero1", "zero2", "zero3"])
def test_checkpoints_are_as_large_as_the_check_of_the_disk_says(strategy):
    asked = job(strategy, save_strategy="steps")
    config = type("Config", (), {"dtype": "float16"})
    run = Strategy(strategy, 2, None if asked.ds_config is None else asked.zero)
    expected = checkpoint_bytes(run, asked.settings, config, PSI, here=2)
    assert predict_by_formulas(asked).checkpoint_bytes.resumable == expected


def test_evaluation_and_the_best_model_count_where_the_recipe_has_them():
    plain = predict_by_formulas(job("zero3", eval_strategy="no"))
    large = predict_by_formulas(job("zero3", eval_strategy="steps", per_device_eval_batch_size=4096))
    assert large.peak_phase == "evaluation" and large.allocated_peak_bytes > plain.allocated_peak_bytes
    small = predict_by_formulas(job("zero3", eval_strategy="steps", per_device_eval_batch_size=1))
    assert small.allocated_peak_bytes == plain.allocated_peak_bytes
    one_row = {"per_device_train_batch_size": 1, "max_length": 1, "eval_strategy": "no"}
    stepping = predict_by_formulas(job("zero2", **one_row))
    best = predict_by_formulas(job("zero2", load_best_model_at_end=True, **one_row))
    again = 8 * plain.trainable_parameters // 2
    assert best.allocated_peak_bytes == max(stepping.allocated_peak_bytes, stepping.memory_phases.step + again)


@pytest.mark.parametrize("strategy", ["zero0", "zero1", "zero2", "zero3"])
def test_a_checkpoint_is_read_a_file_at_a_time(strategy):
    found = predict_by_formulas(job(strategy))
    psi, here = found.parameters, 2
    read = {"zero0": 14 * psi, "zero3": 6 * psi}.get(strategy, max(2, 6) * psi)
    assert found.host_bytes.resume == found.host_bytes.training + here * read


def test_host_memory_while_loading():
    assert predict_by_formulas(job("zero2")).host_bytes.load == 2 * 4 * PSI  # float32 made of a float16 file
    assert predict_by_formulas(job("zero2", ranks=16)).host_bytes.load == 8 * 4 * PSI  # the ranks of one node
    assert predict_by_formulas(job("zero2", dtype="float16")).host_bytes.load == 0  # the file itself is mapped
    assert predict_by_formulas(job("zero3")).host_bytes.load == 0


def test_a_prediction_has_the_shape_of_the_contract():
    found = predict_by_formulas(job("zero3"))
    assert list(found.at_peak) == list(PARTS)
    assert sum(found.at_peak.values()) == found.allocated_peak_bytes
    assert found.reserved_bytes.low < found.reserved_bytes.high
    assert found.source == "formulas" and any("chunked_logprob" in note for note in found.notes)
    assert Prediction.model_validate_json(found.model_dump_json()) == found
    assert json.loads(json.dumps(found.model_dump())) == found.model_dump()
    assert not {"peaks", "resident_bytes"} & found.model_dump().keys()  # of the engine alone
    with pytest.raises(ValidationError, match="peek"):
        Prediction.model_validate(found.model_dump() | {"peek": 1})


def test_an_unlimited_length_is_the_models_and_said_so():
    found = predict_by_formulas(job("zero3", max_length=None))
    assert found.max_length == 2048 and any("2048 tokens" in note for note in found.notes)


@pytest.mark.parametrize(
    ("changes", "config", "says"),
    [
        ({"torch_compile": True}, {}, "torch_compile"),
        ({"load_in_4bit": True}, {}, "Quantised"),
        ({}, {"num_experts": 8}, "mixture of experts"),
    ],
)
def test_what_the_formulas_do_not_know_is_said(changes, config, says):
    plain = job("zero3", name="pythia-410m", **changes)
    notes = predict_by_formulas(replace(plain, config=plain.config | config)).notes
    assert any(says in note for note in notes)
    assert not any(says in note for note in predict_by_formulas(job("zero3", name="pythia-410m")).notes)


def test_a_config_of_an_unknown_class_is_refused():
    with pytest.raises(Refusal, match=r"model_type 'no_such_model' .ZR817"):
        predict_by_formulas(replace(job("zero3"), config={"model_type": "no_such_model"}))


SIZES = dict(
    ranks=draw.sampled_from([1, 2, 4, 8, 64]), batch=draw.integers(1, 64), length=draw.sampled_from([64, 512, 2048])
)


@settings(max_examples=40, deadline=None, derandomize=True)
@given(
    strategy=draw.sampled_from(["ddp", "zero0", "zero1", "zero2", "zero3", "zero2_offload", "zero3_offload"]), **SIZES
)
def test_more_work_never_takes_less_and_shards_never_take_more(strategy, ranks, batch, length):
    def peak(name, ranks, batch, length, **values):
        return predict_by_formulas(
            job(name, ranks, "pythia-410m", per_device_train_batch_size=batch, max_length=length, **values)
        ).allocated_peak_bytes

    here = peak(strategy, ranks, batch, length)
    assert peak(strategy, ranks, batch + 1, length) >= here
    assert peak(strategy, ranks, batch, 2 * length) >= here
    assert peak(strategy, ranks, batch, length, activation_checkpointing=True) <= here
    if strategy != "ddp" and ranks > 1:
        assert peak(strategy, 2 * ranks, batch, length) <= here


def test_a_recipe_of_gigabytes_has_a_peak_of_gigabytes():
    assert 50 * GB < predict_by_formulas(job("zero3")).allocated_peak_bytes < 80 * GB
