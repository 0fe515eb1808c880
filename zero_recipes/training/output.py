"""The output folder of a run while the run lives: its lock, metrics.json as it goes, and what a failure leaves."""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from transformers import PretrainedConfig, PreTrainedModel, PreTrainedTokenizerBase
from trl import SFTConfig, get_peft_config

from zero_recipes import model as models
from zero_recipes.checkpoint.compatibility import refuse_other_data
from zero_recipes.checkpoint.output_dir import claim_output_dir, hold_output_dir
from zero_recipes.config.recipe import write_resolved
from zero_recipes.config.run import RunConfig
from zero_recipes.core.findings import Refusal
from zero_recipes.core.host import device_name
from zero_recipes.core.process import CLOCK, rank
from zero_recipes.data.load import load_tokenizer
from zero_recipes.data.prepare import Prepared, prepare_rows
from zero_recipes.distributed import links, nvme, ulysses
from zero_recipes.distributed.group import agree, host_threads_header, set_host_threads
from zero_recipes.libs import fsdp, patches
from zero_recipes.libs.huggingface import attention_name
from zero_recipes.metrics.callback import UNFINISHED, RunFacts, StageMetricsCallback
from zero_recipes.metrics.failure import if_the_disk_takes_it, keep_failure, write_failure
from zero_recipes.metrics.prediction import PredictedMetrics
from zero_recipes.metrics.schema import SCHEMA, Metrics


@dataclass(frozen=True)
class RunData:
    """The rows as the trainer takes them, and the tokenizer that made them."""

    tokenizer: PreTrainedTokenizerBase
    prepared: Prepared


@dataclass(frozen=True)
class RunParts:
    """TRL's arguments of a run and the model's configuration; the libraries are set up for it."""

    run: RunConfig
    args: SFTConfig
    peft_config: Any  # PEFT's; None without LoRA
    host_threads: int | None  # of each process's optimizer on the host; None where nothing was changed
    config: PretrainedConfig

    @classmethod
    def from_recipe(cls, run: RunConfig) -> RunParts:
        arguments = run.trl_arguments()
        host_threads = _prepare_libraries(run, arguments.training)
        with CLOCK.phase("model"):
            config = models.load_config(run.settings)
            models.refuse_other_keys(config, run.settings)
        arguments.training.model_init_kwargs = None  # of load_model; SFTTrainer would warn that it ignores them
        return cls(run, arguments.training, get_peft_config(arguments.model), host_threads, config)

    def prepare_data(self) -> RunData:
        """Changes `args` so that SFTTrainer takes the rows as they are."""
        with CLOCK.phase("data"):
            tokenizer = load_tokenizer(self.run.settings)
            rows = prepare_rows(self.run.settings, self.args, tokenizer)
        return RunData(tokenizer, rows)

    def load_model(self, data: RunData) -> PreTrainedModel:
        refuse_other_data(self.run.checkpoint, data.prepared.data_sha256)
        with CLOCK.phase("model"):
            return models.load_model(self.config, self.run.settings)


def _prepare_libraries(run: RunConfig, args: SFTConfig) -> int | None:
    """Set the libraries up for this run, once TrainingArguments exist and before model and trainer do.

    Returns RunParts.host_threads.
    """
    patches.patch_libraries(run.strategy, run.settings.ddp_timeout)
    patches.score_supervised_positions_only(run.settings.supervised_logits_only)
    if run.strategy.is_fsdp:
        fsdp.fix_arguments(args, run.device)
    attn_implementation = attention_name(run.settings.attn_implementation)
    ulysses.share_sequences(args, run.strategy.sequence_parallel, attn_implementation)
    return set_host_threads(run.strategy, run.device, os.environ)


