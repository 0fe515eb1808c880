"""What a prediction is made for: from the command line to jobs, and from a job to its command line.

Needs no weights and never asks the hub.
"""

import argparse
import hashlib
import json
import os
import shlex
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from types import MappingProxyType
from typing import Any, Self

import yaml
from huggingface_hub import constants

from zero_recipes.config import recipe as recipes
from zero_recipes.config.accelerate import FOLDER, read_accelerate_file
from zero_recipes.config.ds_config import DsConfig, ModelSize, fill_own_autos, read_json_mapping
from zero_recipes.config.plain import read_plain_recipe
from zero_recipes.config.read import parse_recipe
from zero_recipes.config.recipe import Recipe
from zero_recipes.config.row_lengths import RowLengths, stated
from zero_recipes.config.settings import Settings, computed_in, derive_accumulation, loaded_dtype
from zero_recipes.core.files import as_typed, at_hand
from zero_recipes.core.findings import Refusal, refusal
from zero_recipes.core.gpus import Gpu, gpu_named, gpus
from zero_recipes.core.library_errors import library_error_as_finding
from zero_recipes.tools.plan.cache import cached
from zero_recipes.tools.plan.shape import shape_of

HOSTS, MACHINE_RANK = "HOST,HOST", "K"  # in a command for several machines: of each machine
FSDP = "fsdp2"  # the strategy that no ds_config describes
SINGLE = "single"  # one process, without DeepSpeed
NO_FOLDER = "ZR233"  # the folder on NVMe is the machine's, and a plan is made elsewhere
MODELS = Path(__file__).with_name("models")
USELESS = ("ZR224", "ZR226")  # warnings: ZeRO++ on one node, which costs and saves nothing
# strategies that are planned where none is named, and those of `--strategies all`
USUAL = ("ddp", "zero0", "zero1", "zero2", "zero3", "zero2_offload", "zero3_offload")
ON_SEVERAL = ("zero3_hpz", "zero3_qwz", "zero3_qgz", "zero3_plus_plus", FSDP)  # one GPU has nobody to share with
OTHERS = ("zero3_offload_infinity", "zero3_infinity", "zero2_bf16_states", "zero3_bf16_states", "zero2_autocast")
ALL = (*USUAL, *ON_SEVERAL, *OTHERS)
# keys of a recipe that no prediction depends on
NO_PART = frozenset(
    {
        "allow_keys",
        "data_seed",
        "dataset_name",
        "eval_steps",
        "ignore",
        "learning_rate",
        "logging_steps",
        "max_steps",
        "num_train_epochs",
        "output_dir",
        "overwrite",
        "predict",
        "resume_from_checkpoint",
        "run_name",
        "sample_max_new_tokens",
        "sample_prompts",
        "save_model",
        "save_steps",
        "seed",
        "skip_plan",
        "warmup_steps",
    }
)
# keys that a plan may change
CHANGED = (
    "activation_checkpointing",
    "per_device_train_batch_size",
    "gradient_accumulation_steps",
    "use_peft",
    "load_in_4bit",
    "bnb_4bit_quant_storage",
    "dtype",
)

Strategies = dict[str, dict[str, Any] | None]  # {name: its ds_config, None without DeepSpeed}


