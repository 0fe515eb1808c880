"""What the plan recommends, changes and finds the limits of: by rows and predictions made up to order."""

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as draw

from tests.helpers.plan_jobs import GB, H100, every_strategy, job, made_up, recipe, rows_of, strategies
from zero_recipes.checks.rules import processes
from zero_recipes.core.gpus import gpu_named, gpus
from zero_recipes.metrics.schema import PARTS, HostBytes, ReservedRange
from zero_recipes.tools.plan import choose
from zero_recipes.tools.plan import job as plan_job
from zero_recipes.tools.plan.choose import COST_ORDER, ORDER, largest, limits_of, recommend, smallest_change
from zero_recipes.tools.plan.formulas import predict_by_formulas
from zero_recipes.tools.plan.job import ALL, Job, PlanRequest
from zero_recipes.tools.plan.predict import fit_of
from zero_recipes.tools.plan.show import difference

CAPACITY = 80 * GB
OTHERWISE = {"zero2_bf16_states", "zero3_bf16_states", "zero2_autocast"}


# on cards of 80, 24 and 10 GB: just below and above what is usable of each
@pytest.mark.parametrize(
    ("capacity", "peak", "status"),
    [(80, 72.7, "fits"), (80, 72.8, "tight"), (80, 80, "tight"), (80, 80.1, "no"), (24, 20.6, "fits"),
     (24, 20.7, "tight"), (10, 7.2, "fits"), (10, 7.3, "tight"), (10, 10.1, "no")],
)  # fmt: skip
def test_a_status_is_what_a_run_needs_beside_what_is_usable(capacity, peak, status):
    """What nvidia-smi may show decides nothing."""
    for cache in (0, 40 * GB):
        fit = fit_of(made_up(job("zero3"), int(peak * GB), cache=cache), capacity * GB)
        assert (fit.status, fit.runs, fit.is_sure) == (status, status != "no", status == "fits")
        assert fit.margin == capacity * GB - int(peak * GB)


@pytest.mark.parametrize(
    ("source", "peak", "activations", "status"),
    [
        ("engine", 70, 14, "fits"),
        ("engine", 70, 15, "tight"),
        ("formulas", 66, 60, "fits"),
        ("formulas", 67, 0, "tight"),
    ],
)
def test_a_plan_leaves_room_for_its_own_error(source, peak, activations, status):
    """72.72 GB are usable. Of a simulation the activations may be 19 % larger, by formulas the peak 10 %."""
    prediction = made_up(job("zero3"), int(peak * GB), states=0, activations=activations * GB)
    assert fit_of(prediction.model_copy(update={"source": source}), CAPACITY).status == status


def test_without_its_size_host_memory_is_compared_with_what_is_usual():
    offloads = made_up(job("zero3_offload"), 10 * GB)  # 100 GB of host memory
    found = [fit_of(offloads, CAPACITY, host, usual_host=usual * GB) for host, usual in ((None, 99), (None, 100))]
    assert [(fit.status, fit.host_beyond_usual) for fit in found] == [("tight", GB), ("fits", 0)]
    assert fit_of(offloads, CAPACITY, 100 * GB, usual_host=50 * GB).status == "fits"  # known: it counts alone
    assert fit_of(offloads, CAPACITY, 99 * GB, usual_host=500 * GB).status == "no"


@pytest.mark.parametrize(
    ("gpu", "count", "usual"),
    [("h100-80gb", 8, 2000), ("h100-80gb", 2, 500), ("h100-80gb", 1, 250), ("rtx4090-24gb", 1, 128),
     ("rtx4090-24gb", 8, 128)],
)  # fmt: skip
def test_a_part_of_a_server_has_its_share_of_the_memory(gpu, count, usual):
    assert gpu_named(gpu, gpus()).usual_host_bytes(count) == usual * GB


