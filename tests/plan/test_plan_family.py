"""FSDP2, ZeRO++ and NVMe in a plan: by formulas, said so, with what is theirs and never as something else."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

from tests.helpers.plan_jobs import GB, ROOT, recipe
from zero_recipes.config.settings import Settings
from zero_recipes.core.hardware import gpu_named, gpus
from zero_recipes.plan import cost
from zero_recipes.plan.formulas import family
from zero_recipes.plan.formulas import predict as formulas
from zero_recipes.plan.formulas.predict import predict_by_formulas
from zero_recipes.plan.formulas.shape import shape_of
from zero_recipes.plan.job import Job
from zero_recipes.plan.jobs import job_of, model_config, read_recipe, read_strategies
from zero_recipes.plan.predict import Predictor

PSI = 6_857_302_016  # EleutherAI/pythia-6.9b
MEMBERS = (
    "zero3_infinity",
    "zero3_offload_infinity",
    "zero3_hpz",
    "zero3_qwz",
    "zero3_qgz",
    "zero3_plus_plus",
    "fsdp2",
)


@pytest.fixture(autouse=True)
def in_the_repository(monkeypatch):
    monkeypatch.chdir(ROOT)


def member(name: str, ranks: int = 4, gpus_per_node: int = 2, **values) -> Job:
    own = recipe("pythia")
    ds_config = read_strategies(own, [name])[name]
    made = job_of(own, model_config(own.settings), name, ds_config, ranks, gpus_per_node)
    return replace(made, settings=made.settings.replace(**values))


@pytest.mark.parametrize("name", MEMBERS)
def test_what_is_not_simulated_is_by_formulas_and_says_so(name):
    predicted = Predictor()(member(name))
    assert predicted.source == "formulas" and predicted.notes[0].startswith(f"{name} is by formulas: ")
    assert "by formulas:" not in str(Predictor(quick=True)(member(name)).notes)


def test_fsdp2_is_not_planned_as_ddp():
    """16Ψ/N of model states (docs/strategies.md), not 16Ψ; a run of it would be refused for what it does not need."""
    fsdp, ddp = (predict_by_formulas(member(name, gradient_accumulation_steps=1)) for name in ("fsdp2", "ddp"))
    states = fsdp.model_state_bytes
    assert (states.params, states.grads, states.optimizer) == (PSI, PSI, 2 * PSI)
    assert sum(ddp.model_state_bytes.model_dump().values()) == 16 * PSI
    assert fsdp.allocated_peak_bytes < ddp.allocated_peak_bytes / 3
    assert fsdp.communication_bytes_per_step == {"all_gather": 4 * PSI, "reduce_scatter": 2 * PSI}


def test_fsdp2_keeps_whole_gradients_under_accumulation():
    one, two = (predict_by_formulas(member("fsdp2", gradient_accumulation_steps=steps)) for steps in (1, 2))
    assert two.model_state_bytes.grads - one.model_state_bytes.grads == 2 * PSI
    assert two.communication_bytes_per_step["reduce_scatter"] == 2 * PSI


def test_fsdp2_states_are_those_that_were_measured():
    rows = json.loads((ROOT / "benchmarks" / "results" / "fsdp.json").read_text())["rows"]
    found = next(row for row in rows if row["strategy"] == "fsdp2")
    asked = member("fsdp2", found["world_size"], gradient_accumulation_steps=1)
    shape = replace(shape_of(asked.config, Settings({"use_peft": False})), parameters=found["parameters"])
    states = formulas.model_states(asked, replace(shape, trainable=found["parameters"], dtype="float32"))
    for part in ("params", "grads", "optimizer"):
        assert getattr(states, part) == pytest.approx(found[f"{part}_bytes"], rel=1e-3)


def test_hpz_takes_a_second_copy_of_each_node_and_spares_the_network():
    plain, copied = member("zero3"), member("zero3_hpz")
    assert copied.ds_config["zero_optimization"]["zero_hpz_partition_size"] == 2  # "auto": the GPUs of a machine
    more = [predict_by_formulas(one).model_state_bytes.params for one in (plain, copied)]
    assert more[1] - more[0] == 2 * PSI / 2
    gpu = gpu_named("a100-80gb", gpus())
    waiting = [cost.estimate(one, predict_by_formulas(one), gpu).communicating[1] for one in (plain, copied)]
    assert waiting[1] < waiting[0]


MEASURED = json.loads((ROOT / "benchmarks" / "results" / "zero_family.json").read_text())


@pytest.mark.parametrize("name", ["zero3", "zero3_hpz", "zero3_qwz", "zero3_qgz", "zero3_plus_plus"])
def test_plus_plus_holds_and_moves_what_was_measured(name):
    """Four processes as two nodes of two (docs/strategies.md): weights on a rank with hpZ's second copy, and the bytes
    of a step between nodes; a plan's all-gathers go into the node and out of it."""
    found = MEASURED["plus_plus"][name]
    psi = MEASURED["plus_plus"]["zero3"]["between_nodes_by_collective"]["reduce_scatter"] // 2
    asked = member(name, gradient_accumulation_steps=1)
    shape = replace(shape_of(asked.config, Settings({"use_peft": False})), parameters=psi, trainable=psi)
    assert formulas.model_states(asked, shape).params == found["params_bytes"]
    moved = formulas.communication_bytes(asked, shape)
    outside = moved["all_gather"] * family.gathers_between_nodes(asked) + moved["reduce_scatter"]
    assert outside / (2 * psi) == pytest.approx(found["between_nodes_phi"], rel=0.02)


