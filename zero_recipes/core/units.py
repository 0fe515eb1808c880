"""Numbers as people read them. Sizes are binary (1 GiB = 1024 MiB) and always carry their unit."""

import math

BINARY = (("TiB", 1024**4), ("GiB", 1024**3), ("MiB", 1024**2), ("KiB", 1024), ("B", 1))


def binary_unit(number_of_bytes: float) -> tuple[str, int]:
    """The largest unit of which there is at least one, with its size in bytes."""
    return next((unit for unit in BINARY if abs(number_of_bytes) >= unit[1]), BINARY[-1])


def size(number_of_bytes: float | None) -> str:
    """Bytes with three significant digits and their unit: 63.9 GiB, 152 MiB, 0 B."""
    if number_of_bytes is None:
        return ""
    name, one = binary_unit(number_of_bytes)
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


def parameters(number: int | None) -> str:
    """A model's size in words: 6.86 billion, 5.2 million."""
    if number is None:
        return "unknown number of"
    for name, one in (("billion", 10**9), ("million", 10**6)):
        if number >= one:
            return f"{significant(number / one)} {name}"
    return f"{number:,}"
