"""The atlas in a real browser: its numbers are those of `plan --quick`, and it does what its controls say."""

import json
import random
import shlex
from collections.abc import Iterator
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from benchmarks import atlas
from tests.helpers.browser import Browser, program, started
from tests.helpers.seeded import grid
from zero_recipes.tools.arguments import parse_arguments
from zero_recipes.tools.atlas.page import FIGURES, whole_page
from zero_recipes.tools.main import main
from zero_recipes.tools.plan import show
from zero_recipes.tools.plan.choose import kind, shares_nothing
from zero_recipes.tools.plan.command import answer_by, requested
from zero_recipes.tools.plan.cost import how_good
from zero_recipes.tools.plan.job import USUAL
from zero_recipes.tools.plan.predict import Predictor

MODELS = ("qwen3-8b", "pythia-12b")
# the page listens for the same event, and before this does
GO_BACK = """new Promise((done) => {
    addEventListener("hashchange", () => done(document.querySelector("main").innerText), {once: true});
    history.back();
})"""


@pytest.fixture(scope="module")
def page(tmp_path_factory) -> Path:
    """The page, with figures that are as new as the planner."""
    program()  # skips before the figures are made
    file = tmp_path_factory.mktemp("atlas") / "atlas.html"
    models = {name: atlas.of_model(name) | {"recipes": atlas.recipes_of(name)} for name in MODELS}
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


@cache
def longest_row(model: str) -> int:
    """Of the row lengths that the page has for a model."""
    return max(atlas.lengths_of(atlas.jobs_of(atlas.request_of(model, {}))[0]))


def drawn_choice(rng: random.Random, model: str) -> dict[str, Any]:
    """Of few row lengths: a plan parses each anew."""
    return {
        "model": model,
        "method": rng.choice(list(atlas.METHODS)),
        "gpu": rng.choice(list(atlas.able_gpus())),
        "gpus": rng.choice(atlas.COUNTS),
        "length": rng.choice([512, 2048, longest_row(model)]),
        "price": rng.choice([0.4, 2.5]),
    }


def answer_of(choice: dict[str, Any], strategies: tuple[str, ...], *more: str) -> show.Answer:
    """What `plan --quick` answers."""
    words = ["plan", choice["model"], "--gpu", choice["gpu"], "--gpus", str(choice["gpus"]), "--quick"]
    words += ["--price", str(choice["price"]), "--strategies", ",".join(strategies)]
    words += ["--max_length", str(choice["length"]), *more]
    words += atlas.words_of(atlas.keys_of(choice["model"], choice["method"]))
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
        found[strategy] = [
            verdict.partition(" ")[2],
            memory.partition(" of ")[0],
            host,
            step,
            rate,
            price.removeprefix("$ "),
        ]
    return found


def compare_with_plan(browser: Browser, page: Path, choice: dict[str, Any]) -> None:
    """All rows for micro batches of one row, and the strategy and the micro batch that are proposed."""
    browser.open(address(page, **choice, batch=1))
    found = shown_cells(browser)
    answer = answer_of(choice, atlas.STRATEGIES, "--per_device_train_batch_size", "1")
    planned = {kind(row.job): cells(answer, row) for row in answer.rows if not shares_nothing(row.job)}
    assert {name: found[name] for name in planned} == planned

    browser.open(address(page, **choice, batch="best"))
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
        assert browser.text("#basis") == f"By formulas. {how_good(best.job, usual.request.gpu)}"


def test_drawn_rows_are_those_of_plan(browser, page):
    """Some forty: seven strategies or so in each of six choices."""
    rng = random.Random(57)
    for model in MODELS:
        for _ in range(3):
            compare_with_plan(browser, page, drawn_choice(rng, model))


@pytest.mark.parametrize("model", [grid(path.stem) for path in sorted(atlas.MODELS.glob("*.json"))])
def test_the_figures_of_the_package_are_those_of_plan(browser, tmp_path, model):
    file = tmp_path / "atlas.html"
    file.write_text(whole_page())
    compare_with_plan(browser, file, drawn_choice(random.Random(model), model))


def test_figures_are_small_enough_to_send():
    assert FIGURES.stat().st_size <= 3_000_000


def test_controls_change_the_answer_and_the_address(browser, page):
    browser.open(address(page, gpus=8))
    assert "on 8 x h100-80gb" in browser.text("#answer")
    browser.run("document.getElementById('gpus').focus()")
    browser.press("ArrowDown")
    assert "gpus=16" in browser.run("location.hash")
    assert "on 16 x h100-80gb" in browser.text("#answer")
    assert browser.run("document.activeElement.id") == "gpus"  # the next key goes on from here
    browser.choose("#method", "QLoRA")
    browser.choose("#price", "0.5")
    assert "--load_in_4bit true" in browser.text("#plan-command")
    assert "--price 0.5" in browser.text("#plan-command")


