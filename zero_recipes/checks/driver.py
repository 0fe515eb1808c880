"""Checks of the NVIDIA driver: a GPU that torch cannot use, so that the run would go on on the CPU without a word."""

from __future__ import annotations

import os
import re
import warnings
from collections.abc import Callable, Iterator

from zero_recipes.core.findings import Finding, finding
from zero_recipes.core.host_limits import Host

# oldest driver that runs programs of a CUDA major version (NVIDIA's CUDA compatibility guide, minor version
# compatibility): Linux, data centre and consumer cards alike
OLDEST_DRIVER = {11: 450, 12: 525, 13: 580}
ON_THE_CPU = "To train on the CPU all the same: use_cpu: true, or an empty CUDA_VISIBLE_DEVICES."


def refusal_of_cuda() -> str:
    """What torch says when CUDA is to be started here, in its own words; empty where it starts.

    `torch.cuda.is_available` says it once in a process, as a warning, which another import may have caused and hidden;
    `torch.cuda.init` raises it every time.
    """
    import torch

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            torch.cuda.init()
        except (RuntimeError, AssertionError) as error:
            return str(error).strip().splitlines()[0]
    return ""


def driver_findings(use_cpu: bool, host: Host, reason: Callable[[], str] = refusal_of_cuda) -> Iterator[Finding]:
    """At most one error: torch is a CUDA build, an NVIDIA device is here, and torch cannot use it.

    `use_cpu`: the recipe's own; `reason` gives torch's words.
    """
    import torch

    built = torch.version.cuda
    hidden = host.environment.get("CUDA_VISIBLE_DEVICES") in ("", "-1")
    if use_cpu or hidden or built is None or torch.cuda.is_available():
        return
    shown, driver = nvidia_devices(host), driver_version(host)
    if not shown and driver is None:
        return
    said = reason()
    oldest = OLDEST_DRIVER.get(int(built.split(".")[0]))
    if "driver on your system is too old" in said or (driver and oldest and int(driver.split(".")[0]) < oldest):
        yield finding(
            "ZR650",
            driver=driver or "(of unknown version)",
            version=torch.__version__,
            built=built,
            first_split=built.split(".")[0],
            oldest=oldest or "(a newer one)",
            said=said,
            on_the_cpu=ON_THE_CPU,
            scope="machine",
        )
        return
    yield finding(
        "ZR651",
        seen=" and ".join(_seen(shown, driver)),
        version=torch.__version__,
        built=built,
        said=said,
        cure=_cure(said, shown, host),
        on_the_cpu=ON_THE_CPU,
        scope="machine",
    )


def nvidia_devices(host: Host) -> list[str]:
    """Device files of GPUs: ["/dev/nvidia0", ...]. Containers have them where they were given GPUs."""
    found = [path.name for path in host.at("/dev").glob("nvidia*") if re.fullmatch(r"nvidia\d+", path.name)]
    return [f"/dev/{name}" for name in sorted(found, key=lambda name: int(name.removeprefix("nvidia")))]


def driver_version(host: Host) -> str | None:
    """Version of the loaded kernel module, as "550.54.15": /proc shows it in every container of the machine."""
    try:
        written = host.at("/proc/driver/nvidia/version").read_text()
    except OSError:
        return None
    found = re.search(r"^NVRM version:.*?\s(\d{3,}\.\d+(?:\.\d+)?)\s", written, re.MULTILINE)
    return found.group(1) if found else None


def _seen(shown: list[str], driver: str | None) -> list[str]:
    return ([f"driver {driver}"] if driver else []) + ([", ".join(shown)] if shown else [])


def _cure(said: str, shown: list[str], host: Host) -> str:
    visible = host.environment.get("CUDA_VISIBLE_DEVICES")
    closed = [name for name in shown if not os.access(host.at(name), os.R_OK | os.W_OK)]
    if closed:
        return f"Make {', '.join(closed)} readable and writable for user {os.getuid()} (ls -l /dev/nvidia*)."
    if not shown:
        return "A container sees the driver of its machine, but no GPU unless it is given one: docker run --gpus all."
    if "802" in said or "not yet initialized" in said:
        return "Machines with NVSwitch need NVIDIA's fabric manager in the driver's version, running; or another pod."
    if visible is not None:
        return f"CUDA_VISIBLE_DEVICES is {visible}: unset it, or name GPUs that nvidia-smi -L lists."
    if "no NVIDIA driver" in said:
        return "libcuda.so is not found: docker run --gpus all brings it in (NVIDIA_DRIVER_CAPABILITIES with compute)."
    return "Look at nvidia-smi and its message; restart the machine, or take another pod."
