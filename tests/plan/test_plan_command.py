"""`zero-recipes plan` through its main: tables, JSON, picture, recommendation, cost, calibration, and its refusals."""

from __future__ import annotations

import json
import math
import struct
from dataclasses import replace

import pytest
from packaging.specifiers import SpecifierSet

from tests.helpers.plan_jobs import GB, ROOT, job, made_up, recipe, strategies
from zero_recipes.cli import main as cli
from zero_recipes.core.hardware import gpu_named, gpus
from zero_recipes.libs import versions
from zero_recipes.plan import cli as command
from zero_recipes.plan import cost, messages, overlap
from zero_recipes.plan import rows as planning
from zero_recipes.plan.formulas.predict import predict_by_formulas
from zero_recipes.plan.jobs import run_command
from zero_recipes.plan.predict import Predictor
from zero_recipes.plan.recommend import Recommendation, recommend, rule_of_thumb
from zero_recipes.plan.simulator import parent as simulation

RECIPE = "recipes/pythia.yaml"
H100 = gpu_named("h100-80gb", gpus())


@pytest.fixture(autouse=True)
def at_home(monkeypatch):
    monkeypatch.chdir(ROOT)
    monkeypatch.setenv("COLUMNS", "200")


def plan(capsys, *options: str, name: str = RECIPE, gpus: str = "2", gpu: str = "h100-80gb") -> str:
    assert cli.main(["plan", name, "--gpus", gpus, "--gpu", gpu, "--quick", *options]) == 0
    return capsys.readouterr().out


def refused(capsys, *options: str) -> str:
    assert cli.main(["plan", *options]) == 2
    said = capsys.readouterr().err
    assert "why:" in said and "fix:" in said
    return said


def test_the_table_says_what_fits_and_what_to_run(capsys):
    said = plan(capsys)
    lines = {line.split()[0]: line.split()[1] for line in said.splitlines() if line.split()[1:2]}
    assert lines["zero3"] == "fits" and lines["zero0"] == "no" and lines["zero3_offload"] == "fits"
    assert "Recommended: zero3" in said
    assert f"accelerate_configs/zero3.yaml --num_processes 2 run_sft.py {RECIPE}\n" in said
    assert "A common rule: ddp for a model of 6.86 billion parameters" in said and "does not fit" in said
    assert "zero0: the mildest fix: zero3" in said
    assert "torch.compile" in said and "quantised" in said and "textbook formulas" in said


