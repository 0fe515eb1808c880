"""Private parts of DeepSpeed. File names in the texts are relative to deepspeed/."""

from __future__ import annotations

from zero_recipes.libs.private_part import Exists, Line, Mentions, PrivatePart, Takes

STAGE_1_AND_2 = "deepspeed.runtime.zero.stage_1_and_2:DeepSpeedZeroOptimizer"
STAGE_3 = "deepspeed.runtime.zero.stage3:DeepSpeedZeroOptimizer_Stage3"
FUSED = "deepspeed.runtime.fp16.fused_optimizer:FP16_Optimizer"
UNFUSED = "deepspeed.runtime.fp16.unfused_optimizer:FP16_UnfusedOptimizer"
BF16 = "deepspeed.runtime.bf16_optimizer:BF16_Optimizer"

MODEL_STATES = PrivatePart(
    name="deepspeed_model_states",
    library="deepspeed",
    used_by="libs/deepspeed_tensors.py",
    why="reads the tensors in which DeepSpeed's optimizers keep weights, gradients and masters: their bytes are "
    "measured, and no public call tells them",
    otherwise="Model states would be counted as 0 bytes.",
    relies_on=(
        Mentions(
            STAGE_1_AND_2,
            (
                *("bit16_groups_flat", "single_partition_of_fp32_groups", "partition_gradients", "ipg_buckets"),
                *("grads_in_partition", "averaged_gradients", "all_grad_tensors", "grad_accum"),
            ),
        ),
        Mentions("deepspeed.runtime.zero.stage_1_and_2:IPGBucket", ("buffer",)),
        Mentions(STAGE_3, ("fp32_partitioned_groups_flat", "averaged_gradients", "grad_partitions_flat_buffer")),
        Mentions("deepspeed.runtime.zero.partition_parameters:Init", ("ds_tensor", "ds_secondary_tensor", "ds_numel")),
        Mentions(FUSED, ("fp32_groups_flat", "optimizer")),
        Mentions(UNFUSED, ("fp32_groups", "optimizer")),
        Mentions(BF16, ("bf16_groups_flat", "fp32_groups_flat_partition", "fp32_groups_gradients_flat")),
    ),
)

PARTITIONS = PrivatePart(
    name="partitioned_parameters",
    library="deepspeed",
    used_by="libs/deepspeed_tensors.py, whole_size and whole_shape",
    why="knows the whole size and shape of a parameter that stage 3 has partitioned",
    otherwise="Parameters would be counted as 0, and random weights not be drawn.",
    relies_on=(
        Mentions("deepspeed.runtime.zero.partition_parameters:Init", ("ds_id", "ds_numel", "ds_shape")),
        Mentions("deepspeed.runtime.zero.partition_parameters:is_zero_param", ("ds_id",)),
    ),
)

FRESH_ADAM = PrivatePart(
    name="fresh_adam_at_stage_0",
    library="deepspeed",
    used_by="libs/patches.py, FreshAdamAtStage0",
    why="sets Adam's step counters back to 0: at stage 0 in 16 bit DeepSpeed takes a step before training to allocate "
    "the states",
    otherwise="Adam's bias correction would be off in every step, and weight decay applied once too often.",
    upstream="deepspeedai/DeepSpeed#5104, the same at stages 1 to 3",
    relies_on=(
        Exists(FUSED, ("initialize_optimizer_states", "refresh_fp32_params")),
        Exists(UNFUSED, ("initialize_optimizer_states", "refresh_fp32_params")),
    ),
)

TRACE = PrivatePart(
    name="trace_of_generation",
    library="deepspeed",
    used_by="libs/patches.py, forget_trace_of_generation",
    why="makes stage 3 forget the order of modules that it has recorded while the model generated",
    otherwise="The first training step after samples would die with a parameter in flight.",
    relies_on=(
        Mentions(STAGE_3, ("parameter_offload",)),
        Mentions("deepspeed.runtime.zero.parameter_offload:DeepSpeedZeRoOffload", ("param_coordinator",)),
        Exists(
            "deepspeed.runtime.zero.partitioned_param_coordinator:PartitionedParameterCoordinator",
            ("is_invalid_trace", "_invalidate_trace"),
        ),
    ),
)

