"""`zero-recipes rent`: the plan's choice as files for SkyPilot, SLURM and Kubernetes."""

import argparse
import shlex
from pathlib import Path

from jinja2 import Environment, PackageLoader, StrictUndefined

from zero_recipes.core.files import FILES
from zero_recipes.core.findings import refusal
from zero_recipes.core.tables import working
from zero_recipes.tools.import_config import write_new
from zero_recipes.tools.plan.command import answer_by, simulated
from zero_recipes.tools.plan.job import HOSTS, MACHINE_RANK, read_request
from zero_recipes.tools.plan.predict import Predictor

SKYPILOT = {"a100-80gb": "A100-80GB", "v100-32gb": "V100-32GB"}  # of others the name's first part
WRITTEN = {"sky.yaml": "sky jobs launch", "sbatch": "sbatch", "k8s.yaml": "kubectl apply -f"}  # each with its command


def rent(arguments: argparse.Namespace) -> int:
    """The verb. Returns the exit code; raises Refusal where nothing fits."""
    with working("planning"):
        request = read_request(arguments, arguments.overrides)
        answer = answer_by(Predictor(quick=True), arguments, request)
        answer = answer if arguments.quick else simulated(answer, arguments, Predictor())
    job = answer.advice.job
    if job is None:
        raise refusal("ZR906", recipe=arguments.recipe, gpus=arguments.gpus, gpu=arguments.gpu)
    recipe = Path(arguments.recipe.name) if arguments.recipe.is_relative_to(FILES) else arguments.recipe
    words = shlex.split(request.command(job))
    values = {
        "name": recipe.stem.replace("_", "-").replace(".", "-").lower(),
        "recipe": recipe,
        "recipe_text": arguments.recipe.read_text(encoding="utf-8"),
        "machines": job.world_size // job.ranks_per_node,
        "gpus": job.ranks_per_node,
        "gpu": request.gpu.name,
        "accelerator": SKYPILOT.get(request.gpu.name, request.gpu.name.partition("-")[0].upper()),
        "image": arguments.image,
    }

    def command(rank: str, recipe: Path = recipe) -> str:
        """In a shell where HOSTS names the machines and `rank` is this one's."""
        shell = {HOSTS: '"$HOSTS"', MACHINE_RANK: f'"${rank}"', str(arguments.recipe): shlex.quote(str(recipe))}
        return " ".join(shell.get(word) or shlex.quote(word) for word in words)

    loader = PackageLoader("zero_recipes.tools", "templates")
    environment = Environment(loader=loader, undefined=StrictUndefined, trim_blocks=True, keep_trailing_newline=True)
    files = {arguments.output_dir / f"{recipe.stem}.{kind}": kind for kind in WRITTEN}
    write_new({f: environment.get_template(f"{kind}.j2").render(values, command=command) for f, kind in files.items()})
    print(*(f"{WRITTEN[kind]} {file}" for file, kind in files.items()), sep="\n")
    return 0
