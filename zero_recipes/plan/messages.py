"""The sentences of a plan: all that it says in prose is made here, from values."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from zero_recipes.core.hardware import Gpu
from zero_recipes.core.units import count, parameters, percent, significant, size
from zero_recipes.data.audit import holding
from zero_recipes.data.prepare import RowLengths
from zero_recipes.metrics.prediction import Prediction
from zero_recipes.plan.advice import Change
from zero_recipes.plan.cost import Speed
from zero_recipes.plan.fit import Fit
from zero_recipes.plan.job import Job
from zero_recipes.plan.recommend import PLUS_PLUS, Recommendation, RuleOfThumb, kind
from zero_recipes.plan.rows import Row
from zero_recipes.plan.sequences import padded_together, pads, sequence_of

LARGE_HOST = 2 * 1024**4  # bytes; servers of eight GPUs are mostly rented with 1 to 2 TiB
SOURCES = {"engine": "the engine, simulated", "formulas": "textbook formulas"}
STATUSES = {"fits": "fits into", "tight": "tight in", "no": "does not fit into"}
PRICES = {
    "evaluation": "Smaller evaluation batches change no result.",
    "checkpointing": "Recomputing activations takes about a third more computation, and changes no result.",
    "micro batch": "Smaller micro batches keep the global batch; they compute less efficiently.",
    "stage": "A higher stage changes no result; stage 3 communicates half as much again.",
    "offload": "Offload changes no result, and is much slower, to NVMe most of all.",
    "LoRA": "LoRA trains another model: an adapter, with its own learning rate (ten times as high is usual).",
    "GPUs": "More GPUs cost more an hour and shorten the run.",
}
COLUMNS = [
    "Peak: bytes of live tensors on the fullest GPU, and where it stands; the columns up to Other are its parts.",
    "Reserved: what the process takes of the GPU, allocator, CUDA and NCCL included; the status is about this range.",
    "Host: host memory a machine, while loading / in training / while a checkpoint is read to go on from it; "
    "--host_memory holds it against what there is.",
    "Disk: the model / a checkpoint to go on from. NVMe: swap files while it trains; --nvme holds them against what "
    "there is.",
    "Comm.: bytes through collectives in one step, an all-reduce counted twice.",
    "Times are estimates, 20 to 30 % to either side, more with offload or without NVLink; Step and Tokens/s are for "
    "sequences as long as they may be.",
    "MFU: model FLOPs of the tokens that are no padding, as a share of the GPU's dense peak.",
]
CANNOT_KNOW = [
    "Fragmentation beyond the range given; PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True keeps it small.",
    "torch.compile, mixtures of experts (which tokens go where) and quantised weights.",
    "Answers to sample prompts; other programs on the same GPU.",
]


def not_planned(excluded: Mapping[str, str]) -> list[str]:
    """`excluded`: {strategy: why}; a line for each reason."""
    reasons: dict[str, list[str]] = {}
    for name, why in excluded.items():
        reasons.setdefault(why, []).append(name)
    return [f"Not planned: {', '.join(names)}: {why}." for why, names in reasons.items()]


def row_lengths(row: Row, lengths: RowLengths | None, unknown: str | None) -> str:
    """Which rows time and price are for. `unknown`: why their lengths are not known."""
    longest = row.prediction.max_length
    if lengths is None:
        return (
            f"Rows: their lengths are not at hand ({unknown}): each is taken to have {longest:,} tokens; --mean_tokens "
            "says how many they have."
        )
    each = sequence_of(row.job, longest, lengths)
    said = f"Rows: {lengths.source}: {lengths.mean:,.0f} tokens on average, of {longest:,} that they may have"
    if row.job.settings.packing:
        said += f", packed {each.tokens / each.places:.0%} full"
    elif len(lengths.lengths) > 1 and pads(row.job):
        said += f", {each.places:,.0f} with the padding to the longest of {padded_together(row.job)}"
    said += ". MFU, run and costs are for them."
    needed = holding(round(max(lengths.lengths)))
    if len(lengths.lengths) > 1 and not row.job.settings.packing and needed < longest:
        said += (
            f" None of them has more than {max(lengths.lengths):,.0f} tokens: --max_length {needed} trains them all, "
            "and plans memory for as many."
        )
    return said


def speed(found: Speed, lengths: RowLengths, gpu: Gpu) -> str:
    """What a run's own plan says of its steps."""
    seconds, mfu = " to ".join(map(significant, found.step_seconds)), " to ".join(map(percent, found.mfu))
    tokens = " to ".join(map(count, found.tokens_per_second))
    return (
        f"{gpu.name}: {seconds} s a step, {tokens} real tokens/s, MFU {mfu}: estimated for {lengths.source}, "
        f"{lengths.mean:,.0f} tokens on average"
    )


