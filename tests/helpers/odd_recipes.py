"""Odd values and texts, each with its fixed twin: refused late, with a traceback or never, before they were here."""

from __future__ import annotations

from tests.helpers.fault import TEST_ROWS, Fault, Side, recipe

BIN = "run_name: !!binary aGVsbG8="
BOMB = "a0: &a0 [x, x]\n" + "\n".join(f"a{i}: &a{i} [{', '.join([f'*a{i - 1}'] * 9)}]" for i in range(1, 9))
EVALUATES = "eval_strategy: steps"
MARKS = {
    "c.jinja": "{% for m in messages %}{% if m['role'] == 'assistant' %}{% generation %}{{ m['content'] }}"
    "{{ eos_token }}{% endgeneration %}{% else %}{{ m['content'] }}{% endif %}{% endfor %}"
}
LORA = "use_peft: true\nlora_target_modules: all-linear"
MIXTURE = "datasets: [{path: ./rows%s}]"
SOUND_MIXTURE = MIXTURE % ""


def mixture(name: str, bad: str, fixed: str, code: str, names: str = "") -> Fault:
    """A fault in a mixture of data sets."""
    return recipe(name, bad, fixed, code, names=names, without=("dataset_name",))


def epochs(name: str, bad: str, fixed: str, code: str, names: str = "") -> Fault:
    """A fault in a run by epochs."""
    return recipe(name, bad, fixed, code, names=names, without=("max_steps",))


def ranges() -> list[Fault]:
    """Numbers beyond their range: (key, what is refused, what is taken)."""
    cases = [
        *(("seed", "-1", "0"), ("seed", "4294967296", "4294967295")),
        *(("learning_rate", value, "0.0") for value in ("-0.1", ".nan", ".inf")),
        *(("weight_decay", value, "0.1") for value in ("-0.1", ".nan")),
        *(("adam_beta1", "1.5", "0.9"), ("adam_beta2", "-0.1", "0.9"), ("adam_epsilon", "-1.0", "1.0e-8")),
        *(("max_grad_norm", "-1.0", ".inf"), ("max_grad_norm", ".nan", "0.0"), ("warmup_steps", "-1", "0")),
        *(("max_steps", "-5", "5"), ("per_device_train_batch_size", "-2", "2"), ("lora_r", "0", "8")),
        *(("lora_alpha", "0", "16"), ("lora_dropout", "1.5", "0.1"), ("label_smoothing_factor", "-0.5", "0.1")),
        *(("neftune_noise_alpha", "-1.0", "5.0"), ("dataloader_num_workers", "-1", "0"), ("ddp_timeout", "-1", "60")),
        *(("ddp_timeout", "99999999999999999", "60"), ("eval_accumulation_steps", "0", "1")),
        *(("pad_to_multiple_of", "0", "8"), ("sample_max_new_tokens", "0", "1"), ("dataset_num_proc", "0", "1")),
        *(("logging_steps", "-5", "5"), ("torch_empty_cache_steps", "0", "1"), ("sequence_parallel_size", "0", "1")),
    ]
    return [recipe(f"{key} {bad}", f"{key}: {bad}", f"{key}: {fixed}", "ZR113", names=key) for key, bad, fixed in cases]


def foreign() -> list[Fault]:
    """Dates, sets and bytes, where YAML makes them."""
    sound = "seed: 1"
    lines = [
        *("seed: 2024-01-01", "learning_rate: 2024-01-01", "hub_token: 2024-01-01 10:00:00", "packing: 2024-01-01"),
        *("max_length: 2024-01-01", "run_name: 2024-01-01", "report_to: 2024-01-01", "deepspeed: 2024-01-01"),
    ]
    return [recipe(f"a date: {line}", line, sound, "ZR107", names=line.partition(":")[0]) for line in lines]


def optimizers() -> list[Fault]:
    """Optimizers whose package is not here, or whose arguments are none."""
    names = ["galore_adamw", "lomo", "stable_adamw", "apollo_adamw", "grokadamw", "schedule_free_adamw"]
    lines = [f"optim: {name}\noptim_target_modules: all-linear" for name in names]
    lines += ["optim_args: sparkle"]
    return [recipe(line.partition("\n")[0], line, "optim: adamw_torch", "ZR182") for line in lines]


