"""What `zero-recipes export` writes is the adapter on its base, under the base's names."""

import json
import os
import re
import shutil
import subprocess

import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer, BitsAndBytesConfig, GenerationConfig

from tests.helpers.tiny import ROOT, llama_config, write_llama, write_rows
from zero_recipes.checkpoint.checksums import write_checksums
from zero_recipes.data.forms import alpaca_prompt
from zero_recipes.engine.faults.four_bit_on_cpu import keep_4bit_layout
from zero_recipes.metrics.read_runs import SampleRow
from zero_recipes.tools import export
from zero_recipes.tools.main import main

CHATML = (
    "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\n' + m['content'] + '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)


@pytest.fixture
def adapter(tmp_path):
    """A LoRA adapter with weights of its own beside its base, whose tokenizer has ChatML's tokens."""
    tokenizer = AutoTokenizer.from_pretrained(ROOT / "tiny_world" / "base")
    tokenizer.add_special_tokens({"additional_special_tokens": ["<|im_start|>", "<|im_end|>"]})
    tokenizer.chat_template = CHATML
    base, folder = write_llama(tmp_path / "base"), tmp_path / "lora"
    model = AutoModelForCausalLM.from_pretrained(base)
    model.resize_token_embeddings(len(tokenizer))
    model.save_pretrained(base)
    lora = LoraConfig(r=4, target_modules=["q_proj", "down_proj"], init_lora_weights=False, task_type="CAUSAL_LM")
    get_peft_model(model, lora).save_pretrained(folder)
    for place in (base, folder):
        tokenizer.save_pretrained(place)
    return folder


def test_an_adapter_becomes_a_whole_model(adapter, monkeypatch, capsys):
    monkeypatch.chdir(adapter.parent)
    assert main(["export", "lora"]) == 0
    printed = capsys.readouterr().out
    assert "serve lora-export" in printed and str(adapter.parent) not in printed
    out, base = adapter.with_name("lora-export"), adapter.with_name("base")
    assert load_file(out / "model.safetensors").keys() == load_file(base / "model.safetensors").keys()
    ids = torch.arange(2, 40).reshape(2, 19)
    whole = AutoModelForCausalLM.from_pretrained(out)(ids).logits
    beside = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(base), adapter)(ids).logits
    torch.testing.assert_close(whole, beside, rtol=1e-4, atol=1e-4)
    tokenizer, ends = AutoTokenizer.from_pretrained(out), GenerationConfig.from_pretrained(out).eos_token_id
    assert set(tokenizer.convert_ids_to_tokens(ends)) == {tokenizer.eos_token, "<|im_end|>"}
    assert main(["export", str(adapter)]) == 2 and "ZR902" in capsys.readouterr().err, "nothing is written over"
    assert main(["export", "lora", "--output_dir", "new", "--gguf", "f16"]) == 2
    assert "ZR903" in capsys.readouterr().err and not (adapter.parent / "new").exists()


def test_the_template_of_an_alpaca_model_is_its_prompt(adapter):
    folder, out = adapter.with_name("base"), adapter.with_name("out")
    (folder / "chat_template.jinja").unlink()
    assert main(["export", str(folder), "--dataset_format", "alpaca", "--output_dir", str(out)]) == 0
    tokenizer = AutoTokenizer.from_pretrained(out)
    asked = [{"role": "user", "content": "Name a colour."}]
    assert tokenizer.apply_chat_template(asked, tokenize=False) == alpaca_prompt("Name a colour.")


def test_a_gguf_file_whose_answers_begin_otherwise_is_not_to_be_used(tmp_path, monkeypatch, capsys):
    """A nearly equal token may win later in an answer; at the start of all of them it is another model."""
    expected = {"one": [1, 2, 3], "two": [4, 5, 6]}
    answered = {"near-f16.gguf": [[1, 2, 9], [7, 5, 6]], "far-f16.gguf": [[9, 2, 3], [9, 5, 6]]}
    answered["far-q8_0.gguf"] = answered["far-f16.gguf"]
    monkeypatch.setattr(export, "served_tokens", lambda file, prompts, start: answered[file.name])
    export._compare([tmp_path / "near-f16.gguf", tmp_path / "far-q8_0.gguf"], expected, None)
    assert "near-f16.gguf: 0 of 2 greedy answers match transformers, 1 in their first token" in capsys.readouterr().out
    with pytest.raises(export.NotExported, match="is not to be used"):
        export._compare([tmp_path / "far-f16.gguf"], expected, None)


