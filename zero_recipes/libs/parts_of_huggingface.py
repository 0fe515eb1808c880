"""Private parts of transformers, and of accelerate's data loader."""

from __future__ import annotations

from zero_recipes.libs.private_part import Exists, Mentions, PrivatePart, Takes

TRAINER = "transformers.trainer:Trainer"
SFT_TRAINER = "trl.trainer.sft_trainer:SFTTrainer"

DEEPSPEED_ANNOUNCEMENT = PrivatePart(
    name="deepspeed_announcement",
    library="transformers",
    used_by="libs/huggingface.py, without_deepspeed_announcement",
    why="hides the DeepSpeed configuration that transformers has in force where one rank alone only looks: "
    "from_pretrained would be collective",
    otherwise="A look at the model's keys would wait for the other ranks, or a look at the ds_config would change it.",
    relies_on=(
        Exists("transformers.integrations.deepspeed", ("_hf_deepspeed_config_weak_ref",)),
        Mentions("transformers.integrations.deepspeed:is_deepspeed_zero3_enabled", ("_hf_deepspeed_config_weak_ref",)),
        Mentions("transformers.integrations.deepspeed:deepspeed_config", ("_hf_deepspeed_config_weak_ref",)),
        # a global that is set by name
        Mentions("transformers.integrations.deepspeed:set_hf_deepspeed_config", ("_hf_deepspeed_config_weak_ref",)),
    ),
)

TOKEN_WEIGHTS = PrivatePart(
    name="token_weights",
    library="transformers",
    used_by="libs/huggingface.py, count_tokens_with_loss; training/token_weighting.py",
    why="makes the Trainer count the tokens that have a loss, whatever the model's class says about itself",
    otherwise="Tokens would weigh more in one micro batch or rank than in another.",
    relies_on=(
        Mentions(f"{TRAINER}.__init__", ("model_accepts_loss_kwargs", "_loss_shifts_labels", "_train_batch_size")),
        Takes(f"{TRAINER}.get_batch_samples", ("self", "epoch_iterator", "num_batches", "device")),
        Mentions(f"{TRAINER}.get_batch_samples", ("_get_num_items_in_batch",)),
        Takes(f"{TRAINER}._get_num_items_in_batch", ("self", "batch_samples", "device")),
        Mentions(f"{TRAINER}._get_num_items_in_batch", ("model_accepts_loss_kwargs", "_loss_shifts_labels")),
        Mentions(f"{TRAINER}._run_epoch", ("get_batch_samples",)),
        Mentions(f"{TRAINER}.evaluation_loop", ("prediction_step",)),
        Takes(f"{SFT_TRAINER}.compute_loss", ("self", "model", "inputs", "return_outputs", "num_items_in_batch")),
    ),
)

ROWS_LEFT_OVER = PrivatePart(
    name="rows_left_over",
    library="accelerate",
    used_by="libs/huggingface.py, rows_left_over; training/token_weighting.py",
    why="counts the rows of an epoch's last batches itself: accelerate loses the count where batches are skipped",
    otherwise="After a resume, rows that are repeated to fill the last batches would count twice.",
    upstream="huggingface/accelerate#4235",
    relies_on=(
        Mentions(
            "accelerate.data_loader:BatchSamplerShard", ("batch_size", "drop_last", "split_batches", "num_processes")
        ),
        Mentions("accelerate.data_loader:DataLoaderDispatcher", ("remainder", "gradient_state")),
        Mentions(f"{TRAINER}._prepare_for_training", ("callback_handler", "train_dataloader")),
    ),
)

ROW_ORDER = PrivatePart(
    name="row_order",
    library="transformers",
    used_by="training/row_order.py",
    why="gives the sampler of an epoch a generator of the epoch's own",
    otherwise="A run resumed in a later epoch would train other rows, and so would each rank after dropout.",
    relies_on=(
        Takes(f"{TRAINER}._get_train_sampler", ("self", "train_dataset")),
        Mentions(f"{TRAINER}.get_train_dataloader", ("_get_train_sampler",)),
        Mentions("transformers.trainer_pt_utils:LengthGroupedSampler", ("generator",)),
        Takes(
            f"{TRAINER}._run_epoch",
            (
                *("self", "model", "epoch", "train_dataloader", "steps_in_epoch", "num_update_steps_per_epoch"),
                *("trial", "ignore_keys_for_eval", "start_time", "resume_from_checkpoint", "epochs_trained"),
                "steps_trained_in_current_epoch",
            ),
        ),
    ),
)