def test_a_narrow_terminal_loses_nothing(capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    said = plan(capsys)
    assert all(header in said for header in ("Margin", "Optimizer", "Reserved", "Host", "Disk", "Tokens/s"))
    assert all(len(line) <= 80 for line in said.splitlines() if "run_sft.py" not in line)


def test_json_is_all_that_is_printed_and_holds_every_figure(capsys):
    document = json.loads(plan(capsys, "--json", "--price", "2", "--max"))
    rows = {row["strategy"]: row for row in document["rows"]}
    assert list(rows) == list(strategies())
    three = rows["zero3"]
    formulas = predict_by_formulas(job("zero3")).model_dump()
    assert three["prediction"] == formulas | {"seconds": three["prediction"]["seconds"]}
    assert three["verdict"] == "fits" and three["cure"] is None and three["max"]["micro_batch_size"] >= 4
    assert rows["zero0"]["cure"]["strategy"] == "zero3" and "--num_processes 2" in rows["zero0"]["cure"]["command"]
    hours, run = three["cost"]["hours"], three["cost"]["run"]
    assert run == pytest.approx([2 * 2 * end for end in hours])  # two GPUs at 2 an hour
    assert hours == pytest.approx([500 * end / 3600 for end in three["step_seconds"]])  # max_steps: 500
    assert document["gpu"]["memory_bytes"] == H100.memory_bytes and document["cannot_know"]


def test_epochs_of_data_at_hand_are_counted_in_steps(capsys):
    rows = len((ROOT / "tiny_world" / "train.jsonl").read_text().splitlines())
    keys = ["--max_steps", "-1", "--num_train_epochs", "3", "--per_device_train_batch_size", "7"]
    options = [*keys, "--global_batch_size", "28", "--packing", "false", "--strategies", "zero2", "--price", "1"]
    (row,) = json.loads(plan(capsys, "--json", *options, name="recipes/tiny.yaml"))["rows"]
    steps = 3 * math.ceil(math.ceil(math.ceil(rows / 7) / 2) / 2)  # micro batches, two ranks, two micro steps
    assert row["cost"]["hours"] == pytest.approx([steps * end / 3600 for end in row["step_seconds"]])
    (row,) = json.loads(plan(capsys, "--json", *options, "--packing", "true", name="recipes/tiny.yaml"))["rows"]
    assert row["cost"]["hours"] is None  # TRL makes other rows of these


def test_overrides_reach_the_recipe_and_the_command(capsys):
    said = json.loads(plan(capsys, "--json", "--max_length", "1024", "--activation_checkpointing", "true"))
    assert {row["prediction"]["max_length"] for row in said["rows"]} == {1024}
    assert said["recommendation"]["command"].endswith(f"{RECIPE} --max_length 1024 --activation_checkpointing true")


def test_the_smallest_machine_is_looked_for(capsys):
    said = plan(capsys, gpus="1,2,4,8", gpu="l40s")
    assert "Smallest machine: 1 x l40s-48gb" in said and "Without offload: 4 x l40s-48gb" in said
    document = json.loads(plan(capsys, "--json", "--strategies", "zero2,zero3", gpus="1,2,4,8", gpu="l40s"))
    words = {(row["world_size"], row["strategy"]): row["verdict"] for row in document["rows"]}
    assert words[2, "zero3"] == "no" and words[4, "zero3"] == "fits"
    assert document["smallest_machine"] == 4
    assert "--num_processes 4" in document["recommendation"]["command"]


def test_where_no_machine_is_large_enough_a_fix_is_named(capsys):
    document = json.loads(plan(capsys, "--json", "--strategies", "zero3", gpus="1,2", gpu="l40s"))
    assert document["smallest_machine"] is None
    last = document["rows"][-1]
    assert last["world_size"] == 2 and last["cure"]["command"] == document["recommendation"]["command"]
    assert "--use_peft true" in last["cure"]["command"]


def test_a_count_that_the_global_batch_does_not_go_into_is_said(capsys):
    said = plan(capsys, name="recipes/tiny.yaml", gpus="1,2,4", gpu="l40s")
    assert "4: global_batch_size 16 is not divisible by 4 processes" in said
    assert "Smallest machine: 1 x l40s-48gb" in said


def test_the_hosts_memory_is_held_against_offload_where_it_is_said(capsys):
    options = ("--strategies", "zero2_offload", "--json")
    (row,) = json.loads(plan(capsys, *options, "--host_memory", "64"))["rows"]
    needs = row["prediction"]["host_bytes"]["training"]
    assert row["verdict"] == "no" and row["host_lacks_bytes"] == needs - 64 * GB
    assert json.loads(plan(capsys, *options, "--host_memory", "160"))["rows"][0]["verdict"] == "fits"
    assert "no (host)" in plan(capsys, "--host_memory", "64")


def test_a_card_without_bf16_is_planned_in_fp16_alone(capsys):
    said = refused(capsys, "recipes/pythia-410m.yaml", "--gpus", "2", "--gpu", "t4", "--quick")
    assert "bf16 on t4-16gb" in said and "ZR273" in said
    options = ("--strategies", "zero1,zero2,zero3", "--json")
    in_fp16 = json.loads(plan(capsys, *options, name="recipes/pythia-410m-fp16.yaml", gpu="t4"))["rows"]
    in_bf16 = json.loads(plan(capsys, *options, name="recipes/pythia-410m.yaml", gpu="l40s"))["rows"]
    for one, other in zip(in_fp16, in_bf16, strict=True):
        states = [row["prediction"]["model_state_bytes"] for row in (one, other)]
        assert states[0] == states[1] and one["prediction"]["precision"] == "fp16"
    rows = json.loads(plan(capsys, "--json", name="recipes/pythia-410m-fp16.yaml", gpu="v100-32gb"))["rows"]
    assert "zero0" not in {row["strategy"] for row in rows}, "it is refused in fp16"


def test_several_machines_are_launched_as_such(capsys):
    document = json.loads(plan(capsys, "--json", "--strategies", "zero3", gpus="16", gpu="a100-40gb"))
    assert (
        "--num_processes 16 --num_machines 2 --machine_rank K --main_process_ip HOST"
        in (document["recommendation"]["command"])
    )
    assert any("2 machines" in reason for reason in document["recommendation"]["reasons"])


def test_a_recipe_with_its_own_ds_config_is_planned_and_launched_with_it(capsys):
    document = json.loads(plan(capsys, "--json", "--deepspeed", "ds_configs/zero2_offload.json"))
    assert [row["strategy"] for row in document["rows"]] == ["zero2_offload"]
    assert document["recommendation"]["command"].startswith("torchrun --nproc_per_node 2 run_sft.py")


def test_a_folder_takes_the_picture_and_the_json(capsys, tmp_path):
    plan(capsys, "--output_dir", str(tmp_path / "plan"))
    header = (tmp_path / "plan" / "plan.png").read_bytes()[:24]
    assert header[:8] == b"\x89PNG\r\n\x1a\n" and struct.unpack(">II", header[16:]) == (1200, 720)
    assert len(json.loads((tmp_path / "plan" / "plan.json").read_text())["rows"]) == 7
    written = (tmp_path / "plan" / "plan.md").read_text()
    assert "| zero3 | fits | +14.8 GB |" in written and "- Peak: bytes of live tensors" in written


@pytest.mark.parametrize(
    ("options", "says"),
    [
        (["recipes/none.yaml", "--gpus", "2", "--gpu", "h200"], "there is no recipe"),
        ([RECIPE, "--gpus", "2", "--gpu", "abacus"], "no such GPU"),
        ([RECIPE, "--gpus", "two", "--gpu", "h200"], "--gpus two"),
        ([RECIPE, "--gpus", "2,x", "--gpu", "h200"], "--gpus 2,x"),
        ([RECIPE, "--gpus", "0", "--gpu", "h200"], "--gpus 0"),
        ([RECIPE, "--gpus", "12", "--gpu", "h200"], "--gpus 12 with 8 in each machine"),
        (
            [RECIPE, "--gpus", "2", "--gpu", "h200", "--gpus_per_node", "0"],
            "--gpus_per_node '0' is not a whole number",
        ),
        ([RECIPE, "--gpus", "2", "--gpu", "h200", "--strategies", "zero5"], "no strategy zero5"),
        ([RECIPE, "--gpus", "2", "--gpu", "h200", "--max_stepz", "5"], "max_stepz"),
        ([RECIPE, "--gpus", "2", "--gpu", "h200", "--model_name_or_path", "no/body"], "config.json of no/body"),
        ([RECIPE, "--gpus", "2", "--gpu", "h200", "--hardware", "none.yaml"], "no hardware file"),
        ([RECIPE, "--gpus", "2", "--gpu", "h200", "--quick", "--calibrate", RECIPE], "is no metrics.json"),
        (["recipes/tiny.yaml", "--gpus", "3", "--gpu", "h200", "--quick"], "global_batch_size 16"),
    ],
)
def test_what_cannot_be_planned_is_refused(capsys, options, says):
    assert says in refused(capsys, *options)


# the decision


def rows_of(**needs: int) -> list[planning.Row]:
    """Rows of recipes/pythia.yaml on two H100s that take so many GB."""
    predict = lambda asked: made_up(asked, needs.get(asked.strategy, 500) * GB)  # noqa: E731
    return [planning.make_row(job(name), H100, predict, strategies(), with_change=False) for name in needs]


def decide(rows) -> Recommendation:
    return recommend(rows, H100, gpus())


def reasons(rows) -> list[str]:
    return messages.reasons(decide(rows))


def test_of_equally_fast_strategies_the_one_with_most_headroom_is_chosen():
    assert decide(rows_of(zero1=70, zero2=50, zero3=60)).job.strategy == "zero2"
    assert decide(rows_of(zero1=70, zero3=95)).job == job("zero1")


def test_of_equally_fast_strategies_the_lowest_stage_with_room_is_chosen():
    room = decide(rows_of(ddp=75, zero0=66, zero2=60, zero1=40, zero3=20))  # an H100 has 85.5 GB, a quarter is 21.4
    assert room.job.strategy == "zero2" and room.has_room
    assert "zero2 is the lowest" not in (said := " ".join(messages.reasons(room))) and "lowest stage of them" in said
    assert decide(rows_of(ddp=60, zero0=50, zero2=20, zero3=20)).job.strategy == "ddp"
    assert decide(rows_of(zero1=40, zero3=20)).job.strategy == "zero1"
    none = decide(rows_of(ddp=80, zero0=78, zero2=70, zero3=65))
    assert none.job.strategy == "zero3" and not none.has_room and "leaves most room" in " ".join(messages.reasons(none))


def test_a_strategy_outside_of_the_fastest_ones_range_is_not_as_fast():
    rows = rows_of(zero2=20, zero3=10)
    low, high = rows[0].speed.step_seconds
    for seconds, chosen in ((high * 0.99, "zero2"), (high * 1.01, "zero3")):
        slower = replace(rows[0], speed=replace(rows[0].speed, step_seconds=(seconds, seconds)))
        fast = replace(rows[1], speed=replace(rows[0].speed, step_seconds=(low, high)))
        assert decide([slower, fast]).job.strategy == chosen


HEADERS = {  # what the recipes' headers say of GPUs
    ("pythia-full", 2, "b200"): "zero2",
    ("pythia-full", 2, "h200"): "zero2",
    ("pythia-full", 2, "h100-80gb"): "zero3",
    ("pythia", 2, "h200"): "zero2",
    ("pythia", 2, "h100-80gb"): "zero3",
    ("pythia-410m", 1, "rtx4090"): "single",
    ("pythia-12b", 1, "h200"): "zero2_offload",
}


@pytest.mark.parametrize("name, count, gpu", HEADERS)
def test_the_plan_recommends_what_the_recipes_header_says(name, count, gpu):
    card = gpu_named(gpu, gpus())
    jobs = [job(strategy, count, name) for strategy in strategies()]
    rows = [planning.make_row(one, card, predict_by_formulas, strategies(), with_change=False) for one in jobs]
    assert recommend(rows, card, gpus()).job.strategy == HEADERS[name, count, gpu]


def test_offload_is_chosen_only_where_nothing_else_fits():
    both = decide(rows_of(zero3=80, zero3_offload=10))
    assert both.job.strategy == "zero3" and "Offload (zero3_offload)" in " ".join(messages.reasons(both))
    alone = decide(rows_of(zero3=90, zero3_offload=10))
    assert alone.job.strategy == "zero3_offload" and "host memory" in " ".join(messages.reasons(alone))


def test_a_smaller_gpu_that_would_do_is_named():
    assert any("rtx4090-24gb" in reason for reason in reasons(rows_of(zero3=10)))
    assert not any("smaller GPU" in reason for reason in reasons(rows_of(zero3=60)))


def test_where_nothing_fits_the_mildest_change_of_all_rows_is_recommended():
    def predict(asked):
        helped = asked.strategy == "zero3" and asked.recomputes
        return made_up(asked, (50 if helped else 84 if asked.strategy == "zero2" else 90) * GB, overhead=3 * GB)

    names = {name: strategies()[name] for name in ("zero2", "zero3")}
    found = decide([planning.make_row(job(name), H100, predict, names) for name in names])
    said = " ".join(messages.reasons(found))
    assert found.job.strategy == "zero3" and "activation checkpointing (from zero3)" in said
    assert "zero2 may" in said  # 84 GB fit, 87 do not
    hopeless = decide(rows_of(zero2=500))
    assert hopeless.job is None and "No change that was tried makes one fit." in messages.reasons(hopeless)


def test_the_rule_of_thumb_stands_beside_what_fits():
    assert "Here it fits" in messages.rule(rule_of_thumb(rows_of(ddp=70)))
    assert "does not fit" in messages.rule(rule_of_thumb(rows_of(ddp=90)))
    assert messages.rule(rule_of_thumb(rows_of(zero3=70))).endswith("billion).")  # ddp was not requested


@pytest.fixture
def simulated(monkeypatch, tmp_path) -> list:
    """The jobs that were simulated; nothing is."""
    jobs = []

    def simulate(wanted, done, limit):
        jobs.extend(wanted)
        return [made_up(one, GB) for one in wanted]

    monkeypatch.setattr(simulation, "simulate", simulate)
    return jobs


def test_nothing_is_predicted_twice(simulated, tmp_path):
    predict = Predictor(folder=tmp_path / "file" / "none")
    (tmp_path / "file").write_text("")  # so that nothing can be kept on disk
    assert predict(job("zero3")) is predict(job("zero3"))
    assert predict(job("zero2")) is not None and len(simulated) == 2


def test_versions_that_the_simulation_does_not_know_are_answered_by_formulas(monkeypatch, simulated, tmp_path):
    with monkeypatch.context() as other:
        other.setitem(versions.tested(), "torch", SpecifierSet("==1.0"))
        found = Predictor(folder=tmp_path)(job("zero2"))
    assert found.source == "formulas" and "does not know torch" in found.notes[0]
    assert Predictor(folder=tmp_path)(job("zero2")).source == "engine"
    assert Predictor(quick=True, folder=tmp_path)(job("zero2")).source == "formulas"


# speed and cost


def test_computation_is_flops_over_the_share_of_the_rate():
    gpu = H100.model_copy(update={"achievable": (0.25, 0.5), "memory_gb_s": 1e9})
    found = cost.estimate(job("zero0", ranks=1), made_up(job("zero0", ranks=1), GB), gpu)
    assert found.computing == pytest.approx((1e15 / (989e12 * 0.5), 1e15 / (989e12 * 0.25)))
    assert found.communicating == (0, 0)  # one rank
    assert found.tokens_per_step == 4 * 2 * 512


def test_communication_is_what_the_computation_does_not_hide():
    asked, still = job("zero2", ranks=2), H100.model_copy(update={"bf16_tflops": 1e9, "memory_gb_s": 1e9})
    moved = (2 * 2e9 + 2e9) / 2  # an all-reduce goes around twice; half of each on two ranks
    found = cost.estimate(asked, made_up(asked, GB), still).communicating
    assert found == pytest.approx((moved / (450e9 * 0.85), moved / (450e9 * 0.5)), rel=1e-3)
    hidden = cost.estimate(asked, made_up(asked, GB), H100).communicating
    assert hidden == pytest.approx((1e9 / (450e9 * 0.85), 1e9 / (450e9 * 0.5)))  # only the gather after the step
    apart = job("zero2", ranks=2, gpus_per_node=1)
    assert cost.estimate(apart, made_up(apart, GB), still).communicating[0] == pytest.approx(
        moved / (50e9 * 0.85), rel=1e-3
    )


@pytest.mark.parametrize(
    "strategy, changed, passes, overlapping, window",
    [
        ("ddp", {}, 2, {"all_reduce"}, 1 / 3),
        ("zero0", {}, 2, set(), 1 / 3),
        ("zero1", {}, 2, {"all_reduce"}, 1 / 3),
        ("zero1", {"overlap_comm": False}, 2, set(), 1 / 3),
        ("zero2", {}, 2, {"all_reduce"}, 2 / 3),
        ("zero2", {"overlap_comm": None}, 1, set(), 2 / 3),
        ("zero3", {}, 2, {"all_gather", "reduce_scatter"}, 1),
        ("zero3", {"overlap_comm": None}, 2, {"all_gather", "reduce_scatter"}, 1),  # DeepSpeed's default is true
        ("zero3", {"overlap_comm": False}, 2, set(), 1),
        ("zero3", {"stage3_prefetch_bucket_size": 0}, 2, {"reduce_scatter"}, 1),
    ],
)
def test_what_overlaps_is_what_the_libraries_do(strategy, changed, passes, overlapping, window):
    asked = job(strategy, gradient_accumulation_steps=passes)
    if asked.ds_config is not None:
        zero = asked.ds_config.get("zero_optimization", {})
        asked = replace(asked, ds_config=asked.ds_config | {"zero_optimization": zero | changed})
    moved = ("all_gather", "reduce_scatter") if strategy == "zero3" else ("all_reduce",)
    assert {name for name in moved if overlap.overlaps(asked, name)} == overlapping
    assert not overlap.overlaps(job("zero2"), "all_gather")  # after the step
    assert overlap.window(asked) == pytest.approx(window)


def test_deepspeed_still_overlaps_what_the_plan_says():
    """Its own defaults and the lines that plan/overlap.py names, of the installed version."""
    import inspect

    from deepspeed.runtime import engine
    from deepspeed.runtime.zero.config import DeepSpeedZeroConfig
    from deepspeed.runtime.zero.stage3 import DeepSpeedZeroOptimizer_Stage3
    from deepspeed.runtime.zero.stage_1_and_2 import DeepSpeedZeroOptimizer

    assert [DeepSpeedZeroConfig(stage=stage).overlap_comm for stage in (1, 2, 3)] == [False, False, True]
    hook = inspect.getsource(DeepSpeedZeroOptimizer.process_gradients)
    assert "self.partition_gradients or self.overlap_comm" in hook
    assert "is_gradient_accumulation_boundary" in inspect.getsource(
        DeepSpeedZeroOptimizer.reduce_ready_partitions_and_remove_grads
    )
    assert "all_gather_dp_groups" in inspect.getsource(DeepSpeedZeroOptimizer.step)
    assert "if overlap_comm" in inspect.getsource(DeepSpeedZeroOptimizer_Stage3.__init__)
    assert "self.buffered_allreduce_fallback(grads=grads" in inspect.getsource(engine)


def test_offload_pays_for_the_link_and_for_adam_on_the_cpu():
    asked = job("zero2_offload", ranks=2)
    crossing = 2 * GB / 2 * (2 + 1)  # gradients of two passes, weights once, half of a billion parameters each
    adam = GB  # two halves on one machine
    found = cost.estimate(asked, made_up(asked, GB), H100).offloading
    assert found == pytest.approx((crossing / (64e9 * 0.8) + adam / 3.5e9, crossing / (64e9 * 0.5) + adam / 1.3e9))
    assert cost.estimate(job("zero2"), made_up(job("zero2"), GB), H100).offloading == (0, 0)


def test_an_uncalibrated_range_is_at_most_30_percent_to_either_side_with_nvlink():
    joined = [gpu for gpu in gpus().values() if gpu.link_gb_s >= 300]
    assert len(joined) == 5
    for gpu in joined:
        low, high = cost.estimate(job("zero3"), predict_by_formulas(job("zero3")), gpu).step_seconds
        assert 0.1 < (high - low) / (high + low) < 0.30


def measured(**changes) -> dict:
    """What matters of a metrics.json: tokens per second of exactly twice the estimated time."""
    asked = job("zero3", per_device_train_batch_size=2)
    estimated = cost.estimate(asked, predict_by_formulas(asked), H100)
    return {
        "model": asked.model,
        "strategy": "zero3",
        "device": "NVIDIA H100 80GB HBM3",
        "world_size": 2,
        "micro_batch_size": 2,
        "gradient_accumulation_steps": 2,
        "max_length": 512,
        "step_seconds": {"median": 1.0},
        "tokens_per_second": {"all": estimated.tokens_per_step / (2 * estimated.middle)},
    } | changes


def test_a_measured_run_narrows_the_range(capsys, tmp_path):
    (tmp_path / "metrics.json").write_text(json.dumps(measured()))
    before = json.loads(plan(capsys, "--json"))["rows"]
    after = json.loads(plan(capsys, "--json", "--calibrate", str(tmp_path / "metrics.json")))["rows"]
    for free, bound in zip(before, after, strict=True):
        assert sum(bound["step_seconds"]) == pytest.approx(2 * sum(free["step_seconds"]))
        low, high = bound["step_seconds"]
        assert (high - low) / (high + low) == pytest.approx(0.10)


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"device": "cpu"}, "holds no times of a GPU"),
        ({"step_seconds": None}, "holds no times of a GPU"),
        ({"model": "another/model"}, "another/model under zero3 was measured"),
        ({"strategy": "zero3_own"}, "zero3_own was measured"),
    ],
)
def test_a_run_of_something_else_does_not_calibrate(capsys, tmp_path, changes, says):
    (tmp_path / "metrics.json").write_text(json.dumps(measured(**changes)))
    options = [RECIPE, "--gpus", "2", "--gpu", "h100-80gb", "--quick", "--calibrate", str(tmp_path / "metrics.json")]
    assert says in refused(capsys, *options)


def test_without_steps_there_is_a_price_a_step_and_a_million_tokens_alone():
    asked = replace(job("zero3"), settings=job("zero3").settings.replace(**{"max_steps": -1}))
    estimated = cost.estimate(asked, predict_by_formulas(asked), H100)
    found = cost.cost(asked, estimated, price=3.6)
    assert found.run is None and found.hours is None
    assert found.per_step == pytest.approx(tuple(2 * 3.6 / 3600 * end for end in estimated.step_seconds))
    assert found.per_million_tokens[0] == pytest.approx(found.per_step[0] / estimated.tokens_per_step * 1e6)


def test_the_command_leaves_out_what_the_recipe_says_already():
    own = recipe("tiny")
    changed = replace(job("zero2", name="tiny"), settings=own.settings.replace(**{"activation_checkpointing": True}))
    typed = run_command(own.path, own.settings, [], changed)
    assert typed.endswith("recipes/tiny.yaml --activation_checkpointing true")
    assert run_command(own.path, own.settings, [], job("ddp", 1, "tiny")).startswith("python run_sft.py")


def test_the_plan_imports_no_simulation_for_the_quick_answer():
    assert "simulation" not in vars(command)
