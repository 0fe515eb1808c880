"""Tables, plots, judgements and one HTML page from many metrics.json. Reads files only; loads no model library."""

from zero_recipes.metrics.read_runs import MeasuredRun, read_runs
from zero_recipes.metrics.schema import ContractError
from zero_recipes.report.judge import Judgement, judge_runs
from zero_recipes.report.page import write_report

__all__ = ["ContractError", "Judgement", "MeasuredRun", "judge_runs", "read_runs", "write_report"]
