"""A machine that is files below a folder and numbers, and a run on it."""

import sysconfig
from pathlib import Path
from types import SimpleNamespace

from tests.helpers.tiny import write_recipe
from zero_recipes.config import recipe as recipes
from zero_recipes.config.ds_config import DsConfig
from zero_recipes.config.read import parse_recipe
from zero_recipes.config.run import Run
from zero_recipes.config.settings import Settings
from zero_recipes.config.strategy import Strategy
from zero_recipes.core.host import Host
from zero_recipes.model.meta import MetaModel

PYTHON_H = f"{sysconfig.get_path('include')}/Python.h"
CXX = "/usr/bin/c++"
CONTAINER = {"/proc/self/cgroup": "0::/\n"}
SEEN = {"/sys/class/infiniband/mlx5_0/node_type": "1: CA"}
MODULE = "NVRM version: NVIDIA UNIX {}  {}  Release Build\nGCC version: gcc 12.2.0\n"
CLOSED, OPEN = "x86_64 Kernel Module", "Open Kernel Module for x86_64"
DRIVER = {"/proc/driver/nvidia/version": MODULE.format(CLOSED, "550.54.15"), "/dev/nvidia0": ""}


def machine(root: Path, files: dict[str, str] | None = None, free: int = 10**15, lacks: str = "", **variables) -> Host:
    """A root with these files (programs where the path is in bin/), `free` bytes on every disk, and a sound base less
    what it `lacks`."""
    base = {
        "/proc/meminfo": "MemTotal: 2000000 kB\nMemAvailable: 1000000 kB\n",
        CXX: "#!/bin/sh\n",
        PYTHON_H: "",
        "/usr/include/libaio.h": "",
    }
    for name, text in (base | (files or {})).items():
        path = root / name.lstrip("/")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
        path.chmod(0o755)
    if lacks:
        (root / lacks.lstrip("/")).unlink()
    (root / "dev" / "shm").mkdir(parents=True, exist_ok=True)
    variables = {"PATH": str(root / "usr/bin"), "TORCH_EXTENSIONS_DIR": "/extensions"} | variables
    return Host(root, variables, lambda path: SimpleNamespace(f_bavail=free, f_frsize=1))


LIMITS = "Limit  Soft Limit  Hard Limit  Units\nMax locked memory         {0}                {0}                bytes\n"


def may_lock(limit: int | str, capabilities: str = "0") -> dict[str, str]:
    return {"/proc/self/limits": LIMITS.format(limit), "/proc/self/status": f"Name:\tx\nCapEff:\t{capabilities}\n"}


def said(findings) -> str:
    findings = list(findings)
    assert all(f.what and f.why and f.fix for f in findings)
    return " | ".join(f"{f.level}: {f.what} [{f.code}]" for f in findings)


def sound_settings(folder: Path) -> Settings:
    """The keys of a recipe in force: full fine-tuning in bf16 that saves a model and no checkpoints."""
    path = write_recipe(folder, save_model=True, random_weights=False)
    return parse_recipe(path, recipes.read_recipe_file(path), []).settings


def ds_config(config: dict, offload: str | None = None, stage: int = 2) -> DsConfig:
    zero = {"stage": stage} | ({} if offload is None else {"offload_optimizer": {"device": offload}})
    return DsConfig(config | {"zero_optimization": zero | config.get("zero_optimization", {})})


def run_of(settings, device="cuda", stage=2, world=2, output_dir="out", offload=None, config=None, **changes) -> Run:
    name = "ddp" if stage is None else f"zero{stage}"
    deepspeed = None if stage is None else ds_config({}, offload, stage)
    strategy = Strategy(name, world, deepspeed, "c.json")
    settings = settings.replace(output_dir=str(output_dir), **changes)
    recipe = SimpleNamespace(settings=settings)
    meta = None if config is None else MetaModel(config, settings)
    return Run(recipe, settings, {}, strategy, device, {}, meta)
