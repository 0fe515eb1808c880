"""The life of one run on every rank: its lock on the folder, its clock, its measurements, and the record of its end."""

import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Self

from torch import nn
from transformers import PreTrainedModel

from zero_recipes.checkpoint.checksums import add_records
from zero_recipes.checkpoint.folders import steps_behind
from zero_recipes.checkpoint.output_dir import claim_output_dir, hold_output_dir, look_again
from zero_recipes.checkpoint.resharded import forget_resharded, resharded_where_needed
from zero_recipes.checkpoint.resume import resolve_resume_checkpoint
from zero_recipes.checks.schedule import length_described
from zero_recipes.config.resolved_recipe import write_resolved
from zero_recipes.config.run import Run
from zero_recipes.core.findings import Refusal
from zero_recipes.core.library_errors import library_error_as_finding
from zero_recipes.core.process import PhaseClock, rank, remember_signals, say
from zero_recipes.core.run_end import Preempted
from zero_recipes.core.tables import terminal
from zero_recipes.data.audit import show_rows
from zero_recipes.engine.group import once, rank_0_writes
from zero_recipes.engine.nvme import swap_space
from zero_recipes.metrics.callback import StageMetricsCallback
from zero_recipes.metrics.failure import keep_failure, not_begun, write_failure
from zero_recipes.model.trained import parameter_counts, trained_parts
from zero_recipes.training.card import hub, push, write_card
from zero_recipes.training.inputs import Inputs

SHOWN = 600  # characters of a row, before training


class Session:
    """One run on this rank, from its lock on the output folder to its end. Collective.

    A failure within it leaves failure.rankN.json and metrics.json, a refusal nothing.
    """

    def __init__(self, run: Run, clock: PhaseClock):
        self.run = run
        self.clock = clock
        self.metrics: StageMetricsCallback | None = None  # from `claim` on
        self.repository: str | None = None  # to push to
        self.saved: str | None = None  # what is known of the model's save, once training is over
        self.finished = False
        self._open = ExitStack()

    def __enter__(self) -> Self:
        with ExitStack() as opening:
            opening.callback(remember_signals, False)
            opening.enter_context(hold_output_dir(self.run.output_dir))
            opening.enter_context(self._failure_recorded())
            opening.enter_context(swap_space(self.run.strategy))
            self._open = opening.pop_all()
        return self

    def __exit__(self, *raised) -> bool | None:
        return self._open.__exit__(*raised)

    def choose_checkpoint(self) -> Run:
        """Choose the checkpoint that the run resumes from: nobody else changes the folder now. Collective."""
        self.run = resolve_resume_checkpoint(look_again(self.run))
        return self.run

    def claim(self, inputs: Inputs, model: PreTrainedModel) -> Run:
        """Make the folder this run's: what an earlier run left in it may go. Nothing refuses after this.

        Collective. Returns the run with the checkpoint that it loads.
        """
        with resharded_where_needed(self.run) as run:
            self.repository = _create_repository(run, inputs)
            step = 0 if run.checkpoint is None else steps_behind(Path(run.checkpoint))
            claim = partial(claim_output_dir, run.output_dir, run.settings.overwrite, step)
            previous = once(claim, "claims the folder")
        self.run = run
        if previous is not None:
            say(f"kept: the results of an earlier run, in {previous}")
        if rank() == 0:
            _write_launch(run, inputs, model)
        inputs.arguments.distributed_state.wait_for_everyone()
        self.metrics = StageMetricsCallback(
            run.output_dir,
            run.strategy,
            inputs.predicted,
            ends_with_training=False,
            name=run.recipe.name,
            model=run.recipe.settings.model_name_or_path,
            model_revision=getattr(run.config, "_commit_hash", None),
            precision=run.precision,
            recipe_sha256=run.recipe.sha256,
        )
        return run

    def show_trained(self, model: nn.Module) -> None:
        """Print what of the trainer's model trains, its adapter with it."""
        if rank() == 0:
            print(f"{'trains':<14}{trained_parts(model)}", flush=True)

    def save_model(self, trainer) -> None:
        """Let the trainer save its model where the recipe wants it. What is measured is kept, whatever fails now."""
        self._progress("the model is not saved")
        if self.run.settings.save_model:
            self._progress(trainer.save_verified())
        else:
            self._progress("no model was to be saved")

    def _progress(self, saved: str) -> None:
        """Keep what is measured so far. `saved`: what is known of the model."""
        self.saved = saved
        self.metrics.write("running", saved)

    def finish(self) -> None:
        """Write what remains: the run is over, and what fails from here on leaves its metrics as they are."""
        self.metrics.write()
        self.finished = True
        remember_signals(False)
        if rank() == 0:
            folder = self.run.output_dir
            forget_resharded(folder)
            write_card(folder)
            if self.run.settings.save_model:
                if not self.run.settings.skip_checksums:
                    add_records(folder)
                print(f"next: zero-recipes ask {folder} (also: export, report)", flush=True)
            else:
                print(f"next: zero-recipes report {folder}", flush=True)

    def push_if_requested(self, inputs: Inputs) -> None:
        """Push the folder to the hub where the recipe says so; every rank waits, however long. Collective."""
        if self.repository is None:
            return
        with rank_0_writes():
            if rank() == 0:
                args = inputs.arguments
                address = push(self.run.output_dir, self.repository, args.hub_token, args.hub_revision)
                print(f"pushed: {address}", flush=True)

    @contextmanager
    def _failure_recorded(self) -> Iterator[None]:
        try:
            yield
        except Refusal:
            raise
        except Preempted as preempted:
            self.metrics.write(preempted.status, str(preempted))
            raise
        except Exception as error:
            self._record(error)
            raise

    def _record(self, error: Exception) -> None:
        """Without a collective: other ranks may be gone."""
        run = self.run
        phase = self.clock.failed or "startup"
        states: dict[str, int] = {}
        losses: list[float] = []
        is_measured = self.metrics is not None and self.metrics.identity is not None
        if is_measured:
            losses = self.metrics.losses_so_far()
            with suppress(Exception):  # the engine may be the very thing that broke
                states = self.metrics.states_so_far()
        failure = write_failure(run.output_dir, phase, error, states, self.saved)
        if not self.finished:
            with suppress(OSError):  # a full disk may be the very failure
                if is_measured:
                    self.metrics.write(failure.status, failure.error)
                keep_failure(run.output_dir, failure, losses, _row_of(run), run.checkpoint is not None)
        if self.saved and rank() == 0:
            print(f"the run failed ({phase}); {self.saved}", file=sys.stderr, flush=True)


