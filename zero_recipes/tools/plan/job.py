"""What a prediction is made for: one recipe under one strategy on a number of GPUs; from the command line to such jobs,
and from a job to its command line. Needs no weights and never asks the hub.
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
from zero_recipes.config.ds_config import DsConfig, fill_own_autos, read_json_mapping
from zero_recipes.config.recipe import Recipe, RowLengths, Settings, stated
from zero_recipes.core.files import at_hand
from zero_recipes.core.findings import Refusal, library_error_as_finding, refusal
from zero_recipes.core.host import Gpu, gpu_named, gpus
from zero_recipes.tools.plan.cache import cached
from zero_recipes.tools.plan.shape import shape_of

HOSTS, MACHINE_RANK = "HOST,HOST", "K"  # in a command for several machines: of each machine
FSDP = "fsdp2"  # the strategy that no ds_config describes
SINGLE = "single"  # one process, without DeepSpeed
MODELS = Path(__file__).with_name("models")
ALL = ("ddp", "zero0", "zero1", "zero2", "zero3", "zero2_offload", "zero3_offload")
ON_SEVERAL = ("zero3_hpz", "zero3_qwz", "zero3_qgz", "zero3_plus_plus", FSDP)  # GPUs: one has nobody to share with
EVERY = (*ALL, *ON_SEVERAL)  # what `--strategies all` means
EVERY += ("zero3_offload_infinity", "zero3_infinity", "zero2_bf16_states", "zero3_bf16_states", "zero2_autocast")
# keys of a recipe that no prediction depends on, and those that a plan may change
NO_PART = {"output_dir", "run_name", "overwrite", "predict", "skip_plan", "resume_from_checkpoint", "save_model"}
NO_PART |= {"max_steps", "num_train_epochs", "learning_rate", "warmup_steps", "seed", "data_seed", "allow_keys"}
NO_PART |= {"dataset_name", "sample_prompts", "sample_max_new_tokens", "logging_steps", "save_steps", "eval_steps"}
NO_PART |= {"ignore"}
CHANGED = ("activation_checkpointing", "per_device_train_batch_size", "gradient_accumulation_steps", "use_peft")
NO_FOLDER = "ZR233"  # the folder on NVMe is the machine's, and a plan is made elsewhere
USELESS = ("ZR224", "ZR226")  # warnings: ZeRO++ on one node, which costs and saves nothing

Strategies = dict[str, dict[str, Any] | None]  # {name: its ds_config, None without DeepSpeed}


@dataclass(frozen=True)
class Job:
    """One recipe under one strategy on a number of GPUs. Nothing in it needs weights, data or a network."""

    model: str  # as the recipe names it
    config: dict[str, Any]  # the model's config.json
    settings: Settings  # the recipe's settings with overrides: TRL's keys and ours
    strategy: str  # a name of accelerate_configs/, or "single"
    ds_config: dict[str, Any] | None  # with the "auto" values that transformers fills in; None without DeepSpeed
    world_size: int
    gpus_per_node: int
    device: str = "gpu"  # "cpu": as CPU processes over gloo hold it, to compare with a run on them
    workspace: int = 0  # bytes of cuBLAS for each thread on the card (hardware.yaml); 0 where the card is not known
    evaluated: tuple[int, int] | None = None  # RowLengths.evaluated; None: whole rows of max_length, all with loss

    @property
    def zero(self) -> DsConfig:
        """An empty one without DeepSpeed."""
        return DsConfig(self.ds_config or {})

    @property
    def zero_stage(self) -> int | None:
        return None if self.ds_config is None else self.zero.stage

    @property
    def precision(self) -> str:
        """ "bf16", "fp16" or "fp32", in which it computes; torch_autocast keeps the weights in fp32. Without mixed
        precision the weights' own."""
        own = str(self.settings.dtype or "auto").removeprefix("torch.")
        own = self.config.get("dtype") or self.config.get("torch_dtype") if own == "auto" else own
        pure = {"bfloat16": "bf16", "float16": "fp16"}.get(str(own), "fp32")
        return self.zero.autocast or (pure if self.settings.precision == "fp32" else self.settings.precision)

    @property
    def is_fsdp(self) -> bool:
        return self.ds_config is None and self.strategy.startswith(FSDP)

    @property
    def on_nvme(self) -> bool:
        return bool(self.zero.on_nvme)

    @property
    def offloads_params(self) -> bool:
        """Below stage 3 DeepSpeed keeps them on the GPU, whatever offload_param says."""
        return self.zero_stage == 3 and self.zero.offload_param is not None

    @property
    def keeps_gathered(self) -> bool:
        """Whether stage 3 keeps gathered weights from forward to backward: torch's own linear layers do. Before 0.19.4
        DeepSpeed replaced them only under zero.Init (deepspeedai/DeepSpeed#8189)."""
        replaced = self.zero.zero.get("memory_efficient_linear", True)
        return self.zero_stage == 3 and not replaced and not self.recomputes

    @property
    def ranks_per_node(self) -> int:
        return min(self.gpus_per_node, self.world_size)

    @property
    def sequence_parallel(self) -> int:
        """Ranks that share one sequence."""
        return self.settings.sequence_parallel_size or 1

    @property
    def quantizes(self) -> bool:
        return bool(self.settings.load_in_4bit or self.settings.load_in_8bit)

    @property
    def recomputes(self) -> bool:
        new = self.settings.activation_checkpointing
        return bool(self.settings.gradient_checkpointing if new is None else new)  # transformers' old name

    def changed(self, **values: Any) -> Self:
        return replace(self, settings=self.settings.replace(**values))

    def under(self, strategy: str, ds_config: dict[str, Any] | None) -> Self:
        """Under another strategy, our own "auto" values filled in as in a run."""
        settings, here = self.settings.replace(use_cpu=self.device == "cpu"), {"LOCAL_WORLD_SIZE": self.ranks_per_node}
        filled = ds_config and fill_own_autos(ds_config, settings, self.world_size, here, self.size_of_model)
        return replace(self.changed(deepspeed=filled), strategy=strategy, ds_config=filled)

    def size_of_model(self) -> tuple[int, int] | None:
        """(hidden size, elements of the largest tensor); None where the model cannot be built from its config alone."""
        with suppress(Refusal):
            shape = shape_of(self.config, self.settings)
            return shape.hidden, max(tensor.size for tensor in shape.tensors)

    def as_dict(self) -> dict[str, Any]:
        return vars(self) | {"settings": self.settings.as_dict()}

    @classmethod
    def from_dict(cls, written: dict[str, Any]) -> Self:
        return cls(**(written | {"settings": Settings(written["settings"])}))

    def key(self, versions: dict[str, str]) -> str:
        """Name of the cached answer: everything that it depends on."""
        settings = {key: value for key, value in vars(self.settings).items() if key not in NO_PART}
        dependencies = [vars(self) | {"settings": settings}, versions]
        return hashlib.sha256(json.dumps(dependencies, sort_keys=True, default=str).encode()).hexdigest()


