"""Cases of tests/helpers/group.py: steps of DeepSpeed's stages 1 to 3 with gradients that are not finite."""

import deepspeed
import torch
from torch import distributed
from torch.utils._python_dispatch import TorchDispatchMode

from tests.helpers.forget import forget_last_run
from tests.helpers.step_cases import fp16_on_cpu
from zero_recipes.engine.speed import gradient_copies, norms

STEPS = 5
BAD = {1: "inf", 3: "nan"}  # by step


def engine(stage: int, precision: str, clip: float):
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(7, 11), torch.nn.Tanh(), torch.nn.Linear(11, 3))
    groups = [{"params": [model[0].weight, model[2].weight]}, {"params": [model[0].bias, model[2].bias]}]
    config = {
        "train_micro_batch_size_per_gpu": 4,
        "gradient_clipping": clip,
        "zero_optimization": {"stage": stage},
        "fp16": {"enabled": precision == "fp16", "initial_scale_power": 8, "hysteresis": 1},
        "bf16": {"enabled": precision == "bf16"},
    }
    optimizer = torch.optim.AdamW(groups, lr=1e-2, weight_decay=0.1, fused=True)  # reads no counter
    return deepspeed.initialize(model=model, optimizer=optimizer, config=config)[0]


def steps(stage: int, precision: str, clip: float, bad_rank: int) -> list[dict]:
    """What each step came to, where a gradient of `bad_rank` is not finite in some of them."""
    trained = engine(stage, precision, clip)
    spoil = {"value": 1.0}
    bias = trained.module[0].bias
    bias.register_hook(lambda grad: grad * spoil["value"])
    draw = torch.Generator().manual_seed(distributed.get_rank())
    found = []
    for step in range(STEPS):
        is_bad = step in BAD and distributed.get_rank() == bad_rank
        spoil["value"] = float(BAD[step]) if is_bad else 1.0
        rows = torch.randn(4, 7, generator=draw).to(bias.dtype)
        loss = trained(rows).float().square().mean()
        trained.backward(loss)
        with Operations() as operations:
            trained.step()
        parameters = list(trained.module.parameters())
        with deepspeed.zero.GatheredParameters(parameters, enabled=stage == 3):
            weights = torch.cat([p.detach().double().flatten() for p in parameters])
        outcome = {"loss": loss.item(), "norm": float(trained.get_global_grad_norm())}
        outcome |= {"skipped": trained.optimizer.overflow, "scale": float(trained.optimizer.loss_scale)}
        outcome |= {"operations": operations.count, "read": operations.read}
        found.append(outcome | {"weights": weights.tolist()})
    return found


class Operations(TorchDispatchMode):
    """Counts operators, and numbers that are read."""

    def __init__(self):
        super().__init__()
        self.count = self.read = 0

    def __torch_dispatch__(self, operator, types, arguments=(), keywords=None):
        self.count += 1
        self.read += operator is torch.ops.aten._local_scalar_dense.default
        return operator(*arguments, **(keywords or {}))


def patched_and_not(stage: int) -> dict[str, list]:
    """{precision and clipping: [the steps of DeepSpeed's own, those of ours]}."""
    found = {}
    for precision, clip in (("bf16", 0.5), ("fp16", 0.5), ("fp32", 0.0)):
        ways = []
        for is_patched in (False, True):
            forget_last_run()
            if is_patched:
                quicken = norms.apply_to_stage_3 if stage == 3 else norms.apply_to_stages_1_and_2
                quicken()
            with fp16_on_cpu():
                ways.append(steps(stage, precision, clip, bad_rank=1))
        found[f"{precision}, clipped at {clip}"] = ways
    forget_last_run()
    return found


def trained_scalar(is_patched: bool) -> list[float]:
    """Stage 3 of one element: on the second of two ranks all of it is padding. Its value after each step."""
    forget_last_run()
    if is_patched:
        gradient_copies.apply()
    model = torch.nn.Linear(4, 1)
    torch.nn.init.ones_(model.weight).requires_grad_(False)
    torch.nn.init.zeros_(model.bias)
    config = {"train_micro_batch_size_per_gpu": 1, "zero_optimization": {"stage": 3}}
    optimizer = torch.optim.AdamW([model.bias], lr=1e-2)
    trained = deepspeed.initialize(model=model, optimizer=optimizer, config=config)[0]
    found = []
    for _ in range(3):
        trained.backward(trained(torch.ones(1, 4)).square().mean())
        trained.step()
        with deepspeed.zero.GatheredParameters([model.bias]):
            found.append(model.bias.item())
    forget_last_run()
    return found
