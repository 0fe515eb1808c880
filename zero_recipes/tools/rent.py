"""`zero-recipes rent`: the plan's choice as files for SkyPilot, SLURM and Kubernetes."""

import argparse
import math
import os
import re
import shlex
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from markupsafe import Markup

from zero_recipes.config.recipe import Recipe, read_recipe_file
from zero_recipes.core.files import FILES
from zero_recipes.core.findings import finding, refusal
from zero_recipes.core.gpus import Gpu
from zero_recipes.core.tables import working
from zero_recipes.tools.check import rehearsal_of
from zero_recipes.tools.new_files import write_new
from zero_recipes.tools.plan.command import answer_by, simulated
from zero_recipes.tools.plan.job import HOSTS, MACHINE_RANK, Job, read_request
from zero_recipes.tools.plan.predict import Predictor
from zero_recipes.tools.plan.show import Answer, bottom_line
from zero_recipes.tools.quoting import shell_command, templates

SKYPILOT = {"a100-80gb": "A100-80GB", "v100-32gb": "V100-32GB"}  # of others the name's first part
# file: the command that submits it
WRITTEN = {
    "sky.yaml": "sky jobs launch",
    "sbatch": "sbatch",
    "k8s.yaml": "kubectl apply -f",
}
SECRETS = ("TOKEN", "KEY", "SECRET", "PASSWORD")  # end the name of an environment variable that holds one
PASSED = ("HF_TOKEN", "WANDB_API_KEY")  # secrets that a job may need: by the shell that submits it, never in a file
LONGEST_NAME = 50  # Kubernetes allows 63 bytes, and numbers the pods
OF_THE_JOB = ("output_dir", "nvme_path")  # paths of the machine that trains
# what SLURM is asked for
CPUS = 8  # for each GPU: a process, its threads and its data loaders; servers with eight GPUs have 96 and more
GIB = 1024**3
HOST_MARGIN = 1.25  # of the planned host memory
HOST_BESIDE = 16 * GIB  # for tokenizing
HOUR = 3600
LONGEST = 24 * HOUR  # many partitions end a job then
TIME_MARGIN = 1.5  # of the planned time
TIME_BESIDE = HOUR // 2  # for downloads, evaluations and saves
GPU_MEMORY_MARGIN = 0.95  # of a card's memory, for a driver that shows less


def rent(arguments: argparse.Namespace) -> int:
    """Plan, and write a job file for each scheduler. Returns the exit code. Raises Refusal if nothing fits."""
    if arguments.image.split() != [arguments.image]:
        raise refusal("ZR799", image=arguments.image)
    with working("planning"):
        request = read_request(arguments, arguments.overrides)
        _refuse_secrets(arguments.recipe, request.recipe)
        answer = answer_by(Predictor(quick=True), arguments, request)
        if not arguments.quick:
            answer = simulated(answer, arguments, Predictor(seconds=arguments.seconds))
    job = answer.job
    if job is None:
        raise refusal("ZR906", recipe=arguments.recipe, gpus=arguments.gpus, gpu=arguments.gpu)
    recipe = arguments.recipe
    if recipe.is_relative_to(FILES):
        recipe = Path(recipe.name)
    command = request.command(job)
    rented = Rented(
        recipe=recipe,
        recipe_text=arguments.recipe.read_text(encoding="utf-8"),
        words=shlex.split(command),
        machines=job.world_size // job.ranks_per_node,
        gpus=job.ranks_per_node,
        gpu=request.gpu,
        image=arguments.image,
        rehearsal=rehearsal_of(command, job.world_size),
        cpus=_cpus(job),
        host_bytes=_host_bytes(answer),
        seconds=_seconds(answer),
    )
    print(bottom_line(answer))
    print(command)
    outside = sorted(_paths_outside(arguments.recipe, request.recipe))
    if outside:
        paths = ", ".join(outside)
        print(finding("ZR830", paths=paths, folder=Path.cwd()), file=sys.stderr, flush=True)
    files = {arguments.output_dir / f"{recipe.stem}.{kind}": rented.file(kind) for kind in WRITTEN}
    write_new(files)
    print(rented.rehearsal)
    for file, (kind, submit) in zip(files, WRITTEN.items(), strict=True):
        if kind == "sky.yaml":  # SLURM passes the whole environment, Kubernetes has a secret
            submit += "".join(f" --secret {name}" for name in PASSED if name in os.environ)
        print(submit, shlex.quote(str(file)))
    return 0


def _cpus(job: Job) -> int:
    """CPU cores of one machine."""
    workers = job.settings.dataloader_num_workers or 0
    return job.ranks_per_node * max(CPUS, workers + 2)  # beside them the process and its thread of gradients


def _host_bytes(answer: Answer) -> int:
    """Host memory of one machine: what is planned with a margin, at most what it has."""
    needed = answer.recommended.prediction.host_bytes
    most = max(needed.load, needed.training, needed.resume or 0)
    asked = int(HOST_MARGIN * most) + HOST_BESIDE
    there = answer.request.host
    return asked if there is None else min(asked, there)


def _seconds(answer: Answer) -> int:
    """Time of the job: of the slow end of the plan with a margin, or the longest where the steps are not known.

    A run that takes longer saves before the end, and goes on in another job.
    """
    hours = answer.cost(answer.recommended).hours
    if hours is None:
        return LONGEST
    return min(LONGEST, int(TIME_MARGIN * hours[1] * HOUR) + TIME_BESIDE)


