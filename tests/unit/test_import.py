"""A file of another trainer as a recipe: the text and the mask of a row are those of the other, made by hand here."""

import json
import re

import pytest
from jinja2 import Template
from transformers import AutoTokenizer

from tests.helpers.bad_data import BASE, ON_CPU, lines
from zero_recipes.config import keys
from zero_recipes.config.accelerate import LAUNCH_KEYS, config_files
from zero_recipes.config.recipe import parse_recipe, read_recipe_file, trl_arguments
from zero_recipes.data.forms import alpaca_prompt
from zero_recipes.data.load import load_tokenizer
from zero_recipes.data.prepare import prepare_rows
from zero_recipes.tools import main as cli
from zero_recipes.tools.import_config import REMARKS, table, translated

TURNS = [("Say 1.", "Word 1."), ("Name a fish.", "The red fish hums.")]
SHAREGPT = {
    "conversations": [{"from": w, "value": t} for pair in TURNS for w, t in zip(("human", "gpt"), pair, strict=True)]
}
ALPACA = {"instruction": "Say 1.", "input": "Now.", "output": "Word 1."}
AXOLOTL = "base_model: MODEL\nlearning_rate: 1e-4\nsequence_len: 256\nbf16: false\ndatasets:\n  - path: rows.jsonl\n"
FACTORY = "model_name_or_path: MODEL\nstage: sft\ndataset: mine\ndataset_dir: .\ncutoff_len: 256\nbf16: false\n"
CHAT = "    type: chat_template\n    field_messages: conversations\nchat_template: "
FORMAT = """    type:
      format: "[INST] {instruction}\\n{input} [/INST]"
      no_input_format: "[INST] {instruction} [/INST]"
      system_format: "{system}\\n"
"""
LLAMA = "<|start_header_id|>{}<|end_header_id|>\n\n{}<|eot_id|>"
CHATML = "<|im_start|>{}\n{}<|im_end|>\n"
DEEPSEEK = "<｜User｜>{}<｜Assistant｜>{}<｜end▁of▁sentence｜>"
GEMMA = "<|turn>{}\n{}<turn|>\n"
QWEN = "You are Qwen, created by Alibaba Cloud. You are a helpful assistant."


def written(form, turns, system=None):
    said = [("system", system)] if system else []
    said += [turn for pair in turns for turn in zip(("user", "assistant"), pair, strict=True)]
    return "".join(form.format(who, text) for who, text in said)


# (the other's file, a row, all of the text, what carries loss)
CASES = {
    "axolotl alpaca": (AXOLOTL + "    type: alpaca\n", ALPACA,
        alpaca_prompt("Say 1.", "Now.") + "Word 1.<|endoftext|>", "Word 1.<|endoftext|>"),
    "axolotl alpaca, all": (AXOLOTL + "    type: alpaca\ntrain_on_inputs: true\n", ALPACA, None,
        alpaca_prompt("Say 1.", "Now.") + "Word 1.<|endoftext|>"),
    "axolotl chat_template": (AXOLOTL + CHAT + "llama3\n",
        SHAREGPT, "<|endoftext|>" + written(LLAMA, TURNS), "Word 1.<|eot_id|>The red fish hums.<|eot_id|>"),
    "axolotl chatml": (AXOLOTL + CHAT + "chatml\n",
        SHAREGPT, written(CHATML, TURNS), "Word 1.<|im_end|>The red fish hums.<|im_end|>"),
    "LLaMA-Factory sharegpt": (FACTORY + "template: llama3\n", SHAREGPT,
        "<|endoftext|>" + written(LLAMA, TURNS), "Word 1.<|eot_id|>The red fish hums.<|eot_id|>"),
    "LLaMA-Factory alpaca": (FACTORY + "template: qwen\n", ALPACA, written(CHATML, [("Say 1.\nNow.", "Word 1.")], QWEN),
        "Word 1.<|im_end|>\n"),
    "LLaMA-Factory thoughts": (FACTORY + "template: qwen3\n", ALPACA, None,
        "<think>\n\n</think>\n\nWord 1.<|im_end|>\n"),
    "LLaMA-Factory train_on_prompt": (FACTORY + "template: qwen3_nothink\ntrain_on_prompt: true\n", SHAREGPT, None,
        written(CHATML, TURNS)),
    "axolotl deepseek_v2": (AXOLOTL + CHAT + "deepseek_v2\n", SHAREGPT,
        "<|endoftext|>" + "".join(DEEPSEEK.format(*turn) for turn in TURNS),
        f"Word 1.{DEEPSEEK[-19:]}The red fish hums.{DEEPSEEK[-19:]}"),
    "axolotl format": (AXOLOTL + FORMAT, ALPACA | {"system": "Be short."},
        "Be short.\n[INST] Say 1.\nNow. [/INST]Word 1.<|endoftext|>", "Word 1.<|endoftext|>"),
    "axolotl format, all": (AXOLOTL + FORMAT + "train_on_inputs: true\n", ALPACA, None,
        "[INST] Say 1.\nNow. [/INST]Word 1.<|endoftext|>"),
    "axolotl qwen3": (AXOLOTL + CHAT + "qwen3\n", SHAREGPT,
        written(CHATML, TURNS).replace("The red", "<think>\n\n</think>\n\nThe red"),
        "Word 1.<|im_end|>The red fish hums.<|im_end|>"),
    "axolotl gemma4": (AXOLOTL + CHAT + "gemma4\n", SHAREGPT,
        "<|endoftext|>" + written(GEMMA, TURNS).replace("assistant", "model"),
        "Word 1.<turn|>The red fish hums.<turn|>"),
    "LLaMA-Factory deepseek": (FACTORY + "template: deepseek\n", SHAREGPT,
        "<|endoftext|>" + "".join(f"User: {asked}\n\nAssistant:{said}{DEEPSEEK[-19:]}" for asked, said in TURNS),
        f"Word 1.{DEEPSEEK[-19:]}The red fish hums.{DEEPSEEK[-19:]}"),
}  # fmt: skip