SECTIONS = {
    "Texts that are no recipe": [
        Fault("a variable that is a list", Side(recipe="env: {A: [1]}"), Side(recipe="env: {A: 1}"), "ZR119"),
        Fault("a variable without a value", Side(recipe="env: {A: }"), Side(recipe='env: {A: ""}'), "ZR119"),
    ],
    "Numbers beyond their range": ranges(),
    "Dates, sets and bytes": foreign(),
    "Optimizers": optimizers(),
    "Values that the libraries refuse late": [
        recipe("not a number", "data_seed: 1\ntest_split_size: .nan", "data_seed: 1", "ZR113", names="test_split_size"),
        recipe("tf32 on a CPU", "tf32: true", "tf32: false", "ZR123", names="SFTConfig"),
        recipe("two precisions at once", "fp16: true\nbf16: true", "bf16: true", "ZR123"),
        recipe("no interval to log at", "logging_steps: 0", "logging_steps: 1", "ZR123"),
        recipe("half a step to log at", "logging_steps: 1.5", "logging_steps: 0.5", "ZR123"),
        recipe("prefetching without workers", "dataloader_prefetch_factor: 2", "seed: 1", "ZR123"),
        recipe("an accelerator's key that is none", "accelerator_config: {x: 1}", "accelerator_config: {}", "ZR123"),
        recipe("an accelerator's file", "accelerator_config: no.json", "accelerator_config: {}", "ZR123"),
        recipe("a plateau without evaluation", "lr_scheduler_type: reduce_lr_on_plateau", "seed: 1", "ZR123"),
        recipe(
            "both quantizations",
            f"random_weights: false\nload_in_8bit: true\nload_in_4bit: true\n{LORA}",
            LORA,
            "ZR123",
        ),
        recipe("a task of LoRA that is none", f"{LORA}\nlora_task_type: X", LORA, "ZR180"),
        recipe(
            "LoRA on modules that are not there",
            "use_peft: true\nlora_target_modules: [nothing, nowhere]",
            LORA,
            "ZR181",
        ),
        recipe("an attention that is none", "attn_implementation: sparkle", "attn_implementation: eager", "ZR427"),
        recipe("a keyword that no model has", "model_init_kwargs: {x: 1}", "model_init_kwargs: {}", "ZR427"),
        recipe(
            "a keyword that no checkpoint takes",
            "random_weights: false\nmodel_init_kwargs: {x: 1}",
            "random_weights: false\nmodel_init_kwargs: {low_cpu_mem_usage: true}",
            "ZR427",
        ),
        recipe("an argument of no schedule", "lr_scheduler_kwargs: {x: 1}", "lr_scheduler_kwargs: {}", "ZR183"),
        recipe("a schedule that lacks arguments", "lr_scheduler_type: warmup_stable_decay", "seed: 1", "ZR183"),
        recipe(
            "an end above the start",
            "lr_scheduler_type: polynomial\nlr_scheduler_kwargs: {lr_end: 1.0}",
            "seed: 1",
            "ZR183",
        ),
        recipe("a warm-up without end", "warmup_steps: .inf", "warmup_steps: 2", "ZR183"),
        recipe("workers that stay, where there are none", "dataloader_persistent_workers: true", "seed: 1", "ZR184"),
        recipe(
            "a keyword of no checkpointing",
            "activation_checkpointing: true\nactivation_checkpointing_kwargs: {x: 1}",
            "activation_checkpointing: true\nactivation_checkpointing_kwargs: {use_reentrant: false}",
            "ZR185",
        ),
        recipe(
            "selective checkpointing of nothing",
            "activation_checkpointing_kwargs: {selective: true}",
            "seed: 1",
            "ZR181",
        ),
        recipe("a report to what is not here", "report_to: tensorboard", "report_to: none", "ZR181"),
        recipe("a report to what there is not", "report_to: sparkle", "report_to: []", "ZR181"),
        recipe("a router's loss without experts", "router_aux_loss_coef: 0.1", "seed: 1", "ZR181"),
        recipe(
            "gradients accumulated twice",
            "accelerator_config: {gradient_accumulation_kwargs: {num_steps: 4}}",
            "seed: 1",
            "ZR181",
        ),
        recipe(
            "a compiler that is none", "torch_compile: true\ntorch_compile_backend: x", "torch_compile: true", "ZR181"
        ),
        recipe("a mode of no compiler", "torch_compile: true\ntorch_compile_mode: x", "torch_compile: true", "ZR186"),
        recipe("packing without a length", "packing: true\nmax_length: null", "packing: true", "ZR165"),
        recipe(
            "packed evaluation without a length",
            f"eval_packing: true\nmax_length: null\n{EVALUATES}",
            EVALUATES,
            "ZR165",
            files=TEST_ROWS,
        ),
        recipe(
            "evaluation at start without rows",
            "eval_on_start: true",
            f"eval_on_start: true\n{EVALUATES}",
            "ZR164",
            files=TEST_ROWS,
        ),
        recipe("checkpoints at no interval", "save_strategy: steps\nsave_steps: 0", "save_strategy: epoch", "ZR163"),
        recipe("Liger without its package", "use_liger_kernel: true", "use_liger_kernel: false", "ZR425"),
        recipe("offloaded activations on a CPU", "activation_offloading: true", "seed: 1", "ZR426"),
        recipe("a push without a connection", "push_to_hub: true", "push_to_hub: false", "ZR167"),
        recipe("a backend that is another", "ddp_backend: nccl", "ddp_backend: gloo", "ZR346", names="nccl"),
        recipe("a number of prompts below zero", "sample_prompts: -3", "sample_prompts: 0", "ZR517"),
        recipe("a half number of prompts", "sample_prompts: 2.5", "sample_prompts: [a]", "ZR517"),
        epochs("no epoch", "num_train_epochs: 0", "num_train_epochs: 0.5", "ZR162"),
        epochs("epochs below zero", "num_train_epochs: -1", "num_train_epochs: 1", "ZR162"),
        epochs("epochs without end", "num_train_epochs: .inf", "num_train_epochs: 1", "ZR162"),
        epochs("a stream without an end", "dataset_streaming: true", "dataset_streaming: true\nmax_steps: 3", "ZR161"),
    ],
    "Data that is not at hand": [
        mixture("a path in a mixture", "datasets: [{path: ./nowhere}]", SOUND_MIXTURE, "ZR506"),
        mixture("a split in a mixture", MIXTURE % ", split: nowhere", MIXTURE % ", split: 'train[:4]'", "ZR506"),
        mixture("a key in a mixture", MIXTURE % ", sparkle: 1", SOUND_MIXTURE, "ZR189", names="`sparkle`"),
        mixture(
            "a split of two rows and a half",
            f"{SOUND_MIXTURE}\ntest_split_size: 2.5",
            f"{SOUND_MIXTURE}\ntest_split_size: 0.5",
            "ZR506",
        ),
        mixture(
            "a stream that is split",
            f"{SOUND_MIXTURE}\nstreaming: true\ntest_split_size: 0.5",
            f"{SOUND_MIXTURE}\ntest_split_size: 0.5",
            "ZR506",
        ),
        mixture(
            "a share of one of two",
            "datasets: [{path: ./rows, fraction: 0.5}, {path: ./rows}]",
            "datasets: [{path: ./rows, fraction: 0.5}, {path: ./rows, fraction: 0.5}]",
            "ZR506",
        ),
        Fault(
            "turns of plain rows",
            Side(recipe="assistant_only_loss: true", files=MARKS, overrides=("--chat_template_path", "c.jinja")),
            Side(files=MARKS, overrides=("--chat_template_path", "c.jinja")),
            "ZR431",
            names="prompt, completion",
        ),
        recipe("a configuration of the data", "dataset_config: nowhere", "dataset_config: default", "ZR506"),
    ],
    "The launch that a recipe names": [
        recipe(
            "another number of processes", "num_processes: 4", "num_processes: 2", "ZR347", names="num_processes: 4"
        ),
        recipe("another accelerate file", "accelerate_config: zero3", "num_processes: 2", "ZR347", names="zero3"),
    ],
    "Odd command lines": [
        Fault("a rate that is none", Side(overrides=("--learning_rate", "nan")), Side(), "ZR113"),
        Fault(
            "a length that is unset",
            Side(recipe="packing: true", overrides=("--max_length", "null")),
            Side(recipe="sample_prompts: 3", overrides=("--sample_prompts", "null")),
            "ZR165",
        ),
    ],
}
