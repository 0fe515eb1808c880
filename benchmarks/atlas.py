"""The figures of the atlas, by the planner's formulas: python -m benchmarks.atlas

Writes zero_recipes/tools/atlas/atlas.json, from which the page computes (zero_recipes/tools/atlas/page.js) what
`zero-recipes plan --quick` prints. Needs no GPU, and some minutes of processor time. A run that was ended goes on where
it was: the plans' cache keeps each model for this state of the package.

A table of all plans would be a hundred times as large as the page may be. So it has what their terms depend on:
memory is a line over the tokens of a micro batch, or what the step itself takes; seconds are FLOPs of a row on each
card, and bytes over a bandwidth. These are read off the planner by asking it about GPUs that have a single limit.
tests/plan/test_atlas.py compares the page with the planner.
"""

import json
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from datetime import UTC, datetime
from functools import cache, partial
from pathlib import Path
from typing import Any

import yaml

from zero_recipes.checks.capacity import LITTLE
from zero_recipes.core.files import FILES, write_text
from zero_recipes.core.findings import Refusal
from zero_recipes.core.gpus import Gpu, gpus
from zero_recipes.core.measured_on import library_versions
from zero_recipes.engine.warnings import quieten
from zero_recipes.tools.arguments import parse_arguments
from zero_recipes.tools.atlas.page import FIGURES
from zero_recipes.tools.plan import choose, cost
from zero_recipes.tools.plan.cache import cached
from zero_recipes.tools.plan.command import requested
from zero_recipes.tools.plan.cost import Speed, constant, constants, estimate, window
from zero_recipes.tools.plan.formulas import overheads, predict_by_formulas
from zero_recipes.tools.plan.job import FSDP, MODELS, USUAL, Job, PlanRequest, shares_nothing
from zero_recipes.tools.plan.shape import shape_of

COUNTS = (1, 2, 4, 8, 16, 32, 64, 128, 256)
PER_NODE = 8
LENGTHS = (512, 1024, 2048, 4096, 8192, 16_384, 32_768, 65_536, 131_072)
ANY_MODEL = "qwen3-8b"  # for what no model decides
ANY_GPU = "h100-80gb"
MOST_ROWS = 256  # of a micro batch
STRATEGIES = (*USUAL, FSDP)
METHODS = {"full": {}, **choose.LIGHTER}
ENDLESS = 1e30  # of a bandwidth, or of a peak in TFLOP/s
SHORT, LONG = 2**20, 2**21  # tokens, of which a line over tokens is drawn; backward has the peak at both
DIGITS = 7


def main() -> None:
    quieten()
    own = Path(__file__).read_text()
    models = {}
    for path in sorted(MODELS.glob("*.json")):
        found = cached(partial(of_model, path.stem), own, path.stem, path.read_text())
        models[path.stem] = found | {"recipes": recipes_of(path.stem)}
        print(path.stem, flush=True)
    text = written(figures(models))
    write_text(FIGURES, text)
    print(f"{FIGURES}: {len(text):,} bytes")


def written(found: Mapping[str, Any]) -> str:
    """JSON, a model a line."""
    models = [f"{json.dumps(name)}:{compact(entry)}" for name, entry in found["models"].items()]
    others = {key: value for key, value in found.items() if key != "models"}
    joined = ",\n".join(models)
    return f'{compact(others)[:-1]},\n"models":{{\n{joined}\n}}}}\n'


def compact(value: Any) -> str:
    return json.dumps(value, separators=(",", ":"))


def figures(models: Mapping[str, Any]) -> dict[str, Any]:
    """Everything that the page computes from. `models`: {name: by `of_model`}."""
    cards = able_gpus()
    return {
        "date": f"{datetime.now(UTC):%Y-%m-%d}",
        "versions": library_versions(),
        "source": "formulas",
        "counts": COUNTS,
        "per_node": PER_NODE,
        "lengths": LENGTHS,
        "methods": list(METHODS),
        "strategies": strategies(),
        "most_rows": choose.MOST_FREE_SEQUENCES,
        "gain": choose.GAIN,
        "memory": beside_tensors(),
        "spread": spread(),
        "accuracy": accuracy(),
        "without_bf16": [name for name in gpus() if name not in cards],
        "gpus": {name: of_gpu(gpu) for name, gpu in cards.items()},
        "models": models,
    }


