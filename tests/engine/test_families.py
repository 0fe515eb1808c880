"""The board of families (benchmarks/families.py): a part of five types of distinct kinds; the whole of all types."""

import pytest

from benchmarks import families
from benchmarks.families import (
    BF16,
    CELLS,
    EQUAL,
    PACKED,
    Board,
    compared,
    failures,
    outcome,
    results,
    types_to_do,
    write_recipe,
    write_row,
)
from benchmarks.family_models import TYPES, write_family
from tests.helpers import cases

# latent attention with experts; linear attention; windows; experts with sinks; convolutions
PART = {
    "deepseek_v3": ("zero3", "saved", "resumed"),
    "olmo_hybrid": ("fsdp2",),
    "gemma3_text": ("zero2", "packed"),
    "gpt_oss": ("lora", "bf16"),
    "lfm2": ("recomputed",),
}


@pytest.fixture(scope="module")
def board(one, two, tmp_path_factory):
    return Board(tmp_path_factory.mktemp("board"), {1: one, 2: two})


@pytest.mark.parametrize("kind", PART)
def test_a_part_of_the_board(board, kind):
    row = board.row_of(kind, PART[kind])
    assert set(results(row)) == {"equal"} and list(row["cells"]) == [name for name in CELLS if name in PART[kind]], row
    for name, cell in row["cells"].items():
        assert cell["gap"] <= (BF16 if name == "bf16" else EQUAL)


@pytest.mark.grid
@pytest.mark.timeout(3 * 3600)
def test_the_whole_board(board):
    """Writes benchmarks/results/families.json, then asserts."""
    failing = {}
    for kind in TYPES:
        row = board.row_of(kind)
        write_row(kind, row, families.RESULTS)
        if families.FAILS in results(row):
            failing[kind] = failures(row)
    assert {kind: words for kind, words in failing.items() if not families.is_explained(words)} == {}


def test_packed_rows_that_see_each_other_are_not_equal(board, one, tmp_path):
    """The twin: the cell tells rows that are kept apart from those that are not, which a rule refuses."""
    folder = tmp_path / "gpt_oss"
    folder.mkdir()
    write_family("gpt_oss", folder / "model")
    recipe = write_recipe(folder, board.rows)
    apart = board.run(recipe, 1, "single", "one")
    assert outcome(board.run(recipe, 1, "single", "packed", **PACKED))["codes"] == ["ZR133"]
    words = [word for key, value in PACKED.items() for word in (f"--{key}", str(value))]
    argv = [str(recipe), "--output_dir", str(folder / "mixed"), *words]
    mixed = one.run(cases.train_unchecked, argv=argv)[0]["metrics"]["loss_history"]
    cell = compared({"losses": mixed}, apart["losses"], EQUAL)
    assert cell["result"] == "fails" and cell["gap"] > 10 * EQUAL, cell


def test_cells_say_what_became_of_a_run():
    losses = [2.0, 1.0]
    assert compared({"losses": [2.0, 1.0 + 0.9e-5]}, losses, EQUAL)["result"] == "equal"
    assert compared({"losses": [2.0, 1.0 + 1.1e-5]}, losses, EQUAL)["result"] == "fails"
    assert compared({"losses": [2.0, float("nan")]}, losses, EQUAL)["result"] == "fails"
    assert compared({"losses": [2.0]}, losses, EQUAL)["result"] == "fails", "a step is missing"
    assert outcome({"refused": ["ZR133"], "what": "packed"}) == {
        "result": "refused",
        "codes": ["ZR133"],
        "what": "packed",
    }
    assert outcome({"error": "KeyError: 'x'"}) == {"result": "fails", "error": "KeyError: 'x'"}


def test_the_board_goes_on_where_it_stopped(tmp_path):
    path = tmp_path / "families.json"
    write_row("llama", {"cells": {"one": {"result": "equal"}}}, path)
    write_row("bloom", {"cells": {"one": {"result": "fails", "error": "x"}}}, path)
    write_row("blt", {"unsupported": "x"}, path)
    rows = families.read_results(path)["types"]
    assert list(rows) == ["bloom", "blt", "llama"]
    rest = types_to_do([], False, rows)
    assert len(rest) == len(TYPES) - 3 and "bloom" not in rest
    assert set(types_to_do([], True, rows)) == {*rest, "bloom"}
    assert types_to_do(["llama"], False, rows) == ["llama"]
