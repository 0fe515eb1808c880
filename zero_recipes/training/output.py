"""A run of a recipe: what it is made of before there is a trainer, and its output folder from its lock to its end."""

import contextlib
import os
import sys
from collections.abc import Iterator
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any, Self

from transformers import PreTrainedModel

from zero_recipes import model as models
from zero_recipes.checkpoint.compatibility import refuse_other_data
from zero_recipes.checkpoint.output_dir import claim_output_dir, hold_output_dir, look_again
from zero_recipes.checkpoint.resume import (
    forget_resharded,
    resharded_where_needed,
    resolve_resume_checkpoint,
    steps_behind,
)
from zero_recipes.config.recipe import RunConfig, write_resolved
from zero_recipes.core.findings import UNFINISHED, Preempted, Refusal, library_error_as_finding
from zero_recipes.core.process import CLOCK, rank, remember_signals, say
from zero_recipes.core.tables import terminal
from zero_recipes.data.audit import show_rows
from zero_recipes.data.load import load_tokenizer
from zero_recipes.data.prepare import prepare_rows
from zero_recipes.engine import fsdp, patches
from zero_recipes.engine.group import once, rank_0_writes
from zero_recipes.engine.huggingface import attention_name
from zero_recipes.metrics.callback import StageMetricsCallback
from zero_recipes.metrics.failure import keep_failure, unfinished, write_failure
from zero_recipes.metrics.schema import PredictedMetrics
from zero_recipes.training.card import hub, push, write_card
from zero_recipes.training.token_loss import share_sequences

SHOWN = 600  # characters of a row, before training


