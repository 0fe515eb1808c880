"""The plan of a run that is about to start: made while its rows are tokenised, held against every machine's GPUs before
a weight is loaded, and kept for the report."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from zero_recipes.config.run import RunConfig
from zero_recipes.core.findings import Finding, Refusal, downgraded, finding, first_line, ignored_codes, raise_errors
from zero_recipes.core.host_limits import Host
from zero_recipes.core.phases import CLOCK
from zero_recipes.core.process import local_world_size, rank
from zero_recipes.core.units import size
from zero_recipes.data.lengths import of_prepared
from zero_recipes.distributed.agree import agree
from zero_recipes.distributed.once_per_node import once
from zero_recipes.metrics.prediction import PredictedMetrics, Prediction
from zero_recipes.plan import cards, jobs, messages
from zero_recipes.plan.advice import smallest_change
from zero_recipes.plan.cards import Card
from zero_recipes.plan.cost import estimate
from zero_recipes.plan.fit import Fit, fit_of
from zero_recipes.plan.formulas.predict import predict_by_formulas
from zero_recipes.plan.job import Job
from zero_recipes.plan.overheads import overheads
from zero_recipes.plan.predict import BY_FORMULAS, Predict, Predictor
from zero_recipes.plan.simulator.time_limit import TimeLimit

if TYPE_CHECKING:
    from zero_recipes.data.prepare import Prepared

SECONDS = 90.0  # of simulations, of the run itself and of what would fit
DOING = "plans the run"
PLAIN_ADAM = ("adamw_torch", "adamw_torch_fused")
PACKS_FROZEN = "zero_quantized_nontrainable_weights"  # of zero_optimization
# keys of a ds_config's "bf16" and "fp16" blocks that make other states than Adam's in fp32
OTHER_STATES = ("bf16_master_weights_and_grads", "bf16_optimizer_states", "fp16_master_weights_and_grads")


@contextmanager
def planning(run: RunConfig) -> Iterator[Callable[[Prepared | None], PredictedMetrics | None]]:
    """Plan the run in the background; what is yielded waits for it. Every process calls both.

    What is yielded takes the rows as they are prepared, for the time of a step.

    On an accelerator, unless the recipe has `skip_plan: true`; on CPUs where it has `predict: true`. Rank 0 plans, for
    the smallest GPU of all ranks. What is yielded returns what metrics.json shows as "predicted", None where there is
    no plan. Both raise Refusal on every process where the run does not fit: here for what is certain before any
    simulation, there for the rest. However this is left, no simulation goes on.
    """
    if not wanted(run):
        yield lambda rows=None: None
        return
    with CLOCK.phase("plan"):
        found = agree(cards.card) if _is_held_against_gpus(run) else []
    with ThreadPoolExecutor(1) as background, closing(_Plan(run, os.environ, found)) as plan:
        with CLOCK.phase("plan"):
            once(plan.refuse_what_is_certain, DOING)
        made = background.submit(plan.make) if rank() == 0 else None

        def result(rows: Prepared | None = None) -> PredictedMetrics | None:
            with CLOCK.phase("plan"):
                told = once(lambda: plan.told(made.result, rows), DOING)
            if rank() == 0:
                print(*told["lines"], sep="\n", flush=True)
            return None if told["predicted"] is None else PredictedMetrics.model_validate(told["predicted"])

        yield result


def wanted(run: RunConfig) -> bool:
    """Whether the run is planned at all."""
    return run.settings.predict or _is_held_against_gpus(run)


def _is_held_against_gpus(run: RunConfig) -> bool:
    return run.device == "cuda" and not run.settings.skip_plan


def rehearsed(run: RunConfig, environment: Mapping[str, str]) -> list[Finding]:
    """What the run would be refused for, or warned of; for `zero-recipes check` on a machine with its GPUs."""
    if not _is_held_against_gpus(run):
        return []
    here = cards.cards_here(local_world_size(environment, run.strategy.world_size))
    with closing(_Plan(run, environment, here)) as plan:
        try:
            plan.refuse_what_is_certain()
            _, lines, findings = plan.judged(plan.make)
            print(*lines, sep="\n")
            return findings
        except Refusal as refusal:
            return refusal.findings


class _Plan:
    """Of one run, on the process that plans for all. `cards`: of all ranks; none where it is held against none."""

    def __init__(self, run: RunConfig, environment: Mapping[str, str], cards: Sequence[Card]):
        self.run, self.environment, self.cards = run, environment, cards
        self.limit = TimeLimit(SECONDS)
        self.predict: Predict = Predictor(limit=self.limit)

    def close(self) -> None:
        self.limit.end()

    def refuse_what_is_certain(self) -> None:
        """Before rows are tokenised; what formulas leave open the simulation may still refuse. Raises Refusal."""
        print(f"plan          planning, up to {SECONDS:.0f} s", flush=True)
        try:
            job = job_of_run(self.run, self.environment)
            findings = self._states_alone(job, predict_by_formulas(job))
        except Exception:  # `judged` says why no plan could be made
            return
        raise_errors(findings)

    def make(self) -> tuple[Job, Prediction, float]:
        """The job, what it needs, and the seconds that this took. Raises whatever the simulated engine raises."""
        started = time.monotonic()
        job = job_of_run(self.run, self.environment)
        return job, self.predict(job), time.monotonic() - started

    def told(self, make: Callable[[], tuple[Job, Prediction, float]], rows: Prepared | None = None) -> dict[str, Any]:
        """{"predicted", "lines"} for all processes, as JSON. Raises Refusal where the run does not fit.

        `rows`: as they are prepared, for the time of a step.
        """
        prediction, lines, findings = self.judged(make)
        raise_errors(findings)
        if prediction is not None and rows is not None:
            lines += self._speed(prediction, rows)
        predicted = None if prediction is None else prediction.for_metrics.model_dump(mode="json")
        return {"predicted": predicted, "lines": [*lines, *map(str, findings)]}

    def judged(
        self, make: Callable[[], tuple[Job, Prediction, float]]
    ) -> tuple[Prediction | None, list[str], list[Finding]]:
        """(the prediction, lines for the log, findings). A plan that cannot be made stops no run: it is advice."""
        try:
            job, prediction, seconds = make()
            line = f"plan          {messages.peak(prediction, self._fit(prediction))}; it took {seconds:.0f} s"
            notes = [f"plan          {note}" for note in prediction.notes if BY_FORMULAS in note]
            found = (self._states_alone(job, prediction) or self._too_large(job, prediction)) if self.cards else []
        except Exception as error:  # the engine's own code under simulation may raise anything
            return None, [f"plan          none could be made: {first_line(error)}"], []
        return prediction, [line, *notes], downgraded(found, ignored_codes(self.run.settings.ignore))

    def _speed(self, prediction: Prediction, rows: Prepared) -> list[str]:
        """How long a step of the run's rows takes, in one line; none of a stream, and without the GPU's figures."""
        gpu = cards.gpu_here() if self.run.device == "cuda" else None
        if gpu is None or rows.rows is None:
            return []
        try:
            lengths = of_prepared(rows.train, "the run's rows")
            speed = estimate(job_of_run(self.run, self.environment), prediction, gpu, rows=lengths)
        except Exception as error:  # it is advice
            return [f"plan          no time of a step: {first_line(error)}"]
        return [f"plan          {messages.speed(speed, lengths, gpu)}"]

    def _fit(self, prediction: Prediction) -> Fit | None:
        return fit_of(prediction, self._fullest.left) if self.cards else None

    @property
    def _fullest(self) -> Card:
        return min(self.cards, key=lambda card: card.left)

    def _states_alone(self, job: Job, prediction: Prediction) -> list[Finding]:
        """The run whose model states are larger than a whole GPU: certain, whatever a plan leaves out."""
        smallest, states = min(self.cards, key=lambda card: card.total), certain_states(job, prediction)
        if sum(states.values()) <= smallest.total:
            return []
        parts = ", ".join(f"{name} {size(held)}" for name, held in states.items() if held)
        alone = replace(smallest, others=0)
        return [
            finding(
                "ZR840",
                strategy=job.strategy,
                gpus=_gpus(job),
                size=size(sum(states.values())),
                in_words=cards.in_words(alone, [replace(card, others=0) for card in self.cards]),
                parts=parts,
                what_helps=self._what_helps(job, prediction, smallest.total),
            )
        ]

    def _too_large(self, job: Job, prediction: Prediction) -> list[Finding]:
        """The run that does not fit, with what would. By formulas, and while no GPU was compared with, a warning."""
        card = self._fullest
        if fit_of(prediction, card.left).status != "no":
            return []
        largest = sorted(prediction.at_peak.items(), key=lambda part: -part[1])[:3]
        at_peak = ", ".join(f"{name} {size(held)}" for name, held in largest if held)
        sure = prediction.source == "engine" and overheads().measured
        unsure = (
            ""
            if sure
            else " Not certain: "
            + ("no plan has been compared with a GPU yet." if prediction.source == "engine" else "formulas are coarse.")
        )
        fits_alone = fit_of(prediction, card.total).status != "no"
        return [
            finding(
                "ZR816",
                strategy=job.strategy,
                gpus=_gpus(job),
                size=size(prediction.reserved_bytes.low),
                in_words=cards.in_words(card, self.cards),
                sources=messages.SOURCES[prediction.source],
                peak_phase=prediction.peak_phase,
                at_peak=at_peak,
                unsure=unsure,
                fix="End what else runs on that GPU (nvidia-smi names it). " if fits_alone else "",
                what_helps=self._what_helps(job, prediction, card.left),
                level="error" if sure else "warning",
            )
        ]

    def _what_helps(self, job: Job, prediction: Prediction, capacity: int) -> str:
        strategies = jobs.strategies_here() | {job.strategy: job.ds_config}
        predict: Predict = lambda other: prediction if other is job else self.predict(other)  # noqa: E731
        change = smallest_change(job, capacity, predict, strategies, Host().memory()[0])
        if change is None:
            return "No change that was tried makes it fit: a smaller model, or GPUs with more memory."
        # the configuration came from the launcher or the command line: a command names its own
        recipe = replace(self.run.recipe, settings=self.run.settings.replace(deepspeed=None))
        words = messages.change_in_words(change)
        source = " (by formulas)" if change.prediction.source == "formulas" else ""
        command = jobs.run_command(recipe, [], change.job)
        return f"{words[0].upper()}{words[1:]}{source}, with the other options of this run: {command}."


def _gpus(job: Job) -> str:
    return f"{job.world_size} GPU{'s' if job.world_size > 1 else ''}"


def job_of_run(run: RunConfig, environment: Mapping[str, str]) -> Job:
    """The job that this run is. Raises Refusal where the model's config is not here."""
    settings, strategy = run.settings, run.strategy
    here = local_world_size(environment, strategy.world_size)
    device = "gpu" if run.device == "cuda" else "cpu"
    config = jobs.model_config(settings)
    model = settings.model_name_or_path
    ds_config = None if strategy.ds_config is None else dict(strategy.ds_config.raw)
    return Job(model, config, settings, strategy.name, ds_config, strategy.world_size, here, device)


def certain_states(job: Job, prediction: Prediction) -> dict[str, int]:
    """Bytes of model states that one GPU holds all at once, by part.

    The simulated engine has allocated them. By formulas: weights that nothing packs, and the states of torch's own
    Adam; gradients come and go.
    """
    states = prediction.model_state_bytes
    if prediction.source == "engine":
        return {"weights": states.params, "gradients": states.grads, "optimizer": states.optimizer}
    if job.settings.load_in_4bit or job.settings.load_in_8bit or job.zero.zero.get(PACKS_FROZEN):
        return {}
    return {"weights": states.params, "optimizer": states.optimizer if _is_plain_adam(job) else 0}


def _is_plain_adam(job: Job) -> bool:
    config = job.ds_config or {}
    own = str((config.get("optimizer") or {}).get("type", "adamw")).lower()
    other = any((config.get(block) or {}).get(key) for block in ("bf16", "fp16") for key in OTHER_STATES)
    autocast = (config.get("torch_autocast") or {}).get("enabled")
    return job.settings.optim in PLAIN_ADAM and own in ("adam", "adamw") and not other and not autocast
