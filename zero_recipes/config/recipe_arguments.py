"""The recipe keys that TRL does not have. docs/recipe.md and recipes/schema.json are made from them."""

import dataclasses
from dataclasses import dataclass


@dataclass
class RecipeArguments:
    """The keys that TRL does not have, each with its default, its help and its choices."""

    dataset_format: str | None = dataclasses.field(
        default=None,
        metadata={
            "help": (
                "How rows become prompt and completion: `alpaca` (columns instruction, input, output; loss only on "
                "the answer), `alpaca_chat` (the same prompt as the user turn of a conversation), or `chat` (a "
                "question and its answer as turns, or a conversation). If unset, the columns decide "
                "(docs/your_own.md)."
            ),
            "choices": ["alpaca", "alpaca_chat", "chat"],
        },
    )
    columns: dict | str | None = dataclasses.field(
        default=None,
        metadata={
            "help": (
                "Renames the data's columns: `{question: ask, answer: reply}` reads the column `ask` as `question`, "
                "and `{messages.content: utterance}` that key of each message as its content. An entry of "
                "`datasets` can have its own `columns` and `dataset_format`."
            ),
        },
    )
    mixture_stopping_strategy: str = dataclasses.field(
        default="first_exhausted",
        metadata={
            "help": (
                "When a mixture with `weight` ends: when the first entry is used up, or when every row has been "
                "drawn, which repeats shorter entries."
            ),
            "choices": ["first_exhausted", "all_exhausted"],
        },
    )
    assistant_mask: str | None = dataclasses.field(
        default=None,
        metadata={
            "help": (
                "How assistant_only_loss finds the assistant's tokens. `template` uses `{% generation %}` in the "
                "chat template, or in TRL's version of it. `turn` renders the conversation up to each turn and "
                "includes the turn's markers. `answer` renders it too, but includes only the message's text and the "
                "token that ends the turn. If unset, `template` where possible, otherwise `turn`."
            ),
            "choices": ["template", "turn", "answer"],
        },
    )
    thinking: str = dataclasses.field(
        default="mask_empty",
        metadata={
            "help": (
                "What of the answers' thoughts is trained. `mask_empty` trains them as the chat template writes them, "
                "but no empty block: Qwen3, GLM and others write `<think></think>` before an answer without thoughts, "
                "and a loss on it would teach the model not to think (ms-swift does the same: `ignore_empty_think`). "
                "`keep` trains empty blocks too, and turns on the chat template's switch for thoughts of earlier "
                "answers where it has one (`preserve_thinking: true`, `clear_thinking: false`). `last` removes the "
                "thoughts of answers before the last user turn, `drop` all thoughts; neither trains empty blocks."
            ),
            "choices": ["keep", "last", "drop", "mask_empty"],
        },
    )
    long_rows: str = dataclasses.field(
        default="cut",
        metadata={
            "help": "How to handle rows longer than max_length: `cut` truncates them, `drop` removes them.",
            "choices": ["cut", "drop"],
        },
    )
    global_batch_size: int | None = dataclasses.field(
        default=None,
        metadata={
            "help": (
                "Sequences per optimizer step over all processes. It sets gradient_accumulation_steps to "
                "global_batch_size / (world_size * per_device_train_batch_size), which must be a whole number."
            ),
        },
    )
    sample_prompts: str | None = dataclasses.field(
        default=None,
        metadata={
            "help": (
                "Prompts that the model answers before and after training. A number takes that many rows of the "
                "evaluation split. It can also be a JSON Lines file of rows in the recipe's format, or a YAML list "
                "of prompts. If unset, none."
            ),
        },
    )
    sample_max_new_tokens: int = dataclasses.field(
        default=128,
        metadata={
            "help": "Maximum number of tokens in an answer to a sample prompt (greedy decoding).",
        },
    )
    sample_metrics: list[str] | None = dataclasses.field(
        default=None,
        metadata={
            "help": (
                "Scores of the answers that have a reference, one row at a time. `exact_match`, `token_f1` and "
                "`reference_loss` (nats per token) need no network, and are the default. Other names, such as "
                "`rouge`, are metrics of the Hub (evaluate); FOLDER/NAME is a folder with a NAME.py in it, or a "
                "metric of another owner, and needs trust_remote_code."
            ),
        },
    )
    sequence_parallel_size: int = dataclasses.field(
        default=1,
        metadata={
            "help": (
                "Number of processes that share each sequence (Ulysses, needs DeepSpeed). Use it for sequences "
                "whose activations do not fit on one GPU."
            ),
        },
    )
    random_weights: bool = dataclasses.field(
        default=False,
        metadata={
            "help": (
                "Build the model from its config with seeded random weights. Use it to measure a model without "
                "downloading its weights."
            ),
        },
    )
    allow_keys: list[str] | None = dataclasses.field(
        default=None,
        metadata={
            "help": (
                "Names of tensors that may be missing from the checkpoint, unexpected, or of a different shape. Any "
                "other such tensor is an error, because transformers would initialize it randomly or drop it."
            ),
        },
    )
    peft_config: dict | str | None = dataclasses.field(
        default=None,
        metadata={
            "help": (
                "Arguments of PEFT's configuration that have no `lora_*` key, with `use_peft: true`, e.g. "
                "`{init_lora_weights: orthogonal}`. `peft_type` selects another adapter, e.g. `{peft_type: OFT, "
                "oft_block_size: 32}`, which keeps the target modules, modules_to_save and task type from `lora_*`. "
                "Tested adapters are LORA, OFT and MISS. Tested LoRA initializations are `gaussian` and "
                "`orthogonal`."
            ),
        },
    )
    loraplus_lr_ratio: float | None = dataclasses.field(
        default=None,
        metadata={
            "help": (
                "LoRA+, as in PEFT: LoRA's B matrices and trained vectors use learning_rate times this ratio, e.g. "
                "16. LoRA on embeddings uses 1e-6."
            ),
        },
    )
    save_model: bool = dataclasses.field(
        default=True,
        metadata={
            "help": "Save the model to output_dir after training and check that it is complete.",
        },
    )
    save_on_signal: bool = dataclasses.field(
        default=True,
        metadata={
            "help": (
                "SIGTERM, SIGUSR1 or Ctrl-C to any process ends the run with a checkpoint, whatever save_strategy "
                "is. The same command resumes the run."
            ),
        },
    )
    stop_after_nonfinite_steps: int = dataclasses.field(
        default=3,
        metadata={
            "help": (
                "End the run as `diverged`, without saving a model, after this many consecutive steps with a NaN or "
                "infinite loss or gradient norm. In fp16 only the loss counts, because loss scaling skips steps."
            ),
        },
    )
    early_stopping_patience: int | None = dataclasses.field(
        default=None,
        metadata={
            "help": (
                "End the run after this many evaluations in a row that do not improve `metric_for_best_model` "
                "(default: the evaluation loss). The best model is loaded and saved, so this needs "
                "`load_best_model_at_end: true`. A resumed run continues the count. metrics.json has the step "
                "(`stopped_early_at`, `best_step`)."
            ),
        },
    )
    early_stopping_threshold: float = dataclasses.field(
        default=0.0,
        metadata={
            "help": (
                "How much an evaluation must improve the best one so far to count as progress for "
                "early_stopping_patience."
            ),
        },
    )
    token_metrics: str = dataclasses.field(
        default="logging_steps",
        metadata={
            "help": (
                "When to gather entropy, token accuracy and token counts from all processes. `logging_steps` "
                "gathers them once per log line. `micro_batch` gathers them as TRL does, with four synchronizations "
                "per micro batch. The log is the same."
            ),
            "choices": ["logging_steps", "micro_batch"],
        },
    )
    supervised_logits_only: bool = dataclasses.field(
        default=False,
        metadata={
            "help": (
                "On CPUs, compute logits only for tokens with a loss, not for prompts and padding, as TRL does on "
                "GPUs. The loss is the same. Gradients may differ in their last digits."
            ),
        },
    )
    cudnn_attention: bool = dataclasses.field(
        default=False,
        metadata={
            "help": (
                "On GPUs, let sdpa take cuDNN's attention. It builds a plan for every new shape, which takes longer "
                "than the step: only for runs whose batches all have one shape."
            ),
        },
    )
    nvme_path: str | None = dataclasses.field(
        default=None,
        metadata={
            "help": (
                'Folder for ZeRO-Infinity\'s swap files, used if the ds_config has "nvme_path": "auto". If unset, '
                "the environment variable ZERO_RECIPES_NVME_PATH."
            ),
        },
    )
    open_points: list[str] | None = dataclasses.field(
        default=None,
        metadata={
            "help": (
                "What zero-recipes import could not carry from another trainer's file, one text each. `check` and a "
                "run repeat each as a warning, until you take it out."
            ),
        },
    )
    ignore: list[str] | None = dataclasses.field(
        default=None,
        metadata={
            "help": (
                "Codes of errors to treat as warnings, e.g. `[ZR608]`. docs/codes.md marks the codes that allow this."
            ),
        },
    )
    overwrite: bool = dataclasses.field(
        default=False,
        metadata={
            "help": (
                "Start over in a folder that has an earlier run. The folder is renamed to OUTPUT_DIR.previous, and "
                "an older folder of that name is deleted. Without this key, such a folder is an error."
            ),
        },
    )
    skip_checksums: bool = dataclasses.field(
        default=False,
        metadata={
            "help": "Do not compute or compare checksums of checkpoints. Damage inside a file then goes unnoticed.",
        },
    )
    trust_checkpoint: bool = dataclasses.field(
        default=False,
        metadata={
            "help": (
                "Load a checkpoint even if its pickles contain more than data. Its author can then run arbitrary "
                "code on this machine."
            ),
        },
    )
    predict: bool = dataclasses.field(
        default=False,
        metadata={
            "help": "Also plan runs on CPUs, as on GPUs. The plan is stored as `predicted` in metrics.json.",
        },
    )
    skip_plan: bool = dataclasses.field(
        default=False,
        metadata={
            "help": "Start on a GPU without a plan, even if the run may not fit.",
        },
    )
