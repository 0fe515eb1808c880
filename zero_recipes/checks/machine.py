"""The machine that a run starts on: its driver, GPUs and network, what Triton needs, and room in memory and on disk."""

import contextlib
import os
import re
import threading
import warnings
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path

from huggingface_hub import constants, get_session

from zero_recipes.checks.capacity import room_findings
from zero_recipes.config.run import Run
from zero_recipes.config.settings import Settings
from zero_recipes.config.strategy import Strategy
from zero_recipes.core.findings import Finding, finding
from zero_recipes.core.gpus import Gpu
from zero_recipes.core.host import Host
from zero_recipes.data.load import on_hub, packaged_formats
from zero_recipes.engine.kernels import build_findings

# oldest driver that runs programs of a CUDA major version (NVIDIA's CUDA compatibility guide)
OLDEST_DRIVER = {11: 450, 12: 525, 13: 580}
BF16_FROM = (8, 0)  # NVIDIA's CUDA programming guide, compute capabilities: arithmetic by data type


def machine_findings(run: Run, host: Host) -> list[Finding]:
    """What this machine lacks for the run.

    Warnings that say "on this machine" where a recipe for GPUs is only looked at on a machine without one.
    """
    environment = run.environment
    here = run.ranks_per_node
    findings = [
        *build_findings(run.strategy, run.device, run.settings, host),
        *triton_findings(run.device, host),
        *infiniband_findings(run.device, run.world_size > here, environment, host),
        *volume_findings(run.output_dir, host),
        *room_findings(run, here, host),
    ]
    if run.device == "cuda" and int(environment.get("LOCAL_RANK", 0)) == 0:
        findings += card_findings(run.precision)
        findings += count_findings(run.strategy, here, environment)
    is_meant_for_gpus = run.device == "cpu" and not run.recipe.settings.use_cpu
    if not run.starts_now and is_meant_for_gpus:
        findings = [replace(f, what=f"on this machine: {f.what}", level="warning") for f in findings]
    return [replace(f, scope="machine") for f in findings]


def refusal_of_cuda() -> str:
    """What torch says where CUDA does not start, in one line; empty where it does (is_available says it only once)."""
    import torch

    with warnings.catch_warnings(action="ignore"):
        try:
            torch.cuda.init()
        except (RuntimeError, AssertionError) as error:
            return str(error).strip().splitlines()[0]
    return ""


def driver_findings(use_cpu: bool, host: Host, reason: Callable[[], str] = refusal_of_cuda) -> Iterator[Finding]:
    """A GPU that this build of torch cannot use: the run would train on the CPU without a word."""
    import torch

    built = torch.version.cuda
    hidden = host.environment.get("CUDA_VISIBLE_DEVICES") in ("", "-1")
    if use_cpu or hidden or built is None or torch.cuda.is_available():
        return
    seen = []
    driver = driver_version(host)
    if driver:
        seen.append(f"driver {driver}")
    seen += sorted(f"/dev/{path.name}" for path in host.at("/dev").glob("nvidia[0-9]*"))
    if seen:
        yield finding(
            "ZR650",
            scope="machine",
            version=torch.__version__,
            built=built,
            seen=", ".join(seen),
            oldest=OLDEST_DRIVER.get(int(built.split(".")[0]), "a newer one"),
            message=reason(),
        )


def driver_version(host: Host) -> str | None:
    """The version of NVIDIA's driver, as "550.54.15"; None without one. /proc shows it in every container."""
    written = host.read("/proc/driver/nvidia/version")
    found = re.search(r"^NVRM version:.*?\s(\d{3,}\.\d+(?:\.\d+)?)\s", written, re.MULTILINE)
    return found and found[1]


def card_findings(precision: str) -> Iterator[Finding]:
    """Cards without bf16: torch emulates it and says that it is supported (torch.cuda.is_bf16_supported)."""
    import torch

    if precision != "bf16" or torch.version.cuda is None:  # ROCm names its cards otherwise
        return
    for number in range(torch.cuda.device_count()):
        major, minor = torch.cuda.get_device_capability(number)
        if (major, minor) < BF16_FROM:
            name = torch.cuda.get_device_name(number)
            yield finding("ZR272", number=number, name=name, capability=f"{major}.{minor}")


def gpu_findings(settings: Settings, gpu: Gpu) -> Iterator[Finding]:
    """What a recipe asks for and a card that is not here cannot do. Flash attention begins with bf16."""
    lacking = {
        "bf16": settings.precision == "bf16" and not gpu.bf16,
        "tf32": settings.tf32 and not gpu.tf32_tflops,
        "attn_implementation": "flash" in str(settings.attn_implementation) and not gpu.bf16,
    }
    for key, is_lacking in lacking.items():
        if is_lacking:
            value = str(getattr(settings, key)).lower()
            yield finding("ZR870", name=gpu.name, key=f"{key}: {value}")