def test_what_needs_more_host_memory_than_usual_is_chosen_where_nothing_else_runs():
    plain, offload, nvme = rows_of({"zero3": (90, 1), "zero3_offload": (20, 5), "zero3_infinity": (5, 9)})
    beyond = replace(offload, fit=replace(offload.fit, status="tight", host_beyond_usual=GB))
    assert recommend([plain, offload, nvme], H100).job.strategy == "zero3_offload"
    assert recommend([plain, beyond, nvme], H100).job.strategy == "zero3_infinity"
    assert recommend([plain, beyond], H100).job.strategy == "zero3_offload"


def test_memory_and_nvme_of_the_host_count_where_they_are_known():
    offloads = made_up(job("zero3_offload"), 10 * GB)  # 100 GB of host memory
    assert fit_of(offloads, CAPACITY).status == fit_of(offloads, CAPACITY, 100 * GB).status == "fits"
    short = fit_of(offloads, CAPACITY, 99 * GB)
    assert (short.status, short.host_lacks, short.margin) == ("no", GB, 70 * GB)
    swaps = offloads.model_copy(update={"nvme_bytes": 50 * GB})
    assert fit_of(swaps, CAPACITY, nvme=50 * GB).status == "fits"
    assert fit_of(swaps, CAPACITY, nvme=49 * GB).nvme_lacks == GB
    resumed = made_up(job("zero2"), 10 * GB)
    resumed = resumed.model_copy(update={"host_bytes": HostBytes(load=0, training=0, resume=60 * GB)})
    for host, lacks in ((None, 0), (60 * GB, 0), (50 * GB, 10 * GB)):
        fit = fit_of(resumed, CAPACITY, host)
        assert (fit.status, fit.host_lacks, fit.resume_lacks) == ("fits", 0, lacks)  # the run itself needs none of it


# the rules, in their order: {strategy: (GB on an H100 of 85.5, seconds of a step)} on 16 GPUs

CHOICES = {
    "ddp": {"ddp": (58, 1), "zero0": (50, 1), "zero2": (20, 1), "zero3": (20, 1)},
    "zero0": {"ddp": (80, 1), "zero0": (58, 1), "zero3": (20, 1)},
    "zero1": {"ddp": (80, 1), "zero1": (40, 1), "zero3": (20, 1)},
    "zero2": {"zero1": (50, 1), "zero2": (58, 1), "zero3_offload": (10, 1), "zero2_bf16_states": (10, 1)},
    "zero3": {"zero2": (80, 1), "zero3": (58, 1), "fsdp2": (20, 1), "zero3_hpz": (58, 0.99)},
    "zero3_hpz": {"zero2": (70, 9), "zero3": (58, 9), "zero3_hpz": (62, 5), "zero3_plus_plus": (62, 4.9)},
    "zero3_plus_plus": {"zero3": (58, 9), "zero3_hpz": (62, 5), "zero3_plus_plus": (62, 1), "zero3_qwz": (58, 4)},
    "zero3_qwz": {"zero3": (58, 9), "zero3_plus_plus": (90, 1), "zero3_qwz": (58, 4), "zero3_qgz": (58, 5)},
    "zero3_qgz": {"zero3": (58, 9), "zero3_qgz": (58, 5)},
    "fsdp2": {"ddp": (90, 1), "fsdp2": (58, 1)},
    "zero2_offload": {"zero3": (90, 1), "zero2_offload": (10, 5), "zero3_infinity": (5, 1)},
    "zero3_offload": {"zero2_offload": (90, 1), "zero3_offload": (58, 5)},
    "zero3_infinity": {"zero3_offload": (90, 1), "zero3_infinity": (5, 9)},
    "zero3_offload_infinity": {"zero3_offload_infinity": (5, 9), "zero3_infinity": (5, 9)},
    "zero2_bf16_states": {"zero2_bf16_states": (10, 1)},
    "zero3 which fits for sure": {"zero2": (80, 1), "zero3": (75, 2)},
    "zero2 which may run out": {"zero2": (80, 1), "zero3_offload": (58, 5)},
}


@pytest.mark.parametrize("wanted", CHOICES)
def test_each_rule_chooses_its_strategy(wanted):
    rows = rows_of(CHOICES[wanted], ranks=16)
    advice = recommend(rows, H100)
    assert advice.job.strategy == wanted.split()[0]
    beside = set() if wanted in OTHERWISE else OTHERWISE & set(CHOICES[wanted])
    assert {row.job.strategy for row in advice.other_arithmetic} == beside


