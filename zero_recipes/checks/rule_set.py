"""Rules that are no more than a condition: a code of core/findings.yaml, and the function that says whether it holds.

strategy_rules = RuleSet()

@strategy_rules.rule("ZR2009")
def _muon_scatters(run: Run) -> bool:
    ...
"""

from collections.abc import Callable, Iterator

from zero_recipes.config.run import Run
from zero_recipes.core.findings import Finding, finding

Condition = Callable[[Run], bool]


class RuleSet:
    """The rules of a module, in the order in which they are written."""

    def __init__(self) -> None:
        self.conditions: dict[str, Condition] = {}  # by code

    def rule(self, code: str) -> Callable[[Condition], Condition]:
        """Decorate a condition with the code of its finding, whose texts have no placeholders."""

        def register(condition: Condition) -> Condition:
            self.conditions[code] = condition
            return condition

        return register

    def findings(self, run: Run) -> Iterator[Finding]:
        """A finding for each rule whose condition holds for the run."""
        for code, holds in self.conditions.items():
            if holds(run):
                yield finding(code)