@dataclass(frozen=True)
class Job:
    """One recipe under one strategy on a number of GPUs."""

    model: str  # as the recipe names it
    config: dict[str, Any]  # the model's config.json
    settings: Settings  # with overrides
    strategy: str  # a name of accelerate_configs/, or "single"
    ds_config: dict[str, Any] | None  # with the "auto" values that transformers fills in
    world_size: int
    gpus_per_node: int
    device: str = "gpu"  # "cpu": processes over gloo, to compare with a run on them
    workspace: int = 0  # bytes of cuBLAS for each thread (hardware.yaml); 0 where the card is not known
    evaluated: tuple[int, int] | None = None  # RowLengths.evaluated; None: whole rows of max_length, all with loss

    @property
    def zero(self) -> DsConfig:
        """The ds_config; an empty one without DeepSpeed."""
        return DsConfig(self.ds_config or {})

    @property
    def zero_stage(self) -> int | None:
        """ZeRO's stage; None without DeepSpeed."""
        return None if self.ds_config is None else self.zero.stage

    @property
    def precision(self) -> str:
        """The precision that it computes in ("bf16", "fp16" or "fp32"): without mixed precision the weights' own."""
        saved = self.config.get("dtype") or self.config.get("torch_dtype")
        return computed_in(self.zero.autocast or self.settings.precision, loaded_dtype(self.settings, saved))

    @property
    def is_fsdp(self) -> bool:
        """Whether FSDP2 shards it."""
        return self.ds_config is None and self.strategy.startswith(FSDP)

    @property
    def on_nvme(self) -> bool:
        """Whether it keeps states on NVMe."""
        return bool(self.zero.on_nvme)

    @property
    def offloads_params(self) -> bool:
        """Whether parameters are offloaded: below stage 3 they stay on the GPU, whatever offload_param says."""
        return self.zero_stage == 3 and self.zero.offload_param is not None

    @property
    def keeps_gathered(self) -> bool:
        """Whether stage 3 keeps weights from forward to backward: torch's own linear layers do.

        Before 0.19.4 DeepSpeed replaced them only under zero.Init (deepspeedai/DeepSpeed#8189).
        """
        replaced = self.zero.zero.get("memory_efficient_linear", True)
        return self.zero_stage == 3 and not replaced and not self.recomputes

    @property
    def ranks_per_node(self) -> int:
        """Ranks on one machine."""
        return min(self.gpus_per_node, self.world_size)

    @property
    def sequence_parallel(self) -> int:
        """Ranks that share one sequence."""
        return self.settings.sequence_parallel_size or 1

    @property
    def quantizes(self) -> bool:
        """Whether weights are loaded in 4 or 8 bits."""
        return bool(self.settings.load_in_4bit or self.settings.load_in_8bit)

    @property
    def recomputes(self) -> bool:
        """Whether backward computes activations once more."""
        return self.settings.recomputes

    def changed(self, **values: Any) -> Self:
        """The same job with other values of the recipe's keys."""
        return replace(self, settings=self.settings.replace(**values))

    def under(self, strategy: str, ds_config: dict[str, Any] | None) -> Self:
        """The same job under another strategy, our own "auto" values filled in as in a run."""
        if ds_config:
            settings = self.settings.replace(use_cpu=self.device == "cpu")
            environment = {"LOCAL_WORLD_SIZE": self.ranks_per_node}
            ds_config = fill_own_autos(ds_config, settings, self.world_size, environment, self.size_of_model)
        return replace(self.changed(deepspeed=ds_config), strategy=strategy, ds_config=ds_config)

    def size_of_model(self) -> ModelSize | None:
        """The model's size, by which "auto" values are filled in; None where the model cannot be built."""
        with suppress(Refusal):
            shape = shape_of(self.config, self.settings)
            sizes = [tensor.size for tensor in shape.tensors]
            return ModelSize(shape.hidden, max(sizes), tuple(shape.decoder_layers), sum(sizes))

    def as_dict(self) -> dict[str, Any]:
        """The job as JSON takes it."""
        return vars(self) | {"settings": self.settings.as_dict()}

    @classmethod
    def from_dict(cls, written: dict[str, Any]) -> Self:
        """Read what `as_dict` wrote."""
        return cls(**(written | {"settings": Settings(written["settings"])}))

    def key(self, versions: dict[str, str]) -> str:
        """The name of the cached answer: a hash of everything that it depends on."""
        settings = {key: value for key, value in vars(self.settings).items() if key not in NO_PART}
        dependencies = [vars(self) | {"settings": settings}, versions]
        return hashlib.sha256(json.dumps(dependencies, sort_keys=True, default=str).encode()).hexdigest()


def read_recipe(path: Path, overrides: Sequence[str]) -> Recipe:
    """Read a recipe. Where TRL's parser has to, the result is cached: it imports torch and transformers."""
    mapping = recipes.recipe_in_force(path)
    plain = read_plain_recipe(path, mapping, overrides)
    if plain is not None:
        return plain
    sha256 = hashlib.sha256(path.read_bytes()).hexdigest()

    def parsed() -> list[dict[str, Any]]:
        found = parse_recipe(path, mapping, list(overrides))
        return [found.settings.as_dict(), dict(found.explicit)]

    # parse_recipe looks for the package's files
    words = [*overrides, str(mapping.get("model_name_or_path")), str(mapping.get("dataset_name"))]
    here = [str(at_hand(word.rpartition("=")[2])) for word in words]
    settings, explicit = cached(parsed, sha256, words, here)
    return Recipe(path, Settings(settings), MappingProxyType(explicit), sha256)


