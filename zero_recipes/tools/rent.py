"""`zero-recipes rent`: the plan's choice as files for SkyPilot, SLURM and Kubernetes."""

import argparse
import shlex
from pathlib import Path

from jinja2 import Environment, PackageLoader, StrictUndefined

from zero_recipes.core.files import FILES
from zero_recipes.core.findings import refusal
from zero_recipes.core.tables import working
from zero_recipes.tools.check import rehearsal_of
from zero_recipes.tools.import_config import write_new
from zero_recipes.tools.plan.command import answer_by, simulated
from zero_recipes.tools.plan.job import HOSTS, MACHINE_RANK, read_request
from zero_recipes.tools.plan.predict import Predictor

SKYPILOT = {"a100-80gb": "A100-80GB", "v100-32gb": "V100-32GB"}  # of others the name's first part
# file: the command that submits it
WRITTEN = {
    "sky.yaml": "sky jobs launch",
    "sbatch": "sbatch",
    "k8s.yaml": "kubectl apply -f",
}


def rent(arguments: argparse.Namespace) -> int:
    """Raises Refusal if nothing fits."""
    with working("planning"):
        request = read_request(arguments, arguments.overrides)
        answer = answer_by(Predictor(quick=True), arguments, request)
        if not arguments.quick:
            answer = simulated(answer, arguments, Predictor(seconds=arguments.seconds))
    job = answer.job
    if job is None:
        raise refusal("ZR906", recipe=arguments.recipe, gpus=arguments.gpus, gpu=arguments.gpu)
    recipe = arguments.recipe
    if recipe.is_relative_to(FILES):
        recipe = Path(recipe.name)
    words = shlex.split(request.command(job))
    named = words[2]  # the recipe

    def command(rank: str, recipe: Path = recipe) -> str:
        """`rank`: the shell variable with this machine's rank."""
        shell = {word: shlex.quote(word) for word in words}
        shell[named] = shlex.quote(str(recipe))
        shell[HOSTS] = '"$HOSTS"'
        shell[MACHINE_RANK] = f'"${rank}"'
        return " ".join(shell[word] for word in words)

    values = {
        "name": recipe.stem.replace("_", "-").replace(".", "-").lower(),
        "recipe": recipe,
        "recipe_text": arguments.recipe.read_text(encoding="utf-8"),
        "machines": job.world_size // job.ranks_per_node,
        "gpus": job.ranks_per_node,
        "gpu": request.gpu.name,
        "accelerator": SKYPILOT.get(request.gpu.name, request.gpu.name.partition("-")[0].upper()),
        "image": arguments.image,
        "command": command,
        "rehearsal": rehearsal_of(request.command(job), job.world_size).replace(named, str(recipe)),
    }
    loader = PackageLoader("zero_recipes.tools", "templates")
    environment = Environment(loader=loader, undefined=StrictUndefined, trim_blocks=True, keep_trailing_newline=True)
    files = {}
    for kind in WRITTEN:
        file = arguments.output_dir / f"{recipe.stem}.{kind}"
        files[file] = environment.get_template(f"{kind}.j2").render(values)
    write_new(files)
    print(values["rehearsal"])
    for file, submit in zip(files, WRITTEN.values(), strict=True):
        print(submit, file)
    return 0
