"""A DeepSpeed configuration: read, its form checked, our own "auto" values filled in, and viewed by its meaning.

File names are those of DeepSpeed 0.19.8.
"""

import contextlib
import copy
import io
import json
import logging
import math
import warnings
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from zero_recipes.core.files import at_hand
from zero_recipes.core.findings import library_error_as_finding, refusal
from zero_recipes.core.process import local_world_size

NVME_PATH = "ZERO_RECIPES_NVME_PATH"
BY_MODEL = {"bucket_sizes": "by_model"}  # our own key at the top of a ds_config: how its buckets' "auto" is filled in
BUCKETS = ("reduce_bucket_size", "stage3_prefetch_bucket_size")
SMALLEST, LARGEST, UNKNOWN = 25_000_000, 200_000_000, 50_000_000  # elements of a bucket; UNKNOWN: without the model
LEAST_SWAPPED = 2**20  # bytes: swap_tensor/utils.py, MIN_AIO_BYTES (or aio.block_size, if that is more)
OFFLOADS = ("offload_optimizer", "offload_param")
AUTOCAST_DTYPES = {name: "bf16" for name in ("bf16", "bfloat16", "torch.bfloat16")}
AUTOCAST_DTYPES |= {name: "fp16" for name in ("fp16", "half", "float16", "torch.float16")}
# blocks that transformers or DeepSpeed read with .get(), and stop with a bare AttributeError on anything else
BLOCKS = ("zero_optimization", "bf16", "fp16", "optimizer", "scheduler", "aio", "activation_checkpointing")
BLOCKS += ("comms_logger", "flops_profiler", "checkpoint", "tensorboard", "wandb", "csv_monitor", "comet")
BLOCKS += ("data_types", "tensor_parallel", "torch_autocast", "compile", "zenflow")


def read_json_mapping(named: str | Path | dict[str, Any]) -> dict[str, Any]:
    """A mapping that is given as it is, as JSON text, or by the path of a JSON file; without its nulls, which the
    libraries take for a value here and for the default there. Raises Refusal."""
    if isinstance(named, dict):
        return _without(None, named)
    text, place = str(named), "the inline configuration"
    if not text.lstrip().startswith("{"):
        place, path = text, at_hand(text, "ds_configs")
        if not path.is_file():
            raise refusal("ZR202", path=path, cwd=Path.cwd())
        text = path.read_text()
    try:
        config = json.loads(text)
        if not isinstance(config, dict):
            raise ValueError(f"it holds a {type(config).__name__}")
    except ValueError as error:
        raise refusal("ZR203", place=place, error=error) from None
    return _without(None, config)


def refuse_bad_schema(config: Mapping[str, Any], source: str) -> None:
    """Refuse what DeepSpeed or transformers would stop on, or read as another stage. By DeepSpeed's own model of
    zero_optimization (runtime/zero/config.py): an unknown key or a wrong value stops it. Raises Refusal."""
    with library_error_as_finding(f"reading {source}"):
        for name in BLOCKS:
            if not isinstance(config.get(name, {}), dict):
                raise TypeError(f"{name} is {config[name]!r}, not a mapping")
        zero = config.get("zero_optimization", {})
        stage = zero.get("stage", 0)
        if stage == "auto" or isinstance(stage, (bool, float)):
            raise refusal("ZR261", source=source, stage=stage)
        parsed_zero(zero)


def parsed_zero(block: Mapping[str, Any]):
    """DeepSpeed's own model of a zero_optimization block, "auto" left out. Raises what DeepSpeed raises."""
    from deepspeed.runtime.zero.config import DeepSpeedZeroConfig

    with quiet():
        return DeepSpeedZeroConfig(**_without("auto", block))