def read_strategies(recipe: Recipe, names: Sequence[str] | None) -> Strategies:
    """Read the ds_configs of the strategies to plan.

    Without `names`: the recipe's own `deepspeed:`, or the usual ones. Raises Refusal.
    """
    settings = recipe.settings
    if names is None and str(settings.fsdp).lower() == "true":
        return {FSDP: None}
    if settings.deepspeed is not None:
        if names is not None:
            raise refusal("ZR801", names=",".join(names))
        config = read_json_mapping(settings.deepspeed)
        return {DsConfig(config).name: config}
    if names == ["all"]:
        names = list(ALL)
    elif not names:
        names = list(USUAL)
        if settings.precision == "fp16":
            names.remove("zero0")  # refused: ZR2021
    return {name: _ds_config_of(name) for name in names}


def _ds_config_of(strategy: str) -> dict[str, Any] | None:
    if strategy == SINGLE:
        return None
    path = at_hand(FOLDER / f"{strategy}.yaml")
    with library_error_as_finding(f"reading the accelerate file {path}"):  # accelerate itself waits for torch
        launched = yaml.safe_load(path.read_text()) if path.is_file() else read_accelerate_file(path)
        named = (launched.get("deepspeed_config") or {}).get("deepspeed_config_file")
        kind = launched.get("distributed_type")
    if named is None and kind in ("DEEPSPEED", "FSDP") and path.stem != FSDP:
        raise refusal("ZR367", path=path, kind=kind)
    return None if named is None else read_json_mapping(named)


def model_config(settings: Settings) -> dict[str, Any]:
    """Read the model's config.json: of a folder, of those in plan/models/, or of the cache.

    Raises Refusal without one.
    """
    from huggingface_hub import try_to_load_from_cache
    from huggingface_hub.errors import HFValidationError

    name = str(settings.model_name_or_path)
    revision = settings.model_revision or "main"
    path = Path(name, "config.json")
    if path.is_file():
        return json.loads(path.read_text())
    if revision == "main" and name in known_models():
        return known_models()[name]["config"]
    with suppress(HFValidationError):  # a path of a folder that is not there
        found = try_to_load_from_cache(name, "config.json", revision=revision)
        if isinstance(found, str):
            return json.loads(Path(found).read_text())
    raise refusal("ZR804", name=name, at="" if revision == "main" else f" at revision {revision}")


def known_models() -> dict[str, dict[str, Any]]:
    """Read plan/models/: each model's file, by its names on the hub."""
    known = {}
    for path in sorted(MODELS.glob("*.json")):
        entry = json.loads(path.read_text())
        for name in (entry["model"], *entry["names"]):
            known[name] = entry
    return known


def model_named(text: str) -> str:
    """The model of this name, also of a short one: a file in plan/models/, or the end of a name on the hub."""
    short = text.lower()
    for name in known_models():
        if short in (name.lower(), name.lower().rpartition("/")[2]):
            return name
    file = MODELS / f"{short}.json"
    return json.loads(file.read_text())["model"] if file.is_file() else text


def job_of(
    recipe: Recipe,
    config: dict[str, Any],
    strategy: str,
    ds_config: dict[str, Any] | None,
    ranks: int,
    per_node: int = 8,  # of most machines that are rented
    device: str = "gpu",
) -> Job:
    """Make the job of a recipe under a strategy.

    Raises Refusal where global_batch_size cannot be made of so many ranks.
    """
    settings = recipe.settings
    accumulation = derive_accumulation(settings, recipe.explicit, ranks)
    if accumulation is not None:
        settings = settings.replace(gradient_accumulation_steps=accumulation)
    if ds_config is None and ranks == 1:
        strategy = SINGLE
    made = Job(settings.model_name_or_path, config, settings, strategy, None, ranks, min(per_node, ranks), device)
    return made.under(strategy, ds_config)


