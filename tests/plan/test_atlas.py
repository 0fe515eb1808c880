"""The atlas in a real browser: its numbers are those of `plan --quick`, and it does what its controls say."""

import json
import random
import shlex
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from benchmarks import atlas
from tests.helpers.browser import Browser, program, started
from tests.helpers.seeded import grid
from zero_recipes.tools import main
from zero_recipes.tools.arguments import parse_arguments
from zero_recipes.tools.atlas.page import whole_page
from zero_recipes.tools.plan import show
from zero_recipes.tools.plan.choose import kind, shares_nothing
from zero_recipes.tools.plan.command import answer_by, requested
from zero_recipes.tools.plan.job import USUAL
from zero_recipes.tools.plan.predict import Predictor

MODELS = ("qwen3-8b", "pythia-12b")
NOT_SHOWN = "zero2_offload"  # what a test needs another row for


@pytest.fixture(scope="module")
def page(tmp_path_factory) -> Path:
    """The page, with figures that are as new as the planner."""
    program()  # skips before the figures are made
    file = tmp_path_factory.mktemp("atlas") / "atlas.html"
    models = {name: atlas.of_model(name) for name in MODELS}
    file.write_text(whole_page(atlas.written(atlas.figures(models))))
    return file


@pytest.fixture(scope="module")
def tab(tmp_path_factory) -> Iterator[Browser]:
    with started(tmp_path_factory.mktemp("profile")) as browser:
        browser.show_as(1280)
        yield browser


@pytest.fixture
def browser(tab: Browser) -> Iterator[Browser]:
    """A tab whose console stays empty, and which asks nothing of a network."""
    tab.events.clear()
    yield tab
    assert tab.faults() == []


def address(page: Path, **choice: Any) -> str:
    return f"{page.as_uri()}#{'&'.join(f'{key}={value}' for key, value in choice.items())}"


def drawn_choice(rng: random.Random, model: str) -> dict[str, Any]:
    """Of few row lengths: a plan parses each anew."""
    method = rng.choice(list(atlas.METHODS))
    job = atlas.jobs_of(atlas.request_of(model, atlas.METHODS[method]))[0]
    return {
        "model": model,
        "method": method,
        "gpu": rng.choice(list(atlas.able_gpus())),
        "gpus": rng.choice(atlas.COUNTS),
        "length": rng.choice([512, 2048, max(atlas.lengths_of(job))]),
        "price": rng.choice([0.4, 2.5]),
    }


def answer_of(choice: dict[str, Any], strategies: tuple[str, ...], *more: str) -> show.Answer:
    """What `plan --quick` answers."""
    words = ["plan", choice["model"], "--gpu", choice["gpu"], "--gpus", str(choice["gpus"]), "--quick"]
    words += ["--price", str(choice["price"]), "--strategies", ",".join(strategies)]
    words += ["--max_length", str(choice["length"]), *atlas.words_of(atlas.METHODS[choice["method"]]), *more]
    arguments = parse_arguments(words)
    return answer_by(Predictor(quick=True), arguments, requested(arguments, arguments.overrides))


def cells(answer: show.Answer, row: Any) -> list[str]:
    """A row of plan's table, with and without a price."""
    texts = []
    for form in (replace(answer, price=None), answer):
        named, columns = show.short_columns(form)
        texts.append([column.cell(show.NamedRow("", row)) for column in [*named[1:], *columns]])
    (verdict, memory, host, step, rate), (*_, price) = texts
    return [verdict, memory, host, step, rate, price]


def shown_cells(browser: Browser) -> dict[str, list[str]]:
    """The page's rows in the same form."""
    rows = browser.run(
        "[...document.querySelectorAll('#strategies tbody tr')].map((row) =>"
        " [row.dataset.strategy, ...[...row.cells].slice(1).map((cell) => cell.innerText.trim())])"
    )
    found = {}
    for strategy, verdict, memory, host, _batch, step, rate, price in rows:
        found[strategy] = [verdict.partition(" ")[2], memory.partition(" of ")[0], host, step, rate, price]
    return found


def compare_with_plan(browser: Browser, page: Path, choice: dict[str, Any]) -> None:
    """All rows for micro batches of one row, and the strategy and the micro batch that are proposed."""
    browser.open(address(page, **choice, batch=1))
    browser.settle()
    found = shown_cells(browser)
    answer = answer_of(choice, atlas.STRATEGIES, "--per_device_train_batch_size", "1")
    planned = {kind(row.job): cells(answer, row) for row in answer.rows if not shares_nothing(row.job)}
    assert {name: found[name] for name in planned} == planned

    browser.open(address(page, **choice, batch="best"))
    browser.settle()
    usual = answer_of(choice, USUAL)
    if usual.advice.chosen is None:
        assert browser.text("#answer").startswith("Nothing fits")
        return
    best = usual.better if usual.better and usual.better.fit.is_sure else usual.advice.chosen
    chosen = kind(usual.advice.chosen.job)
    assert browser.run("document.querySelector('input[name=row]:checked').value") == chosen
    if kind(best.job) == chosen and best.job.settings.use_peft == usual.advice.chosen.job.settings.use_peft:
        assert shown_cells(browser)[chosen] == cells(usual, best)
        assert browser.text("#train-command") == usual.request.command(best.job)


def test_ten_drawn_rows_are_those_of_plan(browser, page):
    rng = random.Random(57)
    for model in MODELS:
        for _ in range(5):
            compare_with_plan(browser, page, drawn_choice(rng, model))