def count_findings(strategy: Strategy, here: int, environment: Mapping[str, str]) -> Iterator[Finding]:
    """More visible GPUs than the `here` processes of this machine use."""
    import torch

    visible = torch.cuda.device_count()
    if visible <= here:
        return
    machines = -(-strategy.world_size // here)
    about = {"visible": visible, "here": here, "launch": f"--num_processes {visible * machines}"}
    if strategy.zero_stage == 3 and strategy.ds.quantizes_gradients and machines > 1:
        yield finding("ZR268", **about)
    if "CUDA_VISIBLE_DEVICES" not in environment:
        yield finding("ZR354", **about, idle=visible - here)


def triton_findings(device: str, host: Host) -> Iterator[Finding]:
    """What Triton lacks to compile the kernels of TRL's fused LM head, in the first step of every GPU run."""
    from transformers.utils import is_triton_available

    if device != "cuda" or not is_triton_available():
        return
    missing = []
    compiler = host.environment.get("CC")
    programs = ["gcc", "clang"]
    if compiler:
        programs = compiler.split()[:1]
    if not any(host.which(name) for name in programs):
        missing.append(f"the C compiler {compiler or 'gcc or clang'}")
    if not host.python_headers():
        missing.append("Python's headers (Python.h)")
    folder = _triton_cache(host.environment)
    existing = next(path for path in (folder, *folder.parents) if host.at(path).exists())
    if not os.access(host.at(existing), os.W_OK | os.X_OK):
        missing.append(f"the right to write to {folder}")
    if missing:
        yield finding("ZR652", missing=", ".join(missing))


def _triton_cache(environment: Mapping[str, str]) -> Path:
    """The folder of compiled kernels (triton/knobs.py, `cache_knobs`)."""
    folder = environment.get("TRITON_CACHE_DIR")
    if not folder:
        home = environment.get("TRITON_HOME") or environment.get("HOME") or "~"
        folder = Path(home, ".triton", "cache")
    return Path(folder).expanduser().absolute()


def infiniband_findings(
    device: str, several_machines: bool, environment: Mapping[str, str], host: Host
) -> Iterator[Finding]:
    """InfiniBand or RoCE that NCCL cannot open: a container sees the machine's in /sys."""
    is_off = environment.get("NCCL_IB_DISABLE") == "1" or environment.get("NCCL_NET")
    if device != "cuda" or not several_machines or is_off:
        return
    devices = sorted(path.name for path in host.at("/sys/class/infiniband").glob("*"))
    files = host.at("/dev/infiniband").glob("uverbs*")
    if devices and not any(os.access(file, os.R_OK | os.W_OK) for file in files):
        yield finding("ZR656", devices=", ".join(devices))


PROBE_SECONDS = 5.0


def offline_where_unreachable(settings: Settings) -> list[Finding]:
    """Go on as if HF_HUB_OFFLINE were set, with a warning, where the recipe needs the hub and it is silent."""
    data = {entry["path"] for entry in settings.datasets} or {settings.dataset_name}
    named = {settings.model_name_or_path, *(data - packaged_formats())}
    if constants.is_offline_mode() or not any(map(on_hub, named)) or _answers():
        return []
    import datasets

    os.environ["HF_HUB_OFFLINE"] = "1"
    constants.HF_HUB_OFFLINE = True
    datasets.config.HF_HUB_OFFLINE = True
    return [finding("ZR430", endpoint=constants.ENDPOINT, probe_seconds=PROBE_SECONDS, scope="machine")]


def _answers() -> bool:
    """Whether anything is answered: an error of the hub's is an answer too."""
    answered = threading.Event()

    def ask() -> None:
        with contextlib.suppress(Exception):  # whatever the client raises, there is no answer
            get_session().head(constants.ENDPOINT, timeout=PROBE_SECONDS)
            answered.set()

    thread = threading.Thread(target=ask, daemon=True)  # looking up a name has no limit of its own
    thread.start()
    thread.join(PROBE_SECONDS)
    return answered.is_set()


def volume_findings(output_dir: Path, host: Host) -> Iterator[Finding]:
    """An output folder that RunPod clears once the pod stops: all but its volume, by default at /workspace."""
    volume = Path("/workspace")
    if "RUNPOD_POD_ID" in host.environment and volume.is_mount() and not output_dir.resolve().is_relative_to(volume):
        yield finding("ZR615", folder=output_dir, volume=volume)