@pytest.mark.parametrize("name", CASES)
def test_text_and_mask_of_a_row_are_those_of_the_other_trainer(tmp_path, monkeypatch, name):
    theirs, row, text, loss = CASES[name]
    monkeypatch.chdir(tmp_path)
    tokenizer = AutoTokenizer.from_pretrained(BASE)
    tokenizer.bos_token = "<|endoftext|>"
    tokenizer.add_tokens(
        ["<|start_header_id|>", "<|eot_id|>", "<|im_start|>", "<|im_end|>", "<turn|>", "<s>", "</s>", DEEPSEEK[-19:]],
        special_tokens=True,
    )
    tokenizer.save_pretrained("model")
    (tmp_path / "rows.jsonl").write_bytes(lines([row] * 3))
    columns = {"formatting": "sharegpt", "columns": {"messages": "conversations"}} if row is SHAREGPT else {}
    (tmp_path / "dataset_info.json").write_text(json.dumps({"mine": {"file_name": "rows.jsonl"} | columns}))
    (tmp_path / "theirs.yml").write_text(theirs.replace("MODEL", "model"))
    assert cli.main(["import", "theirs.yml", "--output", "mine.yaml"]) == 0
    recipe = parse_recipe(tmp_path / "mine.yaml", read_recipe_file(tmp_path / "mine.yaml"), [])
    settings = recipe.settings.replace(**ON_CPU, output_dir="out", optim="adamw_torch", dtype="float32")
    settings = settings.replace(max_length=1024, packing=False)
    prepared = prepare_rows(settings, trl_arguments(settings, recipe.path).training, load_tokenizer(settings))
    (_, parts), *_ = prepared.shown[1]
    assert "".join(words for words, carries in parts if carries) == loss
    assert text is None or "".join(words for words, _ in parts) == text


@pytest.mark.parametrize(
    "more",
    [
        "rl: dpo\n",
        "quantize_everything: true\n",
        "lr_scheduler: rex\n",
        "chat_template: mine\n",
        "special_tokens: {bos_token: <x>}\n",
        "special_tokens: {additional_special_tokens: [<x>]}\n",
    ],
)
def test_what_has_no_counterpart_is_refused_by_name_unless_it_is_allowed(tmp_path, monkeypatch, capsys, more):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "a.yml").write_text(AXOLOTL + "    type: chat_template\n" + more)
    key = "template" if "template" in more else more.partition(":")[0]
    key += f".{more.partition('{')[2].partition(':')[0]}" if "{" in more else ""
    assert cli.main(["import", "a.yml"]) == 2 and not (tmp_path / "a.recipe.yaml").exists()
    assert f"`{key}` in a.yml has no counterpart" in capsys.readouterr().err
    assert cli.main(["import", "a.yml", "--allow", key]) == 0
    assert f"# training differs: {key}: " in (tmp_path / "a.recipe.yaml").read_text()
    assert cli.main(["import", "a.yml", "--allow", key]) == 2, "it is not written over"


@pytest.fixture
def drafted(tmp_path):
    """What a file of another trainer with this text becomes: (its draft, {key: value} of the recipe)."""
    (tmp_path / "dataset_info.json").write_text('{"mine": {"hf_hub_url": "a/b"}}')

    def of(text: str):
        (tmp_path / "theirs.txt").write_text(text)
        draft = translated(tmp_path / "theirs.txt", tmp_path / "r.yaml")
        return draft, {key: value for key, (value, _) in draft.recipe.items()}

    return of


