"""How long the rows of a run are, for its plan."""

from dataclasses import dataclass

from zero_recipes.config.settings import Settings
from zero_recipes.core.findings import refusal


@dataclass(frozen=True)
class RowLengths:
    """The lengths of a run's rows in tokens.

    Args:
        lengths: tokens of rows as they are trained on, truncated.
        sequences: how many a micro batch counts them as: so many as they are, or fewer where they are packed.
        epoch: sequences of the whole data; None where it is not known.
        source: where they are from, in words.
        evaluated: tokens of the longest evaluation row, and those with a loss in one batch at most.
    """

    lengths: tuple[float, ...]
    sequences: float
    epoch: int | None
    source: str
    evaluated: tuple[int, int] | None = None

    @property
    def mean(self) -> float:
        """Tokens of a row, on average."""
        return sum(self.lengths) / len(self.lengths)


def stated(mean: float, settings: Settings) -> RowLengths:
    """The lengths of rows that all have `mean` tokens and fill their packs. Raises Refusal where max_length is less."""
    longest = settings.max_length
    if longest is not None and mean > longest:
        raise refusal("ZR841", mean=mean, longest=longest)
    sequences = 1.0
    if settings.packing and longest:
        sequences = mean / longest
    return RowLengths((mean,), sequences, None, f"--mean_tokens {mean:g}, the same for all rows")
