"""`zero-recipes plan`: what a recipe needs on which GPUs, and what to do."""

import argparse
import json
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

from rich.live import Live
from rich.text import Text

from zero_recipes.config.plain import default_values
from zero_recipes.config.recipe import Recipe
from zero_recipes.config.settings import Settings
from zero_recipes.core.files import write_json
from zero_recipes.core.tables import terminal, working
from zero_recipes.core.units import count
from zero_recipes.tools.plan import show
from zero_recipes.tools.plan.choose import best_machine, better, lighter, limits_of, on_each_machine, rows_of
from zero_recipes.tools.plan.job import Job, PlanRequest, model_named, read_recipe, read_request, shares_nothing
from zero_recipes.tools.plan.predict import Predict, Predictor, Progress
from zero_recipes.tools.plan.simulator import parent

VOCABULARY = 32_000
RECIPES = (".yaml", ".yml", ".json")
# without a recipe
DEFAULTS = {"bf16": True, "per_device_train_batch_size": 1, "max_length": 2048}


def run(arguments: argparse.Namespace, rest: list[str]) -> int:
    """Plan, and print the answer. `rest` overrides the recipe's keys. Returns the exit code. Raises Refusal."""
    predict = Predictor(arguments.quick, seconds=arguments.seconds)
    with working(f"reading {arguments.recipe if arguments.params is None else '--params'}"):
        request = requested(arguments, rest)
        if not arguments.quick and predict.missing(request.jobs()[0]):
            parent.start("gpu")
        answer = answer_by(Predictor(quick=True), arguments, request, limits=arguments.quick)
    if not arguments.quick:
        with _shown_meanwhile(answer, arguments, predict) as progress:
            answer = simulated(answer, arguments, predict, progress)
    if arguments.json:
        print(json.dumps(show.document(answer), indent=2))
    else:
        show.print_answer(answer, terminal(), arguments.verbose)
    return 0


def answer_by(
    predict: Predict, arguments: argparse.Namespace, request: PlanRequest, limits: bool = True
) -> show.Answer:
    """Make the whole plan by `predict`. Searches go by formulas.

    `limits`: whether those of `--max` are looked for.
    """
    guess = Predictor(quick=True)
    jobs, excluded = request.jobs()
    rows = rows_of(request, jobs, predict)
    if arguments.max and limits:
        memory = request.gpu.memory_bytes
        rows = [replace(row, limits=limits_of(row.job, memory, predict, guess)) for row in rows]
    machines = on_each_machine(rows, request.gpu)
    advice = best_machine(machines)
    other_ways = lighter(request, advice, predict, guess)
    best = None
    if advice.chosen:
        alike = list(other_ways.values()) if request.recipe.settings.use_peft else []  # QLoRA trains an adapter, too
        best = better(request, advice.chosen, alike, predict, guess)
    return show.Answer(request, rows, excluded, machines, advice, other_ways, best, arguments.price)


def simulated(
    draft: show.Answer, arguments: argparse.Namespace, predict: Predictor, progress: Progress = lambda job, left: None
) -> show.Answer:
    """Make the plan anew by the simulated engine. All that the formulas name is simulated side by side."""
    predict.prepare(by_importance(draft), progress)
    return answer_by(predict, arguments, draft.request)


def by_importance(draft: show.Answer) -> list[Job]:
    """The jobs of a plan in the order in which they are simulated, for there may be no time for all of them.

    What the formulas recommend comes first. Stage 3 takes longest: no core is to be left alone with it at the end. On
    one GPU the stages that the table leaves out come last.
    """
    jobs = [row.job for row in (*draft.rows, *draft.lighter.values())]
    jobs.sort(key=lambda job: (shares_nothing(job), job.zero_stage != 3))
    if draft.better:
        jobs.insert(0, draft.better.job)
    if draft.advice.chosen:
        jobs.insert(0, draft.advice.chosen.job)
    return list({id(job): job for job in jobs}.values())


@contextmanager
def _shown_meanwhile(draft: show.Answer, arguments: argparse.Namespace, predict: Predictor) -> Iterator[Progress]:
    """The formulas' answer, whose rows become the engine's; without a terminal a line on stderr."""
    console = terminal()
    if arguments.json or not console.is_terminal:
        with working(f"by formulas: {show.bottom_line(draft)}") as say:
            say("simulating the engine")
            yield lambda job, left: say(f"simulated {job.strategy}, {left} left")
        return

    def shown(answer: show.Answer, news: str) -> Text:
        with console.capture() as lines:
            console.print(Text(news, style="yellow"))
            show.print_answer(answer, console, is_draft=True)
        return Text.from_ansi(lines.get())

    first = shown(draft, "By formulas; the engine's results follow.\n")
    with Live(first, console=console, auto_refresh=False, transient=True) as live:

        def updated(job: Job, left: int) -> None:
            answer = answer_by(predict.known, arguments, draft.request, limits=False)
            live.update(shown(answer, f"{left} simulations are left, still by formulas.\n"), refresh=True)

        yield updated


def requested(arguments: argparse.Namespace, rest: list[str]) -> PlanRequest:
    """Read what is to be planned: a recipe, a model or `--params`. Raises Refusal."""
    named = arguments.recipe
    config = None
    own = []
    if arguments.params is not None:
        config, name = llama(arguments.params)
    elif named.is_file() or named.suffix in RECIPES:
        return read_request(arguments, rest)
    else:
        name = model_named(str(named))
        own = ["--model_name_or_path", name]
    recipe = Recipe(Path("RECIPE.yaml"), Settings(default_values() | DEFAULTS), DEFAULTS, "")
    if rest:
        with tempfile.TemporaryDirectory() as folder:
            file = Path(folder, "recipe.yaml")
            write_json(file, DEFAULTS)  # JSON is YAML
            recipe = replace(read_recipe(file, rest), path=recipe.path)
    recipe = replace(recipe, settings=recipe.settings.replace(model_name_or_path=name))
    request = read_request(arguments, [*own, *rest], recipe, config)
    batches = ("per_device_train_batch_size", "gradient_accumulation_steps", "global_batch_size")
    is_free = not any(word.lstrip("-").split("=")[0] in batches for word in rest)
    return replace(request, no_lengths="there is no recipe", batch_is_free=is_free)


def llama(parameters: float) -> tuple[dict, str]:
    """Make a config.json in Llama 2's proportions, and its name: heads of 128, as many layers as heads."""
    shapes = []
    for heads in range(1, 2**13):
        width = 128 * heads
        embeddings = 2 * VOCABULARY * width
        layer = 12 * width**2
        layers = max(1, round((parameters - embeddings) / layer))
        total = embeddings + layers * layer
        is_off = abs(total / parameters - 1) > 0.05
        shapes.append((is_off, abs(layers - heads), heads, layers, total))
    *_, heads, layers, total = min(shapes)
    config = {
        "model_type": "llama",
        "vocab_size": VOCABULARY,
        "max_position_embeddings": 131_072,
        "hidden_size": 128 * heads,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "intermediate_size": 1024 * heads // 3,
    }
    size = f"{count(total / 1e9)}B" if total >= 1e9 else f"{count(total / 1e6)}M"
    return config, f"a Llama of {size} parameters"
