"""What a training step asks of a device: operators, collectives, bytes, and each wait of the host for a result.

Counted on a CPU, where every tensor is the host's: what reads one there would wait for a GPU if the tensor were on it.
A copy by `Tensor.to` is not seen: there it goes nowhere.
"""

import contextlib
import sys
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import transformers
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers import TrainerCallback
from trl import SFTTrainer

import run_sft
from tests.helpers.tools import before
from zero_recipes.config import ds_config
from zero_recipes.engine import attention
from zero_recipes.engine.speed import gradient_copies, module_walks, norms, releases
from zero_recipes.training.trainer import ZeroSFTTrainer

aten = torch.ops.aten
SITE = Path(transformers.__file__).parents[1]
# operators that return numbers, or as many elements as the values say
READING = {aten._local_scalar_dense, aten.nonzero, aten.equal, aten.masked_select, aten.bincount, aten.unique_dim}
READING |= {aten._unique2, aten.unique_consecutive, aten.is_nonzero}
READERS = {torch.Tensor.tolist, torch.Tensor.numpy, torch.Tensor.cpu}  # they leave no operator on a CPU
COPIERS = {torch.tensor, torch.as_tensor}  # of a number, to a device: they wait as well
NO_KERNEL = {aten.empty, aten.empty_like, aten.empty_strided, aten.new_empty, aten.new_empty_strided, aten.detach}


class Costs:
    """Of what runs within `counted`."""

    def __init__(self):
        self.operators = 0
        self.kernels = 0  # without views and empty tensors
        self.collectives: Counter[str] = Counter()
        self.bytes_sent = 0  # inputs of collectives
        self.waits: Counter[str] = Counter()  # by place

    @contextlib.contextmanager
    def counted(self) -> Iterator[None]:
        with _Operators(self), _Calls(self):
            yield

    def wait(self) -> None:
        """Count one at the innermost line that is not torch's."""
        frame = sys._getframe(2)
        while frame.f_back is not None and _is_torchs(frame.f_code.co_filename):
            frame = frame.f_back
        path = Path(frame.f_code.co_filename)
        with contextlib.suppress(ValueError):
            path = path.relative_to(SITE)
        with contextlib.suppress(ValueError):
            path = path.relative_to(Path.cwd())
        self.waits[f"{path}:{frame.f_code.co_name}"] += 1

    def as_dict(self) -> dict[str, Any]:
        return {
            "operators": self.operators,
            "kernels": self.kernels,
            "collectives": sum(self.collectives.values()),
            "bytes_sent": self.bytes_sent,
            "waits": dict(sorted(self.waits.items())),
        }


def _is_torchs(path: str) -> bool:
    return path == __file__ or path.startswith(str(SITE / "torch"))


class _Operators(TorchDispatchMode):
    def __init__(self, costs: Costs):
        super().__init__()
        self.costs = costs

    def __torch_dispatch__(self, operator, types, arguments=(), keywords=None):
        costs, packet = self.costs, operator.overloadpacket
        if operator.namespace == "c10d":
            costs.collectives[packet.__name__] += 1
            tensors = [leaf for leaf in tree_leaves(arguments) if isinstance(leaf, torch.Tensor)]
            costs.bytes_sent += max((tensor.nbytes for tensor in tensors), default=0)
        else:
            costs.operators += 1
            is_in_place = packet is aten.copy_ and arguments[0] is arguments[1]
            costs.kernels += not (operator.is_view or packet in NO_KERNEL or is_in_place)
        by_mask = packet is aten.index and any(
            index is not None and index.dtype == torch.bool for index in arguments[1]
        )
        # a Python number as a tensor, such as DDP's divisor, is no result of the device
        is_number = packet is aten._local_scalar_dense and arguments[0].dtype == torch.float64
        if (packet in READING and not is_number) or by_mask:
            costs.wait()
        return operator(*arguments, **(keywords or {}))


class _Calls(TorchFunctionMode):
    def __init__(self, costs: Costs):
        super().__init__()
        self.costs = costs

    def __torch_function__(self, function, types, arguments=(), keywords=None):
        keywords = keywords or {}
        is_number = not (arguments and isinstance(arguments[0], torch.Tensor))
        copies = function in COPIERS and is_number and keywords.get("device") is not None
        if function in READERS or copies:
            self.costs.wait()
        return function(*arguments, **keywords)


def clocks() -> tuple[float, float]:
    """Seconds on the clock, and of the processor for this process: other work on the machine takes none of those."""
    return time.perf_counter(), time.process_time()


class WatchSteps(TrainerCallback):
    """Counts the last `counted` steps, each from the end of the one before it, and times those before them."""

    def __init__(self, counted: int):
        self.counted = counted
        self.seconds: list[tuple[float, float]] = []  # on the clock, and of the processor
        self.costs: list[Costs] = []
        self.began = (0.0, 0.0)
        self.open = contextlib.ExitStack()

    def on_train_begin(self, args, state, control, **kwargs):
        self.began = clocks()

    def on_step_end(self, args, state, control, **kwargs):
        left = state.max_steps - state.global_step
        self.open.close()
        if left >= self.counted:
            now = clocks()
            self.seconds.append((now[0] - self.began[0], now[1] - self.began[1]))
        elif not left:
            return
        if left <= self.counted:
            self.costs.append(Costs())
            self.open.enter_context(self.costs[-1].counted())
        self.began = clocks()


@contextlib.contextmanager
def as_before(*changes: str) -> Iterator[None]:
    """Steps as they were without some of CHANGES."""
    with contextlib.ExitStack() as undone:
        for change in changes:
            for owner, name, original in CHANGES[change]:
                undone.enter_context(mock.patch.object(owner, name, original))
        yield


CHANGES = {
    "copies": [(ds_config, "_fill_copies", lambda *_: None)],
    "each": [(gradient_copies, "apply", lambda: None)],
    "linear": [(ds_config, "_fill_linear_layers", lambda *_: None)],
    "norm": [(norms, name, lambda: None) for name in ("apply_to_stages_1_and_2", "apply_to_stage_3")],
    "reads": [(ZeroSFTTrainer, name, getattr(SFTTrainer, name)) for name in ("_clip_grad_norm", "_get_grad_norm")],
    "releases": [(releases, "apply", lambda: None)],
    "walks": [(module_walks, "apply", lambda: None)],
    "rows": [(attention, "attend_by_row", lambda *_: None)],
}


def costs_of_steps(argv: list[str], off: list[str] = (), counted: int = 1) -> dict:
    """A run of run_sft.py: seconds of its steps, the costs of the last ones, its losses. `off`: of CHANGES."""
    if "reads" in off:
        argv = [*argv, "--logging_nan_inf_filter", "true"]
    watch = WatchSteps(counted)
    with as_before(*off), before(ZeroSFTTrainer, "train", lambda self, *_: self.add_callback(watch)):
        trainer = run_sft.train(run_sft.read_run(argv))
    costs = [each.as_dict() for each in watch.costs]
    return {"seconds": watch.seconds, "costs": costs, "losses": trainer.stage_metrics.step_losses}