RELEASES = PrivatePart(
    name="releases_of_another_trace",
    library="deepspeed",
    used_by="libs/patches.py, forget_releases_with_the_trace",
    why="empties stage 3's memory of which parameters to release when the order of modules that it was for is dropped",
    otherwise="After samples, each training step would gather its parameters twice: half as many bytes again are sent.",
    relies_on=(
        Exists(
            "deepspeed.runtime.zero.partitioned_param_coordinator:PartitionedParameterCoordinator",
            ("_invalidate_trace", "_PartitionedParameterCoordinator__params_to_release"),
        ),
        # the fault itself: where DeepSpeed has fixed it, the patch must go
        Line(
            "deepspeed",
            "deepspeed/runtime/zero/partitioned_param_coordinator.py",
            "    @instrument_w_nvtx\n    @functools.lru_cache(maxsize=None)\n    def __params_to_release(",
        ),
    ),
)

NUMA_CORES = PrivatePart(
    name="numa_cores",
    library="deepspeed",
    used_by="libs/patches.py, remember_numa_cores",
    why="remembers the machine's NUMA nodes: on CPUs DeepSpeed starts numactl for each bucket that stage 3 reduces",
    otherwise="A step at stage 3 on CPUs would start some dozens of processes again.",
    relies_on=(
        Takes("deepspeed.utils.numa:get_numa_cores", ()),
        # the fault itself: where DeepSpeed has fixed it, the patch must go
        Line("deepspeed", "deepspeed/accelerator/cpu_accelerator.py", "numa_core_lists = get_numa_cores()"),
    ),
)

QUANTIZED_GRADIENTS = PrivatePart(
    name="quantized_gradients",
    library="deepspeed",
    used_by="libs/patches.py, patch_quantized_gradients",
    why="replaces all_to_all_quant_reduce in stage 3: its kernel takes bf16 and fp32 for fp16, whose range is too "
    "small for gradients that are not scaled, and adds up the devices of a node without dividing",
    otherwise="Gradients would be divided twice or not at all, scaled for nothing, or lost below fp16's 6e-8.",
    relies_on=(
        Exists("deepspeed.runtime.zero.stage3", ("all_to_all_quant_reduce",)),
        Mentions(STAGE_3, ("all_to_all_quant_reduce",)),
        # the fault itself: where DeepSpeed has fixed it, the patch must go
        Line(
            "deepspeed",
            "deepspeed/ops/csrc/quantization/pt_binding.cpp",
            "(float*)scales.data_ptr(),\n                          (__half*)input_vals.data_ptr(),",
        ),
        Line("deepspeed", "deepspeed/ops/csrc/quantization/quant_reduce.cu", "reduce::element<rop::Add>"),
        Line(
            "deepspeed",
            "deepspeed/runtime/comm/coalesced_collectives.py",
            "output_lst[idx] = (sum(list(final_output.chunk(num_nodes))) / num_nodes).view(-1)",
        ),
    ),
)

GROUP_TIMEOUT = PrivatePart(
    name="timeout_of_groups",
    library="deepspeed",
    used_by="libs/patches.py, patch_timeouts",
    why="gives the groups that DeepSpeed makes (at every stage a second one of all ranks) the run's ddp_timeout",
    otherwise="Their collectives would end after torch's default, 10 minutes under NCCL, whatever ddp_timeout says: a "
    "long save on one rank ends the others.",
    upstream="deepspeedai/DeepSpeed#7533",
    relies_on=(
        Takes("deepspeed.comm.torch:TorchBackend.new_group", ("self", "ranks")),
        Mentions("deepspeed.comm.comm:new_group", ("cdb", "new_group")),
        # the fault itself: where DeepSpeed has fixed it, the patch must go
        Line("deepspeed", "deepspeed/comm/torch.py", "return torch.distributed.new_group(ranks)"),
    ),
)

