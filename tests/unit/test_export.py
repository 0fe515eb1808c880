"""What `zero-recipes export` writes is the adapter on its base, under the base's names."""

import os
import re
import shutil

import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig

from tests.helpers.tiny import ROOT, write_llama
from zero_recipes.data.forms import alpaca_prompt
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


def test_the_prompts_of_the_command_line_count(adapter, monkeypatch):
    taken = []
    monkeypatch.setattr(export, "_merged", lambda model, target, tokenizer, prompt: taken.append(prompt) or model)
    monkeypatch.setattr(export.ask, "load", lambda *_: None)
    monkeypatch.setattr(export, "_agree_on_the_end", lambda *_: (_ for _ in ()).throw(export.NotExported("enough")))
    (adapter / "samples.jsonl").write_text(SampleRow(prompt="of the run", scores_before={}).model_dump_json() + "\n")
    rows = adapter.parent / "mine.jsonl"
    rows.write_text('{"prompt": "of mine"}\n')
    for number, words in enumerate(([], ["--sample_prompts", str(rows)])):
        assert main(["export", str(adapter), "--output_dir", str(adapter.parent / str(number)), *words]) == 1
    assert taken == ["of the run", "of mine"]


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
