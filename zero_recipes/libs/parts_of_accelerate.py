"""Private parts of accelerate."""

from __future__ import annotations

from zero_recipes.libs.private_part import Exists, Mentions, PrivatePart, Takes

SHARDING_ON_CPU = PrivatePart(
    name="sharding_on_cpu",
    library="accelerate",
    used_by="libs/fsdp.py, let_it_shard_on_cpu",
    why="sets the distributed type: accelerate looks for FSDP only where it is not MULTI_CPU",
    otherwise="Every rank would train under DistributedDataParallel.",
    relies_on=(
        Exists("accelerate.state:PartialState", ("_shared_state",)),
        Mentions("accelerate.state:PartialState", ("_shared_state", "distributed_type")),
        Mentions("accelerate.state:AcceleratorState", ("MULTI_GPU", "ACCELERATE_USE_FSDP")),
    ),
)

WRAPPED_OPTIMIZER = PrivatePart(
    name="wrapped_optimizer",
    library="accelerate",
    used_by="libs/deepspeed_tensors.py, base_optimizer",
    why="finds the torch optimizer inside accelerate's wrapper, and DeepSpeed's",
    otherwise="Optimizer states would be counted as 0 bytes, and Adam's step before training at stage 0 not undone.",
    relies_on=(
        Mentions("accelerate.optimizer:AcceleratedOptimizer.__init__", ("optimizer",)),
        Mentions("accelerate.utils.deepspeed:DeepSpeedOptimizerWrapper", ("optimizer",)),
    ),
)

SHARED_STATE = PrivatePart(
    name="shared_state",
    library="accelerate",
    used_by="libs/alone.py, alone",
    why="forgets what accelerate's states hold of a trainer that was made only to see whether it can be",
    otherwise="A run's trainer would find the states of one process where it is one of several.",
    relies_on=(
        Takes("accelerate.state:AcceleratorState._reset_state", ("reset_partial_state",)),
        Exists("accelerate.state:GradientState", ("_reset_state",)),
    ),
)

LAUNCH = PrivatePart(
    name="launch_of_accelerate",
    library="accelerate",
    used_by="libs/accelerate_launch.py, environment_of_launch",
    why="asks `accelerate launch` what it makes of a file, its own checks included, without starting anything",
    otherwise="`zero-recipes check` would pass a file on which the launch ends.",
    relies_on=(
        Takes("accelerate.commands.launch:_validate_launch_command", ("args",)),
        Mentions(
            "accelerate.commands.launch:launch_command",
            ("_validate_launch_command", "deepspeed_fields_from_accelerate_config", "use_deepspeed", "use_fsdp"),
        ),
        Exists(
            "accelerate.utils.launch",
            ("prepare_deepspeed_cmd_env", "prepare_multi_gpu_env", "prepare_simple_launcher_cmd_env"),
        ),
    ),
)
