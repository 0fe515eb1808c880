"""The sentences of a plan, made from values."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from zero_recipes.core.host import Gpu
from zero_recipes.core.units import count, percent, significant, size
from zero_recipes.data.audit import holding
from zero_recipes.data.prepare import RowLengths
from zero_recipes.metrics.prediction import Prediction
from zero_recipes.plan.choose import PLUS_PLUS, Change, Recommendation, Row, kind
from zero_recipes.plan.cost import Speed, padded_together, pads, sequence_of
from zero_recipes.plan.job import Job
from zero_recipes.plan.predict import Fit

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
    "Peak: bytes of live tensors on the fullest GPU, and its phase; the columns up to Other are its parts.",
    "Reserved: what the process takes of the GPU, allocator, CUDA and NCCL included; the status is about this range.",
    "Host: host memory a machine, while loading / in training / while a checkpoint is read to go on from it; "
    "--host_memory says how much there is.",
    "Disk: the model / a checkpoint to go on from. NVMe: swap files while it trains; --nvme says how much there is.",
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
    longest, packs = row.prediction.max_length, row.job.settings.packing
    if lengths is None:
        return f"Rows: lengths unknown ({unknown}); each is taken to have {longest:,} tokens, or as --mean_tokens says."
    each = sequence_of(row.job, longest, lengths)
    text = f"Rows: {lengths.source}: {lengths.mean:,.0f} tokens on average, of {longest:,} that they may have"
    if packs:
        text += f", packed {each.tokens / each.places:.0%} full"
    elif len(lengths.lengths) > 1 and pads(row.job):
        text += f", {each.places:,.0f} with the padding to the longest of {padded_together(row.job)}"
    text += ". MFU, run and costs are for them."
    most = max(lengths.lengths)
    needed = holding(round(most))
    if len(lengths.lengths) > 1 and not packs and needed < longest:
        text += f" None has more than {most:,.0f} tokens: --max_length {needed} trains them all and takes less memory."
    return text


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
    before, after = start.settings, job.settings
    under = job.strategy if job.strategy != start.strategy else ""
    batch, evaluated = after.per_device_train_batch_size, after.per_device_eval_batch_size
    parts = [under]
    if job.world_size != start.world_size:
        parts = [f"{job.world_size} GPUs" + (f" under {under}" if under else "")]
    if after.use_peft and not before.use_peft:
        parts.append("LoRA (use_peft: true)")
    if job.recomputes and not start.recomputes:
        parts.append("activation checkpointing")
    if batch != before.per_device_train_batch_size:
        parts.append(f"micro batches of {batch} with {after.gradient_accumulation_steps} accumulations")
    if evaluated != before.per_device_eval_batch_size:
        parts.append(f"evaluation in batches of {evaluated}")
    return " and ".join(part for part in parts if part)


def change_and_need(change: Change) -> str:
    """The change, what it leaves of the GPU, and what it takes of the host."""
    return f"{change_in_words(change)} ({_left_and_needed(change, 'left')})"


def host_memory(prediction: Prediction) -> str:
    """What the run keeps in the memory of one machine; nothing where it keeps nothing there."""
    taken = prediction.host_bytes.training
    return f"{size(taken)} of host memory a machine" if taken else ""


def _left_and_needed(change: Change, between: str) -> str:
    host = host_memory(change.prediction)
    return f"{size(change.fit.margin)} {between}{f'; it needs {host}' if host else ''}"


def resume_too_large(row: Row) -> str:
    """Of a run that fits, and whose checkpoints could not be read on machines with that much memory."""
    return (
        f"{row.job.strategy}: the run fits, and cannot go on from a checkpoint: reading one takes "
        f"{size(row.prediction.host_bytes.resume)} of host memory a machine, {size(row.fit.resume_lacks)} more than "
        "there is."
    )


def reasons(advice: Recommendation) -> list[str]:
    """Why this is recommended, sentence by sentence."""
    return list(_of_chosen(advice) if advice.chosen else _of_change(advice))


def _of_chosen(advice: Recommendation) -> Iterator[str]:
    fitting, chosen, strategy = advice.fitting, advice.chosen, kind(advice.chosen.job)
    yield f"On {_machine(advice.rows[0].job, advice.gpu)} fit: {_names(fitting)}."
    message = f"{chosen.job.strategy}: {_seconds(chosen.expected.step_seconds)} a step, {size(chosen.fit.margin)} left"
    if len(fitting) > 1 and len(advice.as_fast) == 1:
        message += "; the fastest of them"
    elif len(fitting) > 1:
        why = "is the lowest stage of them that leaves room" if chosen.has_room else "leaves most room"
        why = "changes the fewest numbers" if strategy in PLUS_PLUS else why
        message += f"; {_names(advice.as_fast)} are equally fast within the estimate's error, and it {why}"
    yield f"{message}."
    if strategy in PLUS_PLUS:
        rounds = "" if strategy == "zero3_hpz" else " Its collectives are quantised, which rounds."
        yield f"The network between the machines is what a plain stage 3 waits for.{rounds}"
    if advice.other_arithmetic:
        yield f"{_names(advice.other_arithmetic)} would fit too, with another arithmetic: other losses."
    if chosen.offloads:
        swapped = chosen.prediction.nvme_bytes
        on_disk = f" and swaps {size(swapped)} to NVMe there" if swapped else ""
        yield (
            f"It keeps states in {host_memory(chosen.prediction)}{on_disk}; that takes "
            f"{_seconds(chosen.expected.offloading)} of each step. More GPUs would be faster."
        )
    yield from _network(chosen.job, advice.gpu)


def _of_change(advice: Recommendation) -> Iterator[str]:
    yield f"No strategy is sure to fit on {_machine(advice.rows[0].job, advice.gpu)} as the recipe stands."
    tight = [row for row in advice.rows if row.fit.status == "tight"]
    if tight:
        yield f"{_names(tight)} may: only the low end of the estimate fits, so that it can end out of memory."
    change = advice.change
    if change is None:
        yield "No change that was tried makes one fit."
        yield "What is left: larger GPUs, LoRA with weights in 4 bits, or Infinity (--strategies all --nvme GB)."
        return
    yield f"The change that costs least: {change_in_words(change)} (from {change.start.strategy})."
    yield PRICES[change.costliest]
    yield f"{_left_and_needed(change, 'are then left')}."
    yield from _network(change.job, advice.gpu)


def _seconds(values: tuple[float, float]) -> str:
    return f"{significant(values[0])} to {significant(values[1])} s"


def _machine(job: Job, gpu: Gpu) -> str:
    nodes = job.world_size // job.gpus_per_node
    return f"{job.world_size} x {gpu.name}" + (f" in {nodes} machines" if nodes > 1 else "")


def _names(rows: Sequence[Row]) -> str:
    return ", ".join(row.job.strategy for row in rows)


def _network(job: Job, gpu: Gpu) -> Iterator[str]:
    nodes = job.world_size // job.gpus_per_node
    if nodes > 1:
        yield f"{nodes} machines: collectives cross the network, {significant(gpu.network_gb_s)} GB/s for each GPU."
