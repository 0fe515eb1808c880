"""Packing: which architectures let packed rows see each other, by their losses and by their gradients."""

import contextlib
from itertools import chain
from unittest import mock

import pytest
import torch
from safetensors.torch import load_file
from transformers import CONFIG_MAPPING, AutoConfig, AutoModelForCausalLM, masking_utils
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
from trl.trainer.sft_trainer import DataCollatorForLanguageModeling

from tests.helpers import flash_stand_in, step_cases
from tests.helpers.seeded import grid
from tests.helpers.tiny import write_recipe, write_rows
from tests.helpers.tools import before
from zero_recipes.engine import attention
from zero_recipes.engine.linear_attention import computed_in_torch, kernels_of
from zero_recipes.model.packed import find_out
from zero_recipes.tools.plan.job import known_models

FLASH = "kernels-community/flash-attn2"
# whose packed rows stay apart; of these two sdpa is not told where rows begin (cu_seq_lens_q)
APART = ["gemma", "gemma2", "gemma3_text", "gpt2", "gpt_neox", "llama", "mistral", "mixtral", "olmo"]
APART += ["olmo2", "phi", "phi3", "qwen2", "qwen3", "apertus", "arcee", "codegen", "cohere"]
APART += ["cohere2", "ernie4_5", "exaone4", "gemma4_text", "glm", "glm4", "gpt_bigcode", "gptj", "granite"]
APART += ["granitemoe", "helium", "hunyuan_v1_dense", "jetmoe", "lfm2", "minimax_m2", "ministral3", "nemotron", "olmo3"]
APART += ["olmoe", "persimmon", "phimoe", "qwen2_moe", "qwen3_moe", "seed_oss", "smollm3", "starcoder2", "stablelm"]
TOLD = {*APART} - {"nemotron", "stablelm"}
# they do not pass position_ids to create_causal_mask (masking_utils.py)
WITHOUT_POSITIONS = ["afmoe", "biogpt", "bloom", "falcon", "gpt_oss", "mpt", "opt", "xglm"]
# of these flash attention takes the boundaries from TRL's batch (cu_seq_lens), not from the mask
APART_IN_FLASH = ["afmoe", "biogpt", "gpt_oss", "opt"]
RECURRENT = ["falcon_mamba", "mamba", "minimax", "recurrent_gemma", "rwkv", "xlstm"]
# their packages keep packed rows apart, and without them transformers refuses a pack
CONVOLVING = ["bailing_hybrid", "kimi_linear", "nemotron_h", "qwen3_5_text", "qwen3_next", "zamba2", "qwen3_5_moe_text"]
CONVOLVING += ["olmo_hybrid", "falcon_h1"]


SIZES = {"vocab_size": 128, "hidden_size": 32, "num_attention_heads": 4, "num_hidden_layers": 2, "pad_token_id": 1}
SIZES |= {"bos_token_id": 0, "eos_token_id": 0}
# by the names that some types have for their sizes
OTHERS = {"num_key_value_heads": 2, "intermediate_size": 48, "head_dim": 8, "ffn_dim": 48, "word_embed_proj_dim": 32}
OTHERS |= dict.fromkeys(("num_experts", "num_local_experts", "n_heads", "n_head", "attention_heads"), 4)
OTHERS |= dict.fromkeys(("n_layer", "n_layers", "num_layers", "num_experts_per_tok", "expansion_ratio"), 2)
OTHERS |= dict.fromkeys(("d_model", "n_embd"), 32) | {"moe_intermediate_size": 16, "n_inner": 48, "rotary_dim": 4}
OTHERS |= {"shared_expert_intermediate_size": 16, "global_head_dim": 8, "hidden_size_per_layer_input": 8}
OTHERS |= {"vocab_size_per_layer_input": 128}


def tiny_model(kind: str, attention: str):
    """Two layers, of two kinds where the type has several. Weights of deviation 0.3: attention matters."""
    usual = CONFIG_MAPPING[kind]()
    names = {*usual.to_dict(), *getattr(usual, "attribute_map", {})}
    keys = {key: value for key, value in (SIZES | OTHERS).items() if key in names}
    for key in ("layer_types", "mlp_layer_types"):
        stored = getattr(usual, "attribute_map", {}).get(key, key)
        if getattr(usual, key, None) and not isinstance(getattr(type(usual), stored, None), property):
            keys[key] = (list(dict.fromkeys(getattr(usual, key)))[:2] * 2)[:2]
    config = CONFIG_MAPPING[kind](**keys)
    model = AutoModelForCausalLM.from_config(config, attn_implementation=attention, dtype=torch.float32).eval()
    torch.manual_seed(0)
    for p in model.parameters():
        if p.dim() > 1:
            torch.nn.init.normal_(p, 0.0, 0.3)
    return model