def test_the_rules_have_every_strategy_once():
    assert sorted(ORDER) == sorted(set(ALL) - OTHERWISE) and set(CHOICES) >= set(ORDER)


def test_where_nothing_fits_the_change_of_all_rows_that_costs_least_is_recommended():
    def predict(asked):
        helped = asked.strategy == "zero3" and asked.recomputes
        return made_up(asked, (50 if helped else 90) * GB)

    names = {name: strategies()[name] for name in ("zero2", "zero3")}
    request = PlanRequest(recipe("pythia"), [], {}, names, [2], 8, H100)
    found = recommend(choose.rows_of(request, list(map(job, names)), predict), H100)
    assert (
        found.job.strategy == "zero3" and difference(found.change.start, found.change.job) == "activation checkpointing"
    )
    assert found.chosen is None


# changes: `need` says how many GB a job takes; every job that is predicted is seen


def change_for(need, start: Job, seen: list | None = None, states=lambda job: 0, phase="backward", named=None, **more):
    def predict(asked: Job):
        if seen is not None:
            seen.append(asked)
        return made_up(asked, need(asked) * GB, states(asked) * GB, phase)

    return smallest_change(start, CAPACITY, predict, named or strategies(), **more)


def batch(asked: Job) -> int:
    return asked.settings.per_device_train_batch_size


def offloads_to_host(asked: Job) -> bool:
    return asked.strategy.endswith("_offload")


RECOMPUTES, BATCHES = {"activation_checkpointing"}, {"per_device_train_batch_size", "gradient_accumulation_steps"}


@pytest.mark.parametrize(
    ("need", "costliest", "words", "changed"),
    [
        (lambda j: 90 - 20 * (j != job("zero1")), "checkpointing", "activation checkpointing", RECOMPUTES),
        (lambda j: 50 + 10 * batch(j), "micro batch", "micro batches of 2 with 4 accumulation steps", BATCHES),
        (lambda j: 65 + 10 * batch(j) - 5 * j.recomputes, "micro batch",
         "activation checkpointing and micro batches of 1 with 8 accumulation steps", RECOMPUTES | BATCHES),
        (lambda j: 90 - 20 * (j.strategy == "zero2"), "stage", "zero2", {"deepspeed"}),
        (lambda j: 90 - 20 * offloads_to_host(j), "offload", "zero2_offload", {"deepspeed"}),
        (lambda j: 90 - 20 * j.settings.use_peft, "LoRA", "LoRA (use_peft: true)", {"use_peft", "deepspeed"}),
    ],
)  # fmt: skip
def test_the_change_that_costs_least_is_found(need, costliest, words, changed):
    found = change_for(need, job("zero1"))
    assert (found.costliest, difference(found.start, found.job)) == (costliest, words)
    assert found.fit.status == "fits" and found.costliest in COST_ORDER
    was, now = (asked.settings.as_dict() for asked in (job("zero1"), found.job))
    assert {key for key in was if was[key] != now[key]} == changed
    batches = [each["per_device_train_batch_size"] * each["gradient_accumulation_steps"] for each in (was, now)]
    assert batches[0] == batches[1]


def test_states_that_are_too_large_are_not_tried_with_smaller_activations():
    seen, in_step = [], []
    need = lambda j: 90 - 20 * j.settings.use_peft  # noqa: E731
    found = change_for(need, job("zero1"), seen, states=lambda j: need(j) - 5)
    assert difference(found.start, found.job) == "LoRA (use_peft: true)" and not any(
        j.recomputes or batch(j) < 4 for j in seen
    )
    change_for(lambda j: 79, job("zero1"), in_step, phase="step")  # tight, whatever is recomputed
    assert not any(j.recomputes for j in in_step)