class RecipeRun:
    """One run on every rank; rank 0 writes and prints. What comes before `claim` may refuse, and touches nothing."""

    def __init__(self, run: RunConfig):
        self.run = run
        self.metrics: StageMetricsCallback | None = None  # from `claim` on
        self.saved: str | None = None  # what is known of the model's save, once training is over
        self.finished = False

    @classmethod
    @contextlib.contextmanager
    def hold(cls, run: RunConfig) -> Iterator[Self]:
        """Hold the folder (collective). A failure leaves failure.rankN.json and metrics.json, a refusal nothing."""
        recipe_run = cls(run)
        try:
            with hold_output_dir(run.output_dir), recipe_run._failure_recorded():
                yield recipe_run
        finally:
            remember_signals(False)

    def choose_checkpoint(self) -> RunConfig:
        """The run, to go on from a whole checkpoint (collective). Chosen again: nobody else changes the folder now."""
        self.run = resolve_resume_checkpoint(look_again(self.run))
        return self.run

    def prepare_libraries(self) -> None:
        """TRL's arguments and the model's configuration; the libraries are set up for this run."""
        run, arguments = self.run, self.run.trl_arguments()
        self.args, self.peft_config = arguments.training, models.adapter_config(run.settings, has_weights=True)
        patches.patch_libraries(run.strategy, run.settings.ddp_timeout)
        patches.score_supervised_positions_only(run.settings.supervised_logits_only)
        patches.attend_by_row(run.device == "cpu" and run.settings.joined_by and not run.settings.torch_compile)
        if run.strategy.is_fsdp:
            fsdp.fix_arguments(self.args, run.device)
        share_sequences(self.args, run.strategy.sequence_parallel, attention_name(run.settings.attn_implementation))
        with CLOCK.phase("model"):
            self.config = models.load_config(run.settings)
            models.refuse_other_keys(self.config, run.settings)
        self.args.push_to_hub = False  # the Trainer would push its folder as it is, and at each save
        self._log_in()
        if run.settings.push_to_hub:  # the repository is created after the weights are loaded
            once(library_error_as_finding("logging in (push_to_hub)")(hub(self.args.hub_token).whoami), "logs in")
        self.args.model_init_kwargs = None  # of load_model; SFTTrainer would warn that it ignores them

    def prepare_data(self) -> None:
        """Changes `args` so that SFTTrainer takes the rows as they are."""
        with CLOCK.phase("data"):
            self.data = prepare_rows(self.run.settings, self.args, load_tokenizer(self.run.settings))

    def load_model(self) -> PreTrainedModel:
        refuse_other_data(self.run.checkpoint, self.data.data_sha256)
        with CLOCK.phase("model"):
            model = models.load_model(self.config, self.run.settings)
            self.parameters, _ = models.parameter_counts(model)
            return model

    def claim(self, predicted: PredictedMetrics | None, ds_config: dict[str, Any] | None) -> None:
        """From here on the folder is this run's: what an earlier one left may go, the launch is written down. Every
        rank calls it (collectives). `ds_config`: as it is in force, None without DeepSpeed."""
        with resharded_where_needed(self.run) as run:
            self.repository = self._create_repository()
            step = 0 if run.checkpoint is None else steps_behind(Path(run.checkpoint))
            claim = partial(claim_output_dir, run.output_dir, run.settings.overwrite, step)
            previous = once(claim, "claims the folder")
        self.run = run
        if previous is not None:
            say(f"kept: the results of an earlier run, in {previous}")
        if rank() == 0:
            forms, rows = self.data.shown
            header = [*run.strategy.described(run.device, run.settings), *(f"recognized    {form}" for form in forms)]
            header += [f"parameters    {self.parameters:,}", str(self.data.audit)]
            print(*header, *self.data.findings, sep="\n", flush=True)
            show_rows(rows, terminal(), SHOWN)
            write_resolved(run.explicit, run.output_dir / "recipe.resolved.yaml", header, ds_config)
        self.args.distributed_state.wait_for_everyone()
        self.metrics = StageMetricsCallback(
            run.output_dir,
            run.strategy,
            predicted,
            name=run.recipe.name,
            model=run.recipe.settings.model_name_or_path,
            model_revision=getattr(self.config, "_commit_hash", None),
            precision=run.precision,
            recipe_sha256=run.recipe.sha256,
        )

    def progress(self, saved: str) -> None:
        """Write what is measured so far, as of a run that has not finished. `saved`: what is known of the model."""
        self.saved = saved
        self.metrics.write("failed", f"{UNFINISHED}: {saved}")

    def finish(self) -> None:
        self.metrics.write()
        self.finished = True
        remember_signals(False)
        if rank() == 0:
            forget_resharded(self.run.output_dir)
            write_card(self.run.output_dir)
            next_ones = "ask {} (also: export, report)" if self.run.settings.save_model else "report {}"
            print(f"next: zero-recipes {next_ones.format(self.run.output_dir)}", flush=True)

    def _create_repository(self) -> str | None:
        """The repository to push to, on every rank, once nothing else can refuse; None where none is requested."""
        if not self.run.settings.push_to_hub:
            return None
        args, name = self.args, self.args.hub_model_id or self.run.output_dir.resolve().name

        @library_error_as_finding(f"creating {name} on the hub (push_to_hub)")
        def create() -> str:
            return hub(args.hub_token).create_repo(name, private=args.hub_private_repo, exist_ok=True).repo_id

        return once(create, "creates the repository")

    def _log_in(self) -> None:  # wandb's callback does so after the weights are loaded
        if "wandb" in self.args.report_to and os.environ.get("WANDB_MODE", "online") == "online":
            once(library_error_as_finding("logging in (report_to: wandb)")(import_module("wandb").login), "logs in")

    def push_if_requested(self) -> None:
        """Upload the model where the recipe says push_to_hub. Every rank calls it, and waits however long it takes."""
        if self.repository is None:
            return
        with rank_0_writes():
            if rank() == 0:
                args = self.args
                address = push(self.run.output_dir, self.repository, args.hub_token, args.hub_revision)
                print(f"pushed: {address}", flush=True)

    @contextlib.contextmanager
    def _failure_recorded(self) -> Iterator[None]:
        """What fails once the run is finished (an upload) leaves its metrics as they are."""
        try:
            yield
        except Refusal:
            raise
        except Preempted as ending:
            self.metrics.write(ending.status, str(ending))
            raise
        except Exception as error:
            run, phase, states, losses = self.run, CLOCK.failed or "startup", {}, []
            is_measured = self.metrics is not None and self.metrics.identity is not None
            if is_measured:
                losses = self.metrics.losses_so_far()
                with contextlib.suppress(Exception):  # the engine may be the very thing that broke
                    states = self.metrics.states_so_far()
            failure = write_failure(run.output_dir, phase, error, states, self.saved)
            model, strategy = run.recipe.settings.model_name_or_path, run.strategy
            known = {"zero_stage": strategy.zero_stage, "world_size": strategy.world_size, "model": model}
            begun = unfinished(run.recipe.name, strategy.name, **known)
            if not self.finished:
                with contextlib.suppress(OSError):  # a full disk may be the very failure
                    if is_measured:
                        self.metrics.write(failure.status, failure.error)
                    keep_failure(run.output_dir, failure, losses, begun, run.checkpoint is not None)
            if self.saved and rank() == 0:
                print(f"the run failed ({phase}); {self.saved}", file=sys.stderr, flush=True)
            raise
