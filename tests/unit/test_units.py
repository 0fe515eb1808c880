"""Numbers as people read them: each threshold with the value before it."""

import math

import pytest

from zero_recipes.core import units


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0.0, "0 ms"),
        (0.017, "17 ms"),
        (0.0994, "99 ms"),
        (0.0995, "0.10 s"),
        (0.43, "0.43 s"),
        (0.9949, "0.99 s"),
        (0.995, "1.0 s"),
        (12.34, "12.3 s"),
        (19.94, "19.9 s"),
        (20, "20 s"),
        (119.4, "119 s"),
        (120, "2 min"),
        (214, "3 min 34 s"),
        (5399, "89 min 59 s"),
        (5400, "1 h 30 min"),
        (7500, "2 h 5 min"),
        (129_540, "35 h 59 min"),
        (129_600, "1 days 12 h"),
        (4 * 86_400 + 3 * 3600, "4 days 3 h"),
    ],
)
def test_a_duration_has_the_two_units_that_matter(seconds, text):
    assert units.duration(seconds) == text


@pytest.mark.parametrize(
    ("size", "text"),
    [
        (None, ""),
        (0, "0 MB"),
        (40_000, "0.04 MB"),
        (999_999, "1 MB"),
        (1_000_000, "1.00 MB"),
        (152_000_000, "152 MB"),
        (999_000_000, "999 MB"),
        (1_000_000_000, "1.00 GB"),
        (63_940_000_000, "63.9 GB"),
        (2_500_000_000_000, "2.50 TB"),
        (-2_000_000_000, "-2.00 GB"),
    ],
)
def test_a_size_has_three_digits_and_the_largest_unit(size, text):
    assert units.size(size) == text


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (0, "0.000"),
        (0.0004, "<0.001"),
        (0.0005, "0.001"),
        (0.0432, "0.043"),
        (0.0999, "0.100"),
        (0.1, "0.10"),
        (12.345, "12.35"),
        (999.99, "999.99"),
        (1000, "1,000"),
        (1250.4, "1,250"),
    ],
)
def test_money_is_never_rounded_to_nothing(value, text):
    assert units.money(value) == text


def test_rates_numbers_of_things_and_shares():
    assert [units.count(value) for value in (None, 0, 87.34, 999.4, 1000, 12_345.6)] == [
        "", "0", "87.3", "999", "1,000", "12,346"
    ]  # fmt: skip
    assert [units.counted(number, "epoch") for number in (1, 2, 3.14, 0.25, 2000)] == [
        "1 epoch", "2 epochs", "3.1 epochs", "0.25 epochs", "2,000 epochs"
    ]  # fmt: skip
    assert [units.fixed(value, 2) for value in (None, 1.005, math.nan, math.inf)] == [
        "",
        "1.00",
        "not finite",
        "not finite",
    ]
    assert [units.percent(share) for share in (None, 0.953, 0)] == ["", "95.3 %", "0.0 %"]
