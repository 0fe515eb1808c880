"""A file of another trainer as a recipe: the text and the mask of a row are those of the other, made by hand here."""

import json
import re

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st
from jinja2 import Template
from transformers import AutoTokenizer

from tests.helpers.bad_data import BASE, ON_CPU, lines
from zero_recipes.checks.preflight import preflight
from zero_recipes.config import keys
from zero_recipes.config.accelerate import LAUNCH_KEYS, config_files
from zero_recipes.config.read import parse_recipe
from zero_recipes.config.recipe import read_recipe_file
from zero_recipes.config.trl_arguments import trl_arguments
from zero_recipes.core.findings import Refusal
from zero_recipes.data.forms import alpaca_prompt
from zero_recipes.data.load import load_tokenizer
from zero_recipes.data.prepare import prepare_rows
from zero_recipes.tools import main as cli
from zero_recipes.tools.imports.command import translated
from zero_recipes.tools.imports.draft import REMARKS
from zero_recipes.tools.imports.models import table

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


# messages with two names for each part: the file says which is meant
BOTH = {
    "talk": [
        {"speaker": who, "utterance": text, "role": "system", "content": "Wrong.", "value": "Wrong, too."}
        for pair in TURNS
        for who, text in zip(("human", "gpt"), pair, strict=True)
    ]
}
TALK = "    type: chat_template\n    field_messages: talk\n"
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
    "LLaMA-Factory empty thoughts": (FACTORY + "template: qwen3\nenable_thinking: null\n", ALPACA, None,
        "Word 1.<|im_end|>\n"),
    "LLaMA-Factory thoughts kept": (FACTORY + "template: qwen3\nenable_thinking: null\n",
        ALPACA | {"output": "<think>\nHmm.\n</think>\n\nWord 1."}, None,
        "<think>\nHmm.\n</think>\n\nWord 1.<|im_end|>\n"),
    "LLaMA-Factory thoughts removed": (FACTORY + "template: qwen3\nenable_thinking: false\n",
        ALPACA | {"output": "<think>\nHmm.\n</think>\n\nWord 1."},
        written(CHATML, [("Say 1.\nNow.", "<think>\n\n</think>\n\nWord 1.")]), "Word 1.<|im_end|>\n"),
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
    "axolotl message_property_mappings": (AXOLOTL + TALK
        + "    message_property_mappings: {role: speaker, content: utterance}\nchat_template: chatml\n",
        BOTH, written(CHATML, TURNS), "Word 1.<|im_end|>The red fish hums.<|im_end|>"),
    "axolotl message_field": (AXOLOTL + TALK
        + "    message_field_role: speaker\n    message_field_content: utterance\nchat_template: chatml\n",
        BOTH, written(CHATML, TURNS), "Word 1.<|im_end|>The red fish hums.<|im_end|>"),
    "axolotl sharegpt": (AXOLOTL + "    type: sharegpt\n    conversation: chatml\n", SHAREGPT,
        written(CHATML, TURNS), "Word 1.<|im_end|>The red fish hums.<|im_end|>"),
    "LLaMA-Factory tags": (FACTORY + "template: qwen3_nothink\n", BOTH,
        written(CHATML, TURNS), "Word 1.<|im_end|>\nThe red fish hums.<|im_end|>\n"),
    "LLaMA-Factory pt": (FACTORY.replace("sft", "pt") + "packing: false\n", {"instruction": "The red fish hums."},
        "The red fish hums.<|endoftext|>", "The red fish hums.<|endoftext|>"),
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
    if row is BOTH:
        tags = {"role_tag": "speaker", "content_tag": "utterance", "user_tag": "human", "assistant_tag": "gpt"}
        columns = {"formatting": "sharegpt", "columns": {"messages": "talk"}, "tags": tags}
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


# (more of axolotl's file, its key)
OPEN = [
    ("quantize_everything: true\n", "quantize_everything"),
    ("lr_scheduler: rex\n", "lr_scheduler"),
    ("chat_template: mine\n", "chat_template"),
    ("special_tokens: {bos_token: <x>}\n", "special_tokens.bos_token"),
    ("special_tokens: {additional_special_tokens: [<x>]}\n", "special_tokens.additional_special_tokens"),
    ('"quantize: everything\\nuse_cpu": true\n', "quantize: everything use_cpu"),
]


