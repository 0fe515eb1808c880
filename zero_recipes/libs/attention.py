"""Where transformers finds flash attention: in a package that is installed, or as a kernel of the hub.

transformers 5.23 (modeling_utils.py, `_check_and_adjust_attn_implementation`) takes a kernel that was built beforehand
where the package of flash_attention_2, _3 or _4 is missing and the package `kernels` is there, and then goes by the
kernel's name.

Private: `_attn_implementation` of a model's config, and the tables and functions of transformers 5.23 that are imported
here (modeling_flash_attention_utils.py, integrations/hub_kernels.py, utils/import_utils.py). None of them is
documented; without them a missing kernel would be found after the weights are loaded.
"""

from __future__ import annotations

from pathlib import Path

from transformers import PreTrainedModel
from transformers import modeling_flash_attention_utils as flash
from transformers.integrations import hub_kernels
from transformers.utils import import_utils

from zero_recipes.core.findings import first_line


def kernel_of(attn_implementation: str | None) -> str | None:
    """The kernel of the hub that stands for an implementation, or that it names; None of eager, sdpa and the like."""
    if attn_implementation in flash.FLASH_ATTN_KERNEL_FALLBACK:
        return flash.FLASH_ATTN_KERNEL_FALLBACK[attn_implementation]
    return attn_implementation if hub_kernels.is_kernel(attn_implementation) else None


def has_package(attn_implementation: str) -> bool:
    """Whether the package of flash_attention_2, _3 or _4 is installed; False of a kernel, which none has."""
    known = flash.FLASH_ATTENTION_COMPATIBILITY_MATRIX
    versions = {f"flash_attention_{number}": each["general_availability_check"] for number, each in known.items()}
    return attn_implementation in versions and versions[attn_implementation]()


def name_in_force(attn_implementation: str | None) -> str | None:
    """What the model's config will say: the kernel's name where it stands for a package that is missing."""
    if kernel_of(attn_implementation) is None or has_package(attn_implementation):
        return attn_implementation
    return kernel_of(attn_implementation)


def attention_in_force(model: PreTrainedModel) -> str | None:
    """The attention implementation that the model has taken."""
    return model.config._attn_implementation


def is_requested(requested: str | None, got: str | None) -> bool:
    """Whether a model that says `got` has taken what was requested; None: whatever it takes."""
    return requested is None or got in (requested, kernel_of(requested))


def runs_on(kernel: str, device: str) -> bool:
    """Whether a kernel is built for "cpu" or "cuda", as far as transformers knows."""
    repository, _ = _revision(kernel)
    return device in flash.FLASH_ATTN_KERNEL_DEVICES.get(repository, (device,))


def wanted_kernels() -> str | None:
    """The versions of the package `kernels` that transformers takes, for pip; None where such a one is installed."""
    if import_utils.is_kernels_available():
        return None
    return f"kernels>={import_utils.KERNELS_MIN_VERSION},<{import_utils.KERNELS_MAX_VERSION}"


def download(kernel: str, only_cached: bool) -> Path:
    """The folder of a kernel's build for this torch, from the cache or (unless `only_cached`) the hub. Not loaded.

    Raises LookupError, with the library's words, where there is none.
    """
    from kernels import install_kernel

    repository, revision = _revision(kernel)
    try:
        return Path(install_kernel(repository, revision=revision, local_files_only=only_cached))
    except Exception as error:  # of kernels, huggingface_hub and the network, of many kinds
        raise LookupError(first_line(error).rstrip(":.")) from error


def _revision(kernel: str) -> tuple[str, str]:
    """("owner/name", branch) of "owner/name", "owner/name@revision" or "owner/name:function"; a kernel's versions are
    branches of its repository."""
    repository, _, revision = kernel.partition(":")[0].partition("@")
    return repository, revision or f"v{hub_kernels.get_attn_kernel_version(repository)}"
