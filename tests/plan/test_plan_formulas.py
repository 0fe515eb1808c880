"""The plan's formulas against numbers worked out by hand, what was measured, and what must hold for every size."""

from dataclasses import replace

import pytest

from tests.helpers.plan_jobs import GB, job
from zero_recipes.config.settings import Settings
from zero_recipes.core.findings import Refusal
from zero_recipes.metrics.schema import PARTS, Prediction
from zero_recipes.tools.plan.formulas import Sizes, overheads, predict_by_formulas
from zero_recipes.tools.plan.job import known_models
from zero_recipes.tools.plan.predict import Predictor
from zero_recipes.tools.plan.shape import shape_of

PSI = 6_857_302_016  # EleutherAI/pythia-6.9b
H = 4096
EMBEDDING = 50432 * H
LAYER = (PSI - 2 * EMBEDDING) / 32  # and a part of the last norm
TOKENS = 4 * 512  # recipes/pythia.yaml: four sequences of 512


def member(name: str, ranks: int = 4, gpus_per_node: int = 2, **values):
    return job(name, ranks, gpus_per_node=gpus_per_node, **values)


def sizes(asked) -> Sizes:
    return Sizes(asked, shape_of(asked.config, asked.settings))


@pytest.mark.parametrize("name", sorted({entry["model"] for entry in known_models().values()}))
def test_a_known_config_builds_the_model_that_was_published(name):
    entry = known_models()[name]
    counted = shape_of(entry["config"], Settings({"use_peft": False}))
    assert counted.parameters == counted.trainable + counted.unreached == entry["parameters"]
    assert entry["source"]


def test_widths_are_those_of_the_widest_layer_and_of_latent_heads_as_they_are_multiplied():
    """Gemma 4: heads of 256, of 512 where attention is full. GLM-4.7-Flash: 192 + 64, of which `head_dim` is the 64."""
    known = known_models()
    widths = {}
    for name in ("google/gemma-4-E4B-it", "google/gemma-4-12B-it", "zai-org/GLM-4.7-Flash"):
        shape = shape_of(known[name]["config"], Settings({"use_peft": False}))
        widths[name] = (shape.query_width, shape.kv_width)
    assert widths == {
        "google/gemma-4-E4B-it": (8 * 512, 2 * 512),
        "google/gemma-4-12B-it": (16 * 512, 8 * 256),
        "zai-org/GLM-4.7-Flash": (20 * 256, 20 * 256),
    }


@pytest.mark.parametrize(
    ("strategy", "values", "each", "saved"),
    [
        ("ddp", {}, (4, 4, 8), 4 + 8),
        ("zero0", {}, (2, 2, 12), 2 + 2 + 12),
        ("zero1", {}, (2, 2, 6), 2 + 2 + 12),
        ("zero2", {}, (2, 1, 6), 2 + 2 + 12),
        ("zero3", {}, (1, 1, 6), 2 + 12),
        ("fsdp2", {"gradient_accumulation_steps": 1}, (2, 2, 4), 4 + 8),
        ("fsdp2", {}, (2, 2 + 2, 4), 4 + 8),  # whole gradients in 16 bits stay from one micro step to the next
        ("fsdp2", {"gradient_accumulation_steps": 1, "dtype": "bfloat16"}, (2, 2, 4), 4 + 8),  # upcast by accelerate
        ("zero2_bf16_states", {}, (2, 1, 3), 2 + 2 + 6),
        ("zero3_bf16_states", {}, (1, 1, 3), 2 + 6),
        ("zero2_autocast", {"bf16": False}, (4, 2, 6), 4 + 4 + 12),
        ("zero0", {"bf16": False}, (4, 4, 8), 4 + 4 + 8),
        ("zero1", {"bf16": False}, (4, 4, 6), 4 + 4 + 12),
    ],
)
def test_model_states_and_checkpoints_in_bytes_a_parameter(strategy, values, each, saved):
    """On one of two ranks, by zero_recipes/core/zero_paper.py, which the engine is compared with."""
    found = predict_by_formulas(job(strategy, **values))
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


