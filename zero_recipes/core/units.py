"""Numbers as people read them: the one place where bytes become text.

Sizes are decimal (1 GB = 10^9 bytes), as disks, links and DeepSpeed's documentation count, and always carry their unit.
A GPU's own name ("H100 80GB") is a name: its memory is 81559 MiB by nvidia-smi, 85.5 GB here.
"""

import math

UNITS = (("TB", 10**12), ("GB", 10**9), ("MB", 10**6), ("kB", 10**3), ("B", 1))


def unit_of(number_of_bytes: float) -> tuple[str, int]:
    """The largest unit of which there is at least one, with its size in bytes."""
    return next((unit for unit in UNITS if abs(number_of_bytes) >= unit[1]), UNITS[-1])


def size(number_of_bytes: float | None) -> str:
    """Bytes with three significant digits and their unit: 63.9 GB, 152 MB, 0 B."""
    if number_of_bytes is None:
        return ""
    name, one = unit_of(number_of_bytes)
    return f"{number_of_bytes:.0f} B" if one == 1 else f"{significant(number_of_bytes / one)} {name}"


def significant(value: float) -> str:
    """Three significant digits without an exponent; whole numbers from 100 on."""
    if value == 0:
        return "0"
    decimals = 2 - math.floor(math.log10(abs(value)))
    return f"{value:.{min(max(decimals, 0), 6)}f}"


def count(value: float | None) -> str:
    """A rate or a number of things: 12,345 or 87.3."""
    if value is None:
        return ""
    return f"{value:,.0f}" if value >= 1000 else significant(value)


def fixed(value: float | None, digits: int) -> str:
    """A number with so many decimals; what is not finite is said in words."""
    if value is None:
        return ""
    return f"{value:.{digits}f}" if math.isfinite(value) else "not finite"


def percent(share: float | None) -> str:
    """0.953 as 95.3 %."""
    return "" if share is None else f"{100 * share:.1f} %"