@pytest.mark.parametrize(("more", "key"), OPEN)
def test_a_key_without_counterpart_is_an_open_point_that_check_repeats(tmp_path, monkeypatch, capsys, more, key):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "a.yml").write_text(AXOLOTL + "    type: chat_template\n" + more)
    assert cli.main(["import", "a.yml"]) == 0
    assert f"open point: {key}: " in capsys.readouterr().out
    text = (tmp_path / "a.recipe.yaml").read_text()
    assert f"\n# open point: {key}: " in text
    recipe = parse_recipe(tmp_path / "a.recipe.yaml", read_recipe_file(tmp_path / "a.recipe.yaml"), [])
    [point] = recipe.settings.open_points
    assert point.startswith(f"{key}: ") and "use_cpu" not in recipe.explicit

    assert [found.what for found in warned_of(tmp_path / "a.recipe.yaml")] == [f"open point of the import: {point}"]
    settled = {name: value for name, value in yaml.safe_load(text).items() if name != "open_points"}
    (tmp_path / "a.recipe.yaml").write_text(yaml.safe_dump(settled))
    assert not warned_of(tmp_path / "a.recipe.yaml")
    assert cli.main(["import", "a.yml"]) == 2, "it is not written over"


def warned_of(path):
    """The open points that check and a run name."""
    file = read_recipe_file(path)
    file |= {"model_name_or_path": str(BASE), "use_cpu": True}
    file.pop("chat_template_path", None)
    _, findings = preflight(path, file, [], {}, starts_now=False)
    return [found for found in findings if found.code == "ZR823" and found.level == "warning"]


@pytest.mark.parametrize("name", ["axolotl", "LLaMA-Factory"])
def test_another_kind_of_training_is_refused(tmp_path, monkeypatch, capsys, name):
    monkeypatch.chdir(tmp_path)
    theirs = {"axolotl": AXOLOTL + "rl: dpo\n", "LLaMA-Factory": FACTORY.replace("sft", "dpo")}
    (tmp_path / "a.yml").write_text(theirs[name])
    assert cli.main(["import", "a.yml"]) == 2 and not (tmp_path / "a.recipe.yaml").exists()
    assert "ZR894" in capsys.readouterr().err


@pytest.fixture
def drafted(tmp_path):
    """What a file of another trainer with this text becomes: (its draft, {key: value} of the recipe)."""
    (tmp_path / "dataset_info.json").write_text('{"mine": {"hf_hub_url": "a/b"}}')

    def of(text: str):
        (tmp_path / "theirs.txt").write_text(text)
        draft = translated(tmp_path / "theirs.txt", tmp_path / "r.yaml")
        return draft, {key: line.value for key, line in draft.recipe.items()}

    return of


@pytest.mark.parametrize("source", ["axolotl", "LLaMA-Factory"])
def test_every_key_of_a_table_is_a_key_of_a_recipe(source):
    known, used = {*keys.key_types(), *LAUNCH_KEYS, "env"}, set(table(source)["always"])
    for row in table(source)["keys"].values():
        row = {"to": row} if isinstance(row, str) else row
        assert row.keys() & {"to", "values", "note", "loses", "changes", "refuses", "code", "within"}, row
        used |= {row["to"]} if "to" in row else {*row.get("within", {})}
        used |= {key for values in [*row.get("values", {}).values(), row.get("sets", {})] for key in values}
    used -= set(REMARKS)
    assert used <= known, used - known
    assert {row["strategy"] for row in table(source)["deepspeed"].values()} <= config_files().keys()


def test_keys_of_axolotl_that_stand_in_blocks_and_its_defaults(drafted):
    more = "fsdp_config: {fsdp_offload_params: true}\nspecial_tokens: {bos_token: <s>, pad_token: <p>}\n"
    text = AXOLOTL + "    type: alpaca\nadapter: lora\nlora_r: 16\nlora_alpha: 8\n" + more
    draft, recipe = drafted(text)
    assert not draft.open_points and [*draft.remarks["loses"]] == ["fsdp_config.fsdp_offload_params"]
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
        assert (recipe["loraplus_lr_ratio"], recipe["weight_decay"], [*draft.open_points]) == (16.0, decay, changes)


