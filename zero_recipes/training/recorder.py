"""What is recorded of a run beside its model: how long its phases took, what was measured, what it failed of."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator
from typing import Any

from zero_recipes.checkpoint.output_dir import claim_output_dir, hold_output_dir
from zero_recipes.checkpoint.resume import passed_over
from zero_recipes.config.recipe import write_resolved
from zero_recipes.config.run import RunConfig
from zero_recipes.core import environment
from zero_recipes.core.findings import Refusal
from zero_recipes.core.phases import CLOCK
from zero_recipes.core.process import rank
from zero_recipes.distributed import bandwidth, init, nvme
from zero_recipes.distributed.agree import agree
from zero_recipes.metrics.callback import StageMetricsCallback
from zero_recipes.metrics.failure import if_the_disk_takes_it, keep_failure, write_failure
from zero_recipes.metrics.prediction import PredictedMetrics
from zero_recipes.metrics.schema import FILE, SCHEMA, ContractError, Metrics, Status

UNFINISHED = "the run has not finished"


class RunRecorder:
    """Of one run, on every rank; rank 0 writes and prints."""

    def __init__(self, run: RunConfig):
        self.run = run
        self.clock = CLOCK
        self.clock.begin_run()
        self.disks: list[dict[str, Any]] = []  # what nvme.swap_space has measured
        self.predicted: PredictedMetrics | None = None
        self.host_link: dict[str, Any] | None = None
        self.network: dict[str, Any] | None = None
        self.host_threads: int | None = None
        self.metrics: StageMetricsCallback | None = None  # once there is a model to measure
        self.reached: str | None = None  # how it stands with the model, once training is over
        self.finished = False

    def claim_output_dir(self, args, rows, ds_config: dict[str, Any] | None) -> None:
        """From here on the output folder is this run's: what an earlier one left may go, the launch is written down.

        Every rank calls it (collectives). `args`: TrainingArguments; `rows`: data.prepare.Prepared; `ds_config`:
        as it is in force, None without DeepSpeed.
        """
        run = self.run
        with self.clock.phase("startup"):
            self.network = bandwidth.measure_network(run.device)
            self.host_link = bandwidth.measure_host_link(run.strategy, run.device)
        agree(self._claim)
        if rank() == 0:
            header = [*run.strategy.described(run.device, args), *bandwidth.network_header(self.network)]
            header += [*nvme.described(self.disks), *bandwidth.host_link_header(self.host_link)]
            header += [*init.host_threads_header(self.host_threads), str(rows.audit)]
            print(*header, *rows.findings, sep="\n", flush=True)
            write_resolved(run.given, run.output_dir / "recipe.resolved.yaml", header, ds_config)
        args.distributed_state.wait_for_everyone()

    def _claim(self) -> None:
        if rank() == 0:
            run = self.run
            damaged = passed_over(run.output_dir, run.recipe.settings.resume_from_checkpoint, run.checkpoint)
            previous = claim_output_dir(run.output_dir, run.settings.overwrite, damaged)
            if previous is not None:
                print(f"kept: what an earlier run left, in {previous}", flush=True)

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
        self.finished = status == "ok"

    def progress(self, reached: str | None = None) -> None:
        """Write what is measured so far, as of a run that has not finished. `reached`: how it stands with the model."""
        self.reached = reached
        self.write_metrics("failed", UNFINISHED + (f": {reached}" if reached else ""))

    @contextlib.contextmanager
    def loading(self) -> Iterator[None]:
        """The weights are loaded inside, the last that may refuse.

        A process that is killed there leaves a metrics.json that says so, over that of the run which it goes on with.
        A refusal leaves the folder as it was, and so does a run that is to overwrite another one's.
        """
        folder, path = self.run.output_dir, self.run.output_dir / FILE
        before = path.read_bytes() if path.is_file() else None
        marks = rank() == 0 and (before is None or self.run.checkpoint is not None)
        made = [each for each in (folder, *folder.absolute().parents) if not each.exists()]
        if marks:
            self._last_row().model_copy(update={"status": "failed", "error": UNFINISHED}).write(path)
        try:
            with self.clock.phase("model"):
                yield
        except Refusal:
            if marks and before is not None:
                path.write_bytes(before)
            elif marks:
                path.unlink()
                for each in made:
                    each.rmdir()
            raise

    def _last_row(self) -> Metrics:
        """The metrics.json that stands in the folder; what is known before there is a model where none can be read."""
        try:
            return Metrics.read(self.run.output_dir / FILE)
        except (OSError, ContractError):
            return self._unfinished()

    def _unfinished(self) -> Metrics:
        recipe, strategy = self.run.recipe, self.run.strategy
        return Metrics(
            schema=SCHEMA,
            status="failed",
            error=UNFINISHED,
            name=recipe.name,
            strategy=strategy.name,
            zero_stage=strategy.zero_stage,
            world_size=strategy.world_size,
            device=environment.device_name(self.run.device),
            model=recipe.settings.model_name_or_path,
            recipe_sha256=recipe.sha256,
        )

    @contextlib.contextmanager
    def on_failure(self) -> Iterator[None]:
        """The folder is held for this run (collective). A run that fails leaves failure.rankN.json and a metrics.json
        that says so. A refusal leaves nothing."""
        with hold_output_dir(self.run.output_dir), self._recorded_failure():
            yield

    @contextlib.contextmanager
    def _recorded_failure(self) -> Iterator[None]:
        """What fails once the run is finished (an upload) leaves its metrics as they are."""
        try:
            yield
        except Refusal:
            raise
        except Exception as error:
            states, losses = {}, []
            if self.metrics is not None:
                losses = self.metrics.losses_so_far()
                with contextlib.suppress(Exception):  # the engine may be the very thing that broke
                    states = self.metrics.states_so_far()
            folder, phase = self.run.output_dir, self.clock.failed or self.clock.current
            failure = write_failure(folder, phase, error, states, self.reached)
            if not self.finished:
                with if_the_disk_takes_it():
                    if self.metrics is not None:
                        self.metrics.write(folder, failure.status, failure.error)
                    keep_failure(folder, failure, losses, self._unfinished(), self.run.checkpoint is not None)
            if self.reached and rank() == 0:
                print(f"the run failed ({phase}); {self.reached}", file=sys.stderr, flush=True)
            raise
