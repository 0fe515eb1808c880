"""Private parts of torch and bitsandbytes."""

from __future__ import annotations

from zero_recipes.libs.private_part import Exists, Mentions, PrivatePart

WHOLE_GRADIENTS = PrivatePart(
    name="whole_gradients",
    library="torch",
    used_by="libs/fsdp.py, whole_gradients",
    why="reads the unsharded gradients that FSDP2 keeps from one micro step to the next: no public name leads to them",
    otherwise="They would be counted as 0 bytes.",
    relies_on=(
        Exists("torch.distributed.fsdp:FSDPModule", ("_get_fsdp_state",)),
        Mentions("torch.distributed.fsdp._fully_shard._fsdp_state:FSDPState", ("_fsdp_param_groups",)),
        Mentions("torch.distributed.fsdp._fully_shard._fsdp_param_group:FSDPParamGroup", ("fsdp_params",)),
        Mentions(
            "torch.distributed.fsdp._fully_shard._fsdp_param:FSDPParam",
            ("_unsharded_param", "unsharded_accumulated_grad"),
        ),
    ),
)

OPERATORS = PrivatePart(
    name="collective_operators",
    library="torch",
    used_by="metrics/communication.py, CountCollectives",
    why="counts the bytes of FSDP2's collectives by their operators, which have no documented names",
    otherwise="Communication would be counted as 0 bytes.",
    relies_on=(
        Exists(
            "torch:ops.c10d",
            (
                *("_allgather_base_", "allgather_", "_reduce_scatter_base_", "allreduce_", "broadcast_"),
                "alltoall_base_",
            ),
        ),
        Exists(
            "torch:ops._c10d_functional",
            ("all_gather_into_tensor", "reduce_scatter_tensor", "all_reduce", "all_reduce_"),
        ),
    ),
)

BUCKETS = PrivatePart(
    name="gradient_buckets",
    library="torch",
    used_by="libs/torch_internals.py, ddp_bucket_bytes",
    why="reads the sizes of DistributedDataParallel's buckets: each goes through one all-reduce a step",
    otherwise="Communication would be counted as 0 bytes.",
    relies_on=(Exists("torch.nn.parallel:DistributedDataParallel", ("_get_ddp_logging_data",)),),
)

STORAGES = PrivatePart(
    name="identity_of_storages",
    library="torch",
    used_by="libs/torch_internals.py, storage_identity",
    why="tells storages apart, so that each is counted once: fake tensors have no address",
    otherwise="Memory would be counted twice, or not at all.",
    relies_on=(Exists("torch:UntypedStorage", ("_cdata",)),),
)

PARAMETERS = PrivatePart(
    name="parameters_of_a_module",
    library="torch",
    used_by="libs/deepspeed_tensors.py, packed_weights",
    why="reads a module's own weight, not that which PEFT's layer shows as its own",
    otherwise="Packed weights would be counted twice.",
    relies_on=(Mentions("torch.nn.modules.module:Module.register_parameter", ("_parameters",)),),
)

PACKED_WEIGHTS = PrivatePart(
    name="packed_weights",
    library="bitsandbytes",
    used_by="libs/deepspeed_tensors.py, packed_weights",
    why="reads the scales of 4-bit weights and their shape before packing",
    otherwise="Scales would be counted as 0 bytes, and parameters as half of what they are.",
    relies_on=(
        Mentions("bitsandbytes.nn.modules:Params4bit", ("quant_state",)),
        Mentions("bitsandbytes.nn.modules:Linear4bit", ("quant_state",)),
        Mentions("bitsandbytes.functional:QuantState.__init__", ("shape", "nested", "state2")),
    ),
)

LAYOUT = PrivatePart(
    name="layout_of_4_bit",
    library="bitsandbytes",
    used_by="libs/patches.py, keep_4bit_layout",
    why="switches off the packing for AVX512-BF16, which cannot be trained",
    otherwise="After samples or an evaluation no gradient would pass a frozen layer.",
    relies_on=(Mentions("bitsandbytes.nn.modules:Linear4bit", ("support_avx512bf16_for_cpu",)),),
)
