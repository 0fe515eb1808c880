"""Why a strategy cannot run as it is planned, by the checks that a run itself would be refused by."""

from __future__ import annotations

from importlib.metadata import version

from zero_recipes.checks.low_precision import low_precision_findings
from zero_recipes.checks.zero_options import zero_option_findings
from zero_recipes.planner.job import Job

NO_FOLDER = ("ZR232", "ZR233")  # the folder on NVMe is the machine's, and a plan is made elsewhere
USELESS = ("ZR224", "ZR228")  # warnings: ZeRO++ on one node, which costs and saves nothing


def why_not(job: Job) -> str | None:
    """What a run of `job` would be refused for, or would gain nothing by; None where it is neither."""
    if job.ds_config is None:
        return None
    ranks = (job.world_size, job.ranks_per_node)
    found = zero_option_findings(job.zero, job.settings, *ranks, "cuda", version("deepspeed"))
    found += low_precision_findings(job.zero, job.settings)
    named = (one for one in found if one.code in USELESS or (one.level == "error" and one.code not in NO_FOLDER))
    return next((f"{one.what} ({one.code})" for one in named), None)