RESHARDED_STATES = PrivatePart(
    name="resharded_states",
    library="deepspeed",
    used_by="libs/deepspeed_engine.py",
    why="makes Adam's states and puts weights, masters and moments of a resharded checkpoint into a fresh engine",
    otherwise="A resumed run would go on with other weights or fresh optimizer states.",
    relies_on=(
        Takes(f"{STAGE_3}._optimizer_step", ("self", "sub_group_id")),
        Takes(f"{STAGE_3}.checkpoint_event_epilogue", ("self",)),
        Exists(STAGE_3, ("_reassign_or_swap_out_partitioned_parameters",)),
        Mentions(
            STAGE_3,
            ("fp32_partitioned_groups_flat", "persistent_parameters", "sub_group_to_group_id", "fp16_groups"),
        ),
        Takes(f"{STAGE_1_AND_2}._lazy_init_hp_params_optimizer_state", ("self",)),
        Takes(f"{STAGE_1_AND_2}.update_lp_params", ("self",)),
        Mentions(STAGE_1_AND_2, ("single_partition_of_fp32_groups", "bit16_groups")),
        Mentions("deepspeed.runtime.zero.partition_parameters:Init", ("ds_id", "ds_numel", "ds_process_group")),
        Mentions("deepspeed.runtime.engine:DeepSpeedEngine", ("global_steps", "global_samples", "skipped_steps")),
    ),
)

# methods of DeepSpeed's backend (comm/torch.py; its decorators hide their signatures): the collective, the argument
# with the full tensor, the names of the arguments in order
COLLECTIVES = {
    "all_reduce": ("all_reduce", "tensor", ("tensor", "op", "group")),
    "inference_all_reduce": ("all_reduce", "tensor", ("tensor", "op", "group")),
    "all_reduce_coalesced": ("all_reduce", "tensors", ("tensors", "op", "group")),
    "all_gather": ("all_gather", "tensor_list", ("tensor_list", "tensor", "group")),
    "all_gather_into_tensor": ("all_gather", "output_tensor", ("output_tensor", "input_tensor", "group")),
    "all_gather_base": ("all_gather", "output_tensor", ("output_tensor", "input_tensor", "group")),
    "all_gather_coalesced": ("all_gather", "output_tensors", ("output_tensors", "input_tensors", "group")),
    "reduce_scatter": ("reduce_scatter", "input_list", ("output", "input_list", "op", "group")),
    "reduce_scatter_tensor": ("reduce_scatter", "input_tensor", ("output_tensor", "input_tensor", "op", "group")),
    "all_to_all": ("all_to_all", "input_tensor_list", ("output_tensor_list", "input_tensor_list", "group")),
    "all_to_all_single": ("all_to_all", "input", ("output", "input", "output_splits", "input_splits", "group")),
    "reduce": ("reduce", "tensor", ("tensor", "dst", "op", "group")),
    "broadcast": ("broadcast", "tensor", ("tensor", "src", "group")),
}

BACKEND = PrivatePart(
    name="deepspeed_collectives",
    library="deepspeed",
    used_by="libs/deepspeed_engine.py, communication_backend",
    why="counts the bytes of every collective at DeepSpeed's backend, and knows its group; the comms logger waits for "
    "the device each time and does not know the group",
    otherwise="Communication would be counted as 0 bytes.",
    relies_on=(
        Exists("deepspeed.comm.comm", ("cdb",)),
        Mentions("deepspeed.comm.comm:all_reduce", ("cdb",)),
        Exists("deepspeed.comm.torch:TorchBackend", tuple(COLLECTIVES)),
    ),
)

# constants of utils/timer.py, of the timers that run over all micro steps of one optimizer step: the phase
STEP_TIMERS = {
    "FORWARD_GLOBAL_TIMER": "forward",
    "BACKWARD_GLOBAL_TIMER": "backward",
    "BACKWARD_INNER_GLOBAL_TIMER": "backward_inner",
    "BACKWARD_REDUCE_GLOBAL_TIMER": "backward_reduce",
    "STEP_GLOBAL_TIMER": "optimizer",
}

TIMERS = PrivatePart(
    name="deepspeed_timers",
    library="deepspeed",
    used_by="libs/deepspeed_engine.py, read_timers_before_reset",
    why="reads the engine's timers inside of their log: outside of it they read 0",
    otherwise="Seconds of forward, backward and optimizer would be missing from metrics.json.",
    relies_on=(
        Mentions("deepspeed.runtime.engine:DeepSpeedEngine", ("timers",)),
        Exists("deepspeed.runtime.engine:DeepSpeedEngine", ("wall_clock_breakdown",)),
        Takes("deepspeed.utils.timer:SynchronizedWallClockTimer.__call__", ("self", "name")),
        Exists("deepspeed.utils.timer:SynchronizedWallClockTimer", ("log",)),
        Takes("deepspeed.utils.timer:SynchronizedWallClockTimer.Timer.elapsed", ("self", "reset")),
        Exists("deepspeed.utils.timer", tuple(STEP_TIMERS)),
    ),
)
