"""Model states of the Pythia recipes on two GPUs, by formula: python benchmarks/pythia_model_states.py

Nothing is measured and no GPU is needed: the shapes are counted on the meta device, the bytes are those of
zero_recipes/theory: zero_paper.py (the paper) and deepspeed_memory.py (DeepSpeed, held to the byte by
tests/engine/test_model_states.py on small models). Activations and buckets come on top. The recipes' headers quote it.
"""

from __future__ import annotations

import json
from pathlib import Path

import torch
from transformers import GPTNeoXConfig, GPTNeoXForCausalLM

from zero_recipes.core.files import write_json
from zero_recipes.theory.deepspeed_memory import ddp_terms, model_state_terms
from zero_recipes.theory.zero_paper import model_state_bytes

RESULT = Path(__file__).parent / "results" / "pythia_model_states.json"
WORLD_SIZE = 2
# config.json of EleutherAI/pythia-*-deduped
SHAPES = {
    "pythia-410m": dict(hidden_size=1024, num_hidden_layers=24, num_attention_heads=16, vocab_size=50304),
    "pythia-2.8b": dict(hidden_size=2560, num_hidden_layers=32, num_attention_heads=32, vocab_size=50304),
    "pythia-6.9b": dict(hidden_size=4096, num_hidden_layers=32, num_attention_heads=32, vocab_size=50432),
}


def config(name: str) -> GPTNeoXConfig:
    """The architecture of one Pythia; the MLP is four times as wide as the model."""
    shape = SHAPES[name]
    return GPTNeoXConfig(intermediate_size=4 * shape["hidden_size"], tie_word_embeddings=False, **shape)


def parameter_groups(name: str) -> list[list[int]]:
    """Elements of each tensor, in the Trainer's two groups: matrices decay, biases and norms do not."""
    with torch.device("meta"):
        parameters = list(GPTNeoXForCausalLM(config(name)).parameters())
    return [[p.numel() for p in parameters if p.dim() >= 2], [p.numel() for p in parameters if p.dim() < 2]]


def main() -> None:
    models = {}
    for name, shape in SHAPES.items():
        groups = parameter_groups(name)
        psi = sum(map(sum, groups))
        strategies = {"ddp": {"deepspeed": ddp_terms(groups), "textbook_bytes": 16 * psi}}
        for stage in range(4):
            terms = [
                model_state_terms(groups, WORLD_SIZE, rank, stage, shape["hidden_size"] ** 2)
                for rank in range(WORLD_SIZE)
            ]
            largest = max(terms, key=total)
            textbook = model_state_bytes(psi, WORLD_SIZE, stage).total
            strategies[f"zero{stage}"] = {"deepspeed": largest, "textbook_bytes": int(textbook)}
        for entry in strategies.values():
            entry["deepspeed_bytes"] = total(entry["deepspeed"])
        models[name] = {"parameters": psi, "strategies": strategies}
    write_json(RESULT, {"world_size": WORLD_SIZE, "precision": "bf16", "measured": False, "models": models})
    for name, entry in models.items():
        for strategy, found in entry["strategies"].items():
            print(name, strategy, *(f"{found[key] / 1e9:.1f} GB" for key in ("textbook_bytes", "deepspeed_bytes")))
    print(json.dumps({"written": str(RESULT)}))


def total(terms: dict) -> int:
    return sum(sum(part.values()) for part in terms.values())


if __name__ == "__main__":
    main()