def read_recipe(path: Path, overrides: Sequence[str]) -> Recipe:
    """Cached, because TRL's parser imports torch and transformers."""
    mapping, sha256 = recipes.recipe_in_force(path), hashlib.sha256(path.read_bytes()).hexdigest()

    def parsed() -> list[dict[str, Any]]:
        found = recipes.parse_recipe(path, mapping, list(overrides))
        return [found.settings.as_dict(), dict(found.explicit)]

    words = [*overrides, *(str(mapping.get(key)) for key in ("model_name_or_path", "dataset_name"))]
    here = [str(at_hand(word.rpartition("=")[2])) for word in words]  # parse_recipe looks for the package's files
    settings, explicit = cached(parsed, sha256, words, here)
    return Recipe(path, Settings(settings), MappingProxyType(explicit), sha256)


def read_strategies(recipe: Recipe, names: Sequence[str] | None, folder: Path = FOLDER) -> Strategies:
    """The requested strategies: files of `folder`; unset, the recipe's own `deepspeed:`, or all. Raises Refusal."""
    own = recipe.settings.deepspeed
    if names is None and str(recipe.settings.fsdp).lower() == "true":
        return {FSDP: None}
    if own is not None and names is None:
        config = read_json_mapping(own)
        return {DsConfig(config).name: config}
    if own is not None:
        raise refusal("ZR801", names=",".join(names))
    fp16 = recipe.settings.precision == "fp16"  # zero0 is refused (ZR193)
    named = EVERY if names == ["all"] else names or [name for name in ALL if name != "zero0" or not fp16]
    files = {name: at_hand(folder / f"{name}.yaml") for name in named}
    return {name: None if name == SINGLE else _ds_config_of(file) for name, file in files.items()}


def _ds_config_of(path: Path) -> dict[str, Any] | None:
    with library_error_as_finding(f"reading the accelerate file {path}"):  # accelerate itself waits for torch
        launched = yaml.safe_load(path.read_text()) if path.is_file() else read_accelerate_file(path)
        named = (launched.get("deepspeed_config") or {}).get("deepspeed_config_file")
        kind = launched.get("distributed_type")
    if kind in ("DEEPSPEED", "FSDP") and named is None and path.stem != FSDP:
        raise refusal("ZR367", path=path, kind=kind)
    return None if named is None else read_json_mapping(named)


