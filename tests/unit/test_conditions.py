"""Conditions of rules at their edges: beside each fault of tests/helpers/faults.py, what is near it and what is not."""

from functools import partial

import pytest

from tests.helpers.faults import (
    ADAM,
    EIGHT,
    FOUR,
    KEEPS_BEST,
    LION,
    MASTERS,
    MUON,
    NO_PREFETCH,
    NVME,
    ON_CPU,
    PEFT,
    PLUS,
    STATES,
    TAKEN,
    TWO_NODES,
    found_in,
    zero,
)
from tests.helpers.tiny import llama_config, write_model, write_recipe
from zero_recipes.checks import deepspeed_rules, rules

ALONE = {"environment": {"WORLD_SIZE": "1"}}
NODES = {"environment": TWO_NODES}
CPU = {"device": "cpu"}
STREAM = {"dataset_streaming": True}
UNEVEN = {"accelerator_config": {"even_batches": False}}
JOINED = {"accelerator_config": {"dispatch_batches": True}}
WAITS = {"early_stopping_patience": 2}
NO_NORM = {"compute_grad_norm": False}
HPZ = {"zero_hpz_partition_size": 2, "offload_param": {"device": "cpu"}}
FP16 = {"fp16": True, "bf16": False}
ROUTING = {"enabled": True, "data_routing": {"enabled": True}}
STATES_ALONE = {"bf16": {"enabled": "auto", "bf16_optimizer_states": True}}
MODELS_ALONE = {"save_only_model": True, "save_strategy": "epoch", "resume_from_checkpoint": True}