def gradients(model, rows: list[list[int]], supervised: list[bool]) -> tuple[float, dict[str, torch.Tensor]]:
    """(summed loss, the gradient of each parameter) of rows packed by TRL's collator; a row's loss counts or not."""
    labels = [row if counts else [-100] * len(row) for row, counts in zip(rows, supervised, strict=True)]
    packed = {"input_ids": [*chain(*rows)], "labels": [*chain(*labels)], "seq_lengths": [len(row) for row in rows]}
    batch = DataCollatorForLanguageModeling(pad_token_id=1, padding_free=True)([packed])
    wanted = batch.pop("labels")[0, 1:]
    model.zero_grad()
    logits = model(**batch, use_cache=False).logits[0, :-1]
    loss = torch.nn.functional.cross_entropy(logits, wanted, ignore_index=-100, reduction="sum")
    loss.backward()
    return loss.item(), {n: torch.zeros_like(p) if p.grad is None else p.grad for n, p in model.named_parameters()}


def seen_of_the_row_before(model) -> float:
    """What another row before it changes of a row's loss and of its gradients, in shares of the largest.

    0: the row before is not seen, whatever stands in it, and gets no gradient from this row.
    """
    draw = torch.Generator().manual_seed(1)
    first, other, second = (torch.randint(2, 128, (n,), generator=draw).tolist() for n in (9, 5, 7))
    loss, alone = gradients(model, [second], [True])
    largest = max(gradient.abs().max().item() for gradient in alone.values())
    changes = []
    for earlier in (first, other):
        packed_loss, packed = gradients(model, [earlier, second], [False, True])
        changes.append(abs(packed_loss - loss) / abs(loss))
        changes += [(packed[name] - alone[name]).abs().max().item() / largest for name in alone]
    return max(changes)


def attention_of(kind: str) -> str:
    """sdpa where the architecture has it."""
    try:
        return tiny_model(kind, "sdpa").config._attn_implementation
    except ValueError:
        return "eager"


# one of each kind of attention and layer: plain, fused, sliding windows, experts, convolutions, no rotary embedding
USUAL = ("gpt_neox", "llama", "gemma3_text", "qwen3_moe", "lfm2", "gpt2")


@pytest.mark.parametrize("kind", [kind if kind in USUAL else grid(kind) for kind in APART])
def test_a_packed_row_changes_no_loss_and_no_gradient_of_the_next(kind):
    assert seen_of_the_row_before(tiny_model(kind, attention_of(kind))) < 1e-4


@contextlib.contextmanager
def by_row(kernel=None):
    """Packs are computed row by row within, on CUDA's way by a `kernel`. Yields how often a mask is made."""
    masks = []
    attention.attend_by_row(True, TOLD)
    try:
        with before(masking_utils, "sdpa_mask", lambda **_: masks.append(1)), contextlib.ExitStack() as on_cuda:
            if kernel is not None:
                on_cuda.enter_context(mock.patch.object(attention, "varlen_attn", kernel))
                on_cuda.enter_context(mock.patch.object(attention, "kernel_takes", lambda *_: True))
            yield masks
    finally:
        attention.attend_by_row(False)


@pytest.mark.parametrize("kind", [kind if kind in USUAL else grid(kind) for kind in APART])
def test_on_a_cpu_each_row_of_a_pack_attends_by_itself(kind):
    model, rows = tiny_model(kind, attention_of(kind)), [[5, 6, 7, 8, 9], [10], [11, 12]]
    supervised = [True, False, True]
    if kind == "gemma3_text":  # the first of its two layers does not see the whole row
        model.config.sliding_window = 2
    expected, computed = gradients(model, rows, supervised), []
    with by_row() as masks, before(attention, "attend", lambda query, *_, **__: computed.append(query.shape[2])):
        found = gradients(model, rows, supervised)
    assert found[0] == pytest.approx(expected[0], rel=1e-5)
    torch.testing.assert_close(found[1], expected[1], rtol=1e-3, atol=1e-4)
    is_sdpa = attention_of(kind) == "sdpa"
    by_rows = is_sdpa and kind in TOLD
    assert computed[:3] == ([5, 1, 2] if by_rows else [])
    assert bool(masks) != by_rows


def row_kernel(query, key, value, cu_seq_q, cu_seq_k, max_q, max_k, *, scale, window_size, enable_gqa):
    """torch's varlen_attn, which has no kernel for CPUs. Its arguments: (tokens, heads, size)."""
    assert cu_seq_q.dtype == cu_seq_k.dtype == torch.int32 and max_q == max_k == int(cu_seq_q.diff().max())
    assert enable_gqa or query.shape[1] == key.shape[1]
    assert window_size[1] == 0 and {tensor.stride(-1) for tensor in (query, key, value)} == {1}
    options = {"cu_seqlens_q": cu_seq_q, "softmax_scale": scale, "causal": True, "window_size": window_size}
    return flash_stand_in.flash_attn_varlen_func(query, key, value, **options)


