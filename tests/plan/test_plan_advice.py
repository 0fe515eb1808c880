"""What fits, changes and limits of the plan: tried with predictions made up to order, and refusals of its inputs."""

from __future__ import annotations

import json
from dataclasses import replace
from types import SimpleNamespace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as draw

from tests.helpers.plan_jobs import GB, ROOT, job, made_up, recipe, strategies
from zero_recipes.core.findings import Finding, Refusal
from zero_recipes.core.hardware import gpu_named, gpus
from zero_recipes.metrics.prediction import HostBytes
from zero_recipes.plan.advice import MILDNESS, _largest, largest_micro_batch, longest_sequence, smallest_change
from zero_recipes.plan.fit import fit_of
from zero_recipes.plan.formulas.predict import predict_by_formulas
from zero_recipes.plan.job import Job
from zero_recipes.plan.jobs import model_config, read_recipe, read_strategies, run_command
from zero_recipes.plan.messages import change_in_words, resume_too_large

CAPACITY = 80 * GB


# what fits


@pytest.mark.parametrize(
    ("peak", "overhead", "status", "margin"),
    [(70, 9, "fits", 1), (70, 10, "fits", 0), (70, 11, "tight", -1), (80, 5, "tight", -5), (81, 0, "no", -1)],
)
def test_a_status_is_that_of_the_reserved_range(peak, overhead, status, margin):
    fit = fit_of(made_up(job("zero3"), peak * GB, overhead=overhead * GB), CAPACITY)
    assert (fit.status, fit.margin) == (status, margin * GB)


def test_a_host_that_is_too_small_is_no_place_for_offload():
    offloads = made_up(job("zero3_offload"), 10 * GB)  # 100 GB of host memory
    assert fit_of(offloads, CAPACITY).status == fit_of(offloads, CAPACITY, 100 * GB).status == "fits"
    short = fit_of(offloads, CAPACITY, 99 * GB)
    assert (short.status, short.host_lacks, short.margin) == ("no", GB, 70 * GB)
    predict = lambda j: made_up(j, (10 if offloads_to_host(j) or j.world_size == 4 else 90) * GB)  # noqa: E731
    assert smallest_change(job("zero3"), CAPACITY, predict, strategies(), 100 * GB).harshest == "offload"
    assert change_in_words(smallest_change(job("zero3"), CAPACITY, predict, strategies(), 99 * GB)) == "4 GPUs"


def test_a_checkpoint_that_no_machine_could_read_is_said_and_refuses_nothing():
    prediction = made_up(job("zero2"), 10 * GB)
    prediction = prediction.model_copy(update={"host_bytes": HostBytes(load=0, training=0, resume=60 * GB)})
    for host, lacks in ((None, 0), (60 * GB, 0), (50 * GB, 10 * GB)):
        fit = fit_of(prediction, CAPACITY, host)
        assert (fit.status, fit.host_lacks, fit.resume_lacks) == ("fits", 0, lacks)
        message = resume_too_large(SimpleNamespace(fit=fit, prediction=prediction, job=job("zero2")))
        assert bool(message) == bool(lacks) and (not lacks or ("zero2" in message and "10" in message))


def test_an_evaluation_that_is_too_large_takes_smaller_batches_and_nothing_else():
    start = job("zero3", per_device_eval_batch_size=64, per_device_train_batch_size=4)

    def predict(asked: Job):
        evaluated = asked.settings.per_device_eval_batch_size
        return made_up(asked, (90 if evaluated > 4 else 70) * GB, phase="evaluation")

    change = smallest_change(start, CAPACITY, predict, strategies())
    assert change.harshest == "evaluation" and change_in_words(change) == "evaluation in batches of 4"
    assert change.job.settings.as_dict() == start.settings.as_dict() | {"per_device_eval_batch_size": 4}
    assert "--per_device_eval_batch_size 4" in run_command(ROOT, recipe("pythia").settings, [], change.job)


# changes: `need` says how many GB a job takes; every job that is predicted is seen


def change_for(need, start: Job, seen: list | None = None, states=lambda job: 0, phase="backward"):
    def predict(asked: Job):
        if seen is not None:
            seen.append(asked)
        return made_up(asked, need(asked) * GB, states(asked) * GB, phase)

    return smallest_change(start, CAPACITY, predict, strategies())


def recomputes(asked: Job) -> bool:
    return asked.recomputes


def batch(asked: Job) -> int:
    return asked.settings.per_device_train_batch_size


def offloads_to_host(asked: Job) -> bool:
    return asked.strategy.endswith("_offload")


