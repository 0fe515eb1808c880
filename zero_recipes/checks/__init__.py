"""Preflight: what is known to go wrong, found before it costs money.

Each check is a small function that yields findings. `run_sft.py` refuses on errors, `zero-recipes check` prints all.
"""

from zero_recipes.checks.combinations import combination_findings
from zero_recipes.checks.ds_config import ds_config_findings
from zero_recipes.config.validation import recipe_findings

__all__ = ["combination_findings", "ds_config_findings", "recipe_findings"]