def heading(rows: Sequence[Row], gpu: Gpu) -> str:
    """Model, batch and machine in one line."""
    job, first = rows[0].job, rows[0].prediction
    sources = {row.prediction.source for row in rows}
    source = ", and for * ".join(words for name, words in SOURCES.items() if name in sources)
    return (
        f"{(job.model or '').removeprefix('./')}, {job.world_size} x {gpu.name}, {first.precision}, "
        f"micro batch {first.micro_batch_size} x {first.max_length} tokens; {source}"
    )


def peak(prediction: Prediction, fit: Fit | None) -> str:
    """One line for the log of a run."""
    message = f"{size(prediction.allocated_peak_bytes)} at the peak, by {SOURCES[prediction.source]}"
    return message if fit is None else f"{message}: {STATUSES[fit.status]} {size(fit.capacity)}"


def change_in_words(change: Change) -> str:
    """What is set otherwise: "zero3 and activation checkpointing"."""
    start, job = change.start, change.job
    under = job.strategy if job.strategy != start.strategy else ""
    settings = job.settings
    parts = [under]
    if job.world_size != start.world_size:
        parts = [f"{job.world_size} GPUs" + (f" under {under}" if under else "")]
    if settings.use_peft and not start.settings.use_peft:
        parts.append("LoRA (use_peft: true)")
    if job.recomputes and not start.recomputes:
        parts.append("activation checkpointing")
    batch = settings.per_device_train_batch_size
    if batch != start.settings.per_device_train_batch_size:
        parts.append(f"micro batches of {batch} with {settings.gradient_accumulation_steps} accumulations")
    evaluated = settings.per_device_eval_batch_size
    if evaluated != start.settings.per_device_eval_batch_size:
        parts.append(f"evaluation in batches of {evaluated}")
    return " and ".join(part for part in parts if part)


def change_and_need(change: Change) -> str:
    """The change, what it leaves of the GPU, and what it takes of the host."""
    host = host_memory(change.prediction.host_bytes.training)
    return f"{change_in_words(change)} ({size(change.fit.margin)} left{f'; {host}' if host else ''})"


def host_memory(held: int) -> str:
    """What the run keeps in the memory of one machine, in bytes; nothing where it keeps nothing there."""
    if not held:
        return ""
    return f"{size(held)} of host memory a machine" + (", which few have" if held > LARGE_HOST else "")


def resume_too_large(row: Row) -> str:
    """A run that fits, and whose checkpoints could not be read on machines with that much memory; nothing else."""
    if not row.fit.resume_lacks or row.fit.status == "no":
        return ""
    return (
        f"{row.job.strategy}: going on from a checkpoint reads it into host memory, "
        f"{size(row.prediction.host_bytes.resume)} a machine with what training holds there: "
        f"{size(row.fit.resume_lacks)} more than there is (DeepSpeed's torch.load on every rank). The run itself fits."
    )


def reasons(advice: Recommendation) -> list[str]:
    """Why this is recommended, sentence by sentence."""
    return list(_of_chosen(advice) if advice.chosen else _of_change(advice))


def _of_chosen(advice: Recommendation) -> Iterator[str]:
    fitting, chosen = advice.fitting, advice.chosen
    yield f"{_names(fitting)} {'fits' if len(fitting) == 1 else 'fit'} on {_machine(advice.rows[0].job, advice.gpu)}."
    message = f"{chosen.job.strategy}: {_seconds(chosen.expected.step_seconds)} a step, {size(chosen.fit.margin)} left"
    if len(fitting) == 1:
        yield f"{message}."
    elif len(advice.as_fast) == 1:
        yield f"{message}; the fastest of them."
    else:
        why = "is the lowest stage of them that leaves room" if advice.has_room else "leaves most room"
        why = "changes the fewest numbers" if kind(chosen.job) in PLUS_PLUS else why
        yield f"{message}; {_names(advice.as_fast)} are equally fast within the estimate's error, and it {why}."
    yield from _of_its_kind(advice)
    if chosen.offloads:
        swapped = chosen.prediction.nvme_bytes
        on_disk = f" and swaps {size(swapped)} to NVMe there" if swapped else ""
        yield (
            f"It keeps states in {host_memory(chosen.prediction.host_bytes.training)}{on_disk}; that takes "
            f"{_seconds(chosen.expected.offloading)} of each step. More GPUs would be faster."
        )
    elif advice.offloading:
        row = advice.offloading
        yield (
            f"Offload ({row.job.strategy}) would leave {size(row.fit.margin)}, for a step about "
            f"{significant(row.expected.middle / chosen.expected.middle)} times as long and "
            f"{host_memory(row.prediction.host_bytes.training)}: for larger batches or models."
        )
    yield from _network(chosen.job, advice.gpu)
    if advice.smaller_gpus:
        yield f"A smaller GPU takes it too: {' or '.join(advice.smaller_gpus)}."