@pytest.mark.parametrize(
    ("need", "harshest", "words"),
    [
        (lambda j: 90 - 20 * recomputes(j), "checkpointing", "activation checkpointing"),
        (lambda j: 60 + 10 * batch(j), "micro batch", "micro batches of 2 with 4 accumulations"),
        (
            lambda j: 75 + 10 * batch(j) - 5 * recomputes(j),
            "micro batch",
            "activation checkpointing and micro batches of 1 with 8 accumulations",
        ),
        (lambda j: 90 - 20 * (j.strategy == "zero2"), "stage", "zero2"),
        (
            lambda j: 100 - 15 * (j.strategy == "zero3") - 10 * recomputes(j),
            "stage",
            "zero3 and activation checkpointing",
        ),
        (lambda j: 90 - 20 * offloads_to_host(j), "offload", "zero2_offload"),
        (lambda j: 90 - 20 * (j.strategy == "zero3_offload"), "offload", "zero3_offload"),
        (lambda j: 90 - 20 * j.settings.use_peft, "LoRA", "LoRA (use_peft: true)"),
        (lambda j: 320 // j.world_size, "GPUs", "4 GPUs"),
        (lambda j: 90 - 20 * (j.strategy == "zero3" and j.world_size == 16), "GPUs", "16 GPUs under zero3"),
    ],
)
def test_the_mildest_change_is_found(need, harshest, words):
    found = change_for(need, job("zero1"))
    assert (found.harshest, change_in_words(found)) == (harshest, words)
    assert found.fit.status == "fits"


def test_a_milder_change_goes_before_a_harsher_one():
    everything_helps = change_for(lambda j: 90 - 20 * (j != job("zero1")), job("zero1"))
    assert everything_helps.harshest == "checkpointing"
    assert [MILDNESS.index(name) for name in MILDNESS] == sorted(range(len(MILDNESS)))


def test_a_change_keeps_the_global_batch_and_all_that_it_does_not_name():
    start = job("zero1")
    found = change_for(lambda j: 60 + 10 * batch(j), start)
    before, after = (
        j.settings.per_device_train_batch_size * j.settings.gradient_accumulation_steps for j in (start, found.job)
    )
    assert before == after == 8
    was, now = start.settings.as_dict(), found.job.settings.as_dict()
    changed = {key for key in was if was[key] != now[key]}
    assert changed == {"per_device_train_batch_size", "gradient_accumulation_steps"}
    more = change_for(lambda j: 320 // j.world_size, start)
    assert more.job.world_size == 4 and more.job.settings.gradient_accumulation_steps == 1
    assert start.settings.gradient_accumulation_steps == 2  # the job that was asked about is not touched


def test_more_gpus_that_a_global_batch_cannot_be_divided_over_are_no_change():
    fixed = replace(job("zero1"), settings=job("zero1").settings.replace(**{"global_batch_size": 16}))
    found = change_for(lambda j: 2600 // j.world_size, fixed)
    assert found is None  # 33 GPUs and more would be needed, and 16 sequences go round 4 at a micro batch of 4
    free = change_for(lambda j: 2600 // j.world_size, job("zero1"))
    assert free.job.world_size == 64


def test_states_that_are_too_large_are_not_tried_with_smaller_activations():
    seen = []
    found = change_for(lambda j: 300 // j.world_size, job("zero1"), seen, states=lambda j: 290 // j.world_size)
    assert change_in_words(found) == "4 GPUs"
    assert not any(recomputes(j) or batch(j) < 4 for j in seen)
    in_step = []
    change_for(lambda j: 300 // j.world_size, job("zero1"), in_step, phase="step")
    assert not any(recomputes(j) for j in in_step)


def test_ddp_is_never_spread_over_more_gpus_and_offload_never_taken_back():
    seen = []
    assert change_for(lambda j: 90, job("ddp"), seen) is None
    assert all(j.zero_stage for j in seen if j.world_size > 2)
    seen = []
    assert change_for(lambda j: 90, job("zero2_offload"), seen) is None
    assert all(offloads_to_host(j) for j in seen if j.world_size == 2 and j.zero_stage == 2)


def test_a_change_that_cannot_be_predicted_is_passed_over():
    def predict(asked: Job):
        if asked.settings.use_peft:
            raise Refusal([Finding("ZR000", "no target modules", "PEFT does not know the architecture.", "Name them.")])
        return made_up(asked, (50 if asked.world_size == 8 else 90) * GB)

    assert change_in_words(smallest_change(job("zero3_offload"), CAPACITY, predict, strategies())) == "8 GPUs"


def test_hpz_is_found_as_a_change_with_the_ranks_of_a_node():
    """Its "auto" is filled in, as for a job that is requested."""
    named = {"zero2": strategies()["zero2"], "zero3_hpz": json.loads((ROOT / "ds_configs/zero3_hpz.json").read_text())}
    start = job("zero2", 4, gpus_per_node=2)
    found = smallest_change(start, CAPACITY, lambda j: made_up(j, (90 - 20 * (j.zero_stage == 3)) * GB), named)
    assert change_in_words(found) == "zero3_hpz" and found.job.zero.hpz_partition_size == 2


def test_where_every_strategy_offloads_more_gpus_are_tried_still():
    named = {"zero2_offload": strategies()["zero2_offload"]}
    found = smallest_change(job("zero2_offload"), CAPACITY, lambda j: made_up(j, 320 // j.world_size * GB), named)
    assert change_in_words(found) == "4 GPUs"


def test_the_reference_recipe_by_formula():
    """What recipes/pythia.yaml says in its header: two 80 GB cards take stage 3, and no lower one does."""
    capacity = gpu_named("h100-80gb", gpus()).memory_bytes
    statuses = {name: fit_of(predict_by_formulas(job(name)), capacity).status for name in strategies()}
    assert statuses["zero3"] == "fits" and "fits" not in {statuses[name] for name in ("ddp", "zero0", "zero1", "zero2")}
    assert smallest_change(job("zero0"), capacity, predict_by_formulas, strategies()).job.strategy == "zero3"


# limits


@settings(deadline=None, derandomize=True)
@given(limit=draw.integers(0, 5000))
def test_the_largest_micro_batch_is_found_exactly(limit):
    found = largest_micro_batch(job("zero3"), CAPACITY, lambda j: made_up(j, (80 if batch(j) <= limit else 81) * GB))
    assert found == min(limit, 4096)


@settings(deadline=None, derandomize=True, max_examples=300)
@given(limit=draw.integers(0, 120), most=draw.integers(1, 100), start=draw.integers(0, 130))
def test_a_guess_changes_only_how_many_sizes_are_asked_about(limit, most, start):
    asked = []
    found = _largest(lambda size: asked.append(size) or size <= limit, most, start)
    assert found == min(limit, most)
    assert all(1 <= size <= most for size in asked) and len(asked) <= 16


def test_near_a_good_guess_few_sizes_are_asked_about():
    asked = []
    assert _largest(lambda size: asked.append(size) or size <= 1000, 4096, 1000) == 1000
    assert len(asked) <= 10


@pytest.mark.parametrize(("limit", "found"), [(63, 0), (64, 64), (1000, 960), (2048, 2048), (10**9, 2048)])
def test_the_longest_sequence_is_a_multiple_of_64_within_the_models_positions(limit, found):
    predict = lambda j: made_up(j, (80 if j.settings.max_length <= limit else 81) * GB)  # noqa: E731
    assert longest_sequence(job("zero3"), CAPACITY, predict) == found


def test_what_is_just_below_the_limit_fits_and_what_is_above_does_not():
    capacity = gpu_named("h100-80gb", gpus()).memory_bytes
    most = largest_micro_batch(job("zero3"), capacity, predict_by_formulas)
    statuses = [
        fit_of(predict_by_formulas(job("zero3", per_device_train_batch_size=size)), capacity).status
        for size in (most, most + 1)
    ]
    assert most > 4 and statuses[0] == "fits" and statuses[1] != "fits"


# what is requested: models, strategies


def test_a_model_comes_from_the_project_a_folder_or_the_cache_and_else_is_refused(tmp_path, monkeypatch):
    settings = recipe("pythia").settings
    assert model_config(settings)["num_hidden_layers"] == 32
    (tmp_path / "config.json").write_text('{"model_type": "llama"}')
    assert model_config(settings.replace(**{"model_name_or_path": str(tmp_path)})) == {"model_type": "llama"}
    for bad in (
        {"model_revision": "step1000"},
        {"model_name_or_path": "nobody/nothing"},
        {"model_name_or_path": "./no/such/folder"},
    ):
        with pytest.raises(Refusal, match="ZR804") as refusal:
            model_config(settings.replace(**bad))
        assert "zero-recipes fetch" in refusal.value.fix
    monkeypatch.setattr("huggingface_hub.try_to_load_from_cache", lambda *a, **k: str(tmp_path / "config.json"))
    assert model_config(settings.replace(**{"model_name_or_path": "nobody/nothing"})) == {"model_type": "llama"}
    with pytest.raises(Refusal, match="ZR803"):
        model_config(settings.replace(**{"model_name_or_path": None}))


def test_strategies_are_files_or_the_recipes_own(monkeypatch):
    monkeypatch.chdir(ROOT)
    found = read_strategies(recipe("pythia"), None)
    assert list(found) == [
        "ddp", "zero0", "zero1", "zero2", "zero3", "zero2_offload", "zero3_offload"
    ]  # fmt: skip
    assert found["ddp"] is None and found["zero3"]["zero_optimization"]["stage"] == 3
    own = recipe("pythia", "--deepspeed", "ds_configs/zero2_offload.json")
    assert list(read_strategies(own, None)) == ["zero2_offload"]
    with pytest.raises(Refusal, match="ZR801"):
        read_strategies(own, ["zero3"])
    with pytest.raises(Refusal, match=r"zero9 .ZR802") as refusal:
        read_strategies(recipe("pythia"), ["zero9"])
    assert "zero3_offload" in refusal.value.fix


def test_a_global_batch_is_divided_for_each_number_of_gpus(tmp_path):
    assert job("zero2", 1, "tiny").settings.gradient_accumulation_steps == 2  # 16 = 2 x 8 x 1
    assert job("zero2", 2, "tiny").settings.gradient_accumulation_steps == 1
    with pytest.raises(Refusal, match=r"global_batch_size 16 .*ZR121"):
        job("zero2", 4, "tiny")


def test_an_unknown_key_is_refused():
    with pytest.raises(Refusal, match=r"max_lenght.*ZR103"):
        read_recipe(ROOT / "recipes" / "pythia.yaml", ["--max_lenght", "3"])


# hardware


def test_every_gpu_has_a_source_and_dense_figures():
    known = gpus()
    assert len(known) >= 9 and all(gpu.source for gpu in known.values())
    assert known["h100-80gb"].memory_bytes == 81559 * 2**20
    # no card of the table does more than 1.2 TFLOP/s for each GB/s of its memory, dense; sparse figures would
    assert all(gpu.bf16_tflops / gpu.memory_gb_s < 0.5 for gpu in known.values())


def test_gpus_are_found_by_the_beginning_of_their_name():
    known = gpus()
    assert gpu_named("H200", known).name == "h200-141gb"
    assert gpu_named("rtx 4090", known).name == "rtx4090-24gb"
    with pytest.raises(Refusal, match=r"a100-40gb and a100-80gb .*ZR807"):
        gpu_named("a100", known)
    with pytest.raises(Refusal, match="ZR807") as refusal:
        gpu_named("v100", known)
    assert "--hardware" in refusal.value.fix


MINE = """
v100-32gb: {memory_mib: 32768, bf16_tflops: 100, memory_gb_s: 900, link_gb_s: 150, host_gb_s: 16, network_gb_s: 12.5,
            achievable: [0.3, 0.4], source: mine}
"""


def test_a_users_file_adds_and_replaces(tmp_path):
    mine = tmp_path / "mine.yaml"
    mine.write_text(MINE + MINE.replace("v100-32gb", "h100-80gb"))
    known = gpus(mine)
    assert known["v100-32gb"].memory_bytes == 32 * 2**30 and known["h100-80gb"].bf16_tflops == 100
    assert "a100-80gb" in known and gpus()["h100-80gb"].bf16_tflops == 989


@pytest.mark.parametrize(
    ("old", "new", "says"),
    [
        ("memory_mib: 32768", "memory_mib: 0", "memory_mib: Input should be greater than 0"),
        ("memory_mib: 32768, ", "", "memory_mib: Field required"),
        ("host_gb_s", "host_gbs", "host_gb_s: Field required"),
        ("achievable: [0.3, 0.4]", "achievable: [0.4, 0.3]", "achievable is"),
        ("achievable: [0.3, 0.4]", "achievable: [0.3, 40]", "achievable.1: Input should be less than or equal to 1"),
        ("source: mine", "source: mine, price: 2", "price: Extra inputs"),
        (MINE, "- a\n- b\n", "is not a mapping"),
        (MINE, "v100: 32", "memory_mib: Field required"),
        (MINE, "v100: [", "is not YAML"),
    ],
)
def test_a_faulty_hardware_file_is_refused_by_its_key(tmp_path, old, new, says):
    mine = tmp_path / "mine.yaml"
    mine.write_text(MINE)
    gpus(mine)
    mine.write_text(MINE.replace(old, new))
    with pytest.raises(Refusal) as refusal:
        gpus(mine)
    assert says in refusal.value.what


def test_a_missing_hardware_file_is_refused(tmp_path):
    with pytest.raises(Refusal, match="ZR811"):
        gpus(tmp_path / "none.yaml")