def test_the_host_while_loading_and_at_a_resume():
    assert predict_by_formulas(job("zero2")).host_bytes.load == 2 * 4 * PSI  # float32 made of a float16 file
    assert predict_by_formulas(job("zero2", ranks=16)).host_bytes.load == 8 * 4 * PSI  # the ranks of one node
    assert predict_by_formulas(job("zero2", dtype="float16")).host_bytes.load == 0  # the file itself is mapped
    assert predict_by_formulas(job("zero3")).host_bytes.load == 0
    # a checkpoint is read a file at a time, beside what training keeps there
    for strategy, read in {"zero0": 14, "zero1": 6, "zero2": 6, "zero3": 6, "zero2_offload": 6}.items():
        found = predict_by_formulas(job(strategy)).host_bytes
        assert found.resume == found.training + 2 * read * PSI


def test_infinity_takes_the_disk_and_not_the_hosts_memory():
    """18 bytes a parameter, but for parts below 1 MiB: fp32 master, moments and gradient, and the weight in 16 bits. In
    memory are the gradients in 16 bits and the buffers; with parameters alone on the disk, the optimizer too."""
    whole, params = predict_by_formulas(member("zero3_infinity")), predict_by_formulas(member("zero3_offload_infinity"))
    assert whole.model_state_bytes.offloaded_disk == pytest.approx(18 * PSI / 4, rel=2e-4)
    assert whole.nvme_bytes == 2 * whole.model_state_bytes.offloaded_disk  # two ranks on each machine
    assert whole.model_state_bytes.offloaded_host == 0
    assert 0 < whole.host_bytes.training - 2 * 2 * PSI // 4 < 10 * GB
    assert params.model_state_bytes.offloaded_disk == pytest.approx(2 * PSI / 4, rel=1e-3)
    assert params.model_state_bytes.offloaded_host == 12 * PSI // 4
    assert 0 < params.host_bytes.training - 2 * 18 * PSI // 4 < 5 * GB


def test_activations_are_korthikantis_without_dropout():
    """34sbh + 5as²b of arXiv:2205.05198, less the masks: 2sbh and as²b. Eager attention's softmax is in fp32."""
    heads, layers, s = 32, 32, 512

    def kept(**values):
        return sizes(job("zero3", **values)).activations()

    scores, fused = (4 + 2) * heads * TOKENS * s, 4 * heads * TOKENS
    assert kept(attn_implementation="eager") == layers * (32 * TOKENS * H + scores) + 2 * 2 * TOKENS * H
    assert kept() == layers * (32 * TOKENS * H + fused) + 2 * 2 * TOKENS * H
    assert kept(activation_checkpointing=True) == layers * 2 * TOKENS * H + 32 * TOKENS * H + fused
    assert kept(activation_checkpointing=None) == kept(activation_checkpointing=True)  # TRL's default is to recompute
    assert kept(sequence_parallel_size=2) == kept() / 2
    for dropout, inputs in ((0.1, 3), (0.0, 12)):  # frozen: of six inputs one, dropped out and with a mask, or all
        by_hand = layers * ((20 + inputs) * TOKENS * H + fused) + 2 * 2 * TOKENS * H
        assert kept(use_peft=True, lora_dropout=dropout) == by_hand
    dropping = job("zero3", attn_implementation="eager")
    dropping = replace(dropping, config=dropping.config | {"attention_dropout": 0.1, "hidden_dropout": 0.1})
    masks = (1 * heads * s + 2 * H) * TOKENS  # of bytes; the scores are kept as dropout returns them
    assert sizes(dropping).layer(TOKENS) - sizes(job("zero3", attn_implementation="eager")).layer(TOKENS) == masks
    in_fp32 = sizes(job("zero3", attn_implementation="eager", dtype="float32", bf16=False))
    assert in_fp32.score() == 4 and sizes(replace(in_fp32.job, config=dropping.config)).score() == 4 + 1 + 4
    llama = replace(job("zero3"), config=known_models()["meta-llama/Meta-Llama-3-8B"]["config"])
    # input, queries, keys, values, output; one sum per head; input, gate, up, SiLU, product; two norms
    by_hand = 2 * (4096 + 4096 + 2 * 1024 + 4096) + 4 * 32 + 2 * (4096 + 4 * 14336) + 2 * 2 * 4096
    assert sizes(llama).layer(1) == by_hand