def test_an_optimizer_of_llama_factory_has_its_arguments_and_a_tool_no_turn(drafted):
    draft, recipe = drafted(FACTORY + "template: llama3\nuse_galore: true\ngalore_rank: 4\n")
    with pytest.raises(KeyError, match="role tool"):  # LLaMA-Factory writes it as the user's
        rendered(draft, [{"role": "tool"}])
    assert recipe["optim"] == "galore_adamw" and recipe["optim_target_modules"] == ["attn", "mlp"]
    assert recipe["optim_args"] == "rank=4, update_proj_gap=200, scale=2.0, proj_type=std"


def test_data_of_llama_factory_that_is_on_the_hub(drafted):
    text = FACTORY.replace("dir: .", "dir: REMOTE:llamafactory/demo_data") + "template: qwen\n"
    assert [*drafted(text)[0].open_points] == ["dataset"]
    draft, recipe = drafted(text.replace("mine", "identity"))
    assert recipe["datasets"] == [{"path": "llamafactory/demo_data", "name": "identity"}]
    assert not draft.open_points and [*draft.remarks["loses"]] == ["dataset_dir"]


@pytest.mark.parametrize(
    ("file", "keys"),
    [
        ("finetuning_type: oft\noft_block_size: 16\n", {"peft_type": "OFT", "oft_block_size": 16}),
    ],
)
def test_adapters_become_a_configuration_of_peft(drafted, file, keys):
    draft, recipe = drafted(FACTORY + "template: llama3\n" + file)
    assert not draft.open_points and recipe["peft_config"] == keys
    assert recipe["use_peft"] and recipe["lora_target_modules"] == ["all-linear"]
    assert "lora_r" not in recipe
    assert [*drafted(FACTORY + "template: llama3\npissa_init: true\n")[0].open_points] == ["pissa_init"]


def test_the_deepspeed_files_of_other_trainers_are_strategies(drafted, tmp_path):
    """Whether they are there or not. One that was changed is copied, and what is none of them is named."""
    text = AXOLOTL + "    type: alpaca\ndeepspeed: deepspeed_configs/zero2.json\n"
    draft, recipe = drafted(text)
    assert (
        recipe["accelerate_config"] == "zero2_offload.yaml" and "deepspeed" in draft.remarks["note"] and not draft.files
    )
    theirs = {"zero_optimization": {"stage": 2, "offload_optimizer": {"device": "cpu"}}}
    (tmp_path / "deepspeed_configs").mkdir()
    (tmp_path / "deepspeed_configs" / "zero2.json").write_text(json.dumps(theirs))
    assert drafted(text)[1]["accelerate_config"] == "zero2_offload.yaml"
    (tmp_path / "deepspeed_configs" / "zero2.json").write_text('{"zero_optimization": {"stage": 2}}')
    draft, recipe = drafted(text)
    assert recipe["deepspeed"] == str(tmp_path / "zero2.json") and "accelerate_config" not in recipe
    assert "none of zero-recipes' strategies" in draft.remarks["note"]["deepspeed"]
    draft, recipe = drafted(FACTORY + "template: qwen\ndeepspeed: examples/deepspeed/ds_z3_offload_config.json\n")
    assert recipe["accelerate_config"] == "zero3_offload.yaml" and not draft.remarks["loses"]
    draft, recipe = drafted(FACTORY + "template: qwen\ndeepspeed: mine/own.json\n")
    assert "mine/own.json was not found" in draft.remarks["loses"]["deepspeed"] and "accelerate_config" not in recipe


def test_a_plugin_that_is_not_translated_is_named(drafted):
    names = ["liger.LigerPlugin", "kernels.KernelsPlugin", "lm_eval.LMEvalPlugin", "grokfast.GrokfastPlugin"]
    listed = "".join(f"  - axolotl.integrations.{name}\n" for name in names)
    draft, recipe = drafted(AXOLOTL + f"    type: alpaca\nplugins:\n{listed}")
    assert recipe["use_liger_kernel"] is True
    assert [key.rpartition(".")[2] for key in draft.remarks["loses"]] == ["KernelsPlugin", "LMEvalPlugin"]
    assert "grokfast.GrokfastPlugin" in draft.open_points["plugins"]


