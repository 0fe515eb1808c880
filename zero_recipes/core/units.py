"""Numbers as people read them.

Sizes are decimal (1 GB = 10^9 bytes), as disks, links and DeepSpeed's documentation count. A GPU's own name ("H100
80GB") is a name: its memory is 81559 MiB by nvidia-smi, 85.5 GB here.
"""

import math
from itertools import pairwise

UNITS = (("TB", 10**12), ("GB", 10**9), ("MB", 10**6))
TIMES = (("days", 86_400), ("h", 3600), ("min", 60), ("s", 1))


def unit_of(number_of_bytes: float) -> tuple[str, int]:
    """Choose the largest unit of which there is at least one, MB for less. Returns (its name, its size in bytes)."""
    return next((unit for unit in UNITS if abs(number_of_bytes) >= unit[1]), UNITS[-1])


def size(number_of_bytes: float | None) -> str:
    """Write bytes with three significant digits and their unit: 63.9 GB, 152 MB, 0.04 MB, 0 MB."""
    if number_of_bytes is None:
        return ""
    name, one = unit_of(number_of_bytes)
    number = number_of_bytes / one
    if abs(number) >= 1:
        return f"{significant(number)} {name}"
    return f"{number:.2f}".rstrip("0").rstrip(".") + f" {name}"


def duration(seconds: float) -> str:
    """Write seconds for people: 17 ms, 0.43 s, 12.3 s, 95 s, 3 min 34 s, 2 h 5 min, 4 days 3 h."""
    if seconds < 0.0995:
        return f"{1000 * seconds:.0f} ms"
    if seconds < 0.995:
        return f"{seconds:.2f} s"
    if seconds < 20:
        return f"{seconds:.1f} s"
    if seconds < 120:
        return f"{seconds:.0f} s"
    large_and_small = next(pair for pair in pairwise(TIMES) if seconds >= 1.5 * pair[0][1])
    (large, one), (small, other) = large_and_small
    units, rest = divmod(round(seconds / other), one // other)
    return f"{units} {large} {rest} {small}" if rest else f"{units} {large}"


def money(value: float) -> str:
    """Write an amount in the currency of the price: 1,250, 12.35, 0.043, <0.001."""
    if value >= 1000:
        return f"{value:,.0f}"
    if value >= 0.1:
        return f"{value:,.2f}"
    return "<0.001" if 0 < value < 0.0005 else f"{value:,.3f}"


def significant(value: float) -> str:
    """Write a number with three significant digits and without an exponent; whole numbers from 100 on."""
    if value == 0:
        return "0"
    decimals = 2 - math.floor(math.log10(abs(value)))
    return f"{value:.{min(max(decimals, 0), 6)}f}"


def count(value: float | None) -> str:
    """Write a rate or a number of things: 12,345 or 87.3."""
    if value is None:
        return ""
    return f"{value:,.0f}" if value >= 1000 else significant(value)


def counted(number: float, thing: str) -> str:
    """Write a number of things with its noun: 2,000 rows, 1 epoch, 3.1 epochs."""
    digits = 0 if float(number).is_integer() else 1
    text = f"{number:,.{digits}f}" if digits == 0 or number >= 1 else f"{number:.2g}"
    return f"{text} {thing}{'' if number == 1 else 's'}"


def fixed(value: float | None, digits: int) -> str:
    """Write a number with so many decimals, or "not finite"."""
    if value is None:
        return ""
    return f"{value:.{digits}f}" if math.isfinite(value) else "not finite"


def percent(share: float | None) -> str:
    """Write a share as a percentage: 0.953 is 95.3 %."""
    return "" if share is None else f"{100 * share:.1f} %"