def test_a_link_shows_the_same_and_back_what_was_before(browser, page):
    browser.open(address(page, model="qwen3-8b", gpu="l4-24gb", gpus=4, method="LoRA", sort="memory"))
    before = browser.text("main")
    browser.choose("#length", "8192")
    assert browser.text("main") != before
    changed = browser.text("main")
    sent = browser.run("location.href")
    assert browser.run(GO_BACK) == before
    browser.open("about:blank")
    browser.open(sent)
    assert browser.text("main") == changed


def test_rows_are_sorted_and_chosen_by_keyboard(browser, page):
    browser.open(address(page, gpus=8))
    browser.choose("#sort", "memory")
    needed = [float(cells[1].replace(",", "")) for cells in shown_cells(browser).values()]
    assert needed == sorted(needed)
    browser.choose("#sort", "price")
    rates = [float(cells[4].replace(",", "")) for cells in shown_cells(browser).values()]
    assert rates == sorted(rates, reverse=True)  # of as many GPUs: the cheapest token first
    browser.choose("#sort", "strategy")
    browser.run("document.getElementById('row-zero3').focus()")
    browser.press("ArrowDown")
    assert browser.run("document.activeElement.id") == "row-zero2_offload"
    assert browser.text("#answer").startswith("zero2_offload")
    assert "--config_file zero2_offload.yaml" in browser.text("#train-command")


def test_commands_are_copied_and_plan_takes_them(browser, page):
    browser.call("Emulation.setFocusEmulationEnabled", enabled=True)
    browser.permit("clipboard-read")
    browser.permit("clipboard-write")
    browser.open(address(page, gpus=2, method="QLoRA", row="fsdp2", batch=4))
    browser.click("[data-copies=plan-command]")
    copied = browser.run("navigator.clipboard.readText()")
    assert copied == browser.text("#plan-command")
    assert browser.text("#copied") == f"Copied: {copied}"
    arguments = parse_arguments(shlex.split(copied)[1:])
    (job,), _ = requested(arguments, arguments.overrides).jobs()
    assert (job.strategy, job.world_size, job.quantizes) == ("fsdp2", 2, True)
    assert job.settings.per_device_train_batch_size == 4

    browser.open(page.as_uri())
    browser.click("#link")
    link = browser.run("navigator.clipboard.readText()")
    shown = browser.text("#answer")
    browser.choose("#gpus", "2")
    assert browser.text("#answer") != shown
    browser.open(link)
    assert browser.text("#answer") == shown


def test_what_the_address_has_wrong_is_said(browser, page):
    browser.open(address(page, model="qwen3-8b", gpu="h900", length=2048, price="many"))
    assert 'gpu "h900"' in browser.text("#note")
    assert "h100-80gb" in browser.text("#answer")
    browser.open(address(page, model="pythia-12b", length=8192))
    assert "2,048 positions" in browser.text("#note")
    assert browser.run("document.getElementById('length').value") == "2048"


def test_where_nothing_fits_the_page_says_what_does(browser, page):
    choice = {"model": "qwen3-8b", "gpu": "rtx3090-24gb", "gpus": 1, "length": 16_384, "method": "full", "price": 1}
    assert answer_of(choice, USUAL, "--per_device_train_batch_size", "4").advice.chosen is None
    browser.open(address(page, **choice, batch=4))
    assert browser.text("#answer").startswith("Nothing fits qwen3-8b on 1 x rtx3090-24gb.")
    assert "Try another card" in browser.text("#answer")
    browser.open(address(page, **choice | {"gpu": "h100-80gb", "length": 512}, batch=64, compare="method"))
    assert "fits qwen3-8b on 1 x h100-80gb" in browser.text("#answer")
    methods = "[...document.querySelectorAll('#others tbody tr')].map((row) => row.dataset.value)"
    assert browser.run(methods) == list(atlas.METHODS)


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_a_narrow_window_needs_no_scrolling_to_the_side(browser, page, scheme):
    browser.show_as(400, scheme)
    browser.open(address(page, gpus=64, compare="gpu"))
    seen = "[...document.querySelectorAll('body *:not(thead, thead *)')]"
    rights = f"{seen}.map((part) => part.getBoundingClientRect().right)"
    assert browser.run(f"Math.max(...{rights})") <= 400
    browser.show_as(1280)


def test_the_subcommand_writes_the_page_and_opens_it(monkeypatch, tmp_path, capsys):
    opened = []
    monkeypatch.setattr("webbrowser.open", opened.append)
    file = tmp_path / "new" / "atlas.html"
    assert main(["atlas", "--output", str(file), "--no_browser"]) == 0
    assert opened == []
    assert capsys.readouterr().out.strip() == str(file)
    assert json.loads(FIGURES.read_text())["date"] in file.read_text()
    assert main(["atlas", "--output", str(file)]) == 0
    assert opened == [file.as_uri()]
