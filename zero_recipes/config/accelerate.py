"""What an accelerate file would put into the environment of a run, and what in that contradicts itself.

accelerate reads the file. Its own way from there to the environment (utils/launch.py) is that of a launch: it looks for
this machine's GPUs, and a free port.
"""

from __future__ import annotations

import ipaddress
import os
import shutil
import socket
from collections.abc import Iterator, Mapping, MutableMapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from zero_recipes.config.accelerate_file import UNNAMED, read_accelerate_file
from zero_recipes.core.findings import Finding, finding, first_line, refusal

if TYPE_CHECKING:
    from accelerate.commands.config.config_args import ClusterConfig

# accelerate 1.15, utils/dataclasses.py, DeepSpeedPlugin._deepspeed_config_checks
AMBIGUOUS = ("gradient_accumulation_steps", "gradient_clipping", "zero_stage", "offload_optimizer_device")
AMBIGUOUS += ("offload_param_device", "offload_param_nvme_path", "offload_optimizer_nvme_path")
AMBIGUOUS += ("zero3_save_16bit_model", "mixed_precision")
# accelerate 1.15, utils/launch.py, prepare_deepspeed_cmd_env: the keys of deepspeed_config that reach the training
INLINE = {
    "zero_stage": "ACCELERATE_DEEPSPEED_ZERO_STAGE",
    "gradient_accumulation_steps": "ACCELERATE_GRADIENT_ACCUMULATION_STEPS",
    "gradient_clipping": "ACCELERATE_GRADIENT_CLIPPING",
    "offload_optimizer_device": "ACCELERATE_DEEPSPEED_OFFLOAD_OPTIMIZER_DEVICE",
    "offload_param_device": "ACCELERATE_DEEPSPEED_OFFLOAD_PARAM_DEVICE",
    "zero3_init_flag": "ACCELERATE_DEEPSPEED_ZERO3_INIT",
    "zero3_save_16bit_model": "ACCELERATE_DEEPSPEED_ZERO3_SAVE_16BIT_MODEL",
    "deepspeed_moe_layer_cls_names": "ACCELERATE_DEEPSPEED_MOE_LAYER_CLS_NAMES",
}
DS_FIELDS = "ACCELERATE_CONFIG_DS_FIELDS"