@pytest.mark.parametrize("kind", [kind if kind in USUAL else grid(kind) for kind in sorted(TOLD)])
def test_the_kernel_for_rows_is_given_the_boundaries_and_no_mask(kind):
    """With a kernel of torch's in its place: no GPU has run the real one here."""
    if attention_of(kind) != "sdpa":
        pytest.skip("no sdpa")
    model, rows = tiny_model(kind, "sdpa"), [[5, 6, 7, 8, 9], [10], [11, 12]]
    if getattr(model.config, "sliding_window", None):
        model.config.sliding_window = 2
    expected = gradients(model, rows, [True, False, True])
    with by_row(row_kernel) as masks:
        found = gradients(model, rows, [True, False, True])
        assert seen_of_the_row_before(model) < 1e-4
        alone = gradients(model, [[5, 6, 7, 8, 9]], [True])
    assert not masks
    assert found[0] == pytest.approx(expected[0], rel=1e-5)
    torch.testing.assert_close(found[1], expected[1], rtol=1e-3, atol=1e-4)
    assert alone[0] == pytest.approx(gradients(model, [[5, 6, 7, 8, 9]], [True])[0], rel=1e-5)


@pytest.mark.parametrize("kind", ["llama", "gpt_oss", *map(grid, ("gpt_neox", "gemma2", "afmoe", "biogpt", "opt"))])
def test_flash_attention_is_given_the_boundaries(kind, monkeypatch):
    """With a kernel of torch's in its place: no GPU has run the real one here."""
    flash_stand_in.install(monkeypatch)
    model = tiny_model(kind, FLASH)
    assert "flash-attn" in model.config._attn_implementation  # gpt_oss takes another of them
    assert seen_of_the_row_before(model) < 1e-4
    if kind in APART:
        rows = [[5, 6, 7, 8, 9], [10, 11, 12]]
        plain, found = (gradients(each, rows, [True, True]) for each in (tiny_model(kind, attention_of(kind)), model))
        assert found[0] == pytest.approx(plain[0], rel=1e-5)


LEAKING = [*CONVOLVING, *WITHOUT_POSITIONS, *RECURRENT]


@pytest.mark.parametrize("kind", [kind if kind in ("qwen3_next", "bloom", "mamba") else grid(kind) for kind in LEAKING])
def test_rows_are_not_kept_apart_where_packing_is_refused(kind):
    """By a convolution that needs a package for it, or because the architecture drops the positions."""
    model = tiny_model(kind, "eager")
    if kind in CONVOLVING:
        with pytest.raises(ValueError, match="can't keep packed sequences apart"):
            seen_of_the_row_before(model)
    else:
        assert seen_of_the_row_before(model) > 0.1, f"{kind} no longer leaks"


# what a default leaves out that every config.json has
NEEDED = {"nemotron": {"num_key_value_heads": 8}, "hunyuan_v1_dense": {"head_dim": 128}}
QUICK = ("llama", "gpt2", "stablelm", "bloom", "opt", "mamba", "qwen3_next")


@pytest.mark.parametrize("kind", [kind if kind in QUICK else grid(kind) for kind in APART + LEAKING])
def test_a_small_model_of_the_class_shows_whether_packed_rows_stay_apart(kind):
    config = CONFIG_MAPPING[kind](**NEEDED.get(kind, {}))
    found = find_out(config)
    assert found.are_apart == (kind in APART or kind in CONVOLVING)
    assert bool(found.missing) == (kind in CONVOLVING)
    assert {*found.missing} <= {*found.slow}
    if attention_of(kind) == "sdpa":
        assert bool(found.told) == (kind in TOLD or kind in CONVOLVING)


def test_flash_attention_keeps_rows_apart_that_a_mask_does_not():
    assert find_out(CONFIG_MAPPING["opt"]()).are_apart is False
    assert find_out(CONFIG_MAPPING["opt"](), in_flash=True).are_apart
    assert find_out(CONFIG_MAPPING["bloom"](), in_flash=True).are_apart is False  # it has none


def test_chunks_shorter_than_a_pack_keep_their_mask():
    """Llama 4's layers attend within chunks, which sdpa row by row would take for sliding windows."""
    config = CONFIG_MAPPING["llama4_text"](attention_chunk_size=8192)
    within, across = find_out(config, longest=8192), find_out(config, longest=8193)
    assert within.are_apart and within.told
    assert across.are_apart and not across.told


def test_a_class_that_raises_is_not_known():
    assert find_out(CONFIG_MAPPING["dbrx"]()).are_apart is None


