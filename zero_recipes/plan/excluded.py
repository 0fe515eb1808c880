"""Why a strategy cannot run as it is planned, by the checks that a run itself would be refused by."""

from __future__ import annotations

import functools
from importlib.metadata import version

from zero_recipes.plan.job import Job

NO_FOLDER = ("ZR232", "ZR233")  # the folder on NVMe is the machine's, and a plan is made elsewhere
USELESS = ("ZR224", "ZR228")  # warnings: ZeRO++ on one node, which costs and saves nothing
_installed = functools.cache(version)  # reads a file


def why_not(job: Job) -> str | None:
    """What a run of `job` would be refused for, or would gain nothing by; None where it is neither."""
    zero = job.zero
    special = (zero.on_nvme, zero.quantizes_weights, zero.quantizes_gradients, zero.bf16_masters, zero.autocast)
    if not any(special) and zero.hpz_partition_size == 1:
        return None  # the others need no import of all checks
    from zero_recipes.checks.low_precision import low_precision_findings
    from zero_recipes.checks.zero_options import zero_option_findings

    ranks = (job.world_size, job.ranks_per_node)
    found = zero_option_findings(zero, job.settings, *ranks, "cuda", _installed("deepspeed"))
    found += low_precision_findings(zero, job.settings)
    named = (one for one in found if one.code in USELESS or (one.level == "error" and one.code not in NO_FOLDER))
    return next((f"{one.what} ({one.code})" for one in named), None)
