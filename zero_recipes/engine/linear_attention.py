"""The kernels that layers without softmax attention need: convolutions, gated delta rules, state space models.

transformers 5.23 has each as a function in torch, and calls a package's instead where that is installed
(integrations/hub_kernels.py, `use_kernel_func_from_hub_with_fallback`). In torch they take many times as long, and
refuse packed rows.

Private: the names in the closure of what that decorator returns. No public function says what is missing.
"""

import contextlib
import inspect
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any
from unittest.mock import patch

import torch

DISTRIBUTIONS = {"fla": "flash-linear-attention"}  # others have the package's name
BOUNDARIES = ("cu_seqlens", "seq_idx")
CHUNK = 16  # tokens that they compute at once: the fewer the less memory, with the same result


@dataclass(frozen=True)
class Kernel:
    """A function that transformers takes from a package, or computes in torch where that is missing."""

    module: Any  # Python's, in which layers find it
    name: str  # there
    package: str
    is_installed: bool
    in_torch: Callable

    @property
    def distribution(self) -> str:
        """What pip installs."""
        return DISTRIBUTIONS.get(self.package, self.package.replace("_", "-"))


def kernels_of(model: torch.nn.Module) -> list[Kernel]:
    """The kernels in the code of a model's classes. Whether a layer calls them is another matter."""
    found = []
    for name in sorted({kind.__module__ for module in model.modules() for kind in type(module).__mro__}):
        code = sys.modules.get(name)
        for key, value in list(vars(code).items()) if code else ():
            if not inspect.isfunction(value):
                continue
            outer = inspect.getclosurevars(value).nonlocals
            if "torch_function" in outer and "package" in outer:
                kernel = Kernel(code, key, outer["package"], outer["is_new_implementation"], outer["torch_function"])
                found.append(kernel)
    return found


@dataclass
class KernelCalls:
    """The kernels that a forward has called."""

    called: list[Kernel] = field(default_factory=list)
    with_boundaries: list[Kernel] = field(default_factory=list)  # those that were told where packed rows begin


def missing_packages(kernels: list[Kernel]) -> tuple[str, ...]:
    """The distributions of these that are not installed, each once."""
    return tuple(dict.fromkeys(kernel.distribution for kernel in kernels if not kernel.is_installed))


@contextlib.contextmanager
def computed_in_torch(kernels: list[Kernel], tokens: int) -> Iterator[KernelCalls]:
    """Compute kernels in torch in this block, on any device, packed rows one by one as their packages do.

    `tokens`: of a sequence. No other width of a tensor may be the same.
    """
    calls = KernelCalls()
    with contextlib.ExitStack() as stack:
        for kernel in kernels:
            stack.enter_context(patch.object(kernel.module, kernel.name, _row_by_row(kernel, tokens, calls)))
        yield calls


def _row_by_row(kernel: Kernel, tokens: int, calls: KernelCalls) -> Callable:
    signature = inspect.signature(kernel.in_torch)
    known = signature.parameters

    def compute(*arguments: Any, **keywords: Any) -> Any:
        calls.called.append(kernel)
        lengths = _lengths(keywords)
        keywords = {key: value for key, value in keywords.items() if key in known and key not in BOUNDARIES}
        bound = signature.bind(*arguments, **keywords)
        if "chunk_size" in known:
            bound.arguments["chunk_size"] = CHUNK
        if lengths is None:
            return kernel.in_torch(*bound.args, **bound.kwargs)
        calls.with_boundaries.append(kernel)
        outputs = []
        begin = 0
        for length in lengths:
            row = [_part(value, tokens, begin, length) for value in bound.args]
            of_row = {key: _part(value, tokens, begin, length) for key, value in bound.kwargs.items()}
            outputs.append(kernel.in_torch(*row, **of_row))
            begin += length
        return _joined(outputs)

    return compute


def _lengths(keywords: dict[str, Any]) -> list[int] | None:
    """The lengths of packed rows, in whichever of both forms a kernel is given them. None without."""
    if keywords.get("cu_seqlens") is not None:
        return keywords["cu_seqlens"].diff().tolist()
    if keywords.get("seq_idx") is not None:
        return torch.unique_consecutive(keywords["seq_idx"].flatten(), return_counts=True)[1].tolist()
    return None


def _part(value: Any, tokens: int, begin: int, length: int) -> Any:
    if not isinstance(value, torch.Tensor) or tokens not in value.shape:
        return value
    return value.narrow(value.shape.index(tokens), begin, length)


def _joined(outputs: list[Any]) -> Any:
    """The rows' outputs as one. A state, which has no tokens, is the last row's."""
    first = outputs[0]
    if isinstance(first, tuple):
        return tuple(_joined(list(parts)) for parts in zip(*outputs, strict=True))
    if not isinstance(first, torch.Tensor) or len(outputs) == 1:
        return outputs[-1]
    longer = outputs[-1].shape
    differing = [number for number, size in enumerate(first.shape) if size != longer[number]]
    return torch.cat(outputs, dim=differing[0]) if differing else outputs[-1]