@pytest.mark.parametrize("stderr, said", [("1 of 2\n\nValueError: no such kind\n", "ValueError: no such kind"),
                                          ("", "nothing")])  # fmt: skip
def test_a_converter_that_fails_is_named_with_what_it_says(adapter, monkeypatch, capsys, stderr, said):
    """llama.cpp's script. The model without it is whole."""
    llama_cpp = adapter.with_name("llama.cpp")
    llama_cpp.mkdir()
    (llama_cpp / export.CONVERTER).write_text("")
    monkeypatch.setattr(export.importlib.util, "find_spec", lambda name: name)  # the packages that it needs
    ended = subprocess.CompletedProcess([], 1, stderr=stderr)
    monkeypatch.setattr(export.subprocess, "run", lambda *_, **__: ended)
    words = ["--gguf", "f16", "--llama_cpp", str(llama_cpp)]
    assert main(["export", str(adapter.with_name("base")), "--dataset_format", "alpaca", *words]) == 1
    printed = capsys.readouterr().err
    assert f"llama.cpp's {export.CONVERTER} failed: {said}. Files written before are complete." in printed
    assert (adapter.with_name("base-export") / "model.safetensors").is_file()


def test_the_prompts_of_the_command_line_count(adapter, monkeypatch):
    taken = []
    monkeypatch.setattr(export, "_merged", lambda model, target, tokenizer, prompt: taken.append(prompt) or model)
    monkeypatch.setattr(export.ask, "load", lambda *_: None)
    monkeypatch.setattr(export.losses, "mean_loss", lambda *_: 0.0)
    monkeypatch.setattr(export, "_agree_on_the_end", lambda *_: (_ for _ in ()).throw(export.NotExported("enough")))
    (adapter / "samples.jsonl").write_text(SampleRow(prompt="of the run", scores_before={}).model_dump_json() + "\n")
    rows = adapter.parent / "mine.jsonl"
    rows.write_text('{"prompt": "of mine"}\n')
    for number, words in enumerate(([], ["--sample_prompts", str(rows)])):
        assert main(["export", str(adapter), "--output_dir", str(adapter.parent / str(number)), *words]) == 1
    assert taken == ["of the run", "of mine"]


@pytest.fixture
def qlora(tmp_path):
    """A QLoRA adapter of a run, on a base whose outliers make its 4-bit weights others."""
    pytest.importorskip("bitsandbytes")
    base, folder, rows = write_llama(tmp_path / "base"), tmp_path / "qlora", write_rows(tmp_path / "rows", count=12)
    model = AutoModelForCausalLM.from_pretrained(base)
    with torch.no_grad():
        for name, p in model.named_parameters():
            if name.endswith("proj.weight"):
                p.mul_(5)[::9, ::11] *= 30
    model.save_pretrained(base)
    AutoTokenizer.from_pretrained(ROOT / "tiny_world" / "base").save_pretrained(base)
    lora = LoraConfig(r=4, target_modules=["q_proj", "down_proj"], init_lora_weights=False, task_type="CAUSAL_LM")
    get_peft_model(model, lora).save_pretrained(folder)
    recipe = {
        "model_name_or_path": str(base),
        "dataset_name": str(rows),
        "dataset_format": "alpaca",
        "dtype": "float32",
    }
    recipe |= {"load_in_4bit": True, "bnb_4bit_quant_type": "nf4", "use_peft": True, "max_length": 64}
    (folder / "recipe.resolved.yaml").write_text(json.dumps(recipe))
    write_checksums(folder)
    return folder


def losses_printed(text: str) -> tuple[float, float]:
    """(of the run's model, of the exported one)."""
    found = re.search(r"loss on 8 rows of the split 'test': ([\d.]+) of the run's model, ([\d.]+) of", text)
    return float(found[1]), float(found[2])