@pytest.mark.parametrize("source", ["axolotl", "LLaMA-Factory"])
def test_every_key_of_a_table_is_a_key_of_a_recipe(source):
    known, used = {*keys.key_types(), *LAUNCH_KEYS, "env"}, set(table(source)["always"])
    for row in table(source)["keys"].values():
        row = {"to": row} if isinstance(row, str) else row
        assert row.keys() & {"to", "values", "note", "loses", "changes", "code", "within"}, row
        used |= {row["to"]} if "to" in row else {*row.get("within", {})}
        used |= {key for values in [*row.get("values", {}).values(), row.get("sets", {})] for key in values}
    used -= REMARKS
    assert used <= known, used - known
    assert {row["strategy"] for row in table(source)["deepspeed"].values()} <= config_files().keys()


def test_keys_of_axolotl_that_stand_in_blocks_and_its_defaults(drafted):
    more = "fsdp_config: {fsdp_offload_params: true}\nspecial_tokens: {bos_token: <s>, pad_token: <p>}\n"
    text = AXOLOTL + "    type: alpaca\nadapter: lora\nlora_r: 16\nlora_alpha: 8\n" + more
    draft, recipe = drafted(text)
    assert not draft.changes and [*draft.loses] == ["fsdp_config.fsdp_offload_params"]
    assert recipe["accelerate_config"] == "fsdp2.yaml" and recipe["pad_token"] == "<p>"
    said = {"weight_decay": 0.0, "optim": "adamw_torch_fused", "seed": 42, "warmup_steps": 0.03, "long_rows": "drop"}
    assert said.items() <= recipe.items() and recipe["activation_checkpointing"] is False
    assert drafted(text + "load_in_8bit: true\n")[1]["accelerate_config"] == "zero2.yaml"


def rendered(draft, messages, **tokens):
    text = re.sub("{%-? (end)?generation %}", "", draft.files[draft.at.with_suffix(".jinja")])
    return Template(text).render(messages=messages, raise_exception={}.__getitem__, **tokens)


def test_loraplus_has_the_weight_decay_of_the_other_trainer(drafted):
    """axolotl hands PEFT none. LLaMA-Factory gives an embedding's two matrices different rates."""
    keys = "weight_decay: 0.3\nloraplus_lr_ratio: 16\n"
    axolotl, factory = AXOLOTL + "    type: alpaca\nadapter: lora\n" + keys, FACTORY + "template: llama3\n" + keys
    for theirs, decay, changes in (
        (axolotl, 0.0, []),
        (factory, 0.3, []),
        (factory + "lora_target: q_proj,embed_tokens\n", 0.3, ["lora_target"]),
        (factory + "loraplus_lr_embedding: 2e-6\n", 0.3, ["loraplus_lr_embedding"]),
    ):
        draft, recipe = drafted(theirs)
        assert (recipe["loraplus_lr_ratio"], recipe["weight_decay"], [*draft.changes]) == (16.0, decay, changes)


def test_an_optimizer_of_llama_factory_has_its_arguments_and_a_tool_no_turn(drafted):
    draft, recipe = drafted(FACTORY + "template: llama3\nuse_galore: true\ngalore_rank: 4\n")
    with pytest.raises(KeyError, match="role tool"):  # LLaMA-Factory writes it as the user's
        rendered(draft, [{"role": "tool"}])
    assert recipe["optim"] == "galore_adamw" and recipe["optim_target_modules"] == ["attn", "mlp"]
    assert recipe["optim_args"] == "rank=4, update_proj_gap=200, scale=2.0, proj_type=std"


def test_data_of_llama_factory_that_is_on_the_hub(drafted):
    text = FACTORY.replace("dir: .", "dir: REMOTE:llamafactory/demo_data") + "template: qwen\n"
    assert [*drafted(text)[0].changes] == ["dataset"]
    draft, recipe = drafted(text.replace("mine", "identity"))
    assert recipe["datasets"] == [{"path": "llamafactory/demo_data", "name": "identity"}]
    assert not draft.changes and [*draft.loses] == ["dataset_dir"]


@pytest.mark.parametrize(
    ("file", "keys"),
    [
        ("finetuning_type: oft\noft_block_size: 16\n", {"peft_type": "OFT", "oft_block_size": 16}),
    ],
)
def test_adapters_become_a_configuration_of_peft(drafted, file, keys):
    draft, recipe = drafted(FACTORY + "template: llama3\n" + file)
    assert not draft.changes and recipe["peft_config"] == keys
    assert recipe["use_peft"] and recipe["lora_target_modules"] == ["all-linear"]
    assert "lora_r" not in recipe
    assert [*drafted(FACTORY + "template: llama3\npissa_init: true\n")[0].changes] == ["pissa_init"]