@dataclass(frozen=True)
class PlanRequest:
    """The command line, read and checked."""

    recipe: Recipe
    overrides: list[str]
    config: dict[str, Any]
    strategies: Strategies
    counts: list[int]
    gpus_per_node: int
    gpu: Gpu
    host: int | None = None  # bytes of each machine's memory
    nvme: int | None = None  # the same of its NVMe
    lengths: RowLengths | None = None
    no_lengths: str | None = None  # why they are not known
    batch_is_free: bool = False  # nobody asked for a micro batch

    def jobs(self) -> tuple[list[Job], dict[int, dict[str, str]]]:
        """Make all jobs that can run, and say of the others why not: {GPUs: {strategy: why}}.

        Raises Refusal for none.
        """
        able = []
        excluded = {}
        for count in self.counts:
            reasons = excluded[count] = {}
            for strategy in self.strategies:
                try:
                    job = self._job(strategy, count)
                    why = self._excluded(strategy, job)
                except Refusal as refused:  # global_batch_size cannot be made of so many ranks
                    why = refused.what
                if why is None:
                    able.append(job)
                else:
                    reasons[strategy] = why
        if not able:
            listed = "; ".join(f"{name}: {why}" for name, why in reasons.items())
            raise refusal("ZR842", count=count, reasons=listed)
        return able, excluded

    def _job(self, strategy: str, count: int) -> Job:
        job = job_of(self.recipe, self.config, strategy, self.strategies[strategy], count, self.gpus_per_node)
        if "dtype" not in self.recipe.explicit:
            job = in_own_dtype(job)
        evaluated = self.lengths and self.lengths.evaluated
        return replace(job, workspace=self.gpu.workspace_bytes, evaluated=evaluated)

    def _excluded(self, strategy: str, job: Job) -> str | None:
        if job.world_size == 1 and strategy in ON_SEVERAL and len(self.strategies) > 1:
            return "one GPU has no other GPU to share with"
        if strategy == SINGLE and job.world_size > 1:
            return "it uses a single process"
        if job.on_nvme and self.nvme is None and len(self.strategies) == len(ALL):
            return "--nvme must give the size of each machine's disk"
        return why_not(job)

    def command(self, job: Job) -> str:
        """Write the command of a job: the recipe's own values are left out, what the plan changed is added."""
        settings = self.recipe.settings
        path = self.recipe.path
        argv = ["zero-recipes", "train", as_typed(path)]
        if job.strategy != SINGLE and settings.deepspeed is None:  # else the recipe says all
            argv += ["--config_file", f"{job.strategy}.yaml"]
        argv += ["--num_processes", str(job.world_size)]
        if job.world_size > job.gpus_per_node:
            argv += ["--hosts", HOSTS, "--machine_rank", MACHINE_RANK]
        argv += self.overrides
        for key in CHANGED:
            is_derived = key == "gradient_accumulation_steps" and settings.global_batch_size is not None
            value = getattr(job.settings, key)
            if value != getattr(settings, key) and not is_derived:
                argv += [f"--{key}", str(value).lower() if isinstance(value, bool) else str(value)]
        if job.on_nvme and settings.nvme_path is None:
            argv += ["--nvme_path", "FOLDER"]
        return shlex.join(argv)


def read_request(
    arguments: argparse.Namespace, overrides: list[str], recipe: Recipe | None = None, config: dict | None = None
) -> PlanRequest:
    """Read and check the command line of a plan. Raises Refusal."""
    gpu = gpu_named(arguments.gpu, gpus(arguments.hardware))
    if arguments.network is not None:
        gpu = gpu.model_copy(update={"network_gb_s": arguments.network})
    if arguments.nvme_gbps is not None:
        gpu = gpu.model_copy(update={"nvme_gb_s": arguments.nvme_gbps})
    recipe = recipe or read_recipe(arguments.recipe, overrides)
    settings = recipe.settings
    if settings.precision == "bf16" and not gpu.bf16:
        raise refusal("ZR273", name=gpu.name)
    counts = _counts(arguments.gpus, arguments.gpus_per_node)
    strategies = read_strategies(recipe, arguments.strategies)
    config = config or model_config(settings)
    mean = arguments.mean_tokens
    rows = _rows(recipe) if mean is None else stated(mean, settings)
    known = {"no_lengths": rows} if isinstance(rows, str) else {"lengths": rows}
    machine = (arguments.gpus_per_node, gpu, _bytes(arguments.host_memory), _bytes(arguments.nvme))
    return PlanRequest(recipe, overrides, config, strategies, counts, *machine, **known)