def _without(left_out: Any, block: Mapping[str, Any]) -> dict[str, Any]:
    """The block without the keys of one value: "auto", which transformers fills in, or None."""
    return {
        key: _without(left_out, value) if isinstance(value, dict) else value
        for key, value in block.items()
        if value != left_out
    }


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Hide what the libraries print while a check tries them: the run prints it again."""
    disabled, out = logging.root.manager.disable, io.StringIO()
    logging.disable(logging.CRITICAL)
    try:
        with warnings.catch_warnings(action="ignore"), contextlib.redirect_stdout(out), contextlib.redirect_stderr(out):
            yield
    finally:
        logging.disable(disabled)


def fill_own_autos(
    config: Mapping[str, Any],
    settings: Any,
    world_size: int,
    environment: Mapping[str, str],
    size_of_model: Callable[[], tuple[int, int] | None],
) -> dict[str, Any]:
    """A copy of `config` with the "auto" values that are ours to fill in.

    What cannot be known stays "auto", and the checks find it. `settings`: the recipe's, use_cpu as it is in force.
    `size_of_model`: (hidden size, elements of the largest tensor), called where something is sized by the model.
    zero_hpz_partition_size: the processes of one machine. nvme_path: the recipe's key, else the environment's
    ZERO_RECIPES_NVME_PATH. offload_param.buffer_size: elements of the model's largest partition (stage 3 rounds up),
    the least that DeepSpeed takes (runtime/swap_tensor/partitioned_param_swapper.py, get_buffer). Buckets, under
    BY_MODEL, which is dropped: docs/performance.md; the bounds are a quarter on CPUs.
    """
    filled = copy.deepcopy(dict(config))
    zero = filled.get("zero_optimization", {})
    if not isinstance(zero, dict):
        return filled  # `refuse_bad_schema` says why it cannot be
    if zero.get("zero_hpz_partition_size") == "auto":
        zero["zero_hpz_partition_size"] = local_world_size(environment, world_size)
    path = settings.nvme_path or environment.get(NVME_PATH)
    for block in (zero[key] for key in OFFLOADS if isinstance(zero.get(key), dict)):
        if block.get("nvme_path") == "auto" and path:
            block["nvme_path"] = path
    swapped = zero.get("offload_param")
    if isinstance(swapped, dict) and swapped.get("buffer_size") == "auto" and (model := size_of_model()):
        swapped["buffer_size"] = math.ceil(model[1] / world_size)
    if BY_MODEL.items() <= filled.items():
        del filled["bucket_sizes"]
        hidden, tensor = size_of_model() or (0, UNKNOWN)
        smallest, largest = (bound // (4 if settings.use_cpu else 1) for bound in (SMALLEST, LARGEST))
        block = min(max(12 * hidden**2, tensor, smallest), largest)
        sizes = zip(BUCKETS, (smallest if settings.use_peft or world_size == 1 else block, block), strict=True)
        zero |= {key: size for key, size in sizes if zero.get(key) == "auto"}
    return filled


def are_one(resolved: dict[str, Any], launched: dict[str, Any], fill: Callable[[dict], dict]) -> bool:
    """Whether a recipe's configuration is the launcher's, `fill`ed in as a resolved recipe's is. Where the launcher's
    buckets are sized by the model, others do not count: they may be of another device or number of processes."""
    both = [fill(resolved), fill(launched)]
    for zero in (each.get("zero_optimization") for each in both if BY_MODEL.items() <= launched.items()):
        for key in BUCKETS if isinstance(zero, dict) else ():
            zero.pop(key, None)
    return both[0] == both[1]


def number_in(block: Mapping[str, Any], key: str, default: int) -> int:
    """What is written there, 1e9 included; the default for "auto" and what else DeepSpeed itself will refuse."""
    value = block.get(key, default)
    return int(value) if isinstance(value, (int, float)) else default


@dataclass(frozen=True)
class DsConfig:
    """A typed view of one DeepSpeed configuration, which `raw` holds as it was written ("auto" values included)."""

    raw: Mapping[str, Any]

    @property
    def zero(self) -> Mapping[str, Any]:
        return self.raw.get("zero_optimization") or {}

    @property
    def stage(self) -> int:
        return self.zero.get("stage", 0)

    def offload_block(self, key: str) -> Mapping[str, Any]:
        return self.zero.get(key) or {}

    def offload_device(self, key: str) -> str | None:
        """Where one of OFFLOADS is: "cpu", "nvme", or None for the device that trains."""
        named = self.offload_block(key).get("device")
        return None if named in (None, "none") else named

    @property
    def offload_optimizer(self) -> str | None:
        return self.offload_device("offload_optimizer")

    @property
    def offload_param(self) -> str | None:
        return self.offload_device("offload_param")

    @property
    def offloads(self) -> bool:
        return bool(self.offload_optimizer or self.offload_param)

    @property
    def on_nvme(self) -> tuple[str, ...]:
        return tuple(key for key in OFFLOADS if self.offload_device(key) == "nvme")

    @property
    def hpz_partition_size(self) -> int | str:
        """ZeRO++'s second partition: processes that share one more copy of the parameters; 1 without, or "auto"."""
        return self.zero.get("zero_hpz_partition_size", 1)

    @property
    def quantizes_weights(self) -> bool:
        return bool(self.zero.get("zero_quantized_weights"))

    @property
    def quantizes_gradients(self) -> bool:
        return bool(self.zero.get("zero_quantized_gradients"))

    @property
    def optimizer(self) -> Mapping[str, Any] | None:
        """The optimizer block, which then counts instead of the recipe's keys."""
        return self.raw.get("optimizer")

    @property
    def least_swapped(self) -> int:
        """Bytes below which a tensor is not swapped."""
        return max(LEAST_SWAPPED, number_in(self.raw.get("aio") or {}, "block_size", 0))

    @property
    def grad_accum_dtype(self) -> str | None:
        return (self.raw.get("data_types") or {}).get("grad_accum_dtype")

    @property
    def bf16_masters(self) -> bool:
        return bool((self.raw.get("bf16") or {}).get("bf16_master_weights_and_grads"))

    @property
    def bf16_states(self) -> bool:
        return bool((self.raw.get("bf16") or {}).get("bf16_optimizer_states"))

    @property
    def adam_bytes(self) -> int:
        """Per trained parameter in 16-bit training: the master weight, and Adam's momentum and variance."""
        return (2 if self.bf16_masters else 4) + (4 if self.bf16_states else 8)

    @property
    def autocast(self) -> str | None:
        """ "bf16" or "fp16", in which torch.autocast computes with fp32 weights; None without torch_autocast."""
        block = self.raw.get("torch_autocast") or {}
        return AUTOCAST_DTYPES.get(str(block.get("dtype")).lower(), "bf16") if block.get("enabled") else None

    @property
    def name(self) -> str:
        """ "zero0" ... "zero3", then "_infinity" where states are on NVMe, "_offload" where they are in host memory
        ("_offload_infinity": one each), "_bf16_states" or "_bf16_masters", "_autocast", and ZeRO++'s parts: "_hpz",
        "_qwz", "_qgz", for all three "_plus_plus"."""
        kept = "_offload" if any(self.offload_device(key) == "cpu" for key in OFFLOADS) else ""
        kept += "_infinity" if self.on_nvme else ""
        kept += "_bf16_states" if self.bf16_states else "_bf16_masters" if self.bf16_masters else ""
        kept += "_autocast" if self.autocast else ""
        parts = ["_hpz"] if self.hpz_partition_size != 1 else []
        parts += ["_qwz"] if self.quantizes_weights else []
        parts += ["_qgz"] if self.quantizes_gradients else []
        return f"zero{self.stage}{kept}" + ("_plus_plus" if len(parts) == 3 else "".join(parts))