@pytest.mark.parametrize(
    ("strategy", "ranks", "keys", "elements"),
    [
        ("zero2", 2, {"reduce_bucket_size": 1000, "overlap_comm": False}, 1000),
        ("zero2", 2, {"reduce_bucket_size": 1000, "overlap_comm": True}, 2 * 1000),  # one fills as the other is sent
        ("zero1", 2, {"reduce_bucket_size": "auto", "overlap_comm": True}, 2 * H * H),
        ("zero1", 2, {"reduce_bucket_size": 10**12, "overlap_comm": False}, PSI),
        ("zero3", 2, {"reduce_bucket_size": 1000, "stage3_max_live_parameters": 0}, 1000 + EMBEDDING),
        ("zero3", 2, {"reduce_bucket_size": 1000, "stage3_max_live_parameters": 10**9}, 1000 + 10**9),
        ("zero3", 2, {"reduce_bucket_size": 1000, "stage3_max_live_parameters": 10**12}, 1000 + PSI),
        ("zero3", 2, {"reduce_bucket_size": 1000, "memory_efficient_linear": False}, 1000 + PSI),  # kept for backward
        ("zero3", 1, {"reduce_bucket_size": 1000, "stage3_max_live_parameters": 10**9}, 1000),  # nothing is gathered
        # but for what lies in host memory
        ("zero3_offload", 1, {"reduce_bucket_size": 1000, "stage3_max_live_parameters": 10**9}, 1000 + 10**9),
        ("zero3_offload", 1, {"reduce_bucket_size": 1000, "memory_efficient_linear": False}, 1000 + PSI),
        ("zero3", 1, {"reduce_bucket_size": 1000, "leaf_module": {"classes": ["GPTNeoXLayer"]}}, 1000 + LAYER),
    ],
)
def test_buckets_and_what_stage_3_gathers(strategy, ranks, keys, elements):
    """At least the largest tensor is gathered whole, whatever stage3_max_live_parameters says."""
    asked = job(strategy, ranks)
    zero = asked.ds_config["zero_optimization"]
    zero.pop("leaf_module", None)  # the gradients of a layer, but for its own row
    asked = replace(asked, ds_config={"zero_optimization": zero | keys})
    assert sizes(asked).terms.buckets == pytest.approx(2 * elements)


def test_copies_in_the_step_and_beside_it():
    """20Ψ at stage 0 and not 16Ψ; stages 1 and 2 hold the same at their fullest (tests/helpers/state_terms.py)."""
    zero0 = predict_by_formulas(job("zero0"))
    assert zero0.peak_phase == "step" and zero0.allocated_peak_bytes == 20 * PSI
    one, two = predict_by_formulas(job("zero1")), predict_by_formulas(job("zero2"))
    assert one.allocated_peak_bytes == two.allocated_peak_bytes == 12 * PSI
    ddp, alone = predict_by_formulas(job("ddp")), predict_by_formulas(job("ddp", ranks=1))
    assert ddp.at_peak["buckets"] == 4 * PSI and ddp.at_peak["other"] == 2 * PSI  # buckets, autocast's copies
    assert alone.strategy == "single" and alone.at_peak["buckets"] == 0 and alone.communication_bytes_per_step == {}
    best, plain = (
        predict_by_formulas(job("zero2", load_best_model_at_end=best, max_length=1, per_device_train_batch_size=1))
        for best in (True, False)
    )
    loading = (2 + 6) * PSI + 8 * PSI // 2
    assert best.allocated_peak_bytes == max(plain.allocated_peak_bytes, loading)
    evaluating = predict_by_formulas(job("zero3", eval_strategy="steps", per_device_eval_batch_size=4096))
    assert evaluating.peak_phase == "evaluation"