@pytest.mark.grid
@pytest.mark.parametrize("kind", MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)
def test_the_small_model_says_of_every_type_what_its_gradients_say(kind):
    """Of all types of causal models. Another small model, from other sizes, is the witness."""
    found = find_out(CONFIG_MAPPING[kind](**NEEDED.get(kind, {}))) if kind in CONFIG_MAPPING else None
    if found is None or found.are_apart is None:
        pytest.skip("no small model can be made of the type's defaults")
    try:
        model = tiny_model(kind, attention_of(kind))
        with computed_in_torch(kernels_of(model), 16):
            changes = seen_of_the_row_before(model)
    except Exception as error:  # its sizes do not fit each other, or packages are missing
        assert found.missing or "packed sequences" not in str(error)
        pytest.skip(f"no witness: {error}")
    assert found.are_apart == (changes < 1e-3), changes


def one_step(folder, **keys):
    """A recipe of one step of plain gradient descent over 48 rows of 1 to 60 words, each once."""
    keys |= {"optim": "sgd", "learning_rate": 1.0, "lr_scheduler_type": "constant", "max_grad_norm": 1e9}
    keys |= {"bf16": False, "max_steps": 1, "save_model": True, "weight_decay": 0.0}
    return write_recipe(folder, dataset_name=str(write_rows(folder / "few", count=48)), **keys)


def step(group, recipe, out, **keys) -> tuple[dict, dict[str, torch.Tensor]]:
    """(metrics.json, the parameters afterwards). sdpa takes rows apart on every rank where several are one sequence."""
    argv = [str(recipe), "--output_dir", str(out), *(part for key, v in keys.items() for part in (f"--{key}", str(v)))]
    ranks = group.run(step_cases.train_and_see_attention, argv=argv)
    joined = "packing" in keys or "padding_free" in keys
    assert [rank["by_row"] for rank in ranks] == [joined, joined]
    return ranks[0]["metrics"], load_file(out / "model.safetensors")


def assert_same(found, expected) -> None:
    """The same loss, gradient and tokens but for padding."""
    for key in ("loss_history", "grad_norm_history"):
        assert found[0][key] == pytest.approx(expected[0][key], rel=1e-5)
    for key in ("non_padding", "supervised"):
        assert found[0]["tokens"][key] == expected[0]["tokens"][key]
    for name, weights in expected[1].items():
        torch.testing.assert_close(found[1][name], weights, rtol=1e-5, atol=1e-5, msg=name)


def test_padding_free_rows_that_max_length_cuts_have_the_loss_and_the_gradient_of_padded_ones(two, tmp_path):
    keys = {"per_device_train_batch_size": 12, "gradient_accumulation_steps": 2}
    recipe = one_step(tmp_path, max_length=70, attn_implementation="eager", **keys)
    padded = step(two, recipe, tmp_path / "a")
    free = step(two, recipe, tmp_path / "b", padding_free="true")
    whole = step(two, recipe, tmp_path / "c", padding_free="true", max_length=128)
    assert_same(free, padded)
    tokens = free[0]["tokens"]
    assert tokens["all"] == tokens["non_padding"] < 0.9 * padded[0]["tokens"]["all"]
    assert tokens["non_padding"] < whole[0]["tokens"]["non_padding"]
    assert free[0]["max_length"] == padded[0]["max_length"] == 70


def test_packed_rows_have_the_loss_and_the_gradient_of_padded_ones(two, tmp_path):
    """Packed with accumulation against padded in one micro batch a rank."""
    recipe = one_step(tmp_path)
    padded = step(two, recipe, tmp_path / "a", per_device_train_batch_size=48 // 2)
    needed = padded[0]["tokens"]["non_padding"]
    for packs in range(-(-needed // 128), 48):  # the fewest packs that the rows can have, or a few more
        keys = {"packing": "true", "per_device_train_batch_size": 1}
        keys |= {"gradient_accumulation_steps": -(-packs // 2)}
        packed = step(two, recipe, tmp_path / f"b{packs}", **keys)
        if packed[0]["tokens"]["non_padding"] == needed:
            break
    assert_same(packed, padded)
    assert packed[0]["tokens"]["all"] < 0.8 * padded[0]["tokens"]["all"]


def composites() -> list:
    """Known models with a text model of their own inside; each run of the tests takes Qwen3.5-4B."""
    names = {entry["model"] for entry in known_models().values() if "text_config" in entry["config"]}
    return [name if name == "Qwen/Qwen3.5-4B" else grid(name) for name in sorted(names)]


@pytest.mark.parametrize("name", composites())
def test_a_small_model_is_made_of_a_composite_one_whose_towers_are_large(name):
    found = find_out(AutoConfig.for_model(**known_models()[name]["config"]))
    assert found.are_apart
    assert bool(found.missing) == name.startswith("Qwen/Qwen3.")
