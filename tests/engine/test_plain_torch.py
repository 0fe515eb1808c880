"""Jobs drawn at random train as plain torch does, in one process, or are refused before weights are loaded."""

import json
import os
import shutil
from collections import Counter

import pytest
import torch
from hypothesis import Phase, given, seed, settings
from safetensors.torch import load_file, save_file

from tests.helpers import cases, drawn_jobs, plain_cases
from tests.helpers.group import CaseFailed
from tests.helpers.seeded import grid, write_result
from zero_recipes.config import recipe as recipes
from zero_recipes.config.read import parse_recipe
from zero_recipes.tools.rehearse import observed, plain

REFUSED = "refused"


def outcome(job, groups, folder) -> tuple[str, str]:
    """("equal", how far apart), ("refused", codes), or what went wrong, in words."""
    argv = drawn_jobs.write_job(folder, job)
    shutil.rmtree(folder / "out", ignore_errors=True)
    try:
        codes = groups[job["ranks"]].run(plain_cases.observe, argv=argv)[0]
    except CaseFailed as error:
        return "fails", str(error)[-1500:]
    if codes:
        return REFUSED, " ".join(codes)
    path = folder / "recipe.yaml"
    values = parse_recipe(path, recipes.recipe_in_force(path), argv[1:]).settings
    found = plain.compare(folder / "out", values, path)
    if isinstance(found, plain.Equal):
        return "equal", f"{found.losses_apart:.0e}"
    return "differs", str(found)


@pytest.fixture(scope="module")
def parts(tmp_path_factory):
    folder = tmp_path_factory.mktemp("jobs")
    drawn_jobs.write_parts(folder)
    return folder


DRAWN = 8  # fewer than 11: from then on hypothesis draws each of them six times, a little changed


@pytest.mark.timeout(600)
@pytest.mark.parametrize("number", [0, *map(grid, range(1, 10))])
def test_drawn_jobs_are_plain_torch_or_refused(one, two, parts, number):
    """`number`: hypothesis's seed."""
    counts: Counter[str] = Counter()

    @seed(number)
    @settings(max_examples=DRAWN, phases=[Phase.generate])
    @given(drawn_jobs.jobs())
    def draw(job):
        kind, words = outcome(job, {1: one, 2: two}, parts)
        counts[kind] += 1
        assert kind in ("equal", REFUSED), (words, job)

    draw()
    assert counts["equal"] >= DRAWN // 2, counts


@pytest.mark.grid
@pytest.mark.timeout(7200)
def test_a_thousand_drawn_jobs(one, two, parts):
    """Writes benchmarks/results/drawn_jobs.json as it goes, then asserts."""
    counts: Counter[str] = Counter()
    codes: Counter[str] = Counter()
    wrong = []
    what = "random recipes under random strategies in fp32, five steps each, against plain torch in one process"

    @settings(max_examples=int(os.environ.get("ZERO_RECIPES_JOBS", "1000")), phases=[Phase.generate])
    @given(drawn_jobs.jobs())
    def draw(job):
        kind, words = outcome(job, {1: one, 2: two}, parts)
        counts[kind] += 1
        if kind == REFUSED:
            codes[words] += 1
        elif kind != "equal":
            wrong.append([words, job])
        if counts.total() % 50 == 0:
            write_result("drawn_jobs.json", {"what": what, "counts": counts, "refused": codes, "wrong": wrong})

    draw()
    write_result("drawn_jobs.json", {"what": what, "counts": counts, "refused": codes, "wrong": wrong})
    assert not wrong, wrong[:3]


# what the comparison sees


SIMPLE = {
    "recipe": {"learning_rate": 1e-3, "optim": "sgd", "warmup_steps": 1, "weight_decay": 0.1},
    "fsdp": False,
    "ranks": 1,
    "model": "llama",
    "tied": False,
    "form": "alpaca",
    "deepspeed": None,
}


def compared(folder):
    path = folder / "recipe.yaml"
    argv = ["--output_dir", str(folder / "out")]
    values = parse_recipe(path, recipes.recipe_in_force(path), argv).settings
    return plain.compare(folder / "out", values, path)


@pytest.fixture(scope="module")
def seen(one, parts):
    """The folder of an observed run that plain torch agrees with."""
    assert outcome(SIMPLE, {1: one}, parts)[0] == "equal"
    return parts


def change_facts(**changes):
    def change(kept):
        path = kept / observed.FACTS
        facts = json.loads(path.read_text())
        for key, value in changes.items():
            facts[key] = value(facts[key])
        path.write_text(json.dumps(facts))

    return change


def change_weights(name, factor):
    def change(kept):
        weights = load_file(kept / name)
        changed = sorted(weights)[3]
        weights[changed] = weights[changed] * factor
        save_file(weights, kept / name)

    return change


def drop_a_row(kept):
    path = kept / observed.batches_file(0)
    batches = torch.load(path)
    for key in observed.ROW_KEYS:
        if key in batches[1]:
            batches[1][key] = batches[1][key][:1]
    torch.save(batches, path)