def model_config(settings: Settings) -> dict[str, Any]:
    """The model's config.json: of a folder, of those in plan/models/, or of the cache. Raises Refusal without one."""
    from huggingface_hub import try_to_load_from_cache
    from huggingface_hub.errors import HFValidationError

    name, revision = str(settings.model_name_or_path), settings.model_revision
    known, path = known_models(), Path(name) / "config.json"
    if not path.is_file() and name in known and revision in (None, "main"):
        return known[name]["config"]
    with suppress(HFValidationError):  # a path of a folder that is not there
        found = path if path.is_file() else try_to_load_from_cache(name, "config.json", revision=revision)
        if isinstance(found, (str, Path)):
            return json.loads(Path(found).read_text())
    raise refusal("ZR804", name=name, at="" if revision in (None, "main") else f" at revision {revision}")


def known_models() -> dict[str, dict[str, Any]]:
    """{model's name on the hub: its file in plan/models/ with config, source, revision and parameters}."""
    entries = [json.loads(path.read_text()) for path in sorted(MODELS.glob("*.json"))]
    return {name: entry for entry in entries for name in (entry["model"], *entry["names"])}


def job_of(
    recipe: Recipe,
    config: dict[str, Any],
    strategy: str,
    ds_config: dict[str, Any] | None,
    ranks: int,
    per_node: int = 8,
    device: str = "gpu",
) -> Job:
    """Raises Refusal where global_batch_size cannot be made of so many ranks. `per_node`: GPUs of most machines that
    are rented; --gpus_per_node says otherwise."""
    settings, name = recipe.settings, SINGLE if ds_config is None and ranks == 1 else strategy
    accumulation = recipes.derive_accumulation(settings, recipe.explicit, ranks)
    if accumulation is not None:
        settings = settings.replace(gradient_accumulation_steps=accumulation)
    made = Job(settings.model_name_or_path, config, settings, name, None, ranks, min(per_node, ranks), device)
    return made.under(name, ds_config)


@dataclass(frozen=True)
class PlanRequest:
    """What the command line requests, read and checked."""

    recipe: Recipe
    overrides: list[str]
    config: dict[str, Any]
    strategies: Strategies
    counts: list[int]
    gpus_per_node: int
    gpu: Gpu
    host: int | None = None  # bytes of each machine's memory, where it was given
    nvme: int | None = None  # the same of its NVMe
    lengths: RowLengths | None = None  # of the rows, where they are at hand or stated
    no_lengths: str | None = None  # why they are not known

    def jobs(self) -> tuple[list[Job], dict[int, dict[str, str]]]:
        """(those that can run, {number of GPUs: {strategy: why it is not planned}}). Raises Refusal for none."""
        able, excluded = [], {}
        for count in self.counts:
            excluded[count] = {}
            for strategy in self.strategies:
                try:
                    config = self.strategies[strategy]
                    job = job_of(self.recipe, self.config, strategy, config, count, self.gpus_per_node)
                    evaluated = self.lengths and self.lengths.evaluated
                    job = replace(job, workspace=self.gpu.workspace_bytes, evaluated=evaluated)
                    why = self._excluded(strategy, job)
                except Refusal as refused:  # global_batch_size cannot be made of so many ranks
                    why = refused.what
                if why is None:
                    able.append(job)
                else:
                    excluded[count][strategy] = why
        if not able:
            reasons = "; ".join(f"{name}: {why}" for name, why in excluded[count].items())
            raise refusal("ZR842", count=count, reasons=reasons)
        return able, excluded

    def _excluded(self, strategy: str, job: Job) -> str | None:
        if job.world_size == 1 and strategy in ON_SEVERAL and len(self.strategies) > 1:
            return "one GPU has no other GPU to share with"
        if strategy == SINGLE and job.world_size > 1:
            return "it uses a single process"
        if job.on_nvme and self.nvme is None and len(self.strategies) == len(EVERY):
            return "--nvme must give the size of each machine's disk"
        return why_not(job)

    def command(self, job: Job) -> str:
        return run_command(self.recipe.path, self.recipe.settings, self.overrides, job)


