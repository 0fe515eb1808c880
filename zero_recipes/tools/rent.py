"""`zero-recipes rent`: the plan's choice as files for SkyPilot, SLURM and Kubernetes."""

import argparse
import re
import shlex
from dataclasses import dataclass
from pathlib import Path

from markupsafe import Markup

from zero_recipes.config.recipe import Recipe, read_recipe_file
from zero_recipes.core.files import FILES
from zero_recipes.core.findings import refusal
from zero_recipes.core.tables import working
from zero_recipes.tools.check import rehearsal_of
from zero_recipes.tools.new_files import write_new
from zero_recipes.tools.plan.command import answer_by, simulated
from zero_recipes.tools.plan.job import HOSTS, MACHINE_RANK, read_request
from zero_recipes.tools.plan.predict import Predictor
from zero_recipes.tools.quoting import shell_command, templates

SKYPILOT = {"a100-80gb": "A100-80GB", "v100-32gb": "V100-32GB"}  # of others the name's first part
# file: the command that submits it
WRITTEN = {
    "sky.yaml": "sky jobs launch",
    "sbatch": "sbatch",
    "k8s.yaml": "kubectl apply -f",
}
SECRETS = ("TOKEN", "KEY", "SECRET", "PASSWORD")  # end the name of an environment variable that holds one
LONGEST_NAME = 50  # Kubernetes allows 63 bytes, and numbers the pods


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
        accelerator=SKYPILOT.get(request.gpu.name, request.gpu.name.partition("-")[0].upper()),
        image=arguments.image,
        rehearsal=rehearsal_of(command, job.world_size),
    )
    files = {arguments.output_dir / f"{recipe.stem}.{kind}": rented.file(kind) for kind in WRITTEN}
    write_new(files)
    print(rented.rehearsal)
    for file, submit in zip(files, WRITTEN.values(), strict=True):
        print(submit, shlex.quote(str(file)))
    return 0


@dataclass(frozen=True)
class Rented:
    """A job, for the templates."""

    recipe: Path  # where the job finds it
    recipe_text: str
    words: list[str]  # zero-recipes train RECIPE ...
    machines: int
    gpus: int  # of a machine
    accelerator: str  # as SkyPilot calls it
    image: str
    rehearsal: str  # a command, quoted

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
        return f"{self.accelerator}:{self.gpus}"

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