EPOCH = PrivatePart(
    name="epoch_without_steps",
    library="transformers",
    used_by="training/checkpointing.py, _run_epoch",
    why="skips the epoch where no step is left: the Trainer looks at max_steps after a step only",
    otherwise="A run resumed from its last step would take one more.",
    relies_on=(
        Mentions(f"{TRAINER}._inner_training_loop", ("_run_epoch",)),
        Exists(TRAINER, ("_run_epoch",)),
    ),
)

CHECKPOINTS = PrivatePart(
    name="checkpoints",
    library="transformers",
    used_by="training/checkpointing.py, _save_checkpoint",
    why="writes a manifest around the Trainer's own saving, and deletes older checkpoints after it",
    otherwise="Checkpoints would have no manifest: no later run could tell a whole one from half of one.",
    relies_on=(
        Takes(f"{TRAINER}._save_checkpoint", ("self", "model", "trial")),
        Mentions(f"{TRAINER}._maybe_log_save_evaluate", ("_save_checkpoint",)),
        Mentions(f"{TRAINER}._save_checkpoint", ("rotate_checkpoints", "save_total_limit", "_get_output_dir")),
        Takes(f"{TRAINER}._get_output_dir", ("self", "trial")),
    ),
)

BETWEEN_STEPS = PrivatePart(
    name="between_steps",
    library="transformers",
    used_by="training/trainer.py, _maybe_log_save_evaluate",
    why="tells the seconds of logging from those of steps",
    otherwise="Seconds of logging would count as seconds of steps.",
    relies_on=(
        Exists(TRAINER, ("_maybe_log_save_evaluate",)),
        Mentions(f"{TRAINER}._run_epoch", ("_maybe_log_save_evaluate",)),
    ),
)

TIED_WEIGHTS = PrivatePart(
    name="tied_weights",
    library="transformers",
    used_by="training/checkpointing.py, _save, and libs/patches.py, without_aliases",
    why="leaves out of a gathered state dict what the model ties to another tensor, before the Trainer saves it",
    otherwise="A head that is the embedding would be saved twice at stages 0 to 2 and under FSDP2.",
    upstream="hiyouga/LLaMA-Factory#10560",
    relies_on=(
        Takes(f"{TRAINER}._save", ("self", "output_dir", "state_dict")),
        Mentions(f"{TRAINER}.save_model", ("_save",)),
        Mentions("transformers.modeling_utils:PreTrainedModel", ("all_tied_weights_keys",)),
    ),
)

RESUMING = PrivatePart(
    name="resharded_resume",
    library="transformers",
    used_by="training/trainer.py, _prepare_for_training",
    why="lets the engine be built fresh and then fills it: a resharded checkpoint has no files of DeepSpeed's",
    otherwise="A resharded checkpoint would be taken for one of DeepSpeed's, or not be loaded.",
    relies_on=(
        Takes(f"{TRAINER}._prepare_for_training", ("self", "max_steps", "train_dataloader", "resume_from_checkpoint")),
        Mentions(f"{TRAINER}._inner_training_loop", ("_prepare_for_training",)),
        Takes(f"{TRAINER}._load_optimizer_and_scheduler", ("self", "checkpoint")),
    ),
)

WEIGHTS = PrivatePart(
    name="weights_of_a_checkpoint",
    library="transformers",
    used_by="training/trainer.py, _load_from_checkpoint and _load_best_model",
    why="loads a checkpoint's weights through the model's class, which knows the names that files have",
    otherwise="Renamed weights (GPTNeoX's LM head) would not be loaded, with a warning only.",
    upstream="huggingface/transformers#48822",
    relies_on=(
        Takes(f"{TRAINER}._load_from_checkpoint", ("self", "resume_from_checkpoint", "model")),
        Mentions(f"{TRAINER}.train", ("_load_from_checkpoint",)),
        Takes(f"{TRAINER}._load_best_model", ("self",)),
        Mentions(f"{TRAINER}._finalize_training", ("_load_best_model",)),
    ),
)

