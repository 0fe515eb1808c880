"""Versions below the floor, each with its fault."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from packaging.version import Version

from zero_recipes.core.findings import Finding, finding
from zero_recipes.libs import versions

_UNTESTED = "Nothing older is tested: its private parts may be other ones."
# package: (oldest version that the code is written for, what goes wrong below it); pyproject.toml says the same
FLOORS = {
    "deepspeed": (
        versions.floor("deepspeed"),
        "Before 0.19.0 overlap_comm at stages 1 and 2 freed buffers that the reduction stream still read: the loss "
        "went to nan (deepspeedai/DeepSpeed#7965); before 0.19.4 LoRA at stage 3 stopped where activations were "
        "recomputed (huggingface/transformers#47254); of 0.19.3 wrong gradients at stage 2 are reported where a module "
        f"is used several times (#8224). {_UNTESTED}",
    ),
    "transformers": (
        versions.floor("transformers"),
        "Before 5.18 the Trainer has no end(): the run dies after its last save, its process group still alive "
        "(huggingface/transformers#48874); 5.13 held a whole mixture of experts in host memory while it loaded at "
        f"stage 3 (#47514). {_UNTESTED}",
    ),
    "trl": (
        versions.floor("trl"),
        "TRL gathered the LM head once for each chunk of supervised tokens: under ZeRO stage 3, ranks with unequal "
        "numbers of them waited for each other forever (huggingface/trl#6696). 1.16 gathers once.",
    ),
    "peft": (
        "0.21",
        "Before 0.18 it imports HybridCache, which transformers 5 does not have: TRL cannot be imported "
        "(huggingface/peft#2735). Nothing older than 0.21 is tested.",
    ),
}


def installed_versions() -> dict[str, str]:
    """{package of FLOORS: its installed version}; nothing is imported."""
    return {package: versions.installed(package) for package in FLOORS}


def version_findings(installed: Mapping[str, str]) -> Iterator[Finding]:
    """One finding for each package below its floor."""
    for package, (floor, fault) in FLOORS.items():
        if Version(installed[package]) < Version(floor):
            yield finding("ZR601", package=package, installed=installed[package], floor=floor, fault=fault)