def test_the_deepspeed_files_of_other_trainers_are_strategies(drafted, tmp_path):
    """Whether they are there or not. One that was changed is copied, and what is none of them is named."""
    text = AXOLOTL + "    type: alpaca\ndeepspeed: deepspeed_configs/zero2.json\n"
    draft, recipe = drafted(text)
    assert recipe["accelerate_config"] == "zero2_offload.yaml" and "deepspeed" in draft.note and not draft.files
    theirs = {"zero_optimization": {"stage": 2, "offload_optimizer": {"device": "cpu"}}}
    (tmp_path / "deepspeed_configs").mkdir()
    (tmp_path / "deepspeed_configs" / "zero2.json").write_text(json.dumps(theirs))
    assert drafted(text)[1]["accelerate_config"] == "zero2_offload.yaml"
    (tmp_path / "deepspeed_configs" / "zero2.json").write_text('{"zero_optimization": {"stage": 2}}')
    draft, recipe = drafted(text)
    assert recipe["deepspeed"] == str(tmp_path / "zero2.json") and "accelerate_config" not in recipe
    assert "none of zero-recipes' strategies" in draft.note["deepspeed"]
    draft, recipe = drafted(FACTORY + "template: qwen\ndeepspeed: examples/deepspeed/ds_z3_offload_config.json\n")
    assert recipe["accelerate_config"] == "zero3_offload.yaml" and not draft.loses
    draft, recipe = drafted(FACTORY + "template: qwen\ndeepspeed: mine/own.json\n")
    assert "mine/own.json was not found" in draft.loses["deepspeed"] and "accelerate_config" not in recipe


def test_a_plugin_that_is_not_translated_is_named(drafted):
    names = ["liger.LigerPlugin", "kernels.KernelsPlugin", "lm_eval.LMEvalPlugin", "grokfast.GrokfastPlugin"]
    listed = "".join(f"  - axolotl.integrations.{name}\n" for name in names)
    draft, recipe = drafted(AXOLOTL + f"    type: alpaca\nplugins:\n{listed}")
    assert recipe["use_liger_kernel"] is True
    assert [key.rpartition(".")[2] for key in draft.loses] == ["KernelsPlugin", "LMEvalPlugin"]
    assert "grokfast.GrokfastPlugin" in draft.changes["plugins"]


def test_early_stopping_has_a_checkpoint_for_each_evaluation(drafted):
    keys = "eval_steps: 50\nsave_steps: 100\n"
    axolotl = AXOLOTL + "    type: alpaca\nval_set_size: 0.1\nearly_stopping_patience: 2\n" + keys
    factory = FACTORY + "template: qwen\nearly_stopping_steps: 2\nload_best_model_at_end: true\n" + keys
    for theirs in (axolotl, factory):
        draft, recipe = drafted(theirs)
        assert not draft.changes and recipe["early_stopping_patience"] == 2
        assert recipe["load_best_model_at_end"] is True and recipe["save_steps"] == recipe["eval_steps"] == 50
    _, recipe = drafted(factory.replace("true", "false"))
    assert recipe["save_steps"] == 100
    assert "test_split_size" not in drafted(axolotl.replace("size: 0.1", "size: 0"))[1]


@pytest.mark.parametrize("other", ["{instruction} {input}", "{instruction} {{}}", "no field"])
def test_texts_around_an_instruction_that_no_template_can_write_are_refused(drafted, other):
    form = "    type: {field_instruction: q, field_output: a, format: FORMAT, no_input_format: NONE}\n"
    sound = form.replace("FORMAT", "'<{instruction}\n\n{input}>'").replace("NONE", "'<{instruction}>'")
    draft, recipe = drafted(AXOLOTL + sound)
    assert recipe["datasets"][0]["columns"] == {"instruction": "q", "output": "a"}
    asked, answered = {"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Ho"}
    assert rendered(draft, [asked, answered], bos_token="<s>", eos_token="</s>") == "<s><Hi>Ho</s>"
    assert rendered(draft, [asked], bos_token="</s>", eos_token="</s>") == "<Hi>"
    bad = form.replace("FORMAT", f"'{other}'").replace("NONE", "'<{instruction}>'")
    assert [*drafted(AXOLOTL + bad)[0].changes] == ["datasets"]


@pytest.mark.parametrize(
    ("text", "code"), [("a: b: c", "ZR199"), ("learning_rate: 1", "ZR893"), ("swift sft", "ZR893")]
)
def test_a_file_of_no_trainer_is_refused(tmp_path, capsys, text, code):
    (tmp_path / "theirs.yaml").write_text(text)
    assert cli.main(["import", str(tmp_path / "theirs.yaml")]) == 2 and code in capsys.readouterr().err