# (code, keys, how the run is launched)
HOLDS = [
    ("ZR824", {"save_strategy": "steps", "save_steps": 0}, {}),
    ("ZR826", WAITS | {"eval_strategy": "steps"}, {}),
    ("ZR826", WAITS | {"load_best_model_at_end": True}, {}),
    ("ZR828", KEEPS_BEST | {"eval_steps": None, "logging_steps": 3, "save_steps": 6}, {}),
    ("ZR452", PEFT | PLUS | {"optim": "galore_adamw"}, {}),
    ("ZR476", FOUR | zero(3, **NO_PREFETCH, offload_param=NVME), {}),
    ("ZR476", FOUR | zero(3, zero_hpz_partition_size=2), NODES),
    ("ZR224", zero(3, zero_hpz_partition_size=4), NODES),
    ("ZR224", zero(3, zero_hpz_partition_size=2), {}),
    ("ZR294", zero(2, STATES) | {"learning_rate": 1e-4}, {}),
    ("ZR2004", zero(3, zero_quantized_gradients=True), CPU),
    ("ZR2015", zero(2, **NO_NORM, **ON_CPU) | {"max_grad_norm": 0}, {}),
    ("ZR2017", zero(2, {"gradient_predivide_factor": 2.0}, reduce_scatter=True), {}),
    ("ZR2017", zero(3, {"gradient_predivide_factor": 2.0}, reduce_scatter=False), {}),
]
DOES_NOT = [
    ("ZR824", {"save_strategy": "no", "save_steps": 0}, {}),
    ("ZR824", {"save_strategy": "steps", "save_steps": 1}, {}),
    ("ZR827", KEEPS_BEST | WAITS | {"early_stopping_threshold": 0.1}, {}),
    ("ZR828", KEEPS_BEST, {}),
    ("ZR828", KEEPS_BEST | {"eval_steps": None, "logging_steps": 2}, {}),
    ("ZR828", KEEPS_BEST | {"save_steps": 4, "load_best_model_at_end": False}, {}),
    ("ZR828", KEEPS_BEST | {"save_steps": 4, "eval_strategy": "no"}, {}),
    ("ZR828", KEEPS_BEST | {"save_steps": 4, "save_strategy": "best"}, {}),
    ("ZR829", {"eval_strategy": "steps"}, {}),
    ("ZR829", {"eval_packing": True, "packing": True, "eval_strategy": "steps"}, {}),
    ("ZR179", MODELS_ALONE | {"save_only_model": False}, {}),
    ("ZR179", MODELS_ALONE | {"save_strategy": "no"}, {}),
    ("ZR459", {"push_to_hub": True, "hub_strategy": "every_save"}, {}),
    ("ZR459", {"push_to_hub": True, "hub_strategy": "end"}, {}),
    ("ZR459", {"hub_strategy": "checkpoint"}, {}),
    ("ZR369", UNEVEN, ALONE),
    ("ZR369", UNEVEN | STREAM, {}),
    ("ZR370", JOINED, ALONE),
    ("ZR370", JOINED | STREAM, {}),
    ("ZR371", {"dataloader_num_workers": 2}, {}),
    ("ZR194", {"average_tokens_across_devices": False}, ALONE),
    ("ZR373", FP16, {}),
    ("ZR374", {"activation_offloading": True}, {}),
    ("ZR451", PEFT | {"peft_config": {"init_lora_weights": "orthogonal"}}, {}),
    ("ZR471", {"liger_kernel_config": {"fused_linear_cross_entropy": True}}, {}),
    ("ZR471", {"use_liger_kernel": True}, {}),
    ("ZR475", PEFT | {"random_weights": True}, {}),
    ("ZR476", zero(3, zero_quantized_weights=True) | PEFT, NODES),
    ("ZR477", FOUR | {"fsdp": True}, {}),
    ("ZR478", FOUR | zero(3), {}),
    ("ZR479", FOUR | zero(2), {}),
    ("ZR479", EIGHT | {"fsdp": True}, {}),
    ("ZR480", FOUR | {"bnb_4bit_quant_storage": "float16"}, {}),
    ("ZR480", EIGHT | zero(2) | {"bnb_4bit_quant_storage": "float16"}, {}),
    ("ZR480", FOUR | zero(2) | {"bnb_4bit_quant_storage": "uint8"}, {}),
    ("ZR480", FOUR | zero(2) | {"bnb_4bit_quant_storage": "float16", "bf16": False}, {}),
    ("ZR416", EIGHT | zero(3), {}),
    ("ZR224", zero(3, zero_hpz_partition_size=2), NODES),
    ("ZR224", zero(2, zero_hpz_partition_size=4), NODES),
    ("ZR226", zero(3, zero_quantized_gradients=True), NODES),
    ("ZR294", zero(2, STATES) | {"learning_rate": 1.01e-4}, {}),
    ("ZR2001", zero(2) | {"save_only_model": True}, {}),
    ("ZR2001", zero(2) | {"load_best_model_at_end": True}, {}),
    ("ZR2004", zero(2, zero_quantized_weights=True), CPU),
    ("ZR2004", zero(3, zero_quantized_weights=True), {}),
    ("ZR2005", zero(2, zero_quantized_weights=True), NODES),
    ("ZR2006", zero(2, zero_hpz_partition_size=3), NODES),
    ("ZR2006", zero(3, zero_hpz_partition_size="auto"), NODES),
    ("ZR2022", zero(2, **HPZ), NODES),
    ("ZR2022", zero(3, offload_param={"device": "cpu"}), NODES),
    ("ZR2022", zero(3, **HPZ | {"zero_hpz_partition_size": 1}), NODES),
    ("ZR2007", zero(3, stage3_prefetch_bucket_size=5e7, offload_param={"device": "cpu"}), {}),
    ("ZR2009", zero(2, MUON), {}),
    ("ZR2009", zero(3, ADAM), {}),
    ("ZR2012", zero(2, ADAM), {}),
    ("ZR2016", zero(2, LION), {}),
    ("ZR2016", zero(2, ADAM), CPU),
    ("ZR2008", zero(0), {}),
    ("ZR2008", zero(0, {"data_types": {"grad_accum_dtype": "bf16"}}), {}),
    ("ZR2017", zero(3, {"gradient_predivide_factor": 1.0}), {}),
    ("ZR2017", zero(1, {"gradient_predivide_factor": 2.0}, reduce_scatter=False), {}),
    ("ZR2028", zero(3, {"gradient_allreduce_op": "sum"}), {}),
    ("ZR2018", zero(2, STATES), {}),
    ("ZR2018", zero(3, MASTERS, offload_optimizer=NVME), {}),
    ("ZR2018", zero(3, MASTERS, offload_optimizer=NVME) | {"optim": "sgd"}, {}),
    ("ZR2019", zero(2, STATES), {}),
    ("ZR2019", zero(2, STATES_ALONE, **ON_CPU), {}),
    ("ZR2019", zero(2, MASTERS, **ON_CPU), {}),
    ("ZR2019", zero(2, **ON_CPU), {}),
    ("ZR2029", zero(2) | {"bf16": False}, {}),
    ("ZR2030", zero(2, STATES), {}),
    ("ZR2030", zero(3, offload_optimizer=NVME), {}),
    ("ZR2021", zero(0), {}),
    ("ZR2021", zero(0, {"fp16": {"enabled": True, "loss_scale": 1}}) | FP16, {}),
    ("ZR2020", zero(3, zero_quantized_weights=True), NODES),
    ("ZR2031", zero(2), {}),
    ("ZR2032", zero(2), {}),
    ("ZR2011", zero(2, {"data_efficiency": ROUTING | {"enabled": False}}), {}),
    ("ZR2024", zero(1, {"tensor_parallel": {"autotp_size": 0}}), {}),
    ("ZR2024", zero(1, {"tensor_parallel": {"autotp_size": 1}}), {}),
]