GRADIENT_NORM = PrivatePart(
    name="gradient_norm",
    library="transformers",
    used_by="training/trainer.py, _get_grad_norm",
    why="keeps the norm of every step, which no callback event carries",
    otherwise="grad_norm_history would be empty.",
    relies_on=(
        Takes(f"{TRAINER}._get_grad_norm", ("self", "model", "grad_norm")),
        Mentions(f"{TRAINER}._run_epoch", ("_get_grad_norm",)),
    ),
)

ATTENTION = PrivatePart(
    name="attention_in_force",
    library="transformers",
    used_by="libs/huggingface.py, attention_in_force",
    why="reads which attention implementation the model has taken",
    otherwise="Another implementation than the requested one would go unnoticed.",
    relies_on=(Mentions("transformers.modeling_utils:PreTrainedModel", ("_attn_implementation",)),),
)

ATTENTION_KERNELS = PrivatePart(
    name="attention_kernels",
    library="transformers",
    used_by="libs/attention.py",
    why="knows which kernel of the hub transformers takes where the package of an attention implementation is missing",
    otherwise="A model with the requested flash attention would be refused, or a kernel that is missing found late.",
    relies_on=(
        Exists(
            "transformers.modeling_flash_attention_utils",
            ("FLASH_ATTN_KERNEL_FALLBACK", "FLASH_ATTN_KERNEL_DEVICES", "FLASH_ATTENTION_COMPATIBILITY_MATRIX"),
        ),
        Exists("transformers.integrations.hub_kernels", ("is_kernel", "get_attn_kernel_version")),
        Exists(
            "transformers.utils.import_utils", ("is_kernels_available", "KERNELS_MIN_VERSION", "KERNELS_MAX_VERSION")
        ),
        Mentions("transformers.integrations.hub_kernels:load_and_register_attn_kernel", ("get_attn_kernel_version",)),
    ),
)

KEPT_IN_FP32 = PrivatePart(
    name="modules_kept_in_fp32",
    library="transformers",
    used_by="libs/huggingface.py, kept_in_fp32",
    why="knows the tensors that a class keeps in float32 whatever the config's dtype",
    otherwise="A whole model would be called damaged, or another dtype overlooked.",
    relies_on=(
        Exists(
            "transformers.modeling_utils:PreTrainedModel", ("_keep_in_fp32_modules", "_keep_in_fp32_modules_strict")
        ),
    ),
)

NAMES_OF_THE_FILE = PrivatePart(
    name="names_of_the_file",
    library="transformers",
    used_by="libs/fsdp.py, keep_names_of_the_file",
    why="remembers the renamings of a model before FSDP2 changes the name of its class",
    otherwise="GPTNeoX would be saved with lm_head instead of embed_out.",
    relies_on=(
        Mentions("transformers.core_model_loading:revert_weight_conversion", ("_weight_conversions",)),
        Takes(
            "transformers.conversion_mapping:get_model_conversion_mapping",
            ("model", "key_mapping", "hf_quantizer", "add_legacy"),
        ),
        Exists("transformers.conversion_mapping", ("PrefixChange",)),
    ),
)

FSDP_POLICY = PrivatePart(
    name="fsdp_policy",
    library="transformers",
    used_by="libs/fsdp.py, fix_arguments",
    why="hands accelerate a mixed precision that leaves the loss as the model returns it",
    otherwise="The loss would be rounded to 16 bit.",
    relies_on=(
        Mentions("transformers.training_args:TrainingArguments.__post_init__", ("fsdp_plugin_args",)),
        Mentions(
            f"{TRAINER}.create_accelerator_and_postprocess", ("fsdp_plugin_args", "FullyShardedDataParallelPlugin")
        ),
    ),
)