def strategies() -> dict[str, dict[str, Any]]:
    """What the choice among strategies depends on: choose.py `recommend`."""
    found: dict[str, dict[str, Any]] = {}
    for name in STRATEGIES:
        found[name] = {"order": choose.ORDER.index(name), "usual": name in USUAL}
    for job in jobs_of(request_of(ANY_MODEL, {})):
        entry = found[choose.kind(job)]
        entry["offloads"] = job.zero.offloads
        if job.ds_config is not None:
            entry["stage"] = job.zero_stage
        entry["place"] = next(i for i, place in enumerate(choose.PLACES) if choose.kind(job) in place)
        if shares_nothing(job):
            entry["shares_nothing"] = True  # on one GPU
    return found


@cache
def able_gpus() -> dict[str, Gpu]:
    """The cards that a plan in bf16 is made for."""
    return {name: gpu for name, gpu in gpus().items() if gpu.bf16}


def words_of(keys: Mapping[str, Any]) -> list[str]:
    """The keys of a recipe as a command line has them."""
    words = []
    for key, value in keys.items():
        values = value if isinstance(value, list) else [str(value).lower() if isinstance(value, bool) else str(value)]
        words += [f"--{key}", *values]
    return words


def request_of(model: str, keys: Mapping[str, Any], gpu: str = ANY_GPU) -> PlanRequest:
    """What `zero-recipes plan MODEL` is asked, with keys of a recipe."""
    words = ["plan", model, "--gpu", gpu, "--gpus", ",".join(map(str, COUNTS)), "--gpus_per_node", str(PER_NODE)]
    words += ["--strategies", ",".join(STRATEGIES)]
    arguments = parse_arguments([*words, *words_of(keys)])
    return requested(arguments, arguments.overrides)


def jobs_of(request: PlanRequest) -> list[Job]:
    """The jobs of all strategies and counts, without workspaces, which the page adds."""
    jobs, _ = request.jobs()
    return [replace(job, workspace=0) for job in jobs]


def beside_tensors() -> dict[str, Any]:
    """What GPU memory holds beside the tensors, and what nvidia-smi may show of them."""
    ranges = [overheads().reserved_range(0, ranks) for ranks in (1, 2)]
    much = 10**12
    factor = (overheads().reserved_range(much, 1).high - ranges[0].high) / much
    return {
        "beside": [found.low for found in ranges],
        "shown": [found.high for found in ranges],
        "factor": factor,
        "unplanned": overheads().unplanned["formulas"],
    }


def of_gpu(gpu: Gpu) -> dict[str, Any]:
    """A card's own figures, and host memory that usually comes with so many of them on one machine."""
    return {
        "memory": gpu.memory_bytes,
        "usable": overheads().usable_bytes(gpu.memory_bytes),
        "workspace": 2 * gpu.workspace_bytes,  # of the threads that multiply
        "usual_host": [gpu.usual_host_bytes(min(count, PER_NODE)) for count in COUNTS],
        "memory_gb_s": gpu.memory_gb_s,
        "host_gb_s": gpu.host_gb_s,
        "link_gb_s": [link_of(gpu, count) for count in COUNTS],
    }


def link_of(gpu: Gpu, count: int) -> float:
    """GB/s of the slowest link of a ring: between machines it has every network card of one."""
    if count <= PER_NODE:
        return gpu.link_gb_s
    return min(gpu.network_gb_s * PER_NODE, gpu.link_gb_s)


def spread() -> dict[str, Any]:
    """Factors of seconds, [low, high, middle], for a micro batch of so many tokens, and for offloading.

    Where published rows are for the job: the page widens the others.
    """
    jobs = jobs_of(request_of(ANY_MODEL, {}))
    plain = jobs[0]
    offloading = next(job for job in jobs if job.zero.offloads)
    gpu = able_gpus()[ANY_GPU]
    by_tokens = {}
    tokens = min(LENGTHS)
    while tokens <= max(LENGTHS) * MOST_ROWS:
        job = plain.changed(max_length=tokens)
        speed = estimate(job, predict_by_formulas(job), gpu)
        by_tokens[tokens] = [rounded(point / beside_offloading(speed)) for point in points_of(job, speed, gpu)]
        tokens *= 2
    speed = estimate(offloading, predict_by_formulas(offloading), gpu)
    factors = by_tokens[offloading.settings.max_length]
    points = zip(points_of(offloading, speed, gpu), factors, strict=True)
    offload = [rounded((point - factor * beside_offloading(speed)) / speed.offloading) for point, factor in points]
    return {"tokens": by_tokens, "offload": offload, "likely_width": cost.LIKELY_WIDTH}


