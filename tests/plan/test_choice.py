"""The chart of docs/choice.md and `plan` walked through the same machines; the page's numbers."""

from __future__ import annotations

import importlib.util
import json
import re
import sys
from collections import Counter
from dataclasses import replace
from itertools import product

import pytest

from tests.helpers.plan_jobs import GB, ROOT, made_up
from zero_recipes.cli import main as cli
from zero_recipes.core.hardware import gpus
from zero_recipes.core.units import size
from zero_recipes.plan import jobs, rows
from zero_recipes.plan.fit import fit_of
from zero_recipes.plan.formulas.predict import predict_by_formulas
from zero_recipes.plan.recommend import ORDER, recommend

MODELS = ["EleutherAI/pythia-410m-deduped", "EleutherAI/pythia-6.9b-deduped", "meta-llama/Llama-2-13b-hf"]
MODELS += ["meta-llama/Llama-2-70b-hf", "megatron-1t"]
COUNTS = (1, 2, 8, 16, 64)
CARDS = ("rtx4090-24gb", "a100-40gb", "h100-80gb", "b200-192gb")
HOSTS, DISKS, LINKS = (None, 128 * GB, 1500 * GB), (None, 8_000 * GB), (None, 1.25)
PLUS_PLUS = {"zero3_hpz", "zero3_plus_plus", "zero3_qwz", "zero3_qgz"}
OTHERWISE = {"zero2_bf16_states", "zero3_bf16_states", "zero2_autocast"}


@pytest.fixture(autouse=True)
def in_the_repository(monkeypatch):
    monkeypatch.chdir(ROOT)


def loaded_chart():
    """scripts/choice_chart.py as a module."""
    spec = importlib.util.spec_from_file_location("choice_chart", ROOT / "scripts" / "choice_chart.py")
    module = importlib.util.module_from_spec(spec)
    sys.modules["choice_chart"] = module
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def chart():
    yield loaded_chart()
    del sys.modules["choice_chart"]


def read_off(chart, found: list[dict], capacity: int) -> str | None:
    """Where the chart leads a reader of a plan's rows (as in its JSON); None where it says that nothing fits."""
    fits = {("ddp" if row["strategy"] == "single" else row["strategy"]): row for row in found}
    fits = {name: row for name, row in fits.items() if row["verdict"] == "fits" and name not in OTHERWISE}

    def mean(name: str) -> float:
        return sum(fits[name]["step_seconds"]) / 2

    def as_fast(name: str, others: set[str]) -> bool:
        first = min(others, key=mean)
        return mean(name) <= fits[first]["step_seconds"][1]

    def answer(node) -> bool:
        here = {rule.strategy for rule in node.place.rules} & set(fits)
        exact, rounding = here - PLUS_PLUS or here, here & PLUS_PLUS
        if node.strategy is None or node.strategy not in here:
            return bool(here) and node.strategy is None
        if node.strategy in PLUS_PLUS:
            slow_end = fits[node.strategy]["step_seconds"][1]
            return as_fast(node.strategy, rounding) and all(mean(other) > slow_end for other in exact)
        return as_fast(node.strategy, exact) and fits[node.strategy]["margin_bytes"] >= capacity / 4

    leaf = chart.walk(answer)
    if len(leaf.strategies) < 2:
        return leaf.strategies[0] if leaf.strategies else None
    open_to = set(leaf.strategies) & set(fits)
    return max((n for n in open_to if as_fast(n, open_to)), key=lambda n: fits[n]["margin_bytes"])


def written(row: rows.Row) -> dict:
    """What the plan's JSON says of it, as far as the chart asks."""
    seconds = list(row.speed.step_seconds)
    return {"strategy": row.job.strategy, "verdict": row.fit.status, "margin_bytes": row.fit.margin} | {
        "step_seconds": seconds
    }