def test_a_qlora_adapter_is_merged_into_what_it_was_trained_on(qlora, capsys):
    """The other merge is another model, and it is said by how much."""
    trained = AutoModelForCausalLM.from_pretrained(
        qlora.with_name("base"),
        dtype=torch.float32,
        quantization_config=BitsAndBytesConfig(
            load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_compute_dtype=torch.float32
        ),
    )
    keep_4bit_layout(trained)
    ids = torch.arange(2, 40)[None]
    expected = PeftModel.from_pretrained(trained, qlora)(ids).logits
    gaps = {}
    for merge in (None, "base"):
        out = qlora.with_name(f"out-{merge}")
        words = ["--merge_into", merge] if merge else []
        assert main(["export", str(qlora), "--output_dir", str(out), *words]) == 0
        printed = capsys.readouterr()
        of_run, exported = losses_printed(printed.out)
        gaps[merge] = abs(exported - of_run)
        assert ("ZR908" in printed.err) == (merge == "base")
        logits = AutoModelForCausalLM.from_pretrained(out)(ids).logits
        is_same = torch.allclose(logits, expected, rtol=1e-3, atol=1e-3)
        assert is_same == (merge is None)
    assert gaps[None] < 1e-3 and gaps["base"] > 0.01


def test_what_was_not_quantized_has_no_such_weights(adapter, capsys):
    assert main(["export", str(adapter), "--merge_into", "dequantized"]) == 2
    assert "ZR907" in capsys.readouterr().err and not adapter.with_name("lora-export").exists()


def test_an_exported_model_with_another_loss_is_not_to_be_used(adapter, monkeypatch, capsys):
    """The files are read back: what is lost in them counts."""
    agree = export._agree_on_the_end

    def spoil(model, *rest):
        agree(model, *rest)
        torch.nn.init.zeros_(model.get_output_embeddings().weight)

    monkeypatch.setattr(export, "_agree_on_the_end", spoil)
    (adapter / "samples.jsonl").write_text(
        SampleRow(prompt="Name a fish.", reference="A fish is in the cave.", scores_before={}).model_dump_json() + "\n"
    )
    assert main(["export", str(adapter)]) == 1
    assert "is not to be used: its loss is" in capsys.readouterr().err


def test_a_head_trained_beside_tied_embeddings_is_kept(tmp_path, capsys):
    torch.manual_seed(0)
    base, folder = tmp_path / "base", tmp_path / "lora"
    AutoModelForCausalLM.from_config(llama_config(tie_word_embeddings=True)).save_pretrained(base)
    AutoTokenizer.from_pretrained(ROOT / "tiny_world" / "base").save_pretrained(base)
    lora = LoraConfig(r=4, target_modules=["q_proj"], modules_to_save=["lm_head"], task_type="CAUSAL_LM")
    tuned = get_peft_model(AutoModelForCausalLM.from_pretrained(base), lora)
    torch.nn.init.normal_(tuned.get_output_embeddings().weight)
    tuned.save_pretrained(folder)
    assert main(["export", str(folder)]) == 0
    ids = torch.arange(2, 40)[None]
    whole = AutoModelForCausalLM.from_pretrained(tmp_path / "lora-export")(ids).logits
    torch.testing.assert_close(whole, tuned(ids).logits, rtol=1e-4, atol=1e-4)


@pytest.mark.grid
def test_gguf_answers_as_transformers(tmp_path, capfd):
    """A GPT-NeoX with a tokenizer of its own, and an adapter of it. LLAMA_CPP: llama.cpp's folder."""
    pytest.importorskip("xllamacpp")
    if "LLAMA_CPP" not in os.environ:
        pytest.skip("LLAMA_CPP names no folder of llama.cpp")
    neox, folder = ROOT / "tiny_world" / "base", tmp_path / "lora"
    lora = LoraConfig(r=4, lora_alpha=0.1, target_modules=["query_key_value", "dense"], init_lora_weights=False)
    get_peft_model(AutoModelForCausalLM.from_pretrained(neox), lora).save_pretrained(folder)
    AutoTokenizer.from_pretrained(neox).save_pretrained(folder)
    for model, kinds in ((shutil.copytree(neox, tmp_path / "neox"), ["f16", "q8_0"]), (folder, ["f16"])):
        rows = [SampleRow(prompt=text, scores_before={}).model_dump_json() for text in ("Name a fish.", "Moss", "It")]
        (model / "samples.jsonl").write_text("\n".join(rows) + "\n")
        assert main(["export", str(model), "--llama_cpp", os.environ["LLAMA_CPP"], "--gguf", *kinds]) == 0
        found = re.findall(r"-(\w+).gguf: (\d) of 3 greedy answers match transformers", capfd.readouterr().out)
        assert [kind for kind, _ in found] == kinds
        # a token that is nearly as likely may win in 16 bits
        assert all(int(equal) >= 2 for kind, equal in found if kind != "q8_0"), found