def test_early_stopping_has_a_checkpoint_for_each_evaluation(drafted):
    keys = "eval_steps: 50\nsave_steps: 100\n"
    axolotl = AXOLOTL + "    type: alpaca\nval_set_size: 0.1\nearly_stopping_patience: 2\n" + keys
    factory = FACTORY + "template: qwen\nval_size: 0.1\nearly_stopping_steps: 2\nload_best_model_at_end: true\n" + keys
    for theirs in (axolotl, factory):
        draft, recipe = drafted(theirs)
        assert not draft.open_points and recipe["early_stopping_patience"] == 2
        assert recipe["load_best_model_at_end"] is True and recipe["save_steps"] == recipe["eval_steps"] == 50
    _, recipe = drafted(factory.replace("true", "false"))
    assert recipe["save_steps"] == 100
    for theirs in (axolotl, factory + "eval_strategy: steps\n"):
        draft, recipe = drafted(theirs.replace("size: 0.1", "size: 0"))
        assert draft.open_points and recipe["eval_strategy"] == "no", "there is nothing to evaluate"
        assert not {"test_split_size", "load_best_model_at_end", "early_stopping_patience"} & recipe.keys()


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
    assert [*drafted(AXOLOTL + bad)[0].open_points] == ["datasets"]


@pytest.mark.parametrize(
    ("text", "code"), [("a: b: c", "ZR199"), ("learning_rate: 1", "ZR893"), ("swift sft", "ZR893")]
)
def test_a_file_of_no_trainer_is_refused(tmp_path, capsys, text, code):
    (tmp_path / "theirs.yaml").write_text(text)
    assert cli.main(["import", str(tmp_path / "theirs.yaml")]) == 2 and code in capsys.readouterr().err


@pytest.mark.parametrize("key", ["utterance", "content"])
def test_a_message_without_the_key_that_is_named_is_refused(tmp_path, monkeypatch, key):
    """It would have another one's text."""
    monkeypatch.chdir(tmp_path)
    turn = {"speaker": "human", key: "Say 1."}
    (tmp_path / "rows.jsonl").write_bytes(lines([BOTH, {"talk": [turn, turn | {"speaker": "gpt"}]}]))
    columns = {"messages": "talk", "messages.role": "speaker", "messages.content": "utterance"}
    own = {"model_name_or_path": str(BASE), "chat_template_path": "chatml", "output_dir": "out", "max_length": 256}
    file = own | {"datasets": [{"path": "rows.jsonl", "columns": columns}]}
    (tmp_path / "r.yaml").write_text(yaml.safe_dump(file))
    recipe = parse_recipe(tmp_path / "r.yaml", read_recipe_file(tmp_path / "r.yaml"), [])
    chosen = recipe.settings.replace(**ON_CPU)
    training = trl_arguments(chosen, recipe.path).training
    if key == "utterance":
        assert prepare_rows(chosen, training, load_tokenizer(chosen)).shown
        return
    with pytest.raises(Refusal, match="utterance") as refused:
        prepare_rows(chosen, training, load_tokenizer(chosen))
    assert refused.value.codes == ["ZR524"] and "row 1" in refused.value.what


# each nested key, by its place, with a value that is not the usual one
NESTED = {
    "datasets.0": {"roles_to_train": ["user"], "train_on_eos": "last", "drop_system_message": True, "shards": 4,
        "revision": "main", "message_field_training": "train_on", "field_tools": "functions", "roles": {"user": ["me"]},
        "message_property_mappings": {"content": "utterance"}, "message_field_role": "speaker", "split": "train[:9]",
        "chat_template": "chatml", "field_messages": "talk", "name": "subset", "data_files": "x.jsonl", "unheard": 1},
    "special_tokens": {"bos_token": "<x>", "pad_token": "<p>", "unheard": "<y>"},
    "fsdp_config": {"fsdp_offload_params": True, "activation_checkpointing": True, "unheard": True},
    "bnb_config_kwargs": {"bnb_4bit_quant_type": "fp4", "unheard": True},
    "model_config": {"output_router_logits": True, "unheard": 1},
}  # fmt: skip


@pytest.mark.parametrize(("place", "key"), [(place, key) for place, keys in NESTED.items() for key in keys])
def test_every_nested_key_is_used_or_named(drafted, place, key):
    theirs = yaml.safe_load(AXOLOTL + "    type: chat_template\nchat_template: llama3\nfsdp: [full_shard]\n")
    before, recipe_before = drafted(yaml.safe_dump(theirs))
    outer = theirs["datasets"][0] if place == "datasets.0" else theirs.setdefault(place, {})
    outer[key] = NESTED[place][key]
    after, recipe_after = drafted(yaml.safe_dump(theirs))
    named = [name for kind in REMARKS for name in after.remarks[kind] if name.startswith(f"{place}.{key}")]
    assert named or recipe_before != recipe_after or before.files != after.files
    assert ("unheard" in key) <= bool(named)


