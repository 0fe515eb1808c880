"""What a run leaves behind in its process, undone before the next one. To be imported before the first run.

Some of it stays, for it is the same in every run of a process: tables that are read once (core/findings.py,
core/files.py), levels and filters of loggers (engine/warnings.py). The count of calls in engine/group.py goes on with
the process group.
"""

import torch
from accelerate.state import AcceleratorState, GradientState
from datasets.packaged_modules.json import json as json_reader
from deepspeed.comm.torch import TorchBackend
from deepspeed.runtime import torch_autocast
from deepspeed.runtime.sequence_parallel import parallel_state_sp
from deepspeed.runtime.zero import partitioned_param_coordinator, stage3, stage_1_and_2
from deepspeed.runtime.zero.partitioned_param_coordinator import PartitionedParameterCoordinator
from deepspeed.utils import groups
from peft.tuners.tuners_utils import BaseTunerLayer
from torch.utils import _python_dispatch
from transformers.integrations.deepspeed import unset_hf_deepspeed_config
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from trl.trainer import utils as trl_utils

from zero_recipes.core.process import remember_signals
from zero_recipes.engine import attention
from zero_recipes.engine.deepspeed import COLLECTIVES, communication_backend
from zero_recipes.engine.speed.cpu_products import multiply_in_fp32
from zero_recipes.engine.speed.cudnn_plans import allow_cudnn

REPLACED = (  # for good, with the first run that needs it
    # by zero_recipes/engine/faults and speed
    (TorchBackend, "new_group"),
    (BaseTunerLayer, "_get_base_layer_device_and_dtype"),
    (PartitionedParameterCoordinator, "_invalidate_trace"),
    (PartitionedParameterCoordinator, "_PartitionedParameterCoordinator__release_param"),
    (stage3, "all_to_all_quant_reduce"),
    (stage_1_and_2.DeepSpeedZeroOptimizer, "check_overflow"),
    (stage_1_and_2.DeepSpeedZeroOptimizer, "unscale_and_clip_grads"),
    (stage_1_and_2.DeepSpeedZeroOptimizer, "get_grad_norm_direct"),
    (stage3.DeepSpeedZeroOptimizer_Stage3, "get_grad_norm_direct"),
    (stage3.DeepSpeedZeroOptimizer_Stage3, "partition_grads"),
    (partitioned_param_coordinator, "get_all_parameters"),
    (trl_utils, "_use_triton"),
    (json_reader, "json_encode_field"),
    (json_reader, "json_encode_fields_in_json_lines"),
    # DeepSpeed 0.19.8, zero/partition_parameters.py: stage 3 replaces it by one that keeps its inputs
    (torch.nn.functional, "linear"),
)
ORIGINALS = [(owner, name, getattr(owner, name)) for owner, name in REPLACED]


def forget_last_run() -> None:
    """What zero_recipes, accelerate, transformers and DeepSpeed keep of a run for the whole process."""
    remember_signals(False)
    for owner, name, original in ORIGINALS:
        setattr(owner, name, original)
    attention.attend_by_row(False)
    allow_cudnn("cuda", True)
    if multiply_in_fp32.cache_info().currsize:
        multiply_in_fp32()._destroy()
        multiply_in_fp32.cache_clear()
    stop_counting()
    AcceleratorState._reset_state()
    GradientState._reset_state()
    unset_hf_deepspeed_config()
    # DeepSpeed 0.19.8, utils/groups.py: made once for a process, and hpZ then holds a second copy in every later run
    groups._ZERO_PARAM_INTRA_PARALLEL_GROUP = None
    # DeepSpeed 0.19.8, torch_autocast.py: set by the first engine that has it, and later ones go by it
    torch_autocast.TORCH_AUTOCAST_INITIALIZED, torch_autocast.TORCH_AUTOCAST_DTYPE = False, None
    # DeepSpeed 0.19.8, runtime/sequence_parallel: Ulysses' attention and groups
    ALL_ATTENTION_FUNCTIONS._local_mapping.pop("sdpa", None)  # of the instance; the class still has transformers' own
    parallel_state_sp._release_sequence_parallel_groups()
    groups.mpu = None


def stop_counting() -> None:
    """What a run that failed between two steps goes on counting (zero_recipes/metrics/communication.py)."""
    backend = communication_backend()
    for name in COLLECTIVES if backend is not None else ():
        vars(backend).pop(name, None)  # the class's own method shows again
    while _python_dispatch._get_current_dispatch_mode_stack():
        _python_dispatch._pop_mode()
