"""Tables, plots, judgements and one HTML page from many metrics.json. Reads files only; loads no model library."""

from zero_recipes.metrics.schema import ContractError, Run, read_runs
from zero_recipes.report.judgement import Judgement, judge
from zero_recipes.report.write import write_report

__all__ = ["ContractError", "Judgement", "Run", "judge", "read_runs", "write_report"]