def points_of(job: Job, speed: Speed, gpu: Gpu) -> tuple[float, float, float]:
    """Seconds of a step, (low, high, middle), of a range that is not widened."""
    wider = cost.WIDER if cost.without_rows(job, gpu) else 1
    low, high = speed.step_seconds
    return low * wider, high / wider, speed.middle


def beside_offloading(speed: Speed) -> float:
    """Seconds of a step that a range has by the tokens of a micro batch."""
    return speed.computing + speed.communicating + speed.waiting


def accuracy() -> dict[str, Any]:
    """What `cost.how_good` says of a time: the published rows of each regime, and what they cover."""
    known = constants()
    return {
        "holds": known["holds"],
        "kinds": known["kinds"],
        "long_pass": cost.LONG,
        "long_row": cost.LONG_ROW,
        "wider": cost.WIDER,
    }


def of_model(name: str) -> dict[str, Any]:
    """All terms of one model's plans; of a method that no plan is made for, why."""
    methods = {}
    for method in METHODS:
        try:
            methods[method] = of_method(name, keys_of(name, method))
        except Refusal as refused:  # LoRA without target modules for this architecture
            methods[method] = {"words": " ".join(words_of(METHODS[method])), "refused": refused.what}
    job = jobs_of(request_of(name, {}))[0]
    shape = shape_of(job.config, job.settings)
    return {
        "name": job.model,
        "parameters": shape.parameters,
        "positions": shape.positions,
        "methods": methods,
    }


@cache
def shipped_recipes() -> dict[str, dict[str, Any]]:
    """The shipped recipes by their files' names, short names first."""
    paths = sorted(FILES.glob("recipes/*.yaml"), key=lambda path: (len(path.name), path.name))
    return {path.name: yaml.safe_load(path.read_text()) for path in paths}


def recipes_of(model: str) -> dict[str, str]:
    """{method: a shipped recipe of this model that any strategy can be launched with}"""
    known = json.loads((MODELS / f"{model}.json").read_text())
    names = [known["model"], *known["names"]]
    found: dict[str, str] = {}
    for file, recipe in shipped_recipes().items():
        if recipe["model_name_or_path"] not in names or "deepspeed" in recipe or recipe.get("fp16"):
            continue
        method = "full"
        if recipe.get("use_peft"):
            method = "QLoRA" if recipe.get("load_in_4bit") else "LoRA"
        found.setdefault(method, file)
    return found


@cache
def keys_of(name: str, method: str) -> dict[str, Any]:
    """A method's keys of a recipe for a model: the first of `ways_of` that its class takes. Raises Refusal for none."""
    *others, last = ways_of(name, method)
    for keys in others:
        with suppress(Refusal):
            build(name, keys)
            return keys
    build(name, last)
    return last


def ways_of(name: str, method: str) -> list[dict[str, Any]]:
    """A method's keys of a recipe, and for an adapter with the layers that it needs where PEFT knows none of a model.

    These are as in a shipped recipe of the model, else all; experts take no dropout (ZR455).
    """
    keys = METHODS[method]
    if "use_peft" not in keys:
        return [keys]
    recipe = shipped_recipes().get(recipes_of(name).get("LoRA", ""), {})
    own = recipe.get("lora_target_modules", "all-linear")
    return [
        keys,
        keys | {"lora_target_modules": own},
        keys | {"lora_target_modules": "all-linear"},
        keys | {"lora_target_modules": "all-linear", "lora_dropout": 0},
    ]


def build(name: str, keys: Mapping[str, Any]) -> None:
    """Build a model with its adapter, without memory. Raises Refusal where its class does not take the adapter."""
    request = request_of(name, keys)
    shape_of(request.config, request.recipe.settings)


def of_method(name: str, keys: Mapping[str, Any]) -> dict[str, Any]:
    """The terms of a model that trains in one way."""
    request = request_of(name, keys)
    jobs = jobs_of(request)
    by_strategy: dict[str, list[Job]] = {}
    for job in jobs:
        by_strategy.setdefault(choose.kind(job), []).append(job)
    packed = shape_of(request.config, jobs[0].settings.replace(use_peft=False)).packed_share
    packs_little = jobs[0].quantizes and packed < LITTLE
    return {
        "words": " ".join(words_of(keys)),
        **({"packed": rounded(packed)} if packs_little else {}),  # of the layers' weights
        "flops": [seconds_of_flops(jobs[0], length) for length in lengths_of(jobs[0])],
        "strategies": {strategy: of_strategy(request, jobs) for strategy, jobs in by_strategy.items()},
    }