def _paths_outside(path: Path, recipe: Recipe) -> Iterator[str]:
    """The files and folders of this machine that a job needs and that are not in the working folder."""
    settings = {key: value for key, value in recipe.settings.as_dict().items() if key not in OF_THE_JOB}
    named = {str(path), *_texts(settings), *_texts(dict(read_recipe_file(path).environment))}
    for text in named:
        local = os.path.expanduser(text)
        if not os.path.exists(local):
            continue  # a name on the Hub, or a path of the rented machine
        is_ours = Path(local).is_relative_to(FILES)  # the job has the package
        if not is_ours and not Path(local).resolve().is_relative_to(Path.cwd()):
            yield text


def _texts(value: Any) -> Iterator[str]:
    """All texts in a value of a recipe, at any depth."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict):
        for inner in value.values():
            yield from _texts(inner)
    elif isinstance(value, (list, tuple)):
        for inner in value:
            yield from _texts(inner)


@dataclass(frozen=True)
class Rented:
    """A job, for the templates."""

    recipe: Path  # where the job finds it
    recipe_text: str
    words: list[str]  # zero-recipes train RECIPE ...
    machines: int
    gpus: int  # of a machine
    gpu: Gpu
    image: str
    rehearsal: str  # a command, quoted
    cpus: int  # cores of a machine
    host_bytes: int  # memory of a machine
    seconds: int  # until a job is ended

    def file(self, kind: str) -> str:
        """Write the file of this kind, a key of WRITTEN."""
        return templates().get_template(f"{kind}.j2").render(job=self)

    @property
    def name(self) -> str:
        """The job's name as Kubernetes allows it: small letters of ASCII, digits and hyphens, with a letter first."""
        letters = re.sub(r"[^a-z0-9]+", "-", self.recipe.stem.lower())
        name = letters[:LONGEST_NAME].strip("-")
        return name if name[:1].isalpha() else f"run-{name}".rstrip("-")

    @property
    def key(self) -> str:
        """The recipe's name in a ConfigMap, whose keys are letters of ASCII, digits, `-`, `_` and `.`."""
        return re.sub(r"[^-._a-zA-Z0-9]", "-", self.recipe.name)[-LONGEST_NAME:].lstrip(".")

    @property
    def key_path(self) -> str:
        """The path at which a pod finds the recipe of the ConfigMap."""
        return f"/recipe/{self.key}"

    @property
    def pods(self) -> Markup:
        """The pods' names in Kubernetes's DNS, comma-separated, the first rank's first."""
        return Markup(",".join(f"{self.name}-{rank}.{self.name}" for rank in range(self.machines)))

    @property
    def accelerators(self) -> str:
        """The GPUs of a machine, as SkyPilot asks for them."""
        accelerator = SKYPILOT.get(self.gpu.name, self.gpu.name.partition("-")[0].upper())
        return f"{accelerator}:{self.gpus}"

    @property
    def resource(self) -> Markup:
        """A GPU as its vendor's device plugin names it in Kubernetes."""
        return Markup("amd.com/gpu" if self.gpu.is_amd else "nvidia.com/gpu")

    @property
    def product_label(self) -> Markup:
        """A node's label with the name of its GPU."""
        return Markup("amd.com/gpu.product-name" if self.gpu.is_amd else "nvidia.com/gpu.product")

    @property
    def products(self) -> list[str]:
        """The GPU's names as the vendor's labeller writes them: the driver's name with another sign for spaces."""
        space = "_" if self.gpu.is_amd else "-"
        return [name.replace(" ", space) for name in self.gpu.names]

    @property
    def least_gpu_mib(self) -> int:
        """Memory of a GPU whose name is not known, as a node is labelled with it."""
        return int(GPU_MEMORY_MARGIN * self.gpu.memory_mib)

    @property
    def host_gib(self) -> int:
        """Memory of a machine in GiB, as SLURM counts."""
        return math.ceil(self.host_bytes / GIB)

    @property
    def limit(self) -> Markup:
        """The time of a job as SLURM writes it: days-hours:minutes:seconds, in whole minutes."""
        minutes = math.ceil(self.seconds / 60)
        return Markup(f"{minutes // 1440}-{minutes // 60 % 24:02}:{minutes % 60:02}:00")

    def command(self, rank: str, recipe: Path | str | None = None) -> Markup:
        """Write what a machine runs. `rank`: the shell variable with its number."""
        words = list(self.words)
        words[2] = str(recipe or self.recipe)
        for option, placeholder, variable in (("--hosts", HOSTS, "HOSTS"), ("--machine_rank", MACHINE_RANK, rank)):
            for place in range(3, len(words) - 1):
                if words[place : place + 2] == [option, placeholder]:
                    words[place + 1] = Markup(f'"${variable}"')
        return shell_command(words)


def _refuse_secrets(path: Path, recipe: Recipe) -> None:
    """The recipe is copied into the files, and its keys of the command line too."""
    held = [name for name in read_recipe_file(path).environment if name.upper().endswith(SECRETS)]
    if recipe.settings.hub_token is not None:
        held.append("hub_token")
    if held:
        raise refusal("ZR797", recipe=path, key=", ".join(held))