@pytest.mark.parametrize("key", ["ranking", "folder", "num_samples", "unheard"])
def test_every_key_of_dataset_info_is_used_or_named(drafted, tmp_path, key):
    draft, _ = drafted(FACTORY + "template: qwen\n")
    assert not any(draft.remarks[kind] for kind in ("changes", "refuses"))
    (tmp_path / "dataset_info.json").write_text(json.dumps({"mine": {"hf_hub_url": "a/b", key: 1}}))
    theirs = FACTORY + "template: qwen\n"
    (tmp_path / "theirs.txt").write_text(theirs)
    draft = translated(tmp_path / "theirs.txt", tmp_path / "r.yaml")
    assert f"dataset.mine.{key}" in draft.remarks["changes"] | draft.remarks["refuses"]


def test_a_file_of_dataset_info_may_be_in_another_folder(drafted, tmp_path):
    for name, path in (("sub/x.jsonl", str(tmp_path / "sub/x.jsonl")), ("/data/x.jsonl", "/data/x.jsonl")):
        info = {"mine": {"file_name": name}}
        (tmp_path / "dataset_info.json").write_text(json.dumps(info))
        (tmp_path / "theirs.txt").write_text(FACTORY + "template: qwen\n")
        draft = translated(tmp_path / "theirs.txt", tmp_path / "r.yaml")
        assert draft.recipe["datasets"].value == [{"path": "json", "data_files": path}]
    draft, recipe = drafted(FACTORY.replace("mine", "one,two") + "template: qwen\nmax_samples: 5\n")
    entries = [{"path": "./one", "split": "train[:5]"}, {"path": "./two", "split": "train[:5]"}]
    assert recipe["datasets"] == entries, "they are no names of the Hub"
    assert "'one'" in draft.open_points["dataset"] and "'two'" in draft.open_points["dataset"]


def test_keys_that_a_recipe_has_are_carried(drafted):
    same = {"hub_strategy": "end", "metric_for_best_model": "eval_loss", "dataloader_prefetch_factor": 2}
    for theirs in (AXOLOTL + "    type: alpaca\n", FACTORY + "template: qwen\n"):
        draft, recipe = drafted(theirs + yaml.safe_dump(same | {"data_seed": 7}))
        assert same.items() <= recipe.items() and recipe["data_seed"] == 7 and not draft.open_points
    _, recipe = drafted(FACTORY + "template: qwen\nlabel_smoothing_factor: 0.1\nmax_length: 9\nhub_token: hf_x\n")
    assert recipe["label_smoothing_factor"] == 0.1 and recipe["max_length"] == 256, "theirs is for generated answers"
    assert "hf_x" not in str(recipe)


def test_numbers_as_text_and_a_ds_config_in_the_file(drafted):
    numbers = "num_epochs: '3'\nsaves_per_epoch: '2'\nlora_r: '8'\nadapter: lora\n"
    more = "deepspeed: {zero_optimization: {stage: 2}}\n"
    draft, recipe = drafted(AXOLOTL + "    type: alpaca\n" + numbers + more)
    assert (recipe["num_train_epochs"], recipe["lora_r"], recipe["save_steps"]) == (3.0, 8, 1 / 6)
    assert recipe["deepspeed"] == {"zero_optimization": {"stage": 2}} and not draft.open_points


