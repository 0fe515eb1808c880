"""Private parts of TRL, and of the datasets library that it prepares rows with."""

from __future__ import annotations

from zero_recipes.libs.private_part import Exists, Line, Mentions, PrivatePart, Takes

SFT_TRAINER = "trl.trainer.sft_trainer:SFTTrainer"

TOKEN_METRICS = PrivatePart(
    name="token_metrics",
    library="trl",
    used_by="training/token_metrics.py",
    why="computes SFTTrainer's cross-entropy without its gathers, and hands it entropy, accuracy and tokens at the log",
    otherwise="The loss would be another one than TRL's, or the log lack these numbers.",
    relies_on=(
        Takes(f"{SFT_TRAINER}.compute_loss", ("self", "model", "inputs", "return_outputs", "num_items_in_batch")),
        Mentions(
            f"{SFT_TRAINER}.__init__", ("_metrics", "_tp_size", "_total_train_tokens", "aux_loss_enabled", "_is_vlm")
        ),
        Mentions(f"{SFT_TRAINER}.log", ("_metrics",)),
        *(
            Line("trl", "trl/trainer/sft_trainer.py", text)
            for text in (
                "num_tokens = outputs.label_mask.sum() if num_items_in_batch is None else num_items_in_batch",
                "loss = per_token_loss.sum() / torch.as_tensor(num_tokens).clamp(min=1)",
                "loss = loss * (self.accelerator.num_processes // self.get_tp_size())",
                # what is avoided: where TRL no longer does it, the override must go
                "entropy_sum = self.accelerator.gather_for_metrics(outputs.entropy.detach().sum()).sum()",
            )
        ),
    ),
)

ROWS = PrivatePart(
    name="rows_of_the_trainer",
    library="trl",
    used_by="libs/huggingface.py, prepare_dataset",
    why="tokenises and packs with SFTTrainer's own code before a model is loaded, on one process of each node",
    otherwise="Rows would be prepared otherwise than SFTTrainer prepares them, or the ranks wait for each other.",
    relies_on=(
        Takes(
            f"{SFT_TRAINER}._prepare_dataset",
            ("self", "dataset", "processing_class", "args", "packing", "formatting_func", "dataset_name"),
        ),
        Mentions(
            f"{SFT_TRAINER}._prepare_dataset",
            ("global_then_local_main_first", "_tokenizer", "completion_only_loss", "chat_template"),
        ),
        Exists("trl.trainer.sft_trainer", ("global_then_local_main_first",)),
    ),
)

CUT_ROWS = PrivatePart(
    name="cut_rows_padding_free",
    library="trl",
    used_by="libs/huggingface.py, rows_are_cut",
    why="builds SFTTrainer for padding-free batches of rows that are cut to max_length already, which it refuses",
    otherwise="padding_free without packing could not be had with a max_length.",
    relies_on=(
        Mentions(f"{SFT_TRAINER}.__init__", ("padding_free", "max_length")),
        *(
            Line("trl", "trl/trainer/sft_trainer.py", text)
            for text in (
                # where TRL no longer refuses it, the way round must go
                "if self.padding_free and not args.packing and args.max_length is not None and not self._is_vision",
                "Truncate to max_length. Skipped when packing, since packing already chunks sequences to max_length.",
            )
        ),
    ),
)

FINGERPRINT = PrivatePart(
    name="fingerprint_of_rows",
    library="datasets",
    used_by="libs/huggingface.py, fingerprint",
    why="names the rows in the key under which prepared ones are kept",
    otherwise="Rows of other data would be taken from the cache.",
    relies_on=(Mentions("datasets.arrow_dataset:Dataset", ("_fingerprint",)),),
)

BARS = PrivatePart(
    name="progress_of_rows",
    library="datasets",
    used_by="libs/progress.py, plain_progress",
    why="says in plain lines how far tokenising is, where stderr is no terminal",
    otherwise="Nothing would be said while rows are prepared, for minutes where they are many.",
    relies_on=(
        Exists("datasets.arrow_dataset", ("hf_tqdm",)),
        Mentions("datasets.arrow_dataset:Dataset.map", ("hf_tqdm",)),
    ),
)

LM_HEAD = PrivatePart(
    name="lm_head_positions",
    library="trl",
    used_by="libs/lm_head.py",
    why="has TRL's LM head score the supervised positions alone on CPUs too, as it does on GPUs "
    "(`supervised_logits_only: true`)",
    otherwise="The key would do nothing: logits of prompts and padding would be computed and thrown away.",
    relies_on=(
        Exists("trl.trainer.utils", ("_use_triton",)),
        Mentions("trl.trainer.utils:add_fused_lm_head", ("_use_triton",)),
        *(
            Line("trl", "trl/trainer/utils.py", text)
            for text in (
                "compact = _use_triton(hidden_states.device)",
                "hidden_states[mask] if compact else hidden_states.reshape(-1, hidden_states.size(-1)),",
                "labels[mask] if compact else labels.clamp(min=0).reshape(-1),",
            )
        ),
        # the kernels look at a name of their own: the torch operations stay
        Line(
            "trl",
            "trl/kernels/chunked_logprob.py",
            "fold = _forward_kernel[(n,)] if _use_triton(device) else _forward_tile",
        ),
    ),
)