def _counts(text: str, per_node: int) -> list[int]:
    """Of GPUs: whole machines, or a part of one. Raises Refusal."""
    counts = set()
    for part in text.split(","):
        count = int(part) if part.strip().isdecimal() else 0
        if count < 1 or (count > per_node and count % per_node):
            raise refusal("ZR805", text=text, per_node=per_node)
        counts.add(count)
    return sorted(counts)


def _bytes(gigabytes: float | None) -> int | None:
    return None if gigabytes is None else int(gigabytes * 1e9)


def _rows(recipe: Recipe) -> RowLengths | str:
    """Their lengths, or why not. Cached while the files of model, template and data are the same."""
    settings = recipe.settings
    tokenizer = _files(settings.model_name_or_path, "models")
    if not tokenizer:
        return "the tokenizer is neither a local folder nor in the cache"
    files = [tokenizer]
    data = [settings.dataset_name, settings.chat_template_path, *(entry["path"] for entry in settings.datasets)]
    files += [_files(name, "datasets") for name in data if name]

    def counted() -> dict[str, Any] | str:
        from zero_recipes.data.prepare import rows_at_hand

        found = rows_at_hand(settings, recipe.path)
        return found if isinstance(found, str) else vars(found)

    found = cached(counted, settings.as_dict(), files) if all(files) else counted()
    if isinstance(found, str):
        return found
    return RowLengths(**found | {"lengths": tuple(found["lengths"])})


def _files(name: str, kind: str) -> list[list[Any]]:
    """Local or in the Hub's cache, with their modification times."""
    folder = Path(name)
    if not os.path.exists(name):
        folder = Path(constants.HF_HUB_CACHE, f"{kind}--{name.replace('/', '--')}", "snapshots")
    return sorted([str(file), file.stat().st_mtime_ns] for file in (folder, *folder.rglob("*")) if file.exists())


def in_own_dtype(job: Job) -> Job:
    """Load frozen weights in bf16 if products are: otherwise `check` warns (ZR417)."""
    settings = job.settings
    converts = job.ds_config is not None or job.is_fsdp
    if settings.use_peft and settings.precision == "bf16" and (settings.load_in_4bit or not converts):
        return job.changed(dtype="bfloat16")
    return job


def shares_nothing(job: Job) -> bool:
    """Whether `check` warns that one process has nobody to share with (ZR138)."""
    return job.world_size == 1 and bool(job.zero_stage) and not job.zero.offloads


def warned(job: Job) -> bool:
    """Whether `check` warns that a mask covers all packs of a micro batch (ZR464)."""
    if job.settings.joined_by is None:
        return False
    from zero_recipes.checks.rules import packing
    from zero_recipes.model.meta import MetaModel

    run = replace(_run_of(job), meta=MetaModel(_configuration(job), job.settings))
    return any(found.code == "ZR464" for found in packing(run))


def packs_under_mask(job: Job) -> bool:
    """Whether packed rows of a job are computed under a mask."""
    if job.settings.joined_by is None:
        return False
    if job.device != "gpu":
        return True
    from zero_recipes.checks.rules import packs_without_mask

    precision = job.zero.autocast or job.settings.precision  # without DeepSpeed, or by its torch_autocast
    return not packs_without_mask(job.settings, precision, _configuration(job))


def _configuration(job: Job) -> Any:
    """The model's configuration, as an object of transformers'."""
    from transformers import AutoConfig

    return AutoConfig.for_model(**job.config)


def why_not(job: Job) -> str | None:
    """Say what a job would be refused for, or would gain nothing by; None where there is nothing."""
    zero = job.zero
    is_plus_plus = zero.hpz_partition_size != 1 or zero.quantizes_weights or zero.quantizes_gradients
    if not (is_plus_plus or zero.on_nvme or zero.bf16_masters or zero.autocast):
        return None  # the others need no import of all checks
    from zero_recipes.checks.deepspeed_rules import strategy_findings

    for found in strategy_findings(_run_of(job)):
        if found.code in USELESS or (found.level == "error" and found.code != NO_FOLDER):
            return f"{found.what} ({found.code})"
    return None


def _run_of(job: Job) -> Any:
    """For the rules of `check`."""
    from zero_recipes.config.run import Run
    from zero_recipes.config.strategy import Strategy

    strategy = Strategy(job.zero.name, job.world_size, job.zero, "the ds_config")
    environment = {"LOCAL_WORLD_SIZE": str(job.ranks_per_node)}
    return Run(None, job.settings, {}, strategy, "cuda", environment)
