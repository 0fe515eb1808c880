"""TRL's loss is too small for GPT-2, and weighs micro batches alike for Gemma 3n, whatever their tokens.

The Trainer counts a step's tokens by rules for the model's own loss, but SFTTrainer computes the loss. Where the model
has `accepts_loss_kwargs = False` nothing is counted, and micro batches weigh the same whatever their tokens. Where it
has no `loss_type`, a row's first token is counted, which has no loss.

Library: transformers 5.23, trainer.py (`model_accepts_loss_kwargs`, `_loss_shifts_labels`, `_get_num_items_in_batch`).
Upstream: huggingface/transformers#37766, of models that take no count; none found for the first token.
Here: the tokens that have a loss in SFTTrainer are counted, for every model.

See it: one CPU

    import transformers
    from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments

    model = GPT2LMHeadModel(GPT2Config(vocab_size=16, n_embd=8, n_layer=1, n_head=2))
    trainer = Trainer(model, TrainingArguments("/tmp/out", report_to="none", use_cpu=True))
    assert not trainer._loss_shifts_labels  # a row's first token is counted
    assert not transformers.Gemma3nForConditionalGeneration.accepts_loss_kwargs  # nothing is counted
"""

from transformers import Trainer


def count_tokens_with_loss(trainer: Trainer) -> None:
    """Let the Trainer count a step's tokens that have a loss in SFTTrainer, for every model."""
    trainer.model_accepts_loss_kwargs = trainer._loss_shifts_labels = True