def test_a_change_is_to_nothing_that_does_not_help_cannot_run_or_trains_otherwise():
    """From stage 1: not to hpZ on one node, not to NVMe that nobody named, not to 16-bit states."""
    seen, on_disk, offload = [], [], []
    assert change_for(lambda j: 500, job("zero1", 8), seen, named=every_strategy()) is None
    assert {j.strategy for j in seen} == {"zero1", "zero2", "zero3", "zero2_offload", "zero3_offload"}
    change_for(lambda j: 500, job("zero1", 8), on_disk, named=every_strategy(), nvme=1000 * GB)
    assert {"zero3_infinity", "zero3_offload_infinity"} <= {j.strategy for j in on_disk}
    assert change_for(lambda j: 90, job("zero2_offload"), offload) is None
    assert all(offloads_to_host(j) for j in offload if j.zero_stage == 2)
    host = change_for(lambda j: 10 if offloads_to_host(j) or j.settings.use_peft else 90, job("zero3"), host=99 * GB)
    assert difference(host.start, host.job) == "LoRA (use_peft: true)"


@settings(max_examples=300)
@given(limit=draw.integers(0, 120), most=draw.integers(1, 100), start=draw.integers(0, 130))
def test_a_guess_changes_only_how_many_sizes_are_tried(limit, most, start):
    tried = []
    assert largest(lambda size: tried.append(size) or size <= limit, most, start) == min(limit, most)
    assert all(1 <= size <= most for size in tried) and len(tried) <= 16


def test_what_is_just_below_the_limit_fits_and_what_is_above_does_not():
    guess = lambda j: made_up(j, 81 * GB)  # noqa: E731
    most = limits_of(job("zero3"), H100.memory_bytes, predict_by_formulas, guess).micro_batch_size
    found = [predict_by_formulas(job("zero3", per_device_train_batch_size=size)) for size in (most, most + 1)]
    assert most > 4 and [fit_of(one, H100.memory_bytes).is_sure for one in found] == [True, False]


# in place of what is chosen: `need` says how many GB a job takes