@pytest.mark.parametrize(
    "change, said",
    [
        (change_facts(losses=lambda losses: [losses[0], losses[1] * 1.001, *losses[2:]]), "the loss of step 2"),
        (change_facts(norms=lambda norms: [norms[0] / 2, *norms[1:]]), "the gradient norm of step 1"),
        (change_facts(rates=lambda rates: [dict.fromkeys(one, 1e-3) for one in rates]), "the learning rate of"),
        (change_facts(trained=lambda names: names[1:]), "the parameter "),
        (change_weights(observed.START, 1.01), "the weights "),
        (change_weights(observed.END, 1.01), "the weights "),
        (drop_a_row, "the loss of step 2"),
    ],
)
def test_any_difference_is_named_with_both_values(seen, tmp_path, change, said):
    folder = tmp_path / "changed"
    shutil.copytree(seen, folder)
    change(folder / "out" / observed.FOLDER)
    found = compared(folder)
    assert isinstance(found, plain.Difference) and found.what.startswith(said), found
    assert found.run != found.plain


def test_another_optimizer_is_seen_although_the_losses_are_alike(one, seen, tmp_path):
    """SGD was asked for. A library that steps with Adam instead, at a rate so small that no loss shows it."""
    folder = tmp_path / "adam"
    shutil.copytree(seen, folder)
    job = SIMPLE | {"recipe": SIMPLE["recipe"] | {"optim": "adamw_torch", "learning_rate": 1e-6}}
    one.run(plain_cases.observe, argv=drawn_jobs.write_job(folder, job))
    drawn_jobs.write_job(folder, SIMPLE | {"recipe": SIMPLE["recipe"] | {"learning_rate": 1e-6}})
    assert "after the last step" in compared(folder).what


# optimizers under offload


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_a_schedule_that_reads_the_optimizers_defaults(one, parts, stage):
    """transformers' polynomial and cosine_with_min_lr, under DeepSpeed's optimizers, which have none."""
    recipe = {"learning_rate": 1e-3, "lr_scheduler_type": "polynomial", "lr_scheduler_kwargs": {"lr_end": 1e-5}}
    job = SIMPLE | {"recipe": recipe | {"bf16": False}, "deepspeed": drawn_jobs.ds_config(stage)}
    assert outcome(job, {1: one}, parts)[0] == "equal"


ON_CPU = drawn_jobs.ds_config(2, zero=drawn_jobs.ON_CPU)
ADAGRAD = drawn_jobs.ds_config(2, optimizer={"type": "Adagrad", "params": {"lr": "auto"}})


@pytest.mark.parametrize("optim", ["sgd", "rmsprop", "adamw_8bit"])
def test_offload_keeps_the_recipes_optimizer(one, parts, optim):
    job = SIMPLE | {"recipe": {"optim": optim, "learning_rate": 1e-3, "weight_decay": 0.5}, "deepspeed": ON_CPU}
    if optim == "adamw_8bit":  # tensors of so few numbers keep their states in 32 bits
        argv = drawn_jobs.write_job(parts, job)
        shutil.rmtree(parts / "out", ignore_errors=True)
        assert one.run(plain_cases.observe, argv=argv)[0] == []
        return
    assert outcome(job, {1: one}, parts)[0] == "equal"


@pytest.mark.parametrize(
    "optim, config, codes",
    [
        ("sgd", ON_CPU | {"zero_force_ds_cpu_optimizer": True}, "ZR269"),
        ("adamw_torch", ON_CPU | {"zero_force_ds_cpu_optimizer": True}, ""),
        ("adagrad", drawn_jobs.ds_config(2), "ZR299"),
        ("adagrad", drawn_jobs.ds_config(0), ""),
        ("adamw_torch", ADAGRAD, "ZR299"),
    ],
)
def test_a_library_that_replaces_the_optimizer_is_refused_before_weights_are_loaded(one, parts, optim, config, codes):
    job = SIMPLE | {"recipe": {"optim": optim, "learning_rate": 1e-3}, "deepspeed": config}
    kind, words = outcome(job, {1: one}, parts)
    assert (kind, words) == ((REFUSED, codes) if codes else ("equal", words))


@pytest.mark.parametrize("optim, codes", [("adamw_8bit", "ZR197"), ("lion_32bit", "ZR197"), ("sgd", "")])
def test_optimizers_of_whole_tensors_are_refused_under_fsdp2(two, parts, optim, codes):
    job = SIMPLE | {"recipe": {"optim": optim, "learning_rate": 1e-3}, "fsdp": True, "ranks": 2}
    kind, words = outcome(job, {2: two}, parts)
    assert (kind, words) == ((REFUSED, codes) if codes else ("equal", words))


@pytest.mark.parametrize(
    "optim, config",
    [
        ("sgd", ON_CPU | {"zero_force_ds_cpu_optimizer": True}),
        ("adagrad", drawn_jobs.ds_config(2)),
        ("adamw_torch", ADAGRAD),
    ],
)
def test_and_by_the_engine_where_no_rule_knows_of_it(one, parts, optim, config):
    argv = drawn_jobs.write_job(parts, SIMPLE | {"recipe": {"optim": optim}, "deepspeed": config})
    with pytest.raises(CaseFailed, match="the run trains otherwise than the recipe says"):
        one.run(cases.train_unchecked, argv=argv)
