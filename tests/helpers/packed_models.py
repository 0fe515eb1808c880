"""Small models of any type, and what packed rows give each other: losses and gradients of a row packed and alone."""

from __future__ import annotations

from itertools import chain

import torch
from transformers import CONFIG_MAPPING, AutoModelForCausalLM

SIZES = {"vocab_size": 128, "hidden_size": 32, "num_attention_heads": 4, "num_hidden_layers": 2, "pad_token_id": 1}
SIZES |= {"bos_token_id": 0, "eos_token_id": 0}
# by the names that some types have for their sizes
OTHERS = {"num_key_value_heads": 2, "intermediate_size": 48, "head_dim": 8, "ffn_dim": 48, "word_embed_proj_dim": 32}
OTHERS |= dict.fromkeys(("num_experts", "num_local_experts", "n_heads", "n_head", "attention_heads"), 4)
OTHERS |= dict.fromkeys(("n_layer", "n_layers", "num_layers", "num_experts_per_tok", "expansion_ratio"), 2)
OTHERS |= dict.fromkeys(("d_model", "n_embd"), 32) | {"moe_intermediate_size": 16, "n_inner": 48, "rotary_dim": 4}
OTHERS |= {"shared_expert_intermediate_size": 16, "global_head_dim": 8, "hidden_size_per_layer_input": 8}
OTHERS |= {"vocab_size_per_layer_input": 128}


def tiny_model(kind: str, attention: str):
    """Two layers, of two kinds where the type has several. Weights of deviation 0.3: attention matters."""
    usual = CONFIG_MAPPING[kind]()
    names = {*usual.to_dict(), *getattr(usual, "attribute_map", {})}
    keys = {key: value for key, value in (SIZES | OTHERS).items() if key in names}
    for key in ("layer_types", "mlp_layer_types"):
        stored = getattr(usual, "attribute_map", {}).get(key, key)
        if getattr(usual, key, None) and not isinstance(getattr(type(usual), stored, None), property):
            keys[key] = (list(dict.fromkeys(getattr(usual, key)))[:2] * 2)[:2]
    config = CONFIG_MAPPING[kind](**keys)
    model = AutoModelForCausalLM.from_config(config, attn_implementation=attention, dtype=torch.float32).eval()
    torch.manual_seed(0)
    for p in model.parameters():
        if p.dim() > 1:
            torch.nn.init.normal_(p, 0.0, 0.3)
    return model


def gradients(model, rows: list[list[int]], supervised: list[bool]) -> tuple[float, dict[str, torch.Tensor]]:
    """(summed loss, the gradient of each parameter) of rows packed by TRL's collator; a row's loss counts or not."""
    from trl.trainer.sft_trainer import DataCollatorForLanguageModeling

    labels = [row if counts else [-100] * len(row) for row, counts in zip(rows, supervised, strict=True)]
    packed = {"input_ids": [*chain(*rows)], "labels": [*chain(*labels)], "seq_lengths": [len(row) for row in rows]}
    batch = DataCollatorForLanguageModeling(pad_token_id=1, padding_free=True)([packed])
    wanted = batch.pop("labels")[0, 1:]
    model.zero_grad()
    logits = model(**batch, use_cache=False).logits[0, :-1]
    loss = torch.nn.functional.cross_entropy(logits, wanted, ignore_index=-100, reduction="sum")
    loss.backward()
    return loss.item(), {n: torch.zeros_like(p) if p.grad is None else p.grad for n, p in model.named_parameters()}


def seen_of_the_row_before(model) -> float:
    """What another row before it changes of a row's loss and of its gradients, in shares of the largest.

    0: the row before is not seen, whatever stands in it, and gets no gradient from this row.
    """
    draw = torch.Generator().manual_seed(1)
    first, other, second = (torch.randint(2, 128, (n,), generator=draw).tolist() for n in (9, 5, 7))
    loss, alone = gradients(model, [second], [True])
    largest = max(gradient.abs().max().item() for gradient in alone.values())
    changes = []
    for before in (first, other):
        packed_loss, packed = gradients(model, [before, second], [False, True])
        changes.append(abs(packed_loss - loss) / abs(loss))
        changes += [(packed[name] - alone[name]).abs().max().item() / largest for name in alone]
    return max(changes)