def test_copies_that_adam_makes_of_what_it_updates_at_once():
    """torch's list of intermediates (the engine's simulation: 4 bytes a parameter of a subgroup more at stage 3)."""

    def beside(strategy: str, optim: str) -> float:
        return sizes(job(strategy, optim=optim)).phases()["step"]["other"]

    assert beside("zero0", "adamw_torch") == 2 * beside("zero0", "adamw_torch_fused") == 8 * PSI
    assert beside("zero3", "adamw_torch") == 2 * beside("zero3", "adamw_torch_fused") == 8 * 10**9  # one subgroup
    assert beside("zero2", "adamw_torch") == beside("zero2", "adamw_torch_fused")  # flattened gradients went before
    assert beside("zero3_offload", "adamw_torch") == 0


def test_lora_trains_only_its_adapter():
    found = predict_by_formulas(job("zero2", use_peft=True))
    adapter = 32 * 16 * (H + 3 * H)  # layers x rank x (in + out) of query_key_value
    assert found.trainable_parameters == adapter and found.parameters == PSI + adapter
    assert found.model_state_bytes.params == 2 * (PSI + adapter)
    assert (found.model_state_bytes.grads, found.model_state_bytes.optimizer) == (adapter, 6 * adapter)
    assert found.checkpoint_bytes.weights == 2 * adapter
    assert found.checkpoint_bytes.resumable == (2 + 2 + 12) * adapter  # DeepSpeed's file leaves out the frozen weights
    assert found.at_peak["loss_head"] == 4 * TOKENS * H  # no gradient for the head's frozen weight


@pytest.mark.parametrize(("strategy", "ranks"), [("zero2", 1), ("zero3", 4), ("fsdp2", 4)])
def test_packed_weights_are_shared_out_and_their_scales_are_not(strategy, ranks):
    """Half a byte, and on every rank an fp32 scale for 64, nested a byte; embedding and head stay in bf16."""
    lora, four = {"use_peft": True, "lora_target_modules": "all-linear", "dtype": "bfloat16"}, {"load_in_4bit": True}
    plain, packed, nested = (
        predict_by_formulas(member(strategy, **lora, **keys)).model_state_bytes.params / (32 * 12 * H**2)
        for keys in ({}, four, four | {"use_bnb_nested_quant": True})
    )
    assert plain - packed == pytest.approx((2 - 1 / 2) / ranks - 4 / 64, rel=1e-2)  # and FSDP's fp32 adapter
    assert packed - nested == pytest.approx((3 - 4 / 256) / 64, rel=1e-3)


def test_fsdp_gathers_the_head_and_two_layers_as_they_are_stored():
    """And of what trains, the gradients and their copy."""
    layer, lora = 12 * H**2, {"use_peft": True}
    packed = lora | {"load_in_4bit": True}
    head = EMBEDDING
    for keys, elements in (({}, 2 * head + 4 * layer), (lora, head + 2 * layer), (packed, head + layer / 2)):
        buckets = sizes(member("fsdp2", dtype="bfloat16", **keys)).terms.buckets
        assert buckets == pytest.approx(2 * elements, rel=2e-2)


def test_flops_are_six_per_weight_and_token_and_eight_with_recomputation():
    multiplied, tokens = PSI - EMBEDDING, 2 * TOKENS  # without the embedding's rows; two accumulations
    whole = 12 * 32 * 512 * H * tokens  # the square of attention, which eager attention computes, kernels half of it
    for keys, passes in ({}, 3), ({"activation_checkpointing": True}, 4):
        for kernel, share in ("eager", 1), ("sdpa", 1 / 2):
            found = predict_by_formulas(job("zero3", attn_implementation=kernel, **keys)).flops_per_step
            attention = share * (passes + (kernel != "eager") / 2)  # a kernel's backward computes scores again
            assert found == pytest.approx(2 * passes * multiplied * tokens + whole * attention / 3, rel=1e-3)