def test_chart_and_plan_choose_the_same_on_every_machine(chart):
    known, chosen = gpus(), Counter()
    for model in MODELS:
        recipe = jobs.read_recipe(jobs.Path("recipes/pythia.yaml"), ["--model_name_or_path", model])
        config, strategies = jobs.model_config(recipe.settings), jobs.read_strategies(recipe, ["all"])
        request = jobs.PlanRequest(recipe, [], config, strategies, [1], 8, known["h100-80gb"], known, None)
        for count in COUNTS:
            asked = {name: request.job(name, count) for name in strategies}
            predicted = {name: predict_by_formulas(job) for name, job in asked.items()}
            for card, link in product(CARDS, LINKS):
                gpu = known[card] if link is None else known[card].model_copy(update={"network_gb_s": link})
                by_job = lambda job, known=predicted: known[job.strategy.replace("single", "ddp")]  # noqa: E731
                planned = {n: rows.make_row(job, gpu, by_job, strategies, None, False) for n, job in asked.items()}
                for host, nvme in product(HOSTS, DISKS):
                    here = replace(request, gpu=gpu, host=host, nvme=nvme)
                    able = [
                        replace(row, fit=fit_of(row.prediction, gpu.memory_bytes, host, nvme))
                        for name, row in planned.items()
                        if not here.excluded(name, row.job)
                    ]
                    advised = recommend(able, gpu, {}).chosen
                    found = advised and advised.job.strategy.replace("single", "ddp")
                    assert found == read_off(chart, [written(row) for row in able], gpu.memory_bytes), (
                        f"{model} on {count} x {card}, host {host}, NVMe {nvme}, link {link}"
                    )
                    chosen[found] += 1
    rare = {"zero0", "zero3_hpz", "zero3_qwz", "zero3_qgz", "fsdp2"}  # below, by rows made up for them
    assert set(ORDER) - set(chosen) <= rare and chosen[None], "the machines ask too little"


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
def test_each_rule_has_rows_that_it_chooses(chart, wanted):
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
        assert read_off(chart, [written(row) for row in made], gpu.memory_bytes) == wanted
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
def test_the_program_says_what_the_chart_says(chart, capsys, options, strategy):
    command = ["plan", "recipes/pythia.yaml", "--quick", "--json", "--strategies", "all", *options.split()]
    assert cli.main(command) == 0
    document = json.loads(capsys.readouterr().out)
    capacity = document["gpu"]["memory_bytes"]
    assert read_off(chart, document["rows"], capacity) == strategy
    if strategy is not None:
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


def test_the_chart_is_drawn_from_the_rules_and_holds_every_question(chart):
    assert chart.main(["--check"]) == 0, "run python scripts/choice_chart.py"
    words = " ".join(re.sub(r"<[^>]*>", " ", (ROOT / "docs" / "choice.svg").read_text()).split())
    for place in chart.PLACES:
        assert place.question in words
        assert all(rule.question in words and rule.strategy in words for rule in place.rules)


def test_each_wrong_rule_is_more_than_its_gpu_has(chart):
    """The states alone, by the paper's formula, of every row of the page's second table."""
    for model, count, capacity, stage in chart.MISLEADING:
        psi = chart.jobs.known_models()[model]["parameters"]
        assert chart.model_state_bytes(psi, count, stage).total > capacity * GB
    psi = chart.jobs.known_models()["EleutherAI/pythia-6.9b-deduped"]["parameters"]
    page = (ROOT / "docs" / "choice.md").read_text()
    assert f"in 16 bits, {size(2 * psi)}." in page
    lines = [[cell.strip(" `") for cell in line.split("|")] for line in page.splitlines()]
    host = {cells[1]: cells[5] for cells in lines if len(cells) == 10}
    # what the page says of it: 20 bytes a parameter in both nodes together; more with the weights on NVMe
    plain, swapping = (float(host[name].split()[0]) for name in ("zero3_offload", "zero3_offload_infinity"))
    assert host["zero3_offload"] == size(20 * psi // 2) and plain < swapping
