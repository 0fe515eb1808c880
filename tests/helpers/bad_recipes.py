"""Recipes with one fault each, and their fixed twins: the tests refuse and accept them, docs/codes.md shows them."""

from __future__ import annotations

import os
import shutil
from contextlib import chdir
from pathlib import Path
from typing import Any

from tests.helpers import odd_recipes
from tests.helpers.fault import SOUND_DS_CONFIG, SOUND_RECIPE, TEST_ROWS, Fault, Side, ds, recipe

__all__ = ["FAULTS", "SECTIONS", "SOUND_DS_CONFIG", "SOUND_RECIPE", "Fault", "Side", "findings_of"]

CHAT = ({"messages": [{"role": "user", "content": "Say 1."}, {"role": "assistant", "content": "One."}]},)
MASKED = {"input_ids": [5, 6, 0], "labels": [-100, -100, -100]}
ALPACA = ({"instruction": "Say 1.", "input": "", "output": "One."},)
CHATML = "{% for m in messages %}{{ m['role'] }}: {{ m['content'] }}<|endoftext|>{% endfor %}"
STAGE_3 = {"stage": 3, "stage3_gather_16bit_weights_on_model_save": True}
ACCELERATE = "distributed_type: DEEPSPEED\nnum_processes: 2\ndeepspeed_config:\n  deepspeed_config_file: ds.json\n"
SCHEDULE = {"type": "WarmupLR", "params": {"warmup_min_lr": 0, "warmup_max_lr": "auto", "warmup_type": "linear"}}
LOG_WARMUP = {"type": "WarmupLR", "params": {"warmup_min_lr": 0, "warmup_max_lr": "auto", "warmup_num_steps": 5}}


def schedule(warmup: Any) -> dict[str, Any]:
    return {"scheduler": SCHEDULE | {"params": SCHEDULE["params"] | {"warmup_num_steps": warmup}}}


INLINE = "distributed_type: DEEPSPEED\nnum_processes: 2\ndeepspeed_config:\n"
DDP = "distributed_type: MULTI_GPU\nnum_processes: 2\n"
FSDP_FILE = "distributed_type: FSDP\nnum_processes: 2\nfsdp_config:\n"
FSDP2 = "  fsdp_version: 2\n  fsdp_auto_wrap_policy: TRANSFORMER_BASED_WRAP\n"


def fsdp(name: str, bad: str, fixed: str, code: str, lines: str = "", names: str = "", level: str = "error") -> Fault:
    """A fault in the fsdp_config of an accelerate file."""
    sides = [Side(recipe=lines, accelerate=FSDP_FILE + text) for text in (bad, fixed)]
    return Fault(name, *sides, code, level, names=names)


def launched(
    name: str, bad: str, fixed: str, code: str, level: str = "error", names: str = "", lines: str = ""
) -> Fault:
    """A fault in an accelerate file that names no ds_config."""
    return Fault(name, Side(recipe=lines, accelerate=bad), Side(recipe=lines, accelerate=fixed), code, level, names)