class Output:
    """Of one run, on every rank; rank 0 writes and prints."""

    def __init__(self, run: RunConfig):
        self.run = run
        self.metrics: StageMetricsCallback | None = None  # from `claim` on
        self.saved: str | None = None  # what is known of the model's save, once training is over
        self.finished = False

    @classmethod
    @contextlib.contextmanager
    def hold(cls, run: RunConfig) -> Iterator[Output]:
        """Hold the folder (collective). A run that fails inside leaves failure.rankN.json, and a metrics.json that says
        so; a refusal leaves nothing."""
        CLOCK.begin_run()
        output = cls(run)
        with hold_output_dir(run.output_dir), output._failure_recorded():
            yield output

    def claim(
        self,
        parts: RunParts,
        data: RunData,
        predicted: PredictedMetrics | None,
        disks: list[dict[str, Any]],
        ds_config: dict[str, Any] | None,
    ) -> None:
        """From here on the folder is this run's: what an earlier one left may go, the launch is written down.

        Every rank calls it (collectives). `disks`: of nvme.swap_space; `ds_config`: as it is in force, None without
        DeepSpeed.
        """
        run = self.run
        with CLOCK.phase("startup"):
            network = links.measure_network(run.device)
            link = links.measure_host_link(run.strategy, run.device)
        agree(self._move_earlier_run if rank() == 0 else lambda: None)
        if rank() == 0:
            header = [*run.strategy.described(run.device, parts.args), *links.network_header(network)]
            header += [*nvme.described(disks), *links.host_link_header(link)]
            header += [*host_threads_header(parts.host_threads), str(data.prepared.audit)]
            print(*header, *data.prepared.findings, sep="\n", flush=True)
            write_resolved(run.given, run.output_dir / "recipe.resolved.yaml", header, ds_config)
        parts.args.distributed_state.wait_for_everyone()
        facts = self._facts(disks=disks, host_link=link, network=network, predicted=predicted)
        self.metrics = StageMetricsCallback(run.output_dir, facts)

    def _facts(self, **measured: Any) -> RunFacts:
        recipe = self.run.recipe
        return RunFacts(
            name=recipe.name,
            strategy=self.run.strategy,
            device=self.run.device,
            precision=self.run.precision,
            model=recipe.settings.model_name_or_path,
            recipe_sha256=recipe.sha256,
            **measured,
        )

    def _move_earlier_run(self) -> None:
        run = self.run
        previous = claim_output_dir(run.output_dir, run.settings.overwrite)
        if previous is not None:
            print(f"kept: what an earlier run left, in {previous}", flush=True)

    def progress(self, saved: str | None = None) -> None:
        """Write what is measured so far, as of a run that has not finished. `saved`: what is known of the model."""
        self.saved = saved
        self.metrics.write("failed", UNFINISHED + (f": {saved}" if saved else ""))

    def finish(self) -> None:
        self.metrics.write()
        self.finished = True

    @contextlib.contextmanager
    def _failure_recorded(self) -> Iterator[None]:
        """What fails once the run is finished (an upload) leaves its metrics as they are."""
        try:
            yield
        except Refusal:
            raise
        except Exception as error:
            folder, phase = self.run.output_dir, CLOCK.failed or CLOCK.current
            states, losses = self._measured_so_far()
            failure = write_failure(folder, phase, error, states, self.saved)
            if not self.finished:
                with if_the_disk_takes_it():
                    if self._is_measured:
                        self.metrics.write(failure.status, failure.error)
                    keep_failure(folder, failure, losses, self._unfinished(), self.run.checkpoint is not None)
            if self.saved and rank() == 0:
                print(f"the run failed ({phase}); {self.saved}", file=sys.stderr, flush=True)
            raise

    @property
    def _is_measured(self) -> bool:
        return self.metrics is not None and self.metrics.identity is not None

    def _measured_so_far(self) -> tuple[dict[str, int], list[float]]:
        """(model-state bytes, losses), of this rank and without a collective."""
        if not self._is_measured:
            return {}, []
        with contextlib.suppress(Exception):  # the engine may be the very thing that broke
            return self.metrics.states_so_far(), self.metrics.losses_so_far()
        return {}, self.metrics.losses_so_far()

    def _unfinished(self) -> Metrics:
        """What is known before there is a model."""
        facts = self._facts()
        return Metrics(
            schema=SCHEMA,
            status="failed",
            error=UNFINISHED,
            name=facts.name,
            strategy=facts.strategy.name,
            zero_stage=facts.strategy.zero_stage,
            world_size=facts.strategy.world_size,
            device=device_name(facts.device),
            model=facts.model,
            recipe_sha256=facts.recipe_sha256,
        )