def read_request(
    arguments: argparse.Namespace, overrides: list[str], recipe: Recipe | None = None, config: dict | None = None
) -> PlanRequest:
    """Of the command line, or of this recipe and its model's config."""
    gpu, recipe = gpu_named(arguments.gpu, gpus(arguments.hardware)), recipe or read_recipe(arguments.recipe, overrides)
    if arguments.network is not None:
        gpu = gpu.model_copy(update={"network_gb_s": arguments.network})
    settings, text, per_node = recipe.settings, arguments.gpus, arguments.gpus_per_node
    if settings.precision == "bf16" and not gpu.bf16:
        raise refusal("ZR273", name=gpu.name)
    counts = sorted({int(part) if part.strip().isdigit() else 0 for part in text.split(",")})
    if per_node < 1 or any(count < 1 or (count > per_node and count % per_node) for count in counts):
        raise refusal("ZR805", text=text, per_node=per_node)
    strategies, config = read_strategies(recipe, arguments.strategies), config or model_config(settings)
    host, nvme = (None if size is None else int(size * 1e9) for size in (arguments.host_memory, arguments.nvme))
    mean = arguments.mean_tokens
    found = _rows(recipe) if mean is None else stated(mean, settings)
    lengths, unknown = (None, found) if isinstance(found, str) else (found, None)
    return PlanRequest(recipe, overrides, config, strategies, counts, per_node, gpu, host, nvme, lengths, unknown)


def _rows(recipe: Recipe) -> RowLengths | str:
    """Their lengths, or why these are unknown. Cached as long as the files of model, template and data are the same."""
    settings = recipe.settings
    data = filter(
        None, [settings.dataset_name, settings.chat_template_path, *(entry["path"] for entry in settings.datasets)]
    )
    files = [_files(str(settings.model_name_or_path), "models"), *(_files(name, "datasets") for name in data)]
    if not files[0]:
        return "the tokenizer is neither a local folder nor in the cache"

    def counted() -> dict[str, Any] | str:
        from zero_recipes.data.prepare import rows_at_hand

        found = rows_at_hand(settings, recipe.path)
        return found if isinstance(found, str) else vars(found)

    found = cached(counted, settings.as_dict(), files) if all(files) else counted()
    return found if isinstance(found, str) else RowLengths(**found | {"lengths": tuple(found["lengths"])})


def _files(name: str, kind: str) -> list[list[Any]]:
    """Of a model or data set, local or in the Hub's cache, with their modification times."""
    cached = Path(constants.HF_HUB_CACHE, f"{kind}--{name.replace('/', '--')}", "snapshots")
    folder = Path(name) if os.path.exists(name) else cached
    return sorted([str(file), file.stat().st_mtime_ns] for file in (folder, *folder.rglob("*")) if file.exists())


def why_not(job: Job) -> str | None:
    """What a run of `job` would be refused for, or would gain nothing by; None where it is neither."""
    zero = job.zero
    special = (zero.on_nvme, zero.quantizes_weights, zero.quantizes_gradients, zero.bf16_masters, zero.autocast)
    if not any(special) and zero.hpz_partition_size == 1:
        return None  # the others need no import of all checks
    from zero_recipes.checks.deepspeed_rules import strategy_findings
    from zero_recipes.config.run import Run
    from zero_recipes.config.strategy import Strategy

    strategy = Strategy(zero.name, job.world_size, zero, "the ds_config")
    launch = {"LOCAL_WORLD_SIZE": str(job.ranks_per_node)}
    found = strategy_findings(Run(None, job.settings, {}, strategy, "cuda", launch))
    named = (one for one in found if one.code in USELESS or (one.level == "error" and one.code != NO_FOLDER))
    return next((f"{one.what} ({one.code})" for one in named), None)


def run_command(recipe: Path, settings: Settings, overrides: Sequence[str], job: Job) -> str:
    """What to type to run `job`: the recipe's own values are left out, what the plan changed is added."""
    fixed, options = settings.global_batch_size is not None, [*overrides]
    for key in CHANGED:
        value = getattr(job.settings, key)
        if value != getattr(settings, key) and not (fixed and key == "gradient_accumulation_steps"):
            options += [f"--{key}", str(value).lower() if isinstance(value, bool) else str(value)]
    if job.on_nvme and settings.nvme_path is None:
        options += ["--nvme_path", "FOLDER"]
    own = job.strategy == SINGLE or settings.deepspeed is not None  # the recipe says all
    launch = [*([] if own else ["--config_file", f"{job.strategy}.yaml"]), "--num_processes", str(job.world_size)]
    if job.world_size > job.gpus_per_node:
        launch += ["--hosts", HOSTS, "--machine_rank", MACHINE_RANK]
    return shlex.join(["zero-recipes", "train", str(recipe), *launch, *options])
