"""Numbers of a page that a marker takes from a result's file."""

import json

import pytest

from scripts.page_numbers import with_numbers

RESULTS = {
    "rows": [
        {"case": "a", "gpus": 1, "peak": 8_175_043_584, "error": -0.0353},
        {"case": "a", "gpus": 2, "peak": 120_966_042_624, "error": 0.0812},
        {"case": "b", "gpus": 2, "peak": 1_200_000_000_000, "error": 0.002},
    ],
    "all rows": {"within": [18, 20]},
}


@pytest.fixture
def results(tmp_path):
    (tmp_path / "gpu.json").write_text(json.dumps(RESULTS))
    return tmp_path


@pytest.mark.parametrize(
    ("written", "key", "renewed"),
    [
        ("7.9", "gpu.json rows/0/peak / 1e9", "8.2"),
        ("7.9", "gpu.json rows/case=a,gpus=2/peak / 1e9", "121.0"),
        ("100", "gpu.json rows/case=b/peak / 1e9", "1,200"),  # decimals as written
        ("17", "gpu.json all rows/within/0", "18"),
        ("-1.0", "gpu.json rows/0/error * 100", "-3.5"),
        ("+1.0", "gpu.json rows/1/error * 100", "+8.1"),
        ("1.0", "gpu.json rows/0/error * -100", "3.5"),  # "3.5 % too low"
        ("1", "count gpu.json rows", "3"),
        ("0.1", "max gpu.json rows/*/error * 100", "8.1"),
        ("0.1", "median\ngpu.json rows/*/error * 100", "0.2"),  # a line may end in a marker
    ],
)
def test_a_marked_number_is_what_its_file_has(results, written, key, renewed):
    page = f"It took {written}<!-- from {key} --> GB, in 3.14 hours."
    assert with_numbers(page, results) == f"It took {renewed}<!-- from {key} --> GB, in 3.14 hours."


def test_markers_in_code_and_other_comments_are_left_alone(results):
    page = "`1<!-- from X -->`\n```\n1<!-- from X -->\n```\n2 <!-- a comment -->"
    assert with_numbers(page, results) == page


@pytest.mark.parametrize(
    "marked",
    [
        "8.2<!-- from gpu.json rows/9/peak -->",
        "8.2<!-- from gpu.json rows/case=c/peak -->",
        "8.2<!-- from gpu.json rows/0/peaks -->",
        "8.2<!-- from gpu.json rows -->",
        "8.2<!-- from gone.json rows/0/peak -->",
        "8.2<!-- from gpu.json -->",
        "8.2 <!-- from gpu.json rows/0/peak -->",
        "2e-07<!-- from gpu.json rows/0/peak -->",
    ],
)
def test_a_marker_without_its_number_is_an_error(results, marked):
    with pytest.raises(ValueError, match="marker"):
        with_numbers(f"It took {marked}", results)
