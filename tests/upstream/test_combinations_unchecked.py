"""Known-bad combinations with the check switched off: they fail as the findings say. What looks bad, and is right."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import pytest
from transformers import AutoTokenizer, LlamaConfig

from tests.helpers import group
from tests.helpers.faults import FAULTS, MARKED, PEFT, argv_of, ds_config, found_in
from tests.helpers.grid import grid
from tests.helpers.tiny import ROOT, write_model, write_recipe, write_rows


def llama_folder(folder: Path, tied: bool) -> str:
    LlamaConfig(
        vocab_size=1031,
        hidden_size=64,
        intermediate_size=101,
        num_hidden_layers=2,
        num_attention_heads=4,
        tie_word_embeddings=tied,
        pad_token_id=1,
        bos_token_id=0,
        eos_token_id=0,
    ).save_pretrained(folder)
    AutoTokenizer.from_pretrained(ROOT / "tiny_world" / "base").save_pretrained(folder)
    return str(folder)


def other_tokenizer(folder: Path) -> str:
    tokenizer = AutoTokenizer.from_pretrained(ROOT / "tiny_world" / "base")
    tokenizer.add_tokens(["<|im_start|>", "<|im_end|>"], special_tokens=True)
    tokenizer.chat_template, tokenizer.eos_token = MARKED, "<|im_end|>"
    tokenizer.save_pretrained(folder)
    return str(folder)


# rule of zero_recipes/checks/options.yaml: what DeepSpeed, transformers or torch ends with
FAILURES = {
    "quantized_communication_on_cpu": "This op had not been implemented on CPU backend",
    "grad_accum_dtype": "NotImplementedError: unsupported mix of model_dtype",
    "best_of_models_only": "can't be used with `save_only_model`",
    "torch_compile": "modified by an inplace operation",
    "managed_accumulation": "not supported with managed_gradient_accumulation=False",
    "gradient_scaling": "pre-scale gradients is not yet supported with ZeRO-2",
    "zenflow": "must be a mapping, not NoneType",
}
EXTRA = {
    "best_of_models_only": {"eval_strategy": "epoch", "save_strategy": "epoch"},
    "torch_compile": {"torch_compile_backend": "aot_eager", "bf16": False},
}
# the first fault of each rule, as (bad, fixed)
CASES = {fault.names: (fault.bad.keys, fault.fixed.keys) for fault in reversed(FAULTS) if fault.bad.keys is not None}
# What Dynamo ends with depends on what its process has compiled before. ZenFlow takes half a minute to end.
IN_THE_GRID = ("torch_compile", "zenflow")


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.grid] if name in IN_THE_GRID else []) for name in FAILURES]
)
def test_with_the_check_off_it_fails(two, tmp_path, name):
    extra = EXTRA.get(name, {})
    if name == "quantized_communication_on_cpu":  # sizes that its quantiser takes
        even = write_model(tmp_path / "even", intermediate=128, vocabulary=1024)
        extra = {"model_name_or_path": str(even)}
    argv = argv_of(tmp_path, **CASES[name][0], **extra)
    with pytest.raises(group.CaseFailed, match=FAILURES[name]):
        two.run("train_unchecked", argv=argv)


def test_gradients_that_are_no_mean(two, tmp_path):
    """Two processes: their sum is twice what the fixed twin has, silently."""
    norms = []
    for case in CASES["summed_gradients"]:
        argv = argv_of(tmp_path, **case, overwrite=True)
        norms.append(two.run("train_unchecked", argv=argv)[0]["metrics"]["grad_norm_history"])
    assert norms[0] == pytest.approx([2 * norm for norm in norms[1]], rel=1e-4)


def test_hpz_with_one_group_gathers_from_everybody_all_the_same(two, tmp_path):
    """The same losses, and a single group of all ranks to gather from."""
    keys = {"dataset_name": str(write_rows(tmp_path / "few", 12))}
    runs = []
    for size in (1, 2):
        argv = argv_of(tmp_path, **keys, deepspeed=ds_config(3, zero_hpz_partition_size=size), overwrite=True)
        runs.append(two.run("train_unchecked", argv=argv)[0])
    assert runs[0]["metrics"]["loss_history"] == runs[1]["metrics"]["loss_history"]
    assert [run["hpz_groups"] for run in runs] == [[[1, 2]], [[1, 2]]]


@pytest.mark.parametrize("kind", [grid("gpt_neox"), "llama with tied embeddings"])
def test_an_embedding_resize_at_stage_3_is_right(two, tmp_path, kind):
    """TRL's clone_chat_template adds tokens. Once a fault of transformers, today the same as at stage 2."""
    from safetensors import safe_open

    keys = {"chat_template_path": other_tokenizer(tmp_path / "other"), "bf16": False, "save_model": True}
    if kind != "gpt_neox":
        keys["model_name_or_path"] = llama_folder(tmp_path / "llama", tied=True)
    losses = []
    for stage in (2, 3):
        argv = argv_of(tmp_path, **keys, deepspeed=ds_config(stage), overwrite=True)
        losses.append(two.run("train", argv=argv)[0]["metrics"]["loss_history"])
        with safe_open(tmp_path / "out" / "model.safetensors", "pt") as saved:
            shapes = [saved.get_slice(key).get_shape() for key in saved.keys() if "embed" in key]  # noqa: SIM118
        assert shapes and all(shape == [1408, 64] for shape in shapes)  # 1382 tokens and two, to a multiple of 64
    assert losses[0] == pytest.approx(losses[1], abs=1e-5)


