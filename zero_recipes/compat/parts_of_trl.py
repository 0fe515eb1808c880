"""Private parts of TRL's loss."""

from __future__ import annotations

from zero_recipes.compat.private_part import Exists, Line, Mentions, PrivatePart

LM_HEAD = PrivatePart(
    name="lm_head_positions",
    library="trl",
    used_by="compat/lm_head.py",
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
