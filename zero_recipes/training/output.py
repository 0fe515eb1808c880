"""The output folder of a run while the run lives: its lock, metrics.json as it goes, and what a failure leaves."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator
from typing import Any

from zero_recipes.checkpoint.output_dir import claim_output_dir, hold_output_dir
from zero_recipes.checkpoint.resume import passed_over
from zero_recipes.config.recipe import write_resolved
from zero_recipes.config.run import RunConfig
from zero_recipes.core.findings import Refusal
from zero_recipes.core.host import device_name
from zero_recipes.core.process import CLOCK, rank
from zero_recipes.distributed import links, nvme
from zero_recipes.distributed.group import agree, host_threads_header
from zero_recipes.metrics.callback import UNFINISHED, RunFacts, StageMetricsCallback
from zero_recipes.metrics.failure import if_the_disk_takes_it, keep_failure, write_failure
from zero_recipes.metrics.prediction import PredictedMetrics
from zero_recipes.metrics.schema import SCHEMA, Metrics
from zero_recipes.training.parts import RunData, RunParts


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
        damaged = passed_over(run.output_dir, run.recipe.settings.resume_from_checkpoint, run.checkpoint)
        previous = claim_output_dir(run.output_dir, run.settings.overwrite, damaged)
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