# real shapes, for the property below: a whole file of each trainer
WHOLE = {
    "axolotl": AXOLOTL + """    type: chat_template
    message_property_mappings: {role: from, content: value}
    roles: {user: [human], assistant: [gpt]}
  - path: more.jsonl
    type: {format: '{instruction}', no_input_format: '{instruction}', field_output: a}
adapter: lora
lora_r: 8
lora_target_modules: [q_proj]
lora_target_linear: true
plugins: [axolotl.integrations.liger.LigerPlugin]
special_tokens: {pad_token: <p>}
fsdp: [full_shard, auto_wrap]
fsdp_config: {fsdp_offload_params: true}
deepspeed: deepspeed_configs/zero2.json
val_set_size: 0.1
num_epochs: 2
evals_per_epoch: 4
saves_per_epoch: 1
optimizer: adamw_8bit
optim_args: {betas: 1}
lr_scheduler: cosine
cosine_min_lr_ratio: 0.1
warmup_ratio: 0.1
early_stopping_patience: 2
wandb_project: p
gradient_checkpointing_kwargs: {use_reentrant: false}
loraplus_lr_ratio: 16
chat_template: chatml
eval_table_size: 3
""",
    "LLaMA-Factory": FACTORY + """template: qwen
finetuning_type: lora
lora_rank: 8
lora_target: q_proj,v_proj
max_samples: 10
deepspeed: ds_z3_config.json
fsdp: full_shard
quantization_bit: 4
flash_attn: fa2
val_size: 0.1
eval_strategy: steps
warmup_ratio: 0.1
lr_scheduler_kwargs: {a: 1}
use_galore: true
galore_rank: 4
galore_target: all
neat_packing: true
report_to: none
hub_strategy: checkpoint
loraplus_lr_ratio: 16
early_stopping_steps: 2
load_best_model_at_end: true
""",
    "dataset_info": """mine:
  file_name: sub/rows.jsonl
  formatting: sharegpt
  split: train
  columns: {messages: talk, system: before, prompt: instruction}
  tags: {role_tag: from, content_tag: value, user_tag: human, assistant_tag: gpt}
""",
}  # fmt: skip
SCALARS = st.sampled_from(
    ["", "3", "1e-4", "text", "a/b.json", "{x", "\x00", "\ud800", "a\nb: c", "all", "../..", "x" * 300]
)
JUNK = st.recursive(
    st.none() | st.booleans() | st.integers(-2, 10**30) | st.floats() | SCALARS,
    lambda inner: st.lists(inner, max_size=2) | st.dictionaries(SCALARS | st.integers(), inner, max_size=2),
    max_leaves=4,
)


def places_in(value, path=()):
    """Of all keys and items in nested mappings and lists."""
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, inner in items:
        yield (*path, key)
        yield from places_in(inner, (*path, key))


@pytest.mark.parametrize("name", WHOLE)
@settings(max_examples=150, deadline=None)
@given(data=st.data())
def test_no_value_of_any_key_ends_in_a_traceback(tmp_path_factory, name, data):
    """A recipe, or a refusal that names a key that was changed. The recipe is YAML again, its comments comments."""
    theirs = yaml.safe_load(WHOLE[name])
    changed = []
    for _ in range(data.draw(st.integers(1, 2))):
        *outer, last = data.draw(st.sampled_from([*places_in(theirs)]))
        holder = theirs
        for key in outer:
            holder = holder[key]
        if data.draw(st.booleans()):
            holder[last] = data.draw(JUNK)
        else:
            holder[last] = [holder[last]]
        changed += [str(outer[0] if outer else last), str(last)]
    folder = tmp_path_factory.mktemp("junk")
    main, info = (yaml.safe_load(FACTORY), theirs) if name == "dataset_info" else (theirs, {"mine": {}})
    (folder / "dataset_info.json").write_text(json.dumps(info, default=str))
    (folder / "theirs.yml").write_text(yaml.safe_dump(main))
    try:
        draft = translated(folder / "theirs.yml", folder / "r.yaml")
        text = draft.text()
    except Refusal as refused:
        assert set(refused.codes) <= {"ZR822", "ZR893"}
        assert refused.codes == ["ZR893"] or any(key in refused.what for key in changed)
    else:
        read = yaml.safe_load(text)
        assert read.keys() <= draft.recipe.keys() | {"open_points"}
        assert read.get("open_points", []) == [point for point in read.get("open_points", []) if point]


def test_a_mapping_in_the_place_of_a_number_is_refused_by_its_key(tmp_path, capsys):
    (tmp_path / "a.yml").write_text(AXOLOTL + "    type: alpaca\nnum_epochs: {a: 1}\nlora_r: true\nspecial_tokens: 5\n")
    assert cli.main(["import", str(tmp_path / "a.yml"), "--output", str(tmp_path / "r.yaml")]) == 2
    said = capsys.readouterr().err
    assert "ZR822" in said and "`special_tokens`" in said
    (tmp_path / "a.yml").write_text(AXOLOTL + "    type: alpaca\nnum_epochs: {a: 1}\nlora_r: true\n")
    assert cli.main(["import", str(tmp_path / "a.yml"), "--output", str(tmp_path / "r.yaml")]) == 2
    said = capsys.readouterr().err
    assert "`num_epochs`" in said and "`lora_r`" in said