SECTIONS = {
    "The recipe's text": [
        Fault("an empty recipe", Side(whole=""), Side(), "ZR118"),
        Fault("no YAML", Side(whole="max_steps: [1\n"), Side(), "ZR117"),
        Fault("an env block that is no mapping", Side(recipe="env: fast"), Side(recipe="env: {FAST: 1}"), "ZR119"),
        recipe("a key that is no text", "? 5", "seed: 5", "ZR118"),
        recipe("a key that stands twice", "max_steps: 5\nmax_steps: 7", "max_steps: 7", "ZR126"),
        recipe("a misspelt key", "lerning_rate: 1e-4", "learning_rate: 1e-4", "ZR103", names="`lerning_rate`"),
        recipe("a key of the launcher", "num_machines: 2", "num_processes: 2", "ZR102", names="`num_machines`"),
        recipe("a former key: torch_dtype", "torch_dtype: bfloat16", "dtype: bfloat16", "ZR101", names="`torch_dtype`"),
        recipe(
            "a former key: max_seq_length", "max_seq_length: 64", "max_length: 64", "ZR101", names="`max_seq_length`"
        ),
        recipe(
            "a former key: evaluation_strategy",
            'evaluation_strategy: "no"',
            'eval_strategy: "no"',
            "ZR101",
            names="`evaluation_strategy`",
        ),
        recipe("a former key: warmup_ratio", "warmup_ratio: 0.1", "warmup_steps: 0.1", "ZR101", names="`warmup_ratio`"),
        recipe(
            "a former key: overwrite_output_dir",
            "overwrite_output_dir: true",
            "seed: 2",
            "ZR101",
            names="`overwrite_output_dir`",
        ),
        recipe(
            "a former switch",
            "group_by_length: true",
            "train_sampling_strategy: group_by_length",
            "ZR101",
            names="`group_by_length`",
        ),
        recipe(
            "an old name that is still taken",
            "gradient_checkpointing: false",
            "activation_checkpointing: false",
            "ZR104",
            without=("activation_checkpointing",),
            level="warning",
            names="`gradient_checkpointing`",
        ),
        recipe("YAML's no", "save_strategy: no", 'save_strategy: "no"', "ZR106"),
        recipe("a list for a number", "learning_rate: [1e-5]", "learning_rate: 1e-5", "ZR107"),
        recipe("a mapping for a number", "max_steps: {first: 5}", "max_steps: 5", "ZR107"),
        recipe("a number for text", "run_name: 2024", 'run_name: "2024"', "ZR107", names="2024"),
        recipe(
            "a switch for a list",
            "report_to: none\nlabel_names: true",
            "report_to: none",
            "ZR107",
            names="`label_names`",
        ),
        recipe(
            "a mixture that is no list of data sets",
            "datasets: ./rows",
            "datasets: [{path: ./rows}]",
            "ZR107",
            without=("dataset_name",),
        ),
        recipe("a number for a switch", "packing: 3", "packing: false", "ZR107", names="3"),
        recipe("text for a number", "logging_steps: many", "logging_steps: 5", "ZR107", names="'many'"),
        recipe(
            "a key without a value",
            "learning_rate:",
            "learning_rate: 1e-5",
            "ZR107",
            names="`learning_rate` in recipe.yaml:13",
        ),
        recipe("a count below one", "max_length: 0", "max_length: 64", "ZR113", names="`max_length` in recipe.yaml:12"),
        recipe(
            "a choice that is none", "optim: adamw_fast", "optim: adamw_torch", "ZR114", names="`optim` in recipe.yaml"
        ),
        recipe(
            "a packing strategy that is none",
            "packing_strategy: best",
            "packing_strategy: bfd",
            "ZR114",
            names="`packing_strategy`",
        ),
        recipe("an entry of another type", "label_names: [a, 5]", "label_names: [a]", "ZR107", names="`label_names`"),
        recipe(
            "values that do not go together",
            "load_best_model_at_end: true\nsave_strategy: steps",
            "save_strategy: steps",
            "ZR123",
            names="SFTConfig",
        ),
        recipe("ignoring a code that does not exist", "ignore: [ZR999]", "ignore: [ZR608]", "ZR142", names="ZR999"),
        recipe("ignoring what cannot be ignored", "ignore: [ZR608, ZR215]", "ignore: [ZR608]", "ZR143", names="ZR215"),
    ],
    "The command line": [
        Fault(
            "an abbreviated key",
            Side(overrides=("--max_step", "3")),
            Side(overrides=("--max_steps", "3")),
            "ZR103",
            names="`max_step`",
        ),
        Fault(
            "a value without a key",
            Side(overrides=("--max_steps", "3", "4")),
            Side(overrides=("--max_steps", "3")),
            "ZR120",
            names="'4'",
        ),
        Fault(
            "a wrong value",
            Side(overrides=("--max_steps", "many")),
            Side(overrides=("--max_steps", "3")),
            "ZR124",
            names="many",
        ),
    ],
    "Batches, model and data": [
        recipe(
            "a global batch that does not divide",
            "global_batch_size: 7",
            "global_batch_size: 8",
            "ZR121",
            without=("gradient_accumulation_steps",),
            names="global_batch_size 7",
        ),
        recipe(
            "a global batch that contradicts the accumulation",
            "global_batch_size: 16",
            "global_batch_size: 8",
            "ZR122",
            names="gradient_accumulation_steps 2",
        ),
        recipe(
            "a chat template in a folder without one", "chat_template_path: ./rows", "seed: 1", "ZR511", names="./rows"
        ),
        Fault("no model", Side(without=("model_name_or_path",)), Side(), "ZR401"),
        Fault("no data", Side(without=("dataset_name",)), Side(), "ZR504"),
        recipe("a model that is not there", "model_name_or_path: ./modle", "model_name_or_path: ./model", "ZR403"),
        recipe("data that is not there", "dataset_name: ./row", "dataset_name: ./rows", "ZR506"),
        recipe(
            "a split that is not there",
            "dataset_train_split: training",
            "dataset_train_split: train",
            "ZR507",
            names="'training'",
        ),
        recipe("an evaluation without a split", "eval_strategy: steps", 'eval_strategy: "no"', "ZR507", names="'test'"),
        recipe("no Alpaca columns", "dataset_format: alpaca", "seed: 1", "ZR508", names="prompt"),
        recipe(
            "Alpaca's columns unnamed", "seed: 1", "dataset_format: alpaca", "ZR508", rows=ALPACA, names="instruction"
        ),
        Fault(
            "as many sample prompts as rows of a split that is missing",
            Side(recipe="sample_prompts: 1"),
            Side(recipe="sample_prompts: 1", files=TEST_ROWS),
            "ZR516",
        ),
        recipe(
            "sample prompts from no split", "sample_prompts: 2", "sample_prompts: [Say it.]", "ZR516", names="'test'"
        ),
        recipe("sample prompts from no file", "sample_prompts: p.jsonl", "sample_prompts: [a]", "ZR517"),
        Fault(
            "a sample prompt that is cut off",
            Side(recipe="sample_prompts: p.jsonl", files={"p.jsonl": '\n{"prompt": "a", "comple'}),
            Side(recipe="sample_prompts: p.jsonl", files={"p.jsonl": '\n{"prompt": "a\u2028", "completion": ""}'}),
            "ZR517",
            names="p.jsonl",
        ),
        Fault(
            "a sample prompt that is none",
            Side(recipe="sample_prompts: p.jsonl", files={"p.jsonl": '["a"]'}),
            Side(recipe="sample_prompts: p.jsonl", files={"p.jsonl": '{"prompt": "a"}'}),
            "ZR519",
            names="row 0 of p.jsonl",
        ),
        recipe(
            "sample prompts without text", "sample_prompts: [a, null]", "sample_prompts: [a, 5]", "ZR519", names="row 1"
        ),
        Fault(
            "half of a surrogate pair in a sample prompt",
            Side(recipe="sample_prompts: p.jsonl", files={"p.jsonl": '{"prompt": "a", "completion": "\\ud800"}'}),
            Side(
                recipe="sample_prompts: p.jsonl", files={"p.jsonl": '{"prompt": "a", "completion": "\\ud83d\\ude00"}'}
            ),
            "ZR519",
            names="row 0 of p.jsonl",
        ),
        Fault(
            "a sample prompt without its columns",
            Side(recipe="sample_prompts: p.jsonl", files={"p.jsonl": '{"question": "a"}'}),
            Side(recipe="sample_prompts: p.jsonl", files={"p.jsonl": '{"prompt": "a", "completion": "b"}'}),
            "ZR519",
            names="row 0 of p.jsonl",
        ),
        Fault(
            "a row without an answer",
            Side(rows=({"input_ids": [5, 6, 0], "labels": [5, 6, 0]}, MASKED)),
            Side(rows=({"input_ids": [5, 6, 0], "labels": [5, 6, 0]},)),
            "ZR512",
            names="the first is row 1",
        ),
        recipe("rows cut before their answers", "max_length: 2", "max_length: 64", "ZR513"),
        Fault(
            "an answer that does not learn to end",
            Side(
                rows=CHAT,
                recipe="chat_template_path: c.jinja",
                files={"c.jinja": CHATML.replace("<|endoftext|>", "\n")},
            ),
            Side(rows=CHAT, recipe="chat_template_path: c.jinja", files={"c.jinja": CHATML}),
            "ZR514",
            "warning",
            names="<|endoftext|>",
        ),
        Fault(
            "a chat template that is not there",
            Side(recipe="chat_template_path: chat.jinja"),
            Side(recipe="chat_template_path: c.jinja", files={"c.jinja": CHATML}),
            "ZR511",
            names="chat.jinja",
        ),
        recipe(
            "an unknown end of text", "eos_token: <|im_end|>", "eos_token: <|endoftext|>", "ZR503", names="<|im_end|>"
        ),
        recipe("padding with the end of text", "pad_token: <|endoftext|>", "pad_token: <|padding|>", "ZR502"),
        recipe("unknown padding", "pad_token: <|pad|>", "pad_token: <|padding|>", "ZR503", names="<|pad|>"),
        recipe(
            "flash attention on a CPU",
            "attn_implementation: flash_attention_2",
            "attn_implementation: sdpa",
            "ZR405",
            names="flash_attention_2",
        ),
    ],
    "The output folder": [
        recipe("an output folder that is a file", "output_dir: recipe.yaml", "output_dir: out", "ZR748"),
        Fault(
            "to resume and to overwrite",
            Side(overrides=("--resume_from_checkpoint", "true", "--overwrite", "true")),
            Side(overrides=("--resume_from_checkpoint", "true")),
            "ZR703",
        ),
        Fault(
            "a folder that holds an earlier run",
            Side(files={"out/metrics.json": '{"status": "ok"}'}),
            Side(files={"out/metrics.json": '{"status": "ok"}'}, overrides=("--overwrite", "true")),
            "ZR702",
            names="metrics.json",
        ),
        recipe(
            "a checkpoint that is not there",
            "resume_from_checkpoint: out/checkpoint-5",
            "resume_from_checkpoint: true",
            "ZR707",
        ),
    ],
    "The DeepSpeed configuration": [
        ds(
            "an old offload key beside the new one",
            {"zero_optimization": STAGE_3 | {"offload_param": {"device": "cpu"}, "cpu_offload_param": True}},
            {"zero_optimization": STAGE_3},
            "ZR212",
            names="zero_optimization",
        ),
        recipe("a ds_config that is not there", "deepspeed: zero9.json", "deepspeed: ds.json", "ZR202", ds={}),
        ds("comments in JSON", '{"zero_optimization": {"stage": 2}} // two', {}, "ZR203"),
        ds("a ds_config that is no mapping", "[2]", {}, "ZR203"),
        ds(
            "a stage that is none",
            {"zero_optimization": {"stage": 5}},
            {},
            "ZR211",
            names="zero_optimization.stage in ds.json is 5",
        ),
        ds(
            "an odd bucket",
            {"zero_optimization": {"stage": 2, "allgather_bucket_size": 500_001}},
            {"zero_optimization": {"stage": 2, "allgather_bucket_size": 500_002}},
            "ZR266",
            names="500001",
        ),
        ds(
            "layers that nobody wraps",
            {"data_efficiency": {"enabled": True, "data_routing": {"enabled": True}}},
            {"data_efficiency": {"enabled": True, "data_routing": {"enabled": False}}},
            "ZR267",
        ),
        ds(
            "a bucket larger than the machine",
            {"zero_optimization": {"stage": 2, "reduce_bucket_size": 10**15}},
            {"zero_optimization": {"stage": 2, "reduce_bucket_size": 10**6}},
            "ZR265",
            lines="use_cpu: true",
            names="1e+15 elements",
        ),
        ds("a stage left to others", {"zero_optimization": {"stage": "auto"}}, {}, "ZR261", names="'auto'"),
        ds(
            "a misspelt ZeRO key",
            {"zero_optimization": {"stge": 2}},
            {},
            "ZR211",
            names="zero_optimization.stge in ds.json",
        ),
        ds(
            "a block that is no mapping",
            {"bf16": True},
            {"bf16": {"enabled": True}},
            "ZR208",
            names="bf16 in ds.json is True",
        ),
        ds("no zero_optimization", {"zero_optimization": None}, {}, "ZR213", names="zero_optimization"),
        ds(
            "no micro batch",
            {"train_micro_batch_size_per_gpu": None, "train_batch_size": None},
            {},
            "ZR213",
            names="train_micro_batch_size_per_gpu",
        ),
        ds("no accumulation", {"gradient_accumulation_steps": None}, {}, "ZR213", names="gradient_accumulation_steps"),
        ds(
            "no clipping",
            {"gradient_clipping": None},
            {},
            "ZR213",
            lines="max_grad_norm: 0.5",
            names="gradient_clipping",
        ),
        ds(
            "another global batch",
            {"train_batch_size": 128},
            {"train_batch_size": "auto"},
            "ZR214",
            names="train_batch_size=128",
        ),
        ds(
            "another micro batch",
            {"train_micro_batch_size_per_gpu": 16},
            {},
            "ZR214",
            names="train_micro_batch_size_per_gpu=16",
        ),
        ds(
            "another accumulation",
            {"gradient_accumulation_steps": 4},
            {},
            "ZR214",
            names="gradient_accumulation_steps=4",
        ),
        ds(
            "another clipping",
            {"gradient_clipping": 0.3},
            {"gradient_clipping": 1.0},
            "ZR214",
            names="gradient_clipping=0.3",
        ),
        ds(
            "fp16 beside bf16",
            {"fp16": {"enabled": True}},
            {"fp16": {"enabled": "auto"}},
            "ZR214",
            names="fp16.enabled=True",
        ),
        ds(
            "another learning rate",
            {"optimizer": {"type": "AdamW", "params": {"lr": 0.5, "torch_adam": True}}},
            {"optimizer": {"type": "AdamW", "params": {"lr": "auto", "torch_adam": True}}},
            "ZR214",
            names="optimizer.params.lr=0.5",
        ),
        Fault(
            "a warm-up longer than the run",
            Side(ds=schedule(1000), recipe="warmup_steps: 1000"),
            Side(ds=schedule(5), recipe="warmup_steps: 5"),
            "ZR217",
            names="warmup_num_steps 1000",
        ),
        ds(
            "another warm-up than the recipe's",
            schedule(3),
            schedule(5),
            "ZR264",
            lines="warmup_steps: 5",
            names="warmup_num_steps=3",
        ),
        ds(
            "a misspelt parameter of the optimizer",
            {"optimizer": {"type": "AdamW", "params": {"lr": "auto", "btas": [0.9, 0.999]}}},
            {"optimizer": {"type": "AdamW", "params": {"lr": "auto", "betas": [0.9, 0.999]}}},
            "ZR262",
            names="btas",
        ),
        ds(
            "a schedule that DeepSpeed does not have",
            {"scheduler": SCHEDULE | {"type": "WarmUpLR"}},
            schedule("auto"),
            "ZR263",
            names="WarmUpLR",
        ),
        ds(
            "a stage 3 that saves nothing",
            {"zero_optimization": {"stage": 3}},
            {"zero_optimization": STAGE_3},
            "ZR206",
            lines="save_model: true",
            names="stage3_gather_16bit_weights_on_model_save",
        ),
        ds(
            "a stage 3 whose gather nobody decides",
            {"zero_optimization": STAGE_3 | {"stage3_gather_16bit_weights_on_model_save": "auto"}},
            {"zero_optimization": {"stage": 3, "gather_16bit_weights_on_model_save": True}},
            "ZR259",
            lines="save_model: true",
            names='"auto"',
        ),
        ds(
            "a block that DeepSpeed has removed", {"nebula": {"enabled": False}}, {}, "ZR256", names="nebula in ds.json"
        ),
        ds(
            "fp16's keys in bf16",
            {"bf16": {"enabled": "auto", "loss_scale": 0, "hysteresis": 2}},
            {"bf16": {"enabled": "auto"}},
            "ZR257",
            names="bf16.loss_scale, bf16.hysteresis",
        ),
        ds(
            "a value that DeepSpeed refuses",
            {"fp16": {"enabled": "auto", "min_loss_scale": 1e-10}},
            {"fp16": {"enabled": "auto", "min_loss_scale": 1}},
            "ZR260",
            names="fp16.min_loss_scale in ds.json is 1e-10",
        ),
        ds(
            "an auto that nobody fills in",
            {"communication_data_type": "auto"},
            {"communication_data_type": "fp32", "steps_per_print": 1e5},
            "ZR258",
            names="communication_data_type",
        ),
        ds(
            "a block that does nothing",
            {"activation_checkpointing": {}},
            {},
            "ZR218",
            "warning",
        ),
        ds(
            "a key that does nothing",
            {"aio": {"thread_count": 4}},
            {"aio": {"intra_op_parallelism": 4}},
            "ZR219",
            "warning",
        ),
        ds(
            "a warm-up along a logarithm",
            {"scheduler": LOG_WARMUP},
            schedule(5),
            "ZR216",
            "warning",
            lines="warmup_steps: 5",
            names="WarmupLR in ds.json",
        ),
        ds("an unknown block", {"gradient_cliping": 1.0}, {}, "ZR220", "warning", names="gradient_cliping"),
        recipe("fp16 on a CPU", "fp16: true\nbf16: false", "bf16: true", "ZR215", ds={"fp16": {"enabled": "auto"}}),
    ],
    "The launcher": [
        Fault(
            "two ds_configs",
            Side(recipe="deepspeed: other.json", files={"other.json": "{}"}, ds={}, accelerate=ACCELERATE),
            Side(ds={}, accelerate=ACCELERATE),
            "ZR201",
        ),
        launched("an inline stage that is none", INLINE + "  zero_stage: two\n", INLINE + "  zero_stage: 2\n", "ZR205"),
        launched(
            "an inline stage 3 that saves nothing",
            INLINE + "  zero_stage: 3\n",
            INLINE + "  zero_stage: 3\n  zero3_save_16bit_model: true\n",
            "ZR206",
            lines="save_model: true",
        ),
        launched(
            "another accumulation inline",
            INLINE + "  zero_stage: 2\n  gradient_accumulation_steps: 1\n",
            INLINE + "  zero_stage: 2\n  gradient_accumulation_steps: 2\n",
            "ZR214",
            names="gradient_accumulation_steps=1",
        ),
        launched("mpirun", DDP + "mpirun_config:\n  mpirun_hostfile: hosts\n", DDP, "ZR331"),
        launched(
            "machines started by pdsh without a list of them",
            INLINE + "  zero_stage: 2\nnum_machines: 2\n",
            INLINE + "  zero_stage: 2\n  deepspeed_multinode_launcher: standard\nnum_machines: 2\n",
            "ZR335",
            names="2 machines",
        ),
        launched(
            "an address that leads nowhere",
            DDP + "num_machines: 2\nmain_process_ip: <MAIN IP>\n",
            DDP + "num_machines: 2\nmain_process_ip: 192.0.2.1\n",
            "ZR336",
            names="<MAIN IP>",
        ),
        launched(
            "machines that meet themselves",
            DDP + "num_machines: 2\nmain_process_ip: 127.0.0.1\n",
            DDP + "num_machines: 2\nmain_process_ip: 192.0.2.1\n",
            "ZR336",
            names="127.0.0.1",
        ),
        launched(
            "bf16 by the launcher alone",
            DDP + "mixed_precision: bf16\n",
            DDP,
            "ZR339",
            lines="bf16: false",
            names="mixed_precision bf16",
        ),
        launched(
            "fp16 by the launcher alone",
            DDP + "mixed_precision: fp16\n",
            DDP + "mixed_precision: bf16\n",
            "ZR339",
            "warning",
            names="mixed_precision fp16",
        ),
        launched(
            "several processes of which one starts",
            DDP.replace("MULTI_GPU", '"NO"'),
            DDP,
            "ZR340",
            "warning",
        ),
        Fault(
            "two precisions",
            Side(ds={}, accelerate=ACCELERATE + "mixed_precision: bf16\n"),
            Side(ds={}, accelerate=ACCELERATE),
            "ZR303",
            names="mixed_precision beside",
        ),
        Fault(
            "an inline stage beside a ds_config",
            Side(ds={}, accelerate=ACCELERATE + "  zero_stage: 3\n"),
            Side(ds={}, accelerate=ACCELERATE),
            "ZR303",
            names="zero_stage beside",
        ),
        Fault(
            "FP8",
            Side(accelerate="distributed_type: MULTI_GPU\nnum_processes: 2\nmixed_precision: fp8\n"),
            Side(accelerate="distributed_type: MULTI_GPU\nnum_processes: 2\n"),
            "ZR302",
        ),
        Fault(
            "parallelism in an accelerate file",
            Side(ds={}, accelerate=ACCELERATE + "parallelism_config:\n  parallelism_config_sp_size: 2\n"),
            Side(ds={}, accelerate=ACCELERATE),
            "ZR301",
        ),
        Fault(
            "an accelerate file that is not YAML",
            Side(ds={}, accelerate="num_processes: [2\n"),
            Side(ds={}, accelerate=ACCELERATE),
            "ZR306",
            launcher_stops=True,
        ),
        Fault(
            "an accelerate file of another form",
            Side(ds={}, accelerate="deepspeed_config: zero2\n"),
            Side(ds={}, accelerate=ACCELERATE),
            "ZR306",
            launcher_stops=True,
        ),
        Fault(
            "a number of processes that is none",
            Side(ds={}, accelerate=ACCELERATE.replace("num_processes: 2", "num_processes: all")),
            Side(ds={}, accelerate=ACCELERATE),
            "ZR306",
            launcher_stops=True,
        ),
    ],
    "FSDP": [
        fsdp("FSDP1", "  fsdp_sharding_strategy: FULL_SHARD\n", FSDP2, "ZR314"),
        fsdp(
            "parts saved instead of a model",
            FSDP2 + "  fsdp_state_dict_type: SHARDED_STATE_DICT\n",
            FSDP2,
            "ZR317",
            names="SHARDED_STATE_DICT",
            level="warning",
        ),
        fsdp("parameters on the CPU", FSDP2 + "  fsdp_offload_params: true\n", FSDP2, "ZR318"),
        fsdp(
            "weights on one rank only",
            FSDP2 + "  fsdp_cpu_ram_efficient_loading: true\n",
            FSDP2,
            "ZR319",
            level="warning",
        ),
        fsdp(
            "a layer of another model",
            FSDP2 + "  fsdp_transformer_layer_cls_to_wrap: Qwen2DecoderLayer\n",
            FSDP2 + "  fsdp_transformer_layer_cls_to_wrap: GPTNeoXLayer\n",
            "ZR341",
            names="Qwen2DecoderLayer",
        ),
        fsdp(
            "activations recomputed twice",
            FSDP2 + "  fsdp_activation_checkpointing: true\n",
            FSDP2,
            "ZR320",
            "activation_checkpointing: true",
        ),
        recipe("FSDP's old words", "fsdp: full_shard auto_wrap", "fsdp: true", "ZR312", names="full_shard auto_wrap"),
        recipe(
            "a key that FSDP2 does not read",
            "fsdp: true\nfsdp_config: {sharding_strategy: 1}",
            "fsdp: true",
            "ZR315",
            names="sharding_strategy",
        ),
        recipe(
            "FSDP and DeepSpeed",
            "fsdp: true\ndeepspeed: ds.json",
            "deepspeed: ds.json",
            "ZR311",
            ds={},
        ),
        recipe(
            "a batch size that FSDP2 seeks",
            "fsdp: true\nauto_find_batch_size: true",
            "fsdp: true",
            "ZR321",
        ),
        recipe(
            "an FSDP configuration that is not there",
            "fsdp: true\nfsdp_config: nowhere.json",
            "fsdp: true",
            "ZR202",
            names="nowhere.json",
        ),
        recipe(
            "the best of FSDP models without their states",
            "fsdp: true\nsave_only_model: true\nload_best_model_at_end: true\nsave_strategy: steps\n"
            "eval_strategy: steps",
            "fsdp: true\nload_best_model_at_end: true\nsave_strategy: steps\neval_strategy: steps",
            "ZR322",
            files=TEST_ROWS,
        ),
        Fault(
            "two FSDP configurations",
            Side(recipe="fsdp: true\nfsdp_config: {reshard_after_forward: false}", accelerate=FSDP_FILE + FSDP2),
            Side(accelerate=FSDP_FILE + FSDP2),
            "ZR310",
        ),
    ],
}
SECTIONS |= odd_recipes.SECTIONS
FAULTS = [fault for faults in SECTIONS.values() for fault in faults]


def findings_of(side: Side, folder: Path) -> list:
    """Everything that `zero-recipes check --data` finds, for two processes. `folder` is made anew."""
    from zero_recipes.checks.preflight import preflight
    from zero_recipes.cli.check import data_findings
    from zero_recipes.config import recipe as recipes
    from zero_recipes.config.accelerate import launched_environment
    from zero_recipes.core.findings import Refusal

    shutil.rmtree(folder, ignore_errors=True)
    name, *overrides = side.write(folder)
    kept = dict(os.environ)
    with chdir(folder):
        try:
            path = Path(name)
            file = None if side.accelerate is None else Path("accelerate.yaml")
            environment, findings = launched_environment(file, 2), []
            run, found = preflight(path, recipes.read_recipe_file(path), overrides, environment)
            findings += found
            if run is not None and not any(finding.level == "error" for finding in findings):
                findings += data_findings(run, show=False)
        except Refusal as refusal:
            findings = refusal.findings
        finally:
            os.environ.clear()
            os.environ.update(kept)
    return findings