def better_than(start: Job, need, others=(), capacity=85, **more):
    gpu = H100.model_copy(update={"memory_mib": capacity * GB // 2**20})
    request = PlanRequest(recipe("pythia"), [], {}, strategies(), [start.world_size], 8, gpu, **more)
    predict = lambda asked: of_formulas(asked, need(asked) * GB)  # noqa: E731
    rows = [choose.make_row(request, other, predict) for other in others]
    return choose.better(request, choose.make_row(request, start, predict), rows, predict, predict)


def better_row(start: Job, need) -> choose.Row:
    request = PlanRequest(recipe("pythia"), [], {}, strategies(), [start.world_size], 8, H100)
    return choose.make_row(request, start, lambda asked: of_formulas(asked, need(asked) * GB))


def of_formulas(asked: Job, low: int):
    """With the work and the volume of the job, which decide about its time; without an error of what it needs."""
    found = predict_by_formulas(asked)
    reserved = ReservedRange(low=low, high=low * 4 // 3)
    needs = {"allocated_peak_bytes": low, "reserved_bytes": reserved, "at_peak": dict.fromkeys(PARTS, 0)}
    return found.model_copy(update={"source": "engine"} | needs)


def test_the_largest_micro_batch_that_fits_for_sure_replaces_accumulation():
    start = job("zero2", per_device_train_batch_size=1, gradient_accumulation_steps=8)
    found = better_than(start, lambda j: 50 + 6 * batch(j))  # 74 GB with 4, of 77 that are usable
    assert (batch(found.job), found.job.settings.gradient_accumulation_steps) == (4, 2)
    assert found.fit.status == "fits"
    assert found.speed.tokens_per_second < better_than(start, batch).speed.tokens_per_second
    assert batch(better_than(start, batch).job) == 8
    assert better_than(start, lambda j: 80) is None  # may run out of memory, and so does all that is no slower
    assert better_than(job("zero2", gradient_accumulation_steps=1), batch) is None


def test_no_larger_micro_batch_of_packs_is_proposed_that_check_warns_about():
    packs = {"packing": True, "max_length": 2048, "per_device_train_batch_size": 1, "gradient_accumulation_steps": 4}
    assert better_than(job("zero2", **packs, attn_implementation="eager"), batch) is None
    assert batch(better_than(job("zero2", **packs, attn_implementation="flash_attention_2"), batch).job) == 4


def test_what_fits_for_sure_is_taken_instead_of_what_may_run_out_at_nearly_the_same_time():
    """First with smaller micro batches, which train the same, then QLoRA instead of LoRA."""
    long = {"max_length": 4096, "per_device_train_batch_size": 4, "gradient_accumulation_steps": 1, "use_peft": True}
    start = job("ddp", 1, **long)
    four_bits = start.changed(load_in_4bit=True)
    need = lambda j: 10 if j.quantizes else 74 + 2 * batch(j)  # noqa: E731
    found = better_than(start, need, [four_bits])
    assert (batch(found.job), found.job.quantizes) == (1, False) and found.speed.middle < 1.1 * better_than(
        start, need
    ).speed.middle
    assert better_than(start, lambda j: 10 if j.quantizes else 80, [four_bits]).job == four_bits
    assert better_than(start, lambda j: 80, [four_bits]) is None


def test_where_nobody_asked_for_a_batch_the_smallest_that_is_as_fast_as_any_is_proposed():
    start = job("zero3_offload", 8, per_device_train_batch_size=1, gradient_accumulation_steps=1, max_length=2048)
    need = lambda j: 10 + 4 * batch(j)  # noqa: E731
    assert better_than(start, need) is None
    found = better_than(start, need, batch_is_free=True)
    assert batch(found.job) in (8, 16) and found.job.settings.gradient_accumulation_steps == 1
    assert found.seconds_a_token < 0.5 * better_row(start, need).seconds_a_token
    assert (
        better_than(start, lambda j: 10 + 70 * (batch(j) > 2), batch_is_free=True).job.settings.as_dict()[
            "per_device_train_batch_size"
        ]
        == 2
    )


def test_at_nearly_the_price_the_gpus_are_taken_on_which_it_fits_for_sure():
    """On 8 GPUs a step has four times the tokens of one on 2: at 1 s its tokens cost the same."""
    for need, seconds, wanted in ((80, 1.05, 8), (80, 1.3, 2), (70, 1.05, 2), (70, 0.8, 8)):
        rows = [*rows_of({"zero3": (need, 1)}, ranks=2), *rows_of({"zero2": (20, seconds)}, ranks=8)]
        found = choose.best_machine(choose.on_each_machine(rows, H100))
        assert found.job.world_size == wanted


def test_one_gpu_is_not_advised_to_share_with_itself():
    """Not even where a stage leaves more room: only where nothing else has any."""
    assert recommend(rows_of({"ddp": (75, 1), "zero3": (20, 1)}, ranks=1), H100).job.strategy == "single"
    assert recommend(rows_of({"ddp": (84, 1), "zero3": (20, 1)}, ranks=1), H100).job.strategy == "zero3"
    assert recommend(rows_of({"ddp": (80, 1), "zero3": (20, 1)}), H100).job.strategy == "zero3"


@pytest.mark.parametrize("strategy", ["zero1", "zero2", "zero3", "zero0", "zero2_offload", "ddp"])
def test_what_the_plan_calls_useless_is_what_check_warns_about(strategy):
    for ranks in (1, 2):
        asked = job(strategy, ranks)
        codes = {found.code for found in processes(plan_job._run_of(asked))}
        assert plan_job.shares_nothing(asked) == ("ZR138" in codes)


def test_alone_frozen_weights_are_planned_in_the_dtype_of_the_products():
    def planned(*overrides: str) -> Job:
        own = recipe("pythia", *overrides)
        request = PlanRequest(own, [], plan_job.model_config(own.settings), {"ddp": None}, [1], 8, H100)
        (asked,), _ = request.jobs()
        return asked

    lora = ("--use_peft", "true", "--lora_target_modules", "all-linear")
    assert planned(*lora).settings.dtype == "bfloat16"
    assert planned(*lora, "--dtype", "float32").settings.dtype == planned().settings.dtype == "float32"