def test_a_token_takes_the_weights_and_the_activations_of_the_experts_that_it_goes_to():
    config = {"model_type": "mixtral", "vocab_size": 96, "hidden_size": 32, "num_hidden_layers": 3, "head_dim": 8}
    config |= {"num_attention_heads": 4, "num_key_value_heads": 2, "intermediate_size": 48}
    shape = shape_of(config | {"num_local_experts": 8, "num_experts_per_tok": 2}, Settings({"use_peft": False}))
    assert shape.ffn == 2 * 48 and shape.gated
    assert shape.flops.weights == 3 * (2 * 3 * 32 * 48 + 8 * 32 + 2 * 32 * (32 + 16)) + 96 * 32


PHI = 2 * PSI  # bytes; two passes of the recipe's accumulation


@pytest.mark.parametrize(
    ("strategy", "moved"),
    [
        ("ddp", {"all_reduce": 2 * PHI}),
        ("zero0", {"all_reduce": PHI}),
        ("zero1", {"all_reduce": PHI, "all_gather": PHI}),
        ("zero2", {"all_reduce": 2 * PHI, "all_gather": PHI}),  # reduced in each of two passes
        ("zero3", {"all_gather": 2 * 2 * PHI, "reduce_scatter": 2 * PHI}),
        ("fsdp2", {"all_gather": 2 * 2 * PHI, "reduce_scatter": PHI}),
        ("zero3_hpz", {"all_gather": 2 * 2 * PHI, "reduce_scatter": 2 * PHI}),
        ("zero3_qwz", {"all_gather": 2 * PHI, "reduce_scatter": 2 * PHI}),
        ("zero3_qgz", {"all_gather": 4 * PHI, "reduce_scatter": PHI / 2}),
        ("zero3_plus_plus", {"all_gather": 2 * PHI, "reduce_scatter": PHI / 2}),
    ],
)
def test_collectives(strategy, moved):
    assert predict_by_formulas(member(strategy)).communication_bytes_per_step == moved
    if strategy == "zero3_qgz":  # DeepSpeed quantises gradients between nodes only
        alone = predict_by_formulas(member(strategy, gpus_per_node=4)).communication_bytes_per_step
        assert alone["reduce_scatter"] == 2 * PHI


NOT_SIMULATED = {
    "infinity": member("zero3_infinity"),
    "hpz": member("zero3_hpz"),
    "qwz": member("zero3_qwz"),
    "qgz": member("zero3_qgz"),
    "fsdp2": member("fsdp2"),
    "no max_length": job("zero3", max_length=None),
    "8 bits": job("zero2", use_peft=True, load_in_8bit=True),
}


@pytest.mark.parametrize("asked", NOT_SIMULATED.values(), ids=NOT_SIMULATED)
def test_what_is_not_simulated_is_by_formulas_and_says_so(asked):
    predicted = Predictor()(asked)
    assert predicted.source == "formulas" and predicted.notes[0].startswith(f"{asked.strategy} uses formulas, because ")
    assert "by formulas:" not in str(Predictor(quick=True)(asked).notes)


def test_a_prediction_is_whole_and_a_config_of_an_unknown_class_is_refused():
    found, known = predict_by_formulas(job("zero3")), overheads()
    assert list(found.at_peak) == list(PARTS) and sum(found.at_peak.values()) == found.allocated_peak_bytes
    assert Prediction.model_validate_json(found.model_dump_json()) == found
    alone = predict_by_formulas(job("zero3", 1))  # has no communicator
    for one, communicator in ((found, int(known.communicator)), (alone, 0)):
        least, most = known.context
        beside = int(least) + communicator
        high = int(one.allocated_peak_bytes * known.own[1] + known.segments + most - least)
        assert one.reserved_bytes.low == one.allocated_peak_bytes + beside
        assert one.reserved_bytes.high == high + beside
    with pytest.raises(Refusal, match=r"of the type no_such_model .*ZR199"):
        predict_by_formulas(replace(job("zero3"), config={"model_type": "no_such_model"}))
