"""Options of DeepSpeed that do not go together: hpZ, quantized communication, NVMe, races, what is not to be trusted.

File names are those of DeepSpeed 0.19.8, under deepspeed/. Issues are deepspeedai/DeepSpeed's.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from packaging.version import Version

from zero_recipes.config.ds_auto import NVME_PATH
from zero_recipes.config.ds_view import DsConfig
from zero_recipes.config.settings import Settings
from zero_recipes.config.strategy import Strategy
from zero_recipes.core.errors import Finding


def quantized_weight_findings(strategy: Strategy, sizes: Sequence[int]) -> Iterator[Finding]:
    """`sizes`: elements of each tensor of the model."""
    config = strategy.ds_config
    odd = [size for size in sizes if -(-size // strategy.world_size) % 8]
    if config is not None and config.quantizes_weights and config.stage == 3 and odd:
        yield Finding(
            "ZR221",
            f"zero_quantized_weights with tensors whose part on a rank is no multiple of 8: {_listed(odd)} elements on "
            f"{strategy.world_size} processes",
            "runtime/zero/partition_parameters.py, CUDAQuantizer.quantize stops on it in the first forward pass: "
            '"Qantized weight requires the number of weights be a multiple of 8".',
            "Another number of processes, a model whose sizes divide, or remove it.",
        )


def _listed(sizes: Sequence[int]) -> str:
    distinct = sorted(set(sizes))
    return ", ".join(f"{size:,}" for size in distinct[:3]) + (" ..." if len(distinct) > 3 else "")


PREFETCH = 50_000_000  # elements: DeepSpeed's default of stage3_prefetch_bucket_size (runtime/zero/config.py)
# overlap_comm at stages 1 and 2: (fixed in, torch_compile only, what went wrong)
RACES = (
    (
        "0.19.0",
        False,
        "Buffers are freed while the reduction stream still reads them; ZeRO-2 went to nan in the third step (#7965).",
    ),
    (
        "0.19.3",
        True,
        "Compiled backward passes fill a bucket from several streams, the reduction waits for one: nan from the first "
        "step (#8061, fixed by #8080).",
    ),
)


def zero_option_findings(
    config: DsConfig,
    settings: Settings,
    world_size: int,
    local_world_size: int,
    device: str,
    deepspeed_version: str,
) -> list[Finding]:
    """All findings about the options of one ds_config.

    `settings`: the recipe's keys in force; `local_world_size`: the processes on this node.
    """
    return [
        *_hpz(config, world_size, local_world_size),
        *_quantized_communication(config, world_size, local_world_size, device),
        *_nvme(config, settings),
        *_races(config.zero, settings, deepspeed_version),
        *_accumulation_dtype(config, settings),
        *_muon(config),
        *_not_to_be_trusted(config, device),
        *_compiled(config, settings),
    ]


def _hpz(config: DsConfig, world_size: int, local_world_size: int) -> Iterator[Finding]:
    size = config.hpz_partition_size
    if size <= 1 or config.stage != 3:
        return
    group = min(size, world_size)  # utils/groups.py does the same
    here = f"zero_hpz_partition_size {size}"
    remove = "Remove zero_hpz_partition_size"
    if world_size % group:
        yield Finding(
            "ZR222",
            f"{here} does not divide {world_size} processes",
            "utils/groups.py, _create_zero_param_parallel_group stops on it.",
            "Write the number of GPUs of one node.",
        )
    elif group == world_size:
        yield Finding(
            "ZR223",
            f"{here} with {world_size} processes",
            "There is one group: the second copy of the weights is the first one again "
            "(runtime/zero/partition_parameters.py, _partition_param_sec). It costs memory and saves no communication.",
            f"{remove}; it serves several nodes, with the GPUs of one node as its size.",
        )
    elif local_world_size >= world_size:
        yield Finding(
            "ZR224",
            f"{here} on one node",
            "It keeps gathers off the network between nodes. On one node no speed-up was seen (#4886), and each rank "
            f"holds 1/{size} of the weights beside its own 1/{world_size}.",
            f"{remove}.",
            level="warning",
        )
    offloaded = [k for k in ("offload_param", "offload_optimizer") if config.offload_device(k)]
    if offloaded:
        yield Finding(
            "ZR225",
            f"{here} with {' and '.join(offloaded)}",
            "On GPUs such runs were seen with a loss that never moves and gradients of 0 (#6926; #6889: not tested "
            "together). _partition_param_sec puts the second copy where offload_param lies, so that every gather "
            "leaves the device again.",
            f"{remove}, or the offload.",
        )


def _quantized_communication(
    config: DsConfig, world_size: int, local_world_size: int, device: str
) -> Iterator[Finding]:
    zero = config.zero
    asked = [k for k in ("zero_quantized_weights", "zero_quantized_gradients") if zero.get(k)]
    if not asked:
        return
    named = " and ".join(asked)
    if zero.get("stage") != 3:
        yield Finding(
            "ZR226",
            f"{named} at stage {zero.get('stage', 0)}",
            "Only stage 3 reads it (runtime/engine.py, _configure_zero_optimizer).",
            "Remove it, or use stage 3.",
        )
    elif device == "cpu":
        yield Finding(
            "ZR227",
            f"{named} on a CPU",
            'The quantizer exists for GPUs only: "This op had not been implemented on CPU backend" '
            "(ops/op_builder/cpu/no_impl.py).",
            "Remove it for runs on CPUs.",
        )
    elif "zero_quantized_gradients" in asked and local_world_size >= world_size:
        yield Finding(
            "ZR228",
            "zero_quantized_gradients on one node",
            "Gradients are quantized between nodes only (runtime/zero/stage3.py, __avg_scatter_grads: num_nodes > 1).",
            "Remove it.",
            level="warning",
        )


def _nvme(config: DsConfig, settings: Settings) -> Iterator[Finding]:
    zero = config.zero
    on_nvme = [key for key in ("offload_param", "offload_optimizer") if key in config.on_nvme]
    if not on_nvme:
        return
    named = " and ".join(on_nvme)
    if config.stage != 3:
        yield Finding(
            "ZR229",
            f"{named} on NVMe at stage {config.stage}",
            "Only stage 3 swaps to NVMe; stages 1 and 2 treat any device as host memory "
            "(runtime/zero/stage_1_and_2.py, cpu_offload).",
            'Use stage 3, or "device": "cpu".',
        )
    if settings.saves_checkpoints:
        yield Finding(
            "ZR230",
            f"checkpoints (save_strategy: {settings.save_strategy}) with {named} on NVMe",
            "They cannot be resumed: runtime/engine.py, load_checkpoint skips the optimizer's states on NVMe.",
            'Set save_strategy: "no" and keep save_model: true; or offload to the CPU.',
            level="warning",
        )
    prefetch = zero.get("stage3_prefetch_bucket_size", PREFETCH)
    if "offload_param" in on_nvme and prefetch != 0:
        yield Finding(
            "ZR231",
            f"stage3_prefetch_bucket_size {prefetch} with offload_param on NVMe",
            "Prefetching reads a part that is being read already (runtime/swap_tensor/partitioned_param_swapper.py, "
            '_allocate_and_return_buffers_for_swap_in): the run dies of "already assigned swap buffer id", once a '
            "tensor fits into the bucket.",
            'Set "stage3_prefetch_bucket_size": 0; parts are read ahead all the same.',
        )
    for key in on_nvme:
        path = zero[key].get("nvme_path")
        if path == "auto":
            yield Finding(
                "ZR232",
                f'{key}.nvme_path is "auto", and no folder is named',
                f"It is taken from the recipe's nvme_path or from {NVME_PATH}; neither is set.",
                "--nvme_path FOLDER, on the NVMe disk.",
            )
        elif path is None or not Path(path).is_dir():
            yield Finding(
                "ZR233",
                f"{key}.nvme_path {path} is not a folder here",
                "DeepSpeed would create it silently (runtime/swap_tensor/), on whatever disk, and fill it."
                if path
                else "runtime/zero/stage3.py and runtime/swap_tensor/ join it to a file name and stop on None.",
                "Name a folder on the NVMe disk, and create it first.",
            )


def _races(zero: Mapping, settings: Settings, installed: str) -> Iterator[Finding]:
    if not zero.get("overlap_comm") or zero.get("stage") not in (1, 2):
        return
    for mended, compiled_only, what in RACES:
        if Version(installed) < Version(mended) and (settings.torch_compile or not compiled_only):
            yield Finding(
                "ZR234",
                f"overlap_comm at stage {zero['stage']}"
                + (" with torch_compile" if compiled_only else "")
                + f" under DeepSpeed {installed}",
                what,
                f'Install DeepSpeed {mended} or later, or set "overlap_comm": false.',
            )


def _accumulation_dtype(config: DsConfig, settings: Settings) -> Iterator[Finding]:
    dtype = config.grad_accum_dtype
    if dtype and config.stage == 0 and dtype != settings.precision:
        yield Finding(
            "ZR235",
            f"data_types.grad_accum_dtype {dtype} at stage 0 with a model in {settings.precision}",
            'runtime/engine.py, _do_optimizer_sanity_check: "unsupported mix", once the model has been loaded.',
            "Remove it, or use stage 2.",
        )


def _muon(config: DsConfig) -> Iterator[Finding]:
    muon = str((config.optimizer or {}).get("type", "")).lower() == "muon"
    if muon and config.stage == 3 and config.zero.get("reduce_scatter", True):
        yield Finding(
            "ZR236",
            "Muon at stage 3 with reduce_scatter",
            'runtime/zero/stage3.py: "Muon and reduce scatter cannot be used together", after loading the model.',
            'Set "reduce_scatter": false.',
        )


def _not_to_be_trusted(config: DsConfig, device: str) -> Iterator[Finding]:
    raw, zero = config.raw, config.zero
    if (raw.get("tensor_parallel") or {}).get("autotp_size", 0) > 1:
        yield Finding(
            "ZR237",
            "tensor_parallel.autotp_size (AutoTP)",
            "The Trainer gives every rank its own rows, tensor parallelism needs the same rows on all: the loss is "
            "another one than every other strategy's, or runtime/engine.py stops on the difference.",
            "Remove the tensor_parallel block.",
        )
    if zero.get("zenflow"):
        yield Finding(
            "ZR238",
            f"zero_optimization.zenflow (ZenFlow) at stage {config.stage}",
            "The embedding is not gathered in the first forward pass: IndexError, index out of range."
            if config.stage == 3
            else "It takes its optimizer from the ds_config's block and not the recipe's: TypeError while the "
            "engine is built (runtime/zenflow/zenflow_stage_1_and_2.py, ZenFlowSelectiveAdamW).",
            "Remove zenflow; offload_optimizer alone keeps the states in host memory.",
        )
    if raw.get("pipeline"):
        yield Finding(
            "ZR239",
            "a pipeline block",
            "DeepSpeed cuts models into stages that are written as PipelineModule (runtime/pipe/engine.py); those of "
            "transformers are not, and the block does nothing: every process holds all layers, silently.",
            "Remove it; ZeRO stage 3 partitions the parameters.",
        )
    if config.offload_block("offload_optimizer").get("super_offload") and device == "cpu":
        yield Finding(
            "ZR240",
            "offload_optimizer.super_offload on a CPU",
            "runtime/superoffload/superoffload_stage3.py: SuperOffload only supports CUDA.",
            "Remove super_offload for runs on CPUs.",
        )


def _compiled(config: DsConfig, settings: Settings) -> Iterator[Finding]:
    if (config.raw.get("compile") or {}).get("deepcompile"):
        yield Finding(
            "ZR241",
            "compile.deepcompile (DeepCompile)",
            'runtime/engine.py goes on "without DeepCompile until compile() runs", which nobody calls unless '
            "torch_compile is set; on GPUs it was never compared with other runs here.",
            "Remove the compile block.",
        )
    asks = [key for key in ("torch_compile", "torch_compile_backend", "torch_compile_mode") if getattr(settings, key)]
    if asks and config.stage == 3:
        yield Finding(
            "ZR242",
            f"{asks[0]} at ZeRO stage 3",
            "TRL's fused LM head (trl/kernels/chunked_logprob.py) keeps the gathered head for its backward pass; the "
            'compiled engine has released it by then: "modified by an inplace operation", in the first step.',
            "Remove it, or use stage 2.",
        )
