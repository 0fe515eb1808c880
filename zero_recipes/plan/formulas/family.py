"""What the family's members beyond the plain stages need, by formulas: FSDP2, ZeRO++, NVMe, QLoRA; and a run beside
its steps."""

from __future__ import annotations

from zero_recipes.metrics.prediction import PARTS
from zero_recipes.plan.formulas.shape import Shape, layer_bytes, tokens_of
from zero_recipes.plan.job import Job
from zero_recipes.theory.zero_paper import ModelState


def packed_bytes(job: Job, shape: Shape, width: int) -> float:
    """Bytes of all weights: those of linear layers packed by bitsandbytes where the recipe asks for it.

    4 bit: half a byte and an fp32 scale for 64 weights (arXiv:2305.14314, section 3); 8 bit: a byte. Embedding, head
    and LoRA's adapter stay as they are.
    """
    if not (job.settings.load_in_4bit or job.settings.load_in_8bit):
        return width * shape.parameters
    adapter = shape.trainable if job.settings.use_peft else 0
    linear = shape.multiplied - shape.vocabulary * shape.hidden - adapter
    each = 1 / 2 + 4 / 64 if job.settings.load_in_4bit else 1
    return each * linear + width * (shape.parameters - linear)


def fsdp_states(job: Job, shape: Shape, each: int, width: int) -> ModelState:
    """Shards in the dtype of loading, `each` bytes an element, are their own master; docs/strategies.md measures it.

    Under accumulation whole gradients of `width` bytes stay from one micro step to the next: accelerate 1.15,
    accelerator.py `no_sync`, puts their reduction off.
    """
    trained = each * shape.trainable / job.world_size
    whole = width * shape.trainable if job.settings.gradient_accumulation_steps > 1 else 0
    return ModelState(packed_bytes(job, shape, each) / job.world_size, trained + whole, 2 * trained)


def fsdp_gathered(shape: Shape, width: int) -> float:
    """Bytes gathered in backward: embedding and head, which stay so, two layers, one layer's gradients and their copy.

    torch/distributed/fsdp/_fully_shard/_fsdp_param_group.py: the next layer is gathered while one is at work, and
    `foreach_reduce` copies its gradients into the input of the reduce-scatter.
    """
    ends = shape.parameters - shape.multiplied + shape.vocabulary * shape.hidden
    layer = (shape.parameters - ends) / shape.layers
    return width * (ends + 4 * layer)


def second_copy(job: Job, shape: Shape, width: int) -> float:
    """hpZ keeps the weights a second time, shared out within each node (arXiv:2306.10209, section 3.2)."""
    sharing = job.zero.hpz_partition_size
    return width * shape.parameters / sharing if sharing > 1 else 0


def compressed(job: Job, moved: dict[str, int]) -> dict[str, int]:
    """The same collectives quantised: weights to 8 bits; gradients to 4, which DeepSpeed does between nodes only."""
    several_nodes = job.world_size > job.gpus_per_node
    shares = {"all_gather": 1 / 2} if job.zero.quantizes_weights else {}
    if job.zero.quantizes_gradients and several_nodes:
        shares["reduce_scatter"] = 1 / 4
    return {name: int(size * shares.get(name, 1)) for name, size in moved.items()}


def gathers_between_nodes(job: Job) -> float:
    """Share of the all-gathers that leaves a node: with hpZ those of backward stay within it."""
    return 1 / 2 if job.zero.hpz_partition_size > 1 else 1


def beside_steps(
    job: Job, shape: Shape, states: ModelState, width: int, buckets: float
) -> list[tuple[str, dict[str, float]]]:
    """What a run holds in an evaluation, and where it loads its best model: {part: bytes} of each that the recipe has.

    An evaluation keeps no activations: one layer's at a time. The best model's optimizer states are made before the old
    ones go (torch's Optimizer.load_state_dict; transformers asks DeepSpeed for them too).
    """
    resting = dict.fromkeys(PARTS, 0) | {"params": states.params, "optimizer": states.optimizer}
    found: list[tuple[str, dict[str, float]]] = []
    if job.settings.evaluates:
        tokens = job.settings.per_device_eval_batch_size * tokens_of(job, shape) // job.sequence_parallel
        pairs = shape.heads * tokens * tokens_of(job, shape) if job.settings.attn_implementation == "eager" else 0
        layer = layer_bytes(shape, width, tokens, pairs) + width * tokens * shape.hidden
        gathered = buckets if job.zero_stage == 3 or job.is_fsdp else 0
        found.append(("evaluation", resting | {"activations": layer, "buckets": gathered}))
    if job.settings.load_best_model_at_end and job.ds_config is not None and not job.zero.offload_optimizer:
        again = 8 * shape.trainable / (job.world_size if job.zero_stage else 1)
        found.append(("best model", resting | {"optimizer": states.optimizer + again}))
    return found
