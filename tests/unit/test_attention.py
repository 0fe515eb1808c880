"""Flash attention from the hub: what transformers takes for it, what is refused, and what is fetched beforehand.

The package `kernels` and its kernels are stand-ins here: no kernel has run, and only a GPU can run one.
"""

import sys
from types import SimpleNamespace

import pytest
import torch
import transformers
from transformers.integrations import hub_kernels

from tests.helpers import flash_stand_in
from zero_recipes import model as load
from zero_recipes.cli.verbs import fetch_kernel
from zero_recipes.libs.huggingface import attention_name

KERNEL = "kernels-community/flash-attn2"
SIZES = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "vocab_size": 32}


@pytest.fixture
def kernels(monkeypatch, tmp_path):
    """A package `kernels` of a version that transformers takes, with one kernel in its cache; what it was asked for."""
    asked = []

    def install_kernel(repo_id, *, revision, local_files_only=False, backend=None, **_):
        asked.append((repo_id, revision, local_files_only))
        if repo_id != KERNEL:
            raise FileNotFoundError(f"Cannot find a build variant for this system in {repo_id}:\n\nmuch more")
        (tmp_path / "build").mkdir(exist_ok=True)
        (tmp_path / "build" / "flash.so").write_bytes(bytes(2_000_000))
        return tmp_path / "build"

    flash_stand_in.install(monkeypatch)
    monkeypatch.setitem(sys.modules, "kernels", SimpleNamespace(install_kernel=install_kernel))
    return asked


def loaded(attn_implementation: str | None):
    """A small Llama as the recipe's attn_implementation makes it."""
    keys = {"model_name_or_path": "m", "dtype": "float32", "attn_implementation": attn_implementation}
    keys |= {"load_in_4bit": False, "load_in_8bit": False, "model_init_kwargs": None, "trust_remote_code": False}
    arguments = SimpleNamespace(**keys, seed=0, random_weights=True)
    return load.load_model(transformers.LlamaConfig(**SIZES), arguments)


def test_a_kernel_of_the_hub_is_what_was_requested_and_computes_what_sdpa_does(kernels):
    """transformers goes by the kernel's name then, which is not the recipe's; DeepSpeed compares it (ulysses_sp.py)."""
    for requested in ("flash_attention_2", KERNEL):
        assert loaded(requested).config._attn_implementation == KERNEL == attention_name(requested)
    assert attention_name("sdpa") == "sdpa" and attention_name(None) is None
    ids = torch.randint(0, 32, (2, 9), generator=torch.Generator().manual_seed(3))
    torch.testing.assert_close(*(loaded(name).eval()(ids).logits for name in ("sdpa", KERNEL)))


def test_fetch_brings_the_kernel_or_says_why_not(kernels, monkeypatch, capsys):
    def fetched(name):
        fetch_kernel(name)
        return capsys.readouterr().out

    assert fetched("flash_attention_2") == f"{KERNEL}: 2.00 MB\n" and kernels[-1][2] is False
    version = hub_kernels.get_attn_kernel_version(KERNEL)
    assert kernels[-1][:2] == (KERNEL, f"v{version}") and fetched(f"{KERNEL}@abc:forward") and kernels[-1][1] == "abc"
    said = fetched("flash_attention_3")
    assert "vllm-flash-attn3 is not fetched" in said and "build variant" in said
    assert fetched("sdpa") == fetched(None) == ""
