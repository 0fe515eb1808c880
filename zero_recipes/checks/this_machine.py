"""Checks of the machine that the run starts on: each is small, and reads the machine through a `Host`."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from pathlib import Path

from zero_recipes.checks.cache import missing_of_model, offline_findings, volume_findings
from zero_recipes.checks.capacity import (
    disk_findings,
    download_findings,
    memory_findings,
    resume_findings,
    shared_memory_findings,
)
from zero_recipes.checks.gpus import bf16_findings, capability_findings, count_findings, peer_findings
from zero_recipes.checks.infiniband import infiniband_findings
from zero_recipes.checks.nvme import nvme_findings
from zero_recipes.checks.triton import triton_findings
from zero_recipes.checks.zero_options import quantized_weight_findings
from zero_recipes.config.run import RunConfig
from zero_recipes.core.findings import Finding, finding
from zero_recipes.core.host_limits import Host
from zero_recipes.core.process import local_world_size
from zero_recipes.data.load import on_hub
from zero_recipes.distributed.kernels import build_findings, build_root, stale_locks
from zero_recipes.model import local_config, parameter_sizes


def machine_findings(
    run: RunConfig, environment: Mapping[str, str], host: Host, rehearsal: str | bool
) -> list[Finding]:
    """All findings about this machine for one run. `environment`: the launcher's, for the processes that it starts.

    `rehearsal`: False in a run. `zero-recipes check` says "here" where the run is meant for this machine, "elsewhere"
    where that is open: there is no GPU and the recipe does not ask for a CPU, so that a laptop may be checking a run
    of a GPU machine. Its memory and disk then speak of no run, and errors become warnings that say "on this machine";
    in a run the same findings refuse. What is missing offline stays an error: who forbids the hub means this cache.
    """
    settings, here = run.settings, local_world_size(environment, run.strategy.world_size)
    findings = [
        *build_findings(run.strategy, run.device, settings, host),
        *triton_findings(run.device, host),
        *infiniband_findings(run.device, run.strategy.world_size > here, environment, host),
        *shared_memory_findings(run, here, host),
        *volume_findings(settings, run.output_dir, host),
        *_sized(run, here, host),
        *resume_findings(run, here, host),
    ]
    if int(environment.get("LOCAL_RANK", 0)) == 0:
        findings += [*capability_findings(run.device), *bf16_findings(run.device, run.precision)]
        findings += peer_findings(run.device, here, environment)
        findings += count_findings(run.strategy, run.device, here, environment)
    if rehearsal:
        findings += _locks(host)  # a run deletes them itself and says so
    if rehearsal == "elsewhere":
        findings = [_labelled(finding) for finding in findings]
    return [dataclasses.replace(finding, scope="machine") for finding in (*findings, *offline_findings(settings))]


def _sized(run: RunConfig, here: int, host: Host) -> list[Finding]:
    """What depends on the number of parameters; nothing where the model's configuration is not here yet."""
    from huggingface_hub import constants

    settings = run.settings
    config = local_config(settings)
    sizes = None if config is None else parameter_sizes(config, settings.trust_remote_code)
    if sizes is None:
        return []
    psi = sum(sizes)
    findings = [*memory_findings(run, config, psi, here, host), *disk_findings(run, config, psi, here, host)]
    findings += [*nvme_findings(run, sizes, here, host), *quantized_weight_findings(run.strategy, sizes)]
    waits = on_hub(settings.model_name_or_path) and not constants.is_offline_mode()
    if waits and not settings.random_weights and missing_of_model(settings):
        findings += download_findings(settings, psi, Path(constants.HF_HUB_CACHE), host)
    return findings


def _locks(host: Host) -> list[Finding]:
    return [finding("ZR623", lock=lock) for lock in stale_locks(host.at(build_root(host.environment)))]


def _labelled(finding: Finding) -> Finding:
    return dataclasses.replace(finding, what=f"on this machine: {finding.what}", level="warning")
