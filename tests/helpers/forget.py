"""What a run leaves behind in its process, undone before the next one. To be imported before the first run."""

import torch
from accelerate.state import AcceleratorState, GradientState
from deepspeed.runtime import torch_autocast
from deepspeed.runtime.sequence_parallel import parallel_state_sp
from deepspeed.utils import groups
from transformers.integrations.deepspeed import unset_hf_deepspeed_config
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

LINEAR = torch.nn.functional.linear


def forget_last_run() -> None:
    """What accelerate, transformers and DeepSpeed keep of a run for the whole process."""
    AcceleratorState._reset_state()
    GradientState._reset_state()
    unset_hf_deepspeed_config()
    # DeepSpeed 0.19.8, zero/partition_parameters.py: stage 3 replaces it for good by one that keeps its inputs
    torch.nn.functional.linear = LINEAR
    # DeepSpeed 0.19.8, utils/groups.py: made once for a process, and hpZ then holds a second copy in every later run
    groups._ZERO_PARAM_INTRA_PARALLEL_GROUP = None
    # DeepSpeed 0.19.8, torch_autocast.py: set by the first engine that has it, and later ones go by it
    torch_autocast.TORCH_AUTOCAST_INITIALIZED, torch_autocast.TORCH_AUTOCAST_DTYPE = False, None
    # DeepSpeed 0.19.8, runtime/sequence_parallel: Ulysses' attention and groups
    ALL_ATTENTION_FUNCTIONS._local_mapping.pop("sdpa", None)  # of the instance; the class still has transformers' own
    parallel_state_sp._release_sequence_parallel_groups()
    groups.mpu = None