@pytest.mark.parametrize("name", ["zero2_offload", "zero3_offload"])
def test_offloaded_states_are_those_that_were_measured(name):
    found = MEASURED["offload"][name]
    (held, _), psi = found["model_state_bytes"], found["parameters"]
    asked = member(name, len(found["model_state_bytes"]), gradient_accumulation_steps=1)
    shape = replace(shape_of(asked.config, Settings({"use_peft": False})), parameters=psi, trainable=psi)
    assert formulas.model_states(asked, shape).params == pytest.approx(held["params"], rel=1e-3)
    on_host = formulas._offloaded(asked, shape, "cpu")
    beside = held["offloaded_host"] - on_host  # fp32 gradients of its part, at stage 3 those in 16 bits too
    assert beside / (psi / 2) == pytest.approx(6 if name == "zero3_offload" else 4, rel=0.01)


def test_quantised_collectives_move_what_the_paper_says():
    """Φ = 2Ψ bytes; two passes of the recipe's accumulation gather twice each."""
    moved = {name: predict_by_formulas(member(name)).communication_bytes_per_step for name in ("zero3", *MEMBERS)}
    phi = 2 * PSI
    assert moved["zero3"] == {"all_gather": 4 * phi, "reduce_scatter": 2 * phi}
    assert moved["zero3_qwz"] == {"all_gather": 2 * phi, "reduce_scatter": 2 * phi}
    assert moved["zero3_qgz"] == {"all_gather": 4 * phi, "reduce_scatter": phi / 2}
    assert moved["zero3_plus_plus"] == {"all_gather": 2 * phi, "reduce_scatter": phi / 2}
    one_node = predict_by_formulas(member("zero3_qgz", gpus_per_node=4)).communication_bytes_per_step
    assert one_node == moved["zero3"]  # DeepSpeed quantises gradients between nodes only


def test_infinity_takes_the_disk_and_not_the_hosts_memory():
    """18 bytes a parameter, but for parts below 1 MiB: fp32 master, moments and gradient, and the weight in 16 bits. In
    memory are the gradients in 16 bits and the buffers."""
    states = predict_by_formulas(member("zero3_infinity"))
    assert states.model_state_bytes.offloaded_disk == pytest.approx(18 * PSI / 4, rel=2e-4)
    assert states.nvme_bytes == 2 * states.model_state_bytes.offloaded_disk  # two ranks on each machine
    buffers = states.host_bytes.training - 2 * 2 * PSI // 4
    assert states.model_state_bytes.offloaded_host == 0 and 0 < buffers < 10 * GB


def test_parameters_on_the_disk_leave_the_optimizer_in_the_hosts_memory():
    """12 bytes a parameter and a gradient in fp32 and in 16 bits in memory, 2 on the disk; swap buffers for parameters
    alone."""
    states = predict_by_formulas(member("zero3_offload_infinity"))
    assert states.model_state_bytes.offloaded_disk == pytest.approx(2 * PSI / 4, rel=1e-3)
    assert states.model_state_bytes.offloaded_host == 12 * PSI // 4
    buffers = states.host_bytes.training - 2 * 18 * PSI // 4  # two ranks on each machine
    assert 0 < buffers < 5 * GB


def test_a_recipe_that_asks_for_fsdp_is_planned_so():
    own = read_recipe(ROOT / "recipes" / "pythia.yaml", ["--fsdp", "true"])
    assert read_strategies(own, None) == {"fsdp2": None}


def test_sequences_shared_out_are_counted_so():
    whole, shared = (member("zero3", sequence_parallel_size=size) for size in (1, 2))
    assert Predictor(quick=True)(shared).at_peak["activations"] == pytest.approx(
        Predictor(quick=True)(whole).at_peak["activations"] / 2, rel=1e-6
    )
    assert Predictor()(shared).source == "formulas"


def test_packed_weights_take_nine_sixteenths_of_a_byte():
    """Half a byte and an fp32 scale for 64; the embedding and the head of 50,432 x 4,096 stay in bf16."""
    lora = {"use_peft": True, "lora_target_modules": "all-linear"}
    ends = 2 * 50_432 * 4_096
    norms_and_biases = PSI - ends - 32 * 12 * 4_096**2
    plain, packed = (predict_by_formulas(member("zero2", **lora, load_in_4bit=four)) for four in (False, True))
    spared = plain.model_state_bytes.params - packed.model_state_bytes.params
    assert spared == pytest.approx((2 - 9 / 16) * (PSI - ends - norms_and_biases), rel=1e-3)
    assert Predictor()(member("zero2", **lora, load_in_4bit=True)).source == "formulas"
