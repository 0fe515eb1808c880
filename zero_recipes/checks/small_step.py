"""Whether a model's class takes a step as the run asks for it: padded, in 16 bits, with its adapter. Found by trying.

A small model of the class runs forward and backward, as it is and then as asked. Where only the second raises, the run
would end in its first step, with all weights loaded.
"""

import contextlib
import copy
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from transformers import PretrainedConfig, PreTrainedModel

from zero_recipes.checks.adapter_names import named_modules, tails
from zero_recipes.config.ds_config import quiet
from zero_recipes.config.run import Run
from zero_recipes.config.settings import Settings, loaded_dtype
from zero_recipes.core.findings import Finding, finding, first_line
from zero_recipes.engine.faults.fp32_parameters import fp32_parameters
from zero_recipes.engine.linear_attention import computed_in_torch, kernels_of
from zero_recipes.model.miniature import TOKENS, found_once, miniature, one_thread
from zero_recipes.model.towers import adapter_of

LENGTH = 80  # more tokens than kernels compute at once
PADDING = 15  # tokens
SAME = 1e-4  # of the largest logit; a class that looks at padding moves them by 0.001 and more
NO_KERNEL = "not implemented for"  # torch's words where an operator has no kernel for a dtype on the CPU


def small_step_findings(run: Run) -> Iterator[Finding]:
    """What a small model of the run's class does with padding, and raises in 16 bits or with the run's adapter."""
    if run.config is None:
        return
    settings = run.settings
    is_padded = settings.joined_by is None and settings.per_device_train_batch_size > 1
    tried = try_steps(run.config, settings.trust_remote_code, weights_dtype(run), is_padded)
    if tried is None:
        return
    if tried.sees_padding:
        yield finding("ZR485", kind=tried.kind)
    if tried.error_in_16_bits is not None:
        yield finding("ZR483", kind=tried.kind, dtype=run.precision, error=tried.error_in_16_bits)
    if settings.use_peft:
        yield from _adapter_findings(miniature(run.config, settings.trust_remote_code), settings)


class Tried(NamedTuple):
    """What a small model of a class did."""

    kind: str
    sees_padding: bool
    error_in_16_bits: str | None


@found_once
def try_steps(config: PretrainedConfig, trust_remote_code: bool, dtype: torch.dtype, is_padded: bool) -> Tried | None:
    """Let a small model of a configuration's class take its steps. None where it takes none as it is.

    Args:
        config: of the model itself.
        trust_remote_code: whether code that comes with the model may run.
        dtype: of the weights that compute.
        is_padded: whether rows have padding behind them.
    """
    small = miniature(config, trust_remote_code)
    if small is None or error_of_step(copy.deepcopy(small)) is not None:  # a class may count its calls
        return None
    error = None
    if dtype is not torch.float32:
        raised = error_of_step(in_16_bits(small, dtype))
        if raised is not None and NO_KERNEL not in str(raised):
            error = first_line(raised)
    return Tried(type(small).__name__, is_padded and sees_padding(small), error)


def weights_dtype(run: Run) -> torch.dtype:
    """The dtype of the weights that compute: DeepSpeed converts all of them, autocast none."""
    if run.strategy.is_deepspeed:
        return {"bf16": torch.bfloat16, "fp16": torch.float16}.get(run.precision, torch.float32)
    loaded = getattr(torch, loaded_dtype(run.settings, run.config.dtype), torch.float32)
    return loaded if run.precision == "fp32" else torch.float32


def in_16_bits(model: PreTrainedModel, dtype: torch.dtype) -> PreTrainedModel:
    """A copy of a model with its weights in `dtype`, but for those that its class keeps in fp32.

    Buffers stay in fp32, as DeepSpeed leaves them (0.19.8, runtime/engine.py, `_cast_module_mixed_precision`).
    """
    small = copy.deepcopy(model)
    kept = {name for name, _ in fp32_parameters(small, dtype)}
    for name, parameter in small.named_parameters():
        if name not in kept:
            parameter.data = parameter.data.to(dtype)
    return small


def sees_padding(model: PreTrainedModel) -> bool:
    """Whether a row's logits depend on padding behind it, which the attention mask leaves out."""
    row = torch.tensor([[*TOKENS][:LENGTH]])
    attended = torch.ones_like(row)
    padded = torch.nn.functional.pad(row, (0, PADDING))
    mask = torch.nn.functional.pad(attended, (0, PADDING))
    model.eval()
    with torch.no_grad(), one_thread(), contextlib.suppress(Exception):  # a class may raise anything
        with computed_in_torch(kernels_of(model), LENGTH):
            alone = model(input_ids=row, attention_mask=attended, use_cache=False).logits
        with computed_in_torch(kernels_of(model), LENGTH + PADDING):
            beside = model(input_ids=padded, attention_mask=mask, use_cache=False).logits[:, :LENGTH]
        return not (alone - beside).abs().max() <= SAME * alone.abs().max()
    return False


def error_of_step(model: torch.nn.Module) -> Exception | None:
    """What a model raises in a forward and a backward pass over a row; None where it raises nothing."""
    ids = torch.tensor([[*TOKENS][:LENGTH]])
    model.train()  # some classes compute otherwise in evaluation
    try:
        with one_thread(), computed_in_torch(kernels_of(model), LENGTH):
            logits = model(input_ids=ids, use_cache=False).logits
            if logits.requires_grad:
                logits.float().sum().backward()
    except Exception as error:  # a class may raise anything
        return error
    return None


def _adapter_findings(model: PreTrainedModel, settings: Settings) -> Iterator[Finding]:
    """What a small model raises with the run's adapter."""
    adapter = None
    with contextlib.suppress(Exception):  # what PEFT refuses is reported where TRL's objects are made
        adapter = adapter_of(settings, model)
    if adapter is not None:
        yield from _adapter_that_raises(model, adapter)


def _adapter_that_raises(model: PreTrainedModel, written: Any) -> Iterator[Finding]:
    """An adapter on layers that are called otherwise than a linear layer, by the kinds of modules."""
    error = _error_with(model, written)
    if error is None:
        return
    kept = []
    refused = []
    for kind in tails(named_modules(model, written), 1):
        trial = copy.copy(written)
        trial.target_modules = {kind}
        trial.target_parameters = None
        if _error_with(model, trial) is None:
            kept.append(kind)
        else:
            refused.append(kind)
    if refused and kept:
        yield finding("ZR484", names=", ".join(refused), error=first_line(error), kept=", ".join(kept))


def _error_with(model: PreTrainedModel, adapter: Any) -> Exception | None:
    """What a step with an adapter raises. None, too, where PEFT does not take the adapter: others report that."""
    import peft

    try:
        with quiet():  # PEFT writes into both that it is given
            adapted = peft.get_peft_model(copy.deepcopy(model), copy.deepcopy(adapter))
    except Exception:  # libraries raise whatever they like
        return None
    return error_of_step(adapted)