@pytest.fixture(scope="module")
def found(tmp_path_factory):
    """found_in a quick recipe, with changes."""
    return partial(found_in, write_recipe(tmp_path_factory.mktemp("found")))


def find_spec(name: str, hidden: set[str]) -> str | None:
    """Every package is installed but the hidden ones."""
    return None if name in hidden else name


def codes(findings: list[tuple[str, str]]) -> set[str]:
    return {code for _, code in findings}


def test_rules_hold_up_to_their_edges(found):
    missed = [(code, keys) for code, keys, launch in HOLDS if code not in codes(found(keys, **launch))]
    assert not missed


def test_rules_do_not_hold_beyond_their_edges(found):
    held = [(code, keys) for code, keys, launch in DOES_NOT if code in codes(found(keys, **launch))]
    assert not held


def test_weights_whose_shards_are_multiples_of_8_can_be_quantized(tmp_path):
    """On four processes; stage 3 rounds a shard up."""
    path = write_recipe(tmp_path)
    for intermediate, is_odd in ((128, False), (125, False), (124, True)):
        write_model(tmp_path / "model", vocabulary=1024, intermediate=intermediate)
        found = found_in(path, zero(3, zero_quantized_weights=True), **NODES)
        assert ("ZR2005" in codes(found)) is is_odd, intermediate


@pytest.mark.parametrize(
    "code, package, keys",
    [
        ("ZR470", "liger_kernel", {"use_liger_kernel": True}),
        ("ZR2003", "comet_ml", zero(2, {"comet": {"enabled": True}})),
        ("ZR2003", "tensorboard", zero(2, {"tensorboard": {"enabled": True}})),
    ],
)
def test_a_package_is_missing_where_it_is_not_installed(found, monkeypatch, code, package, keys):
    for is_missing in (True, False):
        find = partial(find_spec, hidden={package} if is_missing else set())
        monkeypatch.setattr(rules.importlib.util, "find_spec", find)
        monkeypatch.setattr(deepspeed_rules, "find_spec", find)
        assert (code in codes(found(keys))) is is_missing


def test_buckets_are_small_below_25_million_elements(tmp_path):
    path = write_recipe(tmp_path)
    filled = {"reduce_bucket_size": "auto", "stage3_prefetch_bucket_size": "auto"}
    for stage, hidden, count in ((2, 4992, 1), (2, 5000, 0), (3, 5264, 1), (3, 5272, 0), (3, 4992, 2)):
        llama_config(hidden_size=hidden).save_pretrained(tmp_path / "model")
        small = [code for _, code in found_in(path, zero(stage, TAKEN, **filled)) if code == "ZR860"]
        assert len(small) == count, (stage, hidden)


def test_little_is_quantized_below_a_fifth(found, monkeypatch):
    for share, is_little in ((0.199, True), (0.2, False)):
        monkeypatch.setattr(rules, "packed_share", lambda model, share=share: share)
        assert ("ZR474" in codes(found(FOUR | {"random_weights": False}))) is is_little
