"""Packing and padding-free batches: whether rows that stand in one sequence see each other, and what it costs."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator

from zero_recipes.config.settings import Settings
from zero_recipes.core.findings import Finding, finding
from zero_recipes.libs import attention

# Each set was found by tests/engine/test_packing.py with transformers 5.23: a packed row's loss and gradients against
# those of the row alone. Model types whose packed rows do not see each other:
APART = {"gemma", "gemma2", "gemma3_text", "gpt2", "gpt_neox", "llama", "mistral", "mixtral", "olmo", "olmo2", "phi"}
APART |= {"phi3", "qwen2", "qwen3", "apertus", "arcee", "codegen", "cohere", "cohere2", "ernie4_5", "exaone4"}
APART |= {"gemma4_text", "glm", "glm4", "gpt_bigcode", "gptj", "granite", "granitemoe", "helium", "hunyuan_v1_dense"}
APART |= {"jetmoe", "lfm2", "minimax_m2", "ministral3", "nemotron", "olmo3", "olmoe", "persimmon", "phimoe"}
APART |= {"qwen2_moe", "qwen3_moe", "seed_oss", "smollm3", "starcoder2", "stablelm"}
# ... and those whose packed rows do: they do not hand position_ids to create_causal_mask (masking_utils.py)
WITHOUT_POSITIONS = {"afmoe", "biogpt", "bloom", "falcon", "gpt_oss", "mpt", "opt", "xglm"}
# ... or they carry a state from token to token across the boundaries
RECURRENT = {"falcon_mamba", "lfm3", "mamba", "minimax", "recurrent_gemma", "rwkv", "xlstm"}
LEAKING = WITHOUT_POSITIONS | RECURRENT
# flash attention takes the boundaries from TRL's batch (cu_seq_lens), not from the mask
APART_IN_FLASH = {"afmoe", "biogpt", "gpt_oss", "opt"}
# their convolution keeps packed rows apart by this package's kernel alone (integrations/hub_kernels.py)
CONVOLUTION = "causal_conv1d"
CONVOLVING = {"bailing_hybrid", "kimi_linear", "nemotron_h", "qwen3_5_text", "qwen3_next", "zamba2"}
QUADRATIC = 4096  # tokens of a micro batch from which attention that sdpa computes in vain is a good part of a step


def packing_findings(settings: Settings, model, device: str) -> Iterator[Finding]:
    """`model`: the model's configuration, None where it is not at hand; `device`: "cpu" or "cuda"."""
    packing, strategy = settings.packing, settings.packing_strategy
    if settings.attn_implementation == "flex_attention" and device == "cpu":
        yield finding("ZR462")
    if settings.padding_free and not packing and settings.max_length is not None:
        streamed = settings.dataset_streaming or settings.streaming
        if streamed or (settings.dataset_kwargs or {}).get("skip_prepare_dataset"):
            yield finding("ZR131", what="a stream" if streamed else "skip_prepare_dataset")
    if settings.eval_packing and settings.evaluates and not (packing or settings.padding_free):
        yield finding("ZR569")
    if packing and strategy == "wrapped":
        yield finding("ZR132")
    elif packing or settings.padding_free:
        if model is not None:
            yield from _rows_apart(settings, model.model_type)
        yield from _scores_in_vain(settings)


def _rows_apart(settings: Settings, kind: str) -> Iterator[Finding]:
    what = f"{'packing' if settings.packing else 'padding_free'} with a model of type {kind}"
    off = "Set packing: false and padding_free: false; train_sampling_strategy: group_by_length pads less."
    flash = attention.kernel_of(settings.attn_implementation) is not None
    if kind in LEAKING and not (flash and kind in APART_IN_FLASH):
        why = f"transformers 5.23 (models/{kind}) does not hand position_ids to create_causal_mask"
        if kind in RECURRENT:
            why = f"transformers 5.23 (models/{kind}) carries a state from each token to the next"
        by_flash = " Flash attention keeps them apart, on GPUs." if kind in APART_IN_FLASH else ""
        yield finding("ZR133", what=what, why=why, off=off, by_flash=by_flash)
    elif kind in CONVOLVING and importlib.util.find_spec(CONVOLUTION) is None:
        yield finding(
            "ZR461",
            what=what,
            convolution=CONVOLUTION,
            convolution_2=CONVOLUTION.replace("_", "-"),
            first_off=off[0].lower(),
            off=off[1:],
        )
    elif kind not in APART | APART_IN_FLASH | CONVOLVING:
        yield finding("ZR460", what=what, off=off)


def _scores_in_vain(settings: Settings) -> Iterator[Finding]:
    rows = settings.per_device_train_batch_size
    if settings.attn_implementation not in (None, "sdpa", "eager") or rows == 1:
        return
    if rows * (settings.max_length or 0) >= QUADRATIC:
        fix = f"Set per_device_train_batch_size: 1 and {rows} times the gradient_accumulation_steps"
        if not settings.packing:
            fix = f"Set packing: true, per_device_train_batch_size: 1 and max_length to about {rows} rows"
        yield finding(
            "ZR464",
            what="packing" if settings.packing else "padding_free",
            rows=rows,
            attn_implementation=settings.attn_implementation or "sdpa",
            rows_2=rows * settings.max_length,
            fix=fix,
        )