def _of_its_kind(advice: Recommendation) -> Iterator[str]:
    """What else is to be known of the chosen strategy, and of those that were left out."""
    chosen = kind(advice.chosen.job)
    if chosen in PLUS_PLUS:
        rounds = "" if chosen == "zero3_hpz" else " Its collectives are quantised, which rounds (docs/strategies.md)."
        yield f"The network between the machines is what a plain stage 3 waits for.{rounds}"
    shared = [row for row in advice.fitting if kind(row.job) == "fsdp2"]
    if chosen == "zero3" and shared:
        yield (
            f"fsdp2 shares out as much without DeepSpeed, and would leave {size(shared[0].fit.margin)}; it has no "
            "offload, and its checkpoints cannot be resharded (docs/strategies.md)."
        )
    if chosen == "fsdp2":
        yield "It has no offload, and its checkpoints cannot be resharded (docs/strategies.md)."
    if advice.other_arithmetic:
        names = _names(advice.other_arithmetic)
        yield f"{names} would fit too, with another arithmetic: other losses (docs/performance.md)."


def _of_change(advice: Recommendation) -> Iterator[str]:
    yield f"No strategy is sure to fit on {_machine(advice.rows[0].job, advice.gpu)} as the recipe stands."
    tight = [row for row in advice.rows if row.fit.status == "tight"]
    if tight:
        yield f"{_names(tight)} may: only the low end of the estimate fits, so that it can end out of memory."
    change = advice.change
    if change is None:
        yield "No change that was tried makes one fit."
        yield (
            "What is left: larger GPUs, weights in 4 bits with LoRA (recipes/pythia-qlora.yaml), or Infinity where "
            "there is NVMe (--strategies all --nvme GB)."
        )
        return
    left = size(change.fit.margin)
    yield f"The mildest change: {change_in_words(change)} (from {change.start.strategy}); {left} are then left."
    yield PRICES[change.harshest]
    host = host_memory(change.prediction.host_bytes.training)
    if host:
        yield f"It needs {host}."
    yield from _network(change.job, advice.gpu)


def rule(found: RuleOfThumb) -> str:
    """What the common rule says for this model, and whether it holds on these GPUs."""
    message = (
        f"A common rule: {found.strategy} for a model of {parameters(found.parameters)} parameters (ddp below 10, "
        "zero2 up to 50 billion)."
    )
    if found.row is None:
        return message
    needs, fit = size(found.row.prediction.reserved_bytes.high), found.row.fit
    if fit.status == "fits":
        return f"{message} Here it fits: {needs} at most."
    return (
        f"{message} Here it {'may not fit' if fit.status == 'tight' else 'does not fit'}: up to {needs} on a GPU of "
        f"{size(fit.capacity)}. The rule leaves out the number of GPUs, their memory and the activations."
    )


def _seconds(values: tuple[float, float]) -> str:
    return f"{significant(values[0])} to {significant(values[1])} s"


def _machine(job: Job, gpu: Gpu) -> str:
    nodes = job.world_size // job.gpus_per_node
    return f"{job.world_size} x {gpu.name}" + (f" in {nodes} machines" if nodes > 1 else "")


def _names(rows: Sequence[Row]) -> str:
    names = [row.job.strategy for row in rows]
    return names[0] if len(names) == 1 else f"{', '.join(names[:-1])} and {names[-1]}"


def _network(job: Job, gpu: Gpu) -> Iterator[str]:
    nodes = job.world_size // job.gpus_per_node
    if nodes > 1:
        yield (
            f"{nodes} machines: collectives cross the network, {significant(gpu.network_gb_s)} GB/s for each GPU "
            "(--network, or the hardware table)."
        )
