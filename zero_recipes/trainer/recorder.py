"""What is recorded of a run beside its model: how long its phases took, what was measured, what it failed of."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator
from typing import Any

from zero_recipes.checkpoint.output_dir import claim_output_dir
from zero_recipes.checkpoint.resume import passed_over
from zero_recipes.config.recipe import write_resolved
from zero_recipes.config.run import RunConfig
from zero_recipes.core.errors import Refusal
from zero_recipes.core.process import rank
from zero_recipes.distributed import bandwidth, init, nvme
from zero_recipes.metrics.callback import StageMetricsCallback
from zero_recipes.metrics.failure import if_the_disk_takes_it, write_failure
from zero_recipes.metrics.prediction import PredictedMetrics
from zero_recipes.metrics.schema import Status
from zero_recipes.metrics.timers import PhaseClock


class RunRecorder:
    """Of one run, on every rank; rank 0 writes and prints.

    `started`: time.perf_counter() when the program began to import.
    """

    def __init__(self, run: RunConfig, started: float):
        self.run = run
        self.clock = PhaseClock()
        self.clock.seconds["imports"] = time.perf_counter() - started
        self.disks: list[dict[str, Any]] = []  # what nvme.swap_space has measured
        self.predicted: PredictedMetrics | None = None
        self.host_link: dict[str, Any] | None = None
        self.network: dict[str, Any] | None = None
        self.host_threads: int | None = None
        self.metrics: StageMetricsCallback | None = None  # once there is a model to measure

    def claim_output_dir(self, args, rows, ds_config: dict[str, Any] | None) -> None:
        """From here on the output folder is this run's: what an earlier one left may go, the launch is written down.

        Every rank calls it (collectives). `args`: TrainingArguments; `rows`: data.prepare.Prepared; `ds_config`:
        as it is in force, None without DeepSpeed.
        """
        run = self.run
        self.network = bandwidth.measure_network(run.device)
        self.host_link = bandwidth.measure_host_link(run.strategy, run.device)
        if rank() == 0:
            requested = run.recipe.settings.resume_from_checkpoint
            found_damaged = passed_over(run.output_dir, requested, run.checkpoint)
            claim_output_dir(run.output_dir, run.settings.overwrite, found_damaged)
            header = [*run.strategy.described(run.device, args), *bandwidth.network_header(self.network)]
            header += [*nvme.described(self.disks), *bandwidth.host_link_header(self.host_link)]
            header += [*init.host_threads_header(self.host_threads), str(rows.audit)]
            print(*header, *rows.findings, sep="\n", flush=True)
            write_resolved(run.given, run.output_dir / "recipe.resolved.yaml", header, ds_config)
        args.distributed_state.wait_for_everyone()

    def measure(self, model, args) -> StageMetricsCallback:
        """Begin to measure the run of this model; a run that fails from now on leaves a metrics.json too."""
        self.metrics = StageMetricsCallback(
            self.run,
            args,
            model,
            self.clock,
            disks=self.disks,
            link=self.host_link,
            links=self.network,
            predicted=self.predicted,
        )
        return self.metrics

    def write_metrics(self, status: Status = "ok", error: str | None = None) -> None:
        self.metrics.write(self.run.output_dir, status, error)

    @contextlib.contextmanager
    def on_failure(self) -> Iterator[None]:
        """A run that fails leaves failure.rankN.json and a metrics.json that says so. A refusal leaves nothing."""
        try:
            yield
        except Refusal:
            raise
        except Exception as error:
            states = {} if self.metrics is None else self.metrics.states_so_far()
            failure = write_failure(self.run.output_dir, self.clock.failed or self.clock.current, error, states)
            if self.metrics is not None:
                with if_the_disk_takes_it():
                    self.write_metrics(failure.status, failure.error)
            raise
