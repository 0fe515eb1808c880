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
from typing import Any, NamedTuple

from zero_recipes.core.files import at_hand
from zero_recipes.core.findings import refusal
from zero_recipes.core.library_errors import library_error_as_finding
from zero_recipes.core.process import local_world_size

# blocks that transformers or DeepSpeed read with .get(): they stop with a bare AttributeError on anything else
MAPPINGS = (
    "zero_optimization",
    "bf16",
    "fp16",
    "optimizer",
    "scheduler",
    "aio",
    "activation_checkpointing",
    "comms_logger",
    "flops_profiler",
    "checkpoint",
    "tensorboard",
    "wandb",
    "csv_monitor",
    "comet",
    "data_types",
    "tensor_parallel",
    "torch_autocast",
    "compile",
    "zenflow",
)
NVME_PATH = "ZERO_RECIPES_NVME_PATH"
BUCKETS = ("reduce_bucket_size", "stage3_prefetch_bucket_size")
COPIES = "contiguous_gradients"
LINEAR = "memory_efficient_linear"
# elements of a bucket
SMALLEST = 25_000_000
LARGEST = 200_000_000
UNKNOWN = 50_000_000  # where the model's size is not known
LEAST_SWAPPED = 2**20  # bytes: swap_tensor/utils.py, MIN_AIO_BYTES (or aio.block_size, if that is more)
OFFLOADS = ("offload_optimizer", "offload_param")
FORCED = "zero_force_ds_cpu_optimizer"  # DeepSpeed's default is true
# Values of `optim` that DeepSpeedCPUAdam computes as torch's AdamW does.
OF_CPU_ADAM = ("adamw_torch", "adamw_torch_fused", "adamw_torch_xla", "adamw_torch_npu_fused")
OF_EACH_GROUP = ("WarmupLR", "WarmupDecayLR")  # schedulers that can take each group's own rate
FP16_NAMES = ("fp16", "half", "float16", "torch.float16")


def read_json_mapping(named: str | Path | dict[str, Any]) -> dict[str, Any]:
    """Read a mapping that is given as such, as JSON text, or as the path of a JSON file. Raises Refusal.

    Nulls are left out: some libraries take them for a value, others for the default.
    """
    if isinstance(named, dict):
        return _without(None, named)
    text = str(named)
    with library_error_as_finding(f"reading the configuration {text[:80]}"):
        if not text.lstrip().startswith("{"):
            text = at_hand(text, "ds_configs").read_text()
        config = json.loads(text)
        if not isinstance(config, dict):
            raise TypeError(f"it is no mapping, but a {type(config).__name__}")
        return _without(None, config)


def refuse_bad_schema(config: Mapping[str, Any], source: str) -> None:
    """Refuse a configuration on which DeepSpeed or transformers would stop, or that they read as another stage.

    `source`: where it comes from, for the message.
    """
    with library_error_as_finding(f"reading {source}"):
        for name in MAPPINGS:
            if not isinstance(config.get(name, {}), dict):
                raise TypeError(f"{name} is {config[name]!r}, not a mapping")
        zero = config.get("zero_optimization", {})
        stage = zero.get("stage", 0)
        if stage == "auto" or isinstance(stage, (bool, float)):
            raise refusal("ZR261", source=source, stage=stage)
        parsed_zero(zero)


def parsed_zero(block: Mapping[str, Any]):
    """Parse a zero_optimization block with DeepSpeed's own model, "auto" left out.

    Raises what DeepSpeed raises at unknown keys and wrong values.
    """
    from deepspeed.runtime.zero.config import DeepSpeedZeroConfig

    with quiet():
        return DeepSpeedZeroConfig(**_without("auto", block))


