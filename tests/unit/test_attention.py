"""Flash attention from the hub: what transformers takes for it, what is refused, and what is fetched beforehand.

The package `kernels` and its kernels are stand-ins here: no kernel has run, and only a GPU can run one.
"""

from __future__ import annotations

import sys
from types import SimpleNamespace

import pytest
import torch
import transformers
from transformers import modeling_utils
from transformers.integrations import hub_kernels

from zero_recipes import model as load
from zero_recipes.core.findings import Refusal
from zero_recipes.data.load import _fetch_kernel
from zero_recipes.libs import attention

KERNEL = "kernels-community/flash-attn2"


@pytest.fixture
def kernels(monkeypatch, tmp_path):
    """A package `kernels` of a version that transformers takes, with one kernel in its cache."""
    asked = []

    def install_kernel(repo_id, *, revision, local_files_only=False, backend=None, **_):
        asked.append((repo_id, revision, local_files_only))
        if repo_id != KERNEL:
            raise FileNotFoundError(f"Cannot find a build variant for this system in {repo_id}:\n\nmuch more")
        (tmp_path / "build").mkdir(exist_ok=True)
        (tmp_path / "build" / "flash.so").write_bytes(b"1234")
        return tmp_path / "build"

    module = SimpleNamespace(flash_attn_func=print, flash_attn_varlen_func=print, flash_attn_with_kvcache=print)
    monkeypatch.setitem(sys.modules, "kernels", SimpleNamespace(install_kernel=install_kernel))
    monkeypatch.setattr(hub_kernels, "get_kernel", lambda *_, **__: module)
    monkeypatch.setattr(attention.flash, "_loaded_implementation", None)  # transformers keeps the last one
    for where in (modeling_utils, hub_kernels, attention.import_utils):
        monkeypatch.setattr(where, "is_kernels_available", lambda *_: True)
    return asked


def tiny_llama() -> transformers.LlamaConfig:
    sizes = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
    return transformers.LlamaConfig(**sizes, vocab_size=32)


def arguments(attn_implementation: str | None):
    model = SimpleNamespace(model_name_or_path="m", dtype="float32", attn_implementation=attn_implementation)
    model.load_in_4bit = model.load_in_8bit = False
    return model, SimpleNamespace(model_init_kwargs=None, trust_remote_code=False, seed=0)


RANDOM = SimpleNamespace(random_weights=True)


@pytest.mark.parametrize("requested", ["flash_attention_2", KERNEL])
def test_a_kernel_of_the_hub_is_what_was_requested(kernels, requested):
    """transformers goes by the kernel's name then, which is not the recipe's."""
    model = load.load_model(tiny_llama(), *arguments(requested), RANDOM)
    assert model.config._attn_implementation == KERNEL == attention.name_in_force(requested)
    assert attention.name_in_force("sdpa") == "sdpa" and attention.name_in_force(None) is None


def test_another_implementation_than_the_kernels_is_still_refused(kernels, monkeypatch):
    monkeypatch.setattr(load, "attention_in_force", lambda model: "kernels-community/vllm-flash-attn3")
    with pytest.raises(Refusal, match=r"flash_attention_2 was requested.*vllm-flash-attn3.*ZR406"):
        load.load_model(tiny_llama(), *arguments("flash_attention_2"), RANDOM)


def test_without_the_package_kernels_it_is_named_with_its_versions():
    for requested in ("flash_attention_2", KERNEL, "flash_attention_3", "somebody/a-kernel@abc:forward"):
        with pytest.raises(Refusal, match=r'(?s)ZR405.*kernels>=[\d.]+,<[\d.]+" \(nothing is compiled\)'):
            load.refuse_missing_attention(requested, "cuda")
    for requested in (None, "sdpa", "eager", "flex_attention"):
        load.refuse_missing_attention(requested, "cuda")


def test_a_kernel_for_gpus_is_refused_on_a_cpu(kernels):
    for requested in ("flash_attention_2", "flash_attention_4", KERNEL, f"{KERNEL}@v3"):
        with pytest.raises(Refusal, match="ZR404"):
            load.refuse_missing_attention(requested, "cpu")
    assert not kernels


def test_a_kernel_that_cannot_be_had_is_found_before_anything_is_loaded(kernels, monkeypatch):
    monkeypatch.setattr(load.constants, "HF_HUB_OFFLINE", True)
    load.refuse_missing_attention("flash_attention_2", "cuda")
    load.refuse_missing_attention(f"{KERNEL}@abc", "cuda")
    version = hub_kernels.get_attn_kernel_version(KERNEL)
    assert kernels == [(KERNEL, f"v{version}", True), (KERNEL, "abc", True)]
    with pytest.raises(Refusal, match=r"(?s)vllm-flash-attn3 cannot be had.*ZR433.*Cannot find a build variant"):
        load.refuse_missing_attention("flash_attention_3", "cuda")


def test_fetch_brings_the_kernel_or_says_why_not(kernels, monkeypatch):
    def fetched(name):
        return _fetch_kernel(SimpleNamespace(attn_implementation=name))

    assert fetched("flash_attention_2") == [(KERNEL, 4)] and kernels[-1][2] is False
    ((said, size),) = fetched("flash_attention_3")
    assert "vllm-flash-attn3 is not fetched" in said and "build variant" in said and size is None
    assert fetched("sdpa") == fetched(None) == []
    monkeypatch.setattr(attention.import_utils, "is_kernels_available", lambda: False)
    ((said, size),) = fetched("flash_attention_2")
    assert 'pip install "kernels>=' in said and size is None


def test_ulysses_takes_the_kernel_by_the_name_that_the_model_will_have(kernels):
    """accelerate asks for the name, DeepSpeed compares it with the model's (ulysses_sp.py)."""
    from accelerate.utils import DeepSpeedSequenceParallelConfig

    name = attention.name_in_force("flash_attention_2")
    taken = DeepSpeedSequenceParallelConfig(sp_seq_length_is_variable=True, sp_attn_implementation=name)
    assert taken.sp_attn_implementation == KERNEL


def test_the_kernel_computes_what_sdpa_does(kernels, monkeypatch):
    """The whole way through transformers with a kernel that is sdpa in disguise: on CPU, in float32."""

    called = []

    def flash_attn_func(query, key, value, dropout_p=0.0, softmax_scale=None, causal=False, window_size=None, **_):
        called.append(causal)
        heads = [each.transpose(1, 2) for each in (query, key, value)]
        kept = torch.nn.functional.scaled_dot_product_attention(*heads, is_causal=causal, scale=softmax_scale)
        return kept.transpose(1, 2)

    module = SimpleNamespace(
        flash_attn_func=flash_attn_func, flash_attn_varlen_func=print, flash_attn_with_kvcache=None
    )
    monkeypatch.setattr(hub_kernels, "get_kernel", lambda *_, **__: module)
    ids = torch.randint(0, 32, (2, 9), generator=torch.Generator().manual_seed(3))
    found = [load.load_model(tiny_llama(), *arguments(name), RANDOM).eval()(ids).logits for name in ("sdpa", KERNEL)]
    torch.testing.assert_close(*found)
    assert called == [True]