def _row_of(run: Run):
    strategy = run.strategy
    return not_begun(
        run.recipe.name,
        strategy.name,
        zero_stage=strategy.zero_stage,
        world_size=strategy.world_size,
        model=run.recipe.settings.model_name_or_path,
    )


def _write_launch(run: Run, inputs: Inputs, model: PreTrainedModel) -> None:
    data = inputs.data
    forms, rows = data.shown
    parameters, _ = parameter_counts(model)
    header = run.strategy.described(run.device, run.settings, run.precision)
    header += [f"recognized    {form}" for form in forms]
    header += [f"parameters    {parameters:,}", str(data.audit)]
    header.append(length_described(run.settings, run.strategy, data.rows and data.audit.trained, data.rows))
    print(*header, *data.findings, *inputs.findings, sep="\n", flush=True)
    show_rows(rows, terminal(), SHOWN)
    write_resolved(run.explicit, run.output_dir / "recipe.resolved.yaml", header, inputs.ds_config)


def _create_repository(run: Run, inputs: Inputs) -> str | None:
    """Create the repository to push to, and return its name on every rank; None where none is asked for. Collective."""
    if not run.settings.push_to_hub:
        return None
    args = inputs.arguments
    name = args.hub_model_id or run.output_dir.resolve().name

    @library_error_as_finding(f"creating {name} on the hub (push_to_hub)")
    def create() -> str:
        return hub(args.hub_token).create_repo(name, private=args.hub_private_repo, exist_ok=True).repo_id

    return once(create, "creates the repository")