def launched_environment(config_file: Path | None, num_processes: int | None) -> dict[str, str]:
    """The variables that `accelerate launch` sets and a run is put together from. Raises Refusal for a broken file."""
    if config_file is None:
        return {} if num_processes in (None, 1) else {"WORLD_SIZE": str(num_processes)}
    config = read_accelerate_file(config_file)
    refuse_what_no_launch_takes(config, config_file, num_processes)
    count = num_processes or config.num_processes
    environment = {"WORLD_SIZE": str(count)}
    if config.num_machines > 1 and count % config.num_machines == 0:
        environment["LOCAL_WORLD_SIZE"] = str(count // config.num_machines)
    if config.distributed_type in ("MULTI_CPU", "NO") and count != 1 and not config.mpirun_config:
        # accelerate 1.15, commands/launch.py, simple_launcher: one process, whatever num_processes says
        alone = {"ACCELERATE_USE_CPU": str(config.use_cpu), "MASTER_ADDR": "127.0.0.1"}
        return alone | {"ACCELERATE_MIXED_PRECISION": str(config.mixed_precision or "no")}
    if config.distributed_type == "FSDP":
        environment["ACCELERATE_USE_FSDP"] = "true"
        named = {"fsdp_transformer_layer_cls_to_wrap": "FSDP_TRANSFORMER_CLS_TO_WRAP"}
        given = config.fsdp_config.items()
        environment |= {named.get(key, key.upper()): str(value) for key, value in given if value is not None}
    if config.mixed_precision:
        environment["ACCELERATE_MIXED_PRECISION"] = str(config.mixed_precision)
    if config.parallelism_config:
        environment["ACCELERATE_USE_PARALLELISM_CONFIG"] = "true"
    if not config.deepspeed_config:
        return environment
    given = [*config.deepspeed_config, *(["mixed_precision"] if config.mixed_precision else [])]
    inline = {INLINE[key]: value for key, value in config.deepspeed_config.items() if key in INLINE}
    environment |= {name: _as_launched(name, value) for name, value in inline.items() if value is not None}
    return environment | {
        "ACCELERATE_USE_DEEPSPEED": "true",
        "ACCELERATE_DEEPSPEED_CONFIG_FILE": str(config.deepspeed_config.get("deepspeed_config_file") or "none"),
        DS_FIELDS: ",".join(map(str, given)),
    }


def _as_launched(name: str, value: Any) -> str:
    return str(value) if name in (INLINE["zero_stage"], INLINE["deepspeed_moe_layer_cls_names"]) else str(value).lower()


def inline_ds_config(environment: Mapping[str, str], precision: str) -> dict[str, Any]:
    """The ds_config that accelerate makes of a file without `deepspeed_config_file`: DeepSpeedPlugin is asked for it.

    `environment`: the launcher's; `precision`: the recipe's, "bf16", "fp16" or "fp32". Raises Refusal.
    """
    from accelerate.utils import DeepSpeedPlugin, clear_environment

    from zero_recipes.config.ds_schema import quiet

    given = {name: text for name, text in environment.items() if name.startswith("ACCELERATE_")}
    try:
        with quiet(), clear_environment():  # which empties `environment` too, where that is os.environ
            os.environ.update(given)
            plugin = DeepSpeedPlugin()
            plugin.set_mixed_precision({"fp32": "no"}.get(precision, precision))
    except (ValueError, TypeError, NotImplementedError) as error:
        raise refusal("ZR205", error=first_line(error)) from None
    config = dict(plugin.deepspeed_config)
    del config["steps_per_print"]  # infinity, which JSON does not know; accelerate writes it again
    return config


def hand_over(environment: MutableMapping[str, str]) -> None:
    """Let accelerate take the ds_config in force beside the launcher's fields, which have been read into it.

    DeepSpeedPlugin (utils/dataclasses.py, _deepspeed_config_checks) stops where both are there.
    """
    environment.pop(DS_FIELDS, None)


def precision_findings(environment: Mapping[str, str], precision: str) -> Iterator[Finding]:
    """What an accelerate file's mixed_precision says against the recipe's `precision`: "bf16", "fp16" or "fp32"."""
    asked = environment.get("ACCELERATE_MIXED_PRECISION", "no").lower()
    if asked not in ("bf16", "fp16") or asked == precision:
        return
    if precision == "fp32":
        yield finding("ZR338", asked=asked)
    else:
        yield finding("ZR339", asked=asked, precision=precision)


def launcher_findings(environment: Mapping[str, str]) -> Iterator[Finding]:
    """What an accelerate file says beside the ds_config that it names. `environment`: the launcher's."""
    if environment.get("ACCELERATE_USE_PARALLELISM_CONFIG", "false").lower() == "true":
        yield finding("ZR301")
    if environment.get("ACCELERATE_MIXED_PRECISION", "no").lower() == "fp8":
        yield finding("ZR302")
    if environment.get("ACCELERATE_DEEPSPEED_CONFIG_FILE", "none").lower() in ("none", ""):
        return
    given = environment.get(DS_FIELDS, "").split(",")
    beside = [name for name in AMBIGUOUS if name in given]
    if beside:
        yield finding("ZR303", beside=", ".join(beside))


def refuse_what_no_launch_takes(config: ClusterConfig, path: Path, num_processes: int | None) -> None:
    """Refuse a file that `accelerate launch` itself ends on, or waits on without an end."""
    kind = str(getattr(config.distributed_type, "value", config.distributed_type))
    if config.mpirun_config:
        raise refusal("ZR331", path=path)
    if kind in ("TPU", "XLA", "MEGATRON_LM"):
        raise refusal("ZR332", path=path, kind=kind)
    if config.num_processes == UNNAMED and num_processes is None:
        raise refusal("ZR333", path=path)
    named = str(config.gpu_ids or "all")
    if kind.startswith("MULTI_") and named != "all" and "," not in named and config.num_machines == 1:
        raise refusal("ZR334", path=path, named=named, kind=kind)
    if config.num_machines > 1:
        _refuse_unreachable_machines(config, path)


def _refuse_unreachable_machines(config: ClusterConfig, path: Path) -> None:
    asked, launcher = config.deepspeed_config, config.deepspeed_config.get("deepspeed_multinode_launcher") or "pdsh"
    if asked and launcher not in ("standard", "nossh"):
        hosts = asked.get("deepspeed_hostfile")
        missing = f"no {launcher} on this machine" if shutil.which(launcher) is None else f"no hostfile {hosts}"
        if shutil.which(launcher) is None or not (hosts and Path(hosts).is_file()):
            raise refusal("ZR335", path=path, num_machines=config.num_machines, launcher=launcher, missing=missing)
    address = config.main_process_ip
    if address is None:
        return  # the command line names it: --main_process_ip
    try:
        found = socket.getaddrinfo(str(address), None)[0][4][0]
    except (OSError, UnicodeError) as error:
        raise refusal(
            "ZR336", address=address, path=path, num_machines=config.num_machines, error=first_line(error)
        ) from None
    if ipaddress.ip_address(found).is_loopback:
        raise refusal("ZR337", address=address, path=path, num_machines=config.num_machines)