def _without(left_out: Any, block: Mapping[str, Any]) -> dict[str, Any]:
    """`left_out`: a value, "auto" or None."""
    kept = {}
    for key, value in block.items():
        if isinstance(value, dict):
            kept[key] = _without(left_out, value)
        elif value != left_out:
            kept[key] = value
    return kept


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Hide what the libraries print while a check tries them: the run prints it again."""
    disabled = logging.root.manager.disable
    hidden = io.StringIO()
    logging.disable(logging.CRITICAL)
    try:
        with (
            warnings.catch_warnings(action="ignore"),
            contextlib.redirect_stdout(hidden),
            contextlib.redirect_stderr(hidden),
        ):
            yield
    finally:
        logging.disable(disabled)


class ModelSize(NamedTuple):
    """Sizes of a model that decide parts of a DeepSpeed configuration."""

    hidden: int
    largest_tensor: int  # elements
    layers: tuple[str, ...] = ()  # classes of the decoder's layers; none where they cannot be leaf modules
    elements: int = 0  # of all weights


def fill_own_autos(
    config: Mapping[str, Any],
    settings: Any,
    world_size: int,
    environment: Mapping[str, str],
    size_of_model: Callable[[], ModelSize | None],
) -> dict[str, Any]:
    """Copy a DeepSpeed configuration, and fill in the "auto" values that are ours.

    What cannot be known stays "auto", and the checks find it.

    Args:
        settings: the recipe's, use_cpu as it is in force.
        environment: the launcher's variables.
        size_of_model: called where something is sized by the model.
    """
    filled = copy.deepcopy(dict(config))
    zero = filled.get("zero_optimization", {})
    if not isinstance(zero, dict):
        return filled  # `refuse_bad_schema` says why it cannot be
    if zero.get("zero_hpz_partition_size") == "auto":
        zero["zero_hpz_partition_size"] = local_world_size(environment, world_size)
    path = settings.nvme_path or environment.get(NVME_PATH)
    for key in OFFLOADS:
        block = zero.get(key)
        if isinstance(block, dict) and block.get("nvme_path") == "auto" and path:
            block["nvme_path"] = path
    swapped = zero.get("offload_param")
    if isinstance(swapped, dict) and swapped.get("buffer_size") == "auto":
        size = size_of_model()
        if size is not None:
            # the largest partition is the least that DeepSpeed takes (partitioned_param_swapper.py, get_buffer)
            swapped["buffer_size"] = math.ceil(size.largest_tensor / world_size)
    _fill_rates(filled, settings)
    if _is_sized_by_model(filled):
        del filled["bucket_sizes"]
        _fill_buckets(zero, settings, world_size, size_of_model())
        _fill_copies(zero, world_size)
    _keep_offloaded_optimizer(filled, zero, settings)
    if filled.get("leaf_modules") == "by_model":
        del filled["leaf_modules"]
        _fill_leaf_modules(zero, settings, size_of_model())
    return filled


def _keep_offloaded_optimizer(config: dict[str, Any], zero: Mapping[str, Any], settings: Any) -> None:
    """The recipe's `optim` steps in host memory, unless it is an AdamW, which DeepSpeedCPUAdam computes faster.

    accelerate 1.15 (utils/deepspeed.py, map_pytorch_optim_to_deepspeed) puts DeepSpeedCPUAdam in the place of any other
    optimizer too, without a message: SGD becomes Adam, 8-bit AdamW becomes Adam with L2.
    """
    offload = zero.get("offload_optimizer")
    offloads = isinstance(offload, dict) and offload.get("device", "none") != "none"
    if offloads and "optimizer" not in config and settings.optimizer_name not in OF_CPU_ADAM:
        config.setdefault(FORCED, False)


def _fill_rates(config: dict[str, Any], settings: Any) -> None:
    """Under LoRA+ each group of parameters warms up to the rate that it was made with.

    WarmupLR and WarmupDecayLR do so where warmup_max_lr is null (runtime/lr_schedules.py). transformers puts
    learning_rate in the place of "auto", and accepts no other number: the rate of all groups.
    """
    scheduler = config.get("scheduler")
    if settings.loraplus_lr_ratio is None or not isinstance(scheduler, dict):
        return
    parameters = scheduler.setdefault("params", {})
    is_learning_rate = parameters.get("warmup_max_lr", "auto") in ("auto", settings.learning_rate)
    if scheduler.get("type") in OF_EACH_GROUP and is_learning_rate:
        parameters["warmup_max_lr"] = None


def _is_sized_by_model(config: Mapping[str, Any]) -> bool:
    """By our own key at its top: then "auto" of its buckets is ours to fill in."""
    return config.get("bucket_sizes") == "by_model"


def _fill_buckets(zero: dict[str, Any], settings: Any, world_size: int, size: ModelSize | None) -> None:
    """docs/performance.md has the measurements. The bounds are a quarter on CPUs."""
    size = size or ModelSize(0, UNKNOWN)
    scale = 4 if settings.use_cpu else 1
    smallest = SMALLEST // scale
    wanted = max(12 * size.hidden**2, size.largest_tensor, smallest)
    elements = min(wanted, LARGEST // scale)
    sizes = dict.fromkeys(BUCKETS, elements)
    if settings.use_peft or world_size == 1:
        sizes["reduce_bucket_size"] = smallest
    for key in BUCKETS:
        if zero.get(key) == "auto":
            zero[key] = sizes[key]


def _fill_copies(zero: dict[str, Any], world_size: int) -> None:
    """Whether gradients are copied side by side. docs/performance.md counts.

    Stage 3 does so by one call when it reduces them. At stages 1 and 2 one process sends none.
    """
    alone = world_size == 1 and "offload_optimizer" not in zero
    if zero.get("stage") == 3 or (alone and zero.get("stage") in (1, 2)):
        zero.setdefault(COPIES, False)


def _fill_leaf_modules(zero: dict[str, Any], settings: Any, size: ModelSize | None) -> None:
    """A leaf module's weights are gathered at once, and its gradients reduced: docs/performance.md has the times.

    Not from NVMe, of whose buffers each tensor of a layer would take one.
    """
    nvme = (zero.get("offload_param") or {}).get("device") == "nvme"
    if zero.get("stage") == 3 and size is not None and size.layers and not nvme:
        zero.setdefault("leaf_module", {"classes": list(size.layers)})
        _fill_linear_layers(zero, settings, size)


def _fill_linear_layers(zero: dict[str, Any], settings: Any, size: ModelSize) -> None:
    """torch's own take less of the host than DeepSpeed's, and hold gathered weights until their backward pass.

    That costs nothing where a layer is computed again just before it, or where DeepSpeed keeps all weights until then.
    """
    farthest = 2 * size.elements  # from a layer's forward to its backward pass
    if settings.recomputes or farthest <= number_in(zero, "stage3_max_reuse_distance", 10**9):
        zero.setdefault(LINEAR, False)


def are_one(resolved: dict[str, Any], launched: dict[str, Any], fill: Callable[[dict], dict]) -> bool:
    """Whether two configurations are the same once `fill` has filled in both, as a resolved recipe's is.

    Buckets do not count where the launcher's are sized by the model: a resolved recipe's may be of another device,
    or of another number of processes.
    """
    both = [fill(resolved), fill(launched)]
    if _is_sized_by_model(launched):
        for config in both:
            zero = config.get("zero_optimization")
            if isinstance(zero, dict):
                for key in (*BUCKETS, COPIES, LINEAR):
                    zero.pop(key, None)
    return both[0] == both[1]


def number_in(block: Mapping[str, Any], key: str, default: int) -> int:
    """Read a number of a block; the default stands for what is missing or no number, as "auto"."""
    value = block.get(key, default)
    return int(value) if isinstance(value, (int, float)) else default


@dataclass(frozen=True)
class DsConfig:
    """A DeepSpeed configuration, viewed by what its blocks mean."""

    raw: Mapping[str, Any]  # as it was written, "auto" included

    def _block(self, name: str) -> Mapping[str, Any]:
        return self.raw.get(name) or {}

    @property
    def zero(self) -> Mapping[str, Any]:
        """The block zero_optimization, empty where it is missing."""
        return self._block("zero_optimization")

    @property
    def stage(self) -> int:
        """The ZeRO stage, 0 to 3."""
        return self.zero.get("stage", 0)

    def offload_block(self, key: str) -> Mapping[str, Any]:
        """The block of one of OFFLOADS, empty where it is missing."""
        return self.zero.get(key) or {}

    def offload_device(self, key: str) -> str | None:
        """The device that one of OFFLOADS names: "cpu", "nvme", or None for the device that trains."""
        named = self.offload_block(key).get("device")
        return None if named == "none" else named

    @property
    def offload_optimizer(self) -> str | None:
        """Where the optimizer's states are: "cpu", "nvme", or None for the device that trains."""
        return self.offload_device("offload_optimizer")

    @property
    def offload_param(self) -> str | None:
        """Where the parameters are: "cpu", "nvme", or None for the device that trains."""
        return self.offload_device("offload_param")

    @property
    def offloads(self) -> bool:
        """Whether the optimizer's states or the parameters are offloaded."""
        return bool(self.offload_optimizer or self.offload_param)

    @property
    def on_nvme(self) -> tuple[str, ...]:
        """Those of OFFLOADS that are on NVMe."""
        return tuple(key for key in OFFLOADS if self.offload_device(key) == "nvme")

    @property
    def hpz_partition_size(self) -> int | str:
        """Processes that share ZeRO++'s second copy of the parameters; 1 without it, or "auto"."""
        return self.zero.get("zero_hpz_partition_size", 1)

    @property
    def quantizes_weights(self) -> bool:
        """Whether ZeRO++ gathers quantized weights (qwZ)."""
        return bool(self.zero.get("zero_quantized_weights"))

    @property
    def quantizes_gradients(self) -> bool:
        """Whether ZeRO++ reduces quantized gradients (qgZ)."""
        return bool(self.zero.get("zero_quantized_gradients"))

    @property
    def optimizer(self) -> Mapping[str, Any] | None:
        """The block of an optimizer, which counts instead of the recipe's keys; None without."""
        return self.raw.get("optimizer")

    @property
    def least_swapped(self) -> int:
        """The bytes below which a tensor is not swapped to NVMe."""
        return max(LEAST_SWAPPED, number_in(self._block("aio"), "block_size", 0))

    @property
    def grad_accum_dtype(self) -> str | None:
        """The dtype in which gradients are accumulated; None where DeepSpeed chooses."""
        return self._block("data_types").get("grad_accum_dtype")

    @property
    def bf16_masters(self) -> bool:
        """Whether master weights and gradients are bf16 instead of fp32."""
        return bool(self._block("bf16").get("bf16_master_weights_and_grads"))

    @property
    def bf16_states(self) -> bool:
        """Whether the optimizer's moments are bf16 instead of fp32."""
        return bool(self._block("bf16").get("bf16_optimizer_states"))

    @property
    def adam_bytes(self) -> int:
        """Bytes of Adam's states and the master weight per trained parameter in 16-bit training."""
        master = 2 if self.bf16_masters else 4
        moments = 4 if self.bf16_states else 8
        return master + moments

    @property
    def autocast(self) -> str | None:
        """The precision in which torch.autocast computes with fp32 weights, "bf16" or "fp16"; None without it."""
        block = self._block("torch_autocast")
        if not block.get("enabled"):
            return None
        return "fp16" if str(block.get("dtype")).lower() in FP16_NAMES else "bf16"

    @property
    def name(self) -> str:
        """The strategy's name: "zero0" ... "zero3", and what the configuration adds to the stage."""
        name = f"zero{self.stage}"
        if "cpu" in (self.offload_optimizer, self.offload_param):
            name += "_offload"
        if self.on_nvme:
            name += "_infinity"
        if self.bf16_states:
            name += "_bf16_states"
        elif self.bf16_masters:
            name += "_bf16_masters"
        if self.autocast:
            name += "_autocast"
        parts = ""
        if self.hpz_partition_size != 1:
            parts += "_hpz"
        if self.quantizes_weights:
            parts += "_qwz"
        if self.quantizes_gradients:
            parts += "_qgz"
        if parts == "_hpz_qwz_qgz":
            parts = "_plus_plus"
        return name + parts