def lengths_of(job: Job) -> list[int]:
    """The row lengths that the model has positions for."""
    positions = shape_of(job.config, job.settings).positions
    return [length for length in LENGTHS if length <= positions or not positions]


def seconds_of_flops(job: Job, length: int) -> list[float]:
    """Seconds of one row's FLOPs on each card."""
    job = job.changed(max_length=length)
    prediction = predict_by_formulas(job)
    cards = [gpu.model_copy(update={"memory_gb_s": ENDLESS}) for gpu in able_gpus().values()]
    return [rounded(estimate(job, prediction, gpu).computing) for gpu in cards]


def of_strategy(request: PlanRequest, jobs: Sequence[Job]) -> dict[str, Any]:
    """The terms of one strategy: those of a token, and those of each count of GPUs in a list."""
    first = jobs[0]
    lengths = [SHORT, LONG]
    ends = [AtLimits(first.changed(max_length=length)) for length in lengths]
    tokens = LONG - SHORT
    a_token = (ends[1].peak - ends[0].peak) / tokens
    moved_a_token = (ends[1].speed(memory_gb_s=1).computing - ends[0].speed(memory_gb_s=1).computing) / tokens
    terms: dict[str, list] = {}
    for job in jobs:
        for term, value in of_job(job, a_token, moved_a_token).items():
            terms.setdefault(term, []).append(value)
    added = {} if first.settings.dtype == request.recipe.settings.dtype else {"dtype": first.settings.dtype}
    return {
        "words": " ".join(words_of(added)),  # that the plan adds to the command
        "counts": [job.world_size for job in jobs],
        "a_token": rounded(a_token),
        "moved_a_token": rounded(moved_a_token),
        **{term: shortest(values) for term, values in terms.items() if any(values)},
    }


class AtLimits:
    """A job on GPUs that are endlessly fast but for the limits that are named."""

    FIGURES = ("bf16_tflops", "memory_gb_s", "link_gb_s", "host_gb_s", "network_gb_s", "nvme_gb_s")

    def __init__(self, job: Job):
        self.job = job
        self.prediction = predict_by_formulas(job)
        self.gpu = able_gpus()[ANY_GPU].model_copy(update=dict.fromkeys(self.FIGURES, ENDLESS))

    @property
    def peak(self) -> int:
        """Bytes."""
        return self.prediction.allocated_peak_bytes

    def speed(self, **limits: float) -> Speed:
        """How long a step takes."""
        return estimate(self.job, self.prediction, self.gpu.model_copy(update=limits))


def of_job(job: Job, a_token: float, moved_a_token: float) -> dict[str, float]:
    """The terms of one job: bytes, seconds, and seconds at 1 GB/s."""
    tiny = predict_by_formulas(job.changed(max_length=1))
    large = AtLimits(job.changed(max_length=SHORT))
    at_once = large.speed()
    by_link = large.speed(link_gb_s=1)
    hidden = window(job) * constant("hidden")
    terms = {
        "peak": large.peak - a_token * SHORT,
        "step": tiny.allocated_peak_bytes,
        "host": tiny.host_bytes.most,
        "moved": large.speed(memory_gb_s=1).computing - moved_a_token * SHORT,
        "hosting": at_once.computing + at_once.communicating + at_once.waiting,
        "calls": at_once.communicating,
        "sent": by_link.communicating - at_once.communicating,
        "offload": at_once.offloading,
        "to_host": large.speed(host_gb_s=1).offloading - at_once.offloading,
        "hidden": hidden,
    }
    if hidden:  # what is left where the computation is long
        endless = large.speed(bf16_tflops=1 / ENDLESS).communicating
        terms["bare_calls"] = endless
        terms["bare_sent"] = large.speed(bf16_tflops=1 / ENDLESS, link_gb_s=1).communicating - endless
    return {term: rounded(value) for term, value in terms.items()}


def rounded(value: float) -> float:
    """So many digits that the page prints what the planner does. Whole where nothing is behind the point."""
    value = float(f"{value:.{DIGITS}g}")
    return int(value) if value.is_integer() else value


def shortest(values: Sequence[float]) -> Any:
    """A list whose values are all the same is that value."""
    return values[0] if len(set(values)) == 1 else list(values)


if __name__ == "__main__":
    main()