def test_an_embedding_resize_with_lora(two, tmp_path):
    """It goes wrong with tied embeddings; it is right without."""
    found = partial(found_in, write_recipe(tmp_path))
    runs = {
        (2, True): ("lora_template", "'TrainableTokensWrapper' object has no attribute 'bias'"),
        (2, False): None,
    }
    template = other_tokenizer(tmp_path / "other")
    for (stage, tied), expected in runs.items():
        keys = PEFT | {"chat_template_path": template, "deepspeed": ds_config(stage)}
        keys["model_name_or_path"] = llama_folder(tmp_path / f"llama{tied}", tied)
        said = [code for _, code in found(keys, device="cpu")]
        argv = argv_of(tmp_path, **keys, overwrite=True)
        if expected is None:
            assert said == []
            assert two.run("train", argv=argv)[0]["metrics"]["status"] == "ok"
            continue
        code, error = expected
        assert said == [code]
        with pytest.raises(group.CaseFailed, match=error):
            two.run("train_unchecked", argv=argv)


@pytest.mark.parametrize("streaming", [grid(False), True])
def test_rows_that_do_not_divide_are_right_at_stage_3(two, tmp_path, streaming):
    """accelerate evens the batches out: 5 rows in batches of 2 on two ranks train and evaluate as at stage 2."""
    length = {"max_steps": 4} if streaming else {"max_steps": -1, "num_train_epochs": 2}
    keys = length | {
        "dataset_name": str(write_rows(tmp_path / "five", 5)),
        "dataset_streaming": streaming,
        "eval_strategy": "steps",
        "eval_steps": 2,
        "per_device_eval_batch_size": 2,
        "bf16": False,
    }
    seen = []
    for stage in (2, 3):
        argv = argv_of(tmp_path, **keys, deepspeed=ds_config(stage), overwrite=True)
        metrics = two.run("train", argv=argv)[0]["metrics"]
        seen.append(metrics["loss_history"] + [point["loss"] for point in metrics["eval_history"]])
    assert len(seen[0]) == 6
    assert seen[0] == pytest.approx(seen[1], abs=1e-5)


def test_loaders_that_give_ranks_unequal_numbers_of_batches(tmp_path):
    """Every rank's batches, counted without a launch: 5 rows in batches of 2; two files of 12 and 4 rows."""
    from accelerate.data_loader import BatchSamplerShard, prepare_data_loader
    from datasets import load_dataset
    from torch.utils.data import BatchSampler, DataLoader

    def batches(even: bool) -> list[int]:
        rows = BatchSampler(range(5), 2, drop_last=False)
        return [len(list(BatchSamplerShard(rows, 2, rank, even_batches=even))) for rank in range(2)]

    assert batches(even=False) == [2, 1] and batches(even=True) == [2, 2]

    for number, count in enumerate((12, 4)):
        (tmp_path / f"train-{number}.jsonl").write_text('{"a": 1}\n' * count)
    files = {"train": [str(path) for path in sorted(tmp_path.glob("*.jsonl"))]}
    streamed = []
    for rank in range(2):
        rows = load_dataset("json", data_files=files, streaming=True, split="train")
        loader = prepare_data_loader(
            DataLoader(rows, 2), num_processes=2, process_index=rank, put_on_device=False, dispatch_batches=False
        )
        streamed.append(sum(1 for _ in loader.base_dataloader))
    assert streamed == [6, 2]


@pytest.mark.grid
@pytest.mark.parametrize("name", ["autotp", "even_batches"])
def test_with_the_check_off_ranks_are_lost(tmp_path, monkeypatch, name):
    """Both leave their processes unusable: each in a pair of its own. Uneven batches hang or die, as gloo sees it."""
    monkeypatch.setattr(group, "HANG_SECONDS", 150)
    keys = {"dataset_name": str(write_rows(tmp_path / "five", 5)), "max_steps": -1, "num_train_epochs": 2}
    pair = group.Group(2)
    try:
        if name == "autotp":
            sound = pair.run("train", argv=argv_of(tmp_path, **CASES[name][1]))[0]["metrics"]["loss_history"]
            argv = argv_of(tmp_path, **CASES[name][0], overwrite=True)
            wrong = pair.run("train_unchecked", argv=argv)[0]["metrics"]["loss_history"]
            assert abs(wrong[0] - sound[0]) > 0.1, "AutoTP is right now"
        else:
            argv = argv_of(tmp_path, **keys, **CASES[name][0], deepspeed=ds_config(3))
            with pytest.raises(group.CaseFailed, match=r"hangs|has ended|Connection"):
                pair.run("train_unchecked", argv=argv)
    finally:
        pair.kill()
