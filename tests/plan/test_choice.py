"""What `plan` recommends, and what it does not plan."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

from tests.helpers.plan_jobs import GB, ROOT, made_up
from zero_recipes.cli import main as cli
from zero_recipes.core.hardware import gpus
from zero_recipes.plan import jobs, rows
from zero_recipes.plan.recommend import recommend

OTHERWISE = {"zero2_bf16_states", "zero3_bf16_states", "zero2_autocast"}


@pytest.fixture(autouse=True)
def in_the_repository(monkeypatch):
    monkeypatch.chdir(ROOT)


# {strategy: (GB on an H100, seconds of a step)}
MADE_UP = {
    "zero0": {"ddp": (80, 1), "zero0": (60, 1), "zero3": (20, 1)},
    "zero3": {"zero2": (70, 1), "zero3": (60, 1), "fsdp2": (20, 1), "zero3_hpz": (60, 0.99)},
    "zero3_hpz": {"zero2": (70, 9), "zero3": (60, 9), "zero3_hpz": (62, 5), "zero3_plus_plus": (62, 4.9)},
    "zero3_plus_plus": {"zero3": (60, 9), "zero3_hpz": (62, 5), "zero3_plus_plus": (62, 1), "zero3_qwz": (60, 4)},
    "zero3_qwz": {"zero3": (60, 9), "zero3_plus_plus": (90, 1), "zero3_qwz": (60, 4), "zero3_qgz": (60, 5)},
    "zero3_qgz": {"zero3": (60, 9), "zero3_qgz": (60, 5)},
    "fsdp2": {"ddp": (90, 1), "fsdp2": (60, 1)},
    "zero2": {"zero2": (80, 1), "zero3_offload": (10, 1), "zero2_bf16_states": (10, 1)},
    "zero2_bf16_states": {"zero2_bf16_states": (10, 1)},
}


@pytest.mark.parametrize("wanted", MADE_UP)
def test_each_rule_has_rows_that_it_chooses(wanted):
    recipe, gpu = jobs.read_recipe(jobs.Path("recipes/pythia.yaml"), []), gpus()["h100-80gb"]
    config, strategies = jobs.model_config(recipe.settings), jobs.read_strategies(recipe, ["all"])
    made = []
    for name, (held, seconds) in MADE_UP[wanted].items():
        job = jobs.job_of(recipe, config, name, strategies[name], 16)
        row = rows.make_row(job, gpu, lambda asked, held=held: made_up(asked, held * GB), strategies, None, False)
        made.append(replace(row, speed=replace(row.speed, step_seconds=(0.9 * seconds, 1.1 * seconds))))
    advice = recommend(made, gpu, {})
    assert advice.chosen.job.strategy == wanted
    if wanted not in OTHERWISE:
        assert [row.job.strategy for row in advice.other_arithmetic] == sorted(OTHERWISE & set(MADE_UP[wanted]))


@pytest.mark.parametrize(
    ("options", "strategy"),
    [
        ("--model_name_or_path EleutherAI/pythia-410m-deduped --gpus 2 --gpu h100-80gb", "ddp"),
        ("--gpus 2 --gpu b200", "zero2"),
        ("--gpus 2 --gpu h100-80gb --host_memory 512 --nvme 4000", "zero3"),
        ("--gpus 2 --gpu a100-40gb", "zero2_offload"),
        ("--gpus 2 --gpu a100-40gb --host_memory 64 --nvme 4000", "zero3_infinity"),
        ("--gpus 2 --gpu a100-40gb --host_memory 64", None),
        (
            "--model_name_or_path meta-llama/Llama-2-70b-hf --gpus 64 --gpu h200 --network 1.25 --host_memory 1000",
            "zero3_plus_plus",
        ),
    ],
)
def test_the_program_chooses(capsys, options, strategy):
    command = ["plan", "recipes/pythia.yaml", "--quick", "--json", "--strategies", "all", *options.split()]
    assert cli.main(command) == 0
    document = json.loads(capsys.readouterr().out)
    if strategy is None:
        assert "fits" not in {row["verdict"] for row in document["rows"]}
    else:
        assert document["recommendation"]["strategy"] == strategy
        assert ("--nvme_path FOLDER" in document["recommendation"]["command"]) == (strategy == "zero3_infinity")
    names = {row["strategy"] for row in document["rows"]}
    (not_planned,) = document["not_planned"].values()
    assert names | set(not_planned) == set(jobs.EVERY) and not names & set(not_planned)


@pytest.mark.parametrize(
    ("options", "reasons"),
    [
        ("--gpus 1", {"zero3_hpz": "no other", "zero3_plus_plus": "no other", "fsdp2": "no other"}),
        ("--gpus 8", {"zero3_hpz": "ZR223", "zero3_plus_plus": "ZR223", "zero3_qgz": "ZR228"}),
        ("--gpus 16", {"zero3_infinity": "--nvme", "zero3_offload_infinity": "--nvme", "zero2_autocast": "ZR278"}),
        ("--gpus 16 --bf16 false --nvme 1000", {"zero2_bf16_states": "ZR274", "zero3_bf16_states": "ZR274"}),
    ],
)
def test_what_cannot_run_is_named_with_the_reason(capsys, options, reasons):
    command = ["plan", "recipes/pythia.yaml", "--quick", "--strategies", "all", "--gpu", "h100-80gb", *options.split()]
    assert cli.main([*command, "--json"]) == 0
    (not_planned,) = json.loads(capsys.readouterr().out)["not_planned"].values()
    assert all(part in not_planned[name] for name, part in reasons.items())
    assert cli.main(command) == 0
    said = " ".join(capsys.readouterr().out.split())
    assert all(part in said for part in reasons.values()) and "Not planned: " in said


def test_swap_sizes_stand_in_the_table_and_too_small_a_disk_does_not_fit(capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "200")
    command = ["plan", "recipes/pythia.yaml", "--quick", "--gpus", "16", "--gpu", "h100-80gb", "--nvme"]
    assert cli.main([*command, "50", "--strategies", "zero3,zero3_infinity,zero3_offload_infinity"]) == 0
    said = capsys.readouterr().out
    lines = {line.split()[0]: line for line in said.splitlines() if line.split()[1:2]}
    assert "NVMe a node" in said and "6.86 GB / 13.7 GB" in said and "61.7 GB / 123 GB" in said
    assert "no (NVMe)" in lines["zero3_infinity"] and " fits " in lines["zero3_offload_infinity"]
    assert cli.main([*command, "50", "--strategies", "zero3"]) == 0
    assert "NVMe a node" not in capsys.readouterr().out


def test_a_network_of_the_command_line_counts(capsys):
    command = ["plan", "recipes/pythia.yaml", "--quick", "--json", "--gpus", "16", "--gpu", "h100-80gb"]
    slow = [end for link in ("50", "5") for end in _step(capsys, [*command, "--network", link])]
    assert slow[2] > 3 * slow[0] and slow[3] > 3 * slow[1]
    assert _step(capsys, command) == slow[:2]  # the hardware table's


def _step(capsys, command: list[str]) -> list[float]:
    assert cli.main([*command, "--strategies", "zero3"]) == 0
    (row,) = json.loads(capsys.readouterr().out)["rows"]
    return row["step_seconds"]


def test_strategies_that_none_can_run_are_refused(capsys):
    command = ["plan", "recipes/pythia.yaml", "--quick", "--gpus", "2", "--gpu", "h200"]
    assert cli.main([*command, "--strategies", "zero3_plus_plus,zero3_hpz"]) == 2
    said = capsys.readouterr().err
    assert "none of the strategies can run on 2 GPUs [ZR842]" in said and "ZR223" in said


def test_several_counts_name_what_is_not_planned_by_a_dash(capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "300")
    command = ["plan", "recipes/pythia.yaml", "--quick", "--gpus", "1,8,16", "--gpu", "a100-80gb", "--strategies"]
    assert cli.main([*command, "ddp,zero3,zero3_hpz,fsdp2"]) == 0
    table = [
        line.split() for line in capsys.readouterr().out.splitlines() if line.split()[:1] in (["1"], ["8"], ["16"])
    ]
    assert [line[3:] for line in table] == [["-", "-"], ["-", "fits"], ["fits", "fits"]]


def test_a_change_is_to_no_strategy_that_cannot_run_or_trains_otherwise():
    """From stage 1 that does not fit: not to hpZ on one node, not to NVMe that nobody named, not to 16-bit states."""
    from zero_recipes.plan.advice import smallest_change

    recipe = jobs.read_recipe(jobs.Path("recipes/pythia.yaml"), [])
    config, strategies = jobs.model_config(recipe.settings), jobs.read_strategies(recipe, ["all"])
    seen = set()

    def predict(asked):
        seen.add((asked.strategy, asked.world_size))
        return made_up(asked, 500 * GB)

    start = jobs.job_of(recipe, config, "zero1", strategies["zero1"], 8)
    assert smallest_change(start, 80 * GB, predict, strategies) is None
    exact = {"zero1", "zero2", "zero3", "zero2_offload", "zero3_offload"}
    assert {name for name, count in seen if count == 8} == exact
    seen.clear()
    smallest_change(start, 80 * GB, predict, strategies, nvme=1000 * GB)
    assert {"zero3_infinity", "zero3_offload_infinity"} <= {name for name, _ in seen}


def test_all_means_every_strategy_of_one_node():
    from zero_recipes.cli.sweep import all_strategies

    assert set(jobs.EVERY) == set(all_strategies()) and len(set(jobs.EVERY)) == len(jobs.EVERY)
