"""Cases of tests/engine/test_library_faults.py, run by the workers of tests/helpers/group.py."""

from __future__ import annotations

import contextlib
import sys
from datetime import timedelta
from importlib.machinery import ModuleSpec
from types import ModuleType
from unittest import mock

import torch
from torch import distributed, nn
from torch.utils.checkpoint import checkpoint


class SharedLayers(nn.Module):
    """A stack in which one block is called several times, beside blocks that are called once; a head of its own."""

    def __init__(self, width: int, calls: list[int]):
        """`calls`: the block of each layer, by number: [0, 1, 0] calls block 0 twice."""
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(width, width) for _ in range(max(calls) + 1))
        self.calls = calls
        self.head = nn.Linear(width, 3)

    def forward(self, hidden, recompute: str):
        for number in self.calls:
            block = self.blocks[number]
            if recompute == "no":
                hidden = hidden + torch.tanh(block(hidden))
            else:
                layer = checkpoint(block, hidden, use_reentrant=recompute == "reentrant")
                hidden = hidden + torch.tanh(layer)
        return self.head(hidden)


def _data(seed: int, rank: int, micro_step: int, width: int, forwards: int) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(1000 * seed + 10 * rank + micro_step)
    return [torch.randn(4, width, generator=generator) for _ in range(forwards)]


def _loss(model, inputs: list[torch.Tensor], recompute: str, dtype: torch.dtype) -> torch.Tensor:
    """Several forward passes of one module before one backward pass."""
    outputs = [model(x.to(dtype).requires_grad_(), recompute) for x in inputs]
    return sum(out.float().square().mean() for out in outputs)


def shared_layer_gaps(setups: list[dict]) -> list[float]:
    """For each setup the relative distance of DeepSpeed's fp32 weights after a step of SGD from a plain model's.

    Setup: {"stage", "dtype", "width", "calls", "recompute", "forwards", "accumulation", "seed", "zero"}.
    """
    return [_shared_layer_gap(**setup) for setup in setups]


def _shared_layer_gap(stage, dtype, width, calls, recompute, forwards, accumulation, seed, zero) -> float:
    import deepspeed
    from deepspeed.utils import safe_get_full_fp32_param

    world, rank, kind = distributed.get_world_size(), distributed.get_rank(), getattr(torch, dtype)
    torch.manual_seed(seed)
    plain = SharedLayers(width, calls).to(kind)
    config = {
        "train_micro_batch_size_per_gpu": 1,
        "gradient_accumulation_steps": accumulation,
        "zero_optimization": {"stage": stage, **zero},
        "zero_allow_untested_optimizer": True,
        "gradient_clipping": 0.0,
        "steps_per_print": 10**9,
    }
    if dtype == "bfloat16":
        config["bf16"] = {"enabled": True}
    torch.manual_seed(seed)
    given = SharedLayers(width, calls)
    optimizer = torch.optim.SGD(given.parameters(), lr=1.0)
    engine, *_ = deepspeed.initialize(model=given, optimizer=optimizer, config=config)
    for micro_step in range(accumulation):
        engine.backward(_loss(engine, _data(seed, rank, micro_step, width, forwards), recompute, kind))
        engine.step()
    got = {name: safe_get_full_fp32_param(p).clone() for name, p in engine.module.named_parameters()}
    engine.destroy()

    wanted = {name: p.detach().float() for name, p in plain.named_parameters()}
    gradients = {name: torch.zeros_like(p) for name, p in wanted.items()}
    for every in range(world):
        for micro_step in range(accumulation):
            plain.zero_grad()
            _loss(plain, _data(seed, every, micro_step, width, forwards), "no", kind).backward()
            for name, p in plain.named_parameters():
                if p.grad is not None:  # a block may have no layer
                    gradients[name] += p.grad.float() / (world * accumulation)
    off = sum((wanted[name] - gradients[name] - got[name]).square().sum() for name in wanted)
    return float((off / sum(g.square().sum() for g in gradients.values())).sqrt())


def train_recomputing_without_reentrance(argv: list[str]) -> dict:
    """`train` with LoRA at stage 3, recomputing as TRL 1.16 does not dare to; {"loss_history", "reentrant"}."""
    from tests.helpers.cases import train
    from zero_recipes.training.trainer import ZeroSFTTrainer

    original, found = ZeroSFTTrainer.train, {}

    def without_reentrance(self, *arguments):
        found["reentrant"] = self.args.gradient_checkpointing_kwargs["use_reentrant"]
        self.args.gradient_checkpointing_kwargs["use_reentrant"] = False
        return original(self, *arguments)

    with mock.patch.object(ZeroSFTTrainer, "train", without_reentrance):
        return found | {"loss_history": train(argv)["metrics"]["loss_history"]}


def train_and_look_at_the_head(argv: list[str]) -> dict:
    """`train`, and of each tensor of modules_to_save: [whole elements, this rank's]."""
    from tests.helpers.cases import train
    from zero_recipes.training.trainer import ZeroSFTTrainer

    original, held = ZeroSFTTrainer.save_verified, {}

    def save_verified(self):
        for name, p in self.model.named_parameters():
            if "modules_to_save" in name:
                held[name] = [p.ds_numel, p.ds_tensor.numel()] if hasattr(p, "ds_numel") else [p.numel(), p.numel()]
        return original(self)

    with mock.patch.object(ZeroSFTTrainer, "save_verified", save_verified):
        return {"loss_history": train(argv)["metrics"]["loss_history"], "held": held}


def train_with_liger(argv: list[str]) -> dict:
    """`train` with a stand-in for Liger's package that remembers what it was asked to replace."""
    from transformers import training_args, utils

    from tests.helpers.cases import train

    asked: list[dict] = []
    package, module = ModuleType("liger_kernel"), ModuleType("liger_kernel.transformers")
    module._apply_liger_kernel_to_instance = lambda model, **kernels: asked.append(kernels)
    package.transformers = module
    package.__spec__ = ModuleSpec("liger_kernel", None)  # importlib.util.find_spec finds it by that
    with contextlib.ExitStack() as stack:
        stack.enter_context(
            mock.patch.dict(sys.modules, {"liger_kernel": package, "liger_kernel.transformers": module})
        )
        for owner in (utils, utils.import_utils, training_args, sys.modules["transformers.integrations.liger"]):
            if hasattr(owner, "is_liger_kernel_available"):
                stack.enter_context(mock.patch.object(owner, "is_liger_kernel_available", lambda *_: True))
        history = train(argv)["metrics"]["loss_history"]
    return {"asked": asked, "loss_history": history}


def timeouts(argv: list[str], patched: bool) -> list[float]:
    """Seconds of the process groups that a run makes."""
    from torch.distributed import distributed_c10d

    from tests.helpers.cases import train
    from zero_recipes.libs import patches

    known = set(distributed_c10d._world.pg_map)
    forget_clone_of_the_world()
    with contextlib.ExitStack() as stack:
        if not patched:
            stack.enter_context(mock.patch.object(patches, "patch_timeouts", lambda seconds: None))
            stack.enter_context(unpatched_groups())
        train(argv)
    made = set(distributed_c10d._world.pg_map) - known
    forget_clone_of_the_world()
    backends = [group._get_backend(torch.device("cpu")) for group in made]
    return [backend.options._timeout.total_seconds() for backend in backends]


@contextlib.contextmanager
def unpatched_groups():
    from deepspeed.comm.torch import TorchBackend

    faulty = getattr(TorchBackend.new_group, "unpatched", TorchBackend.new_group)
    with mock.patch.object(TorchBackend, "new_group", faulty):
        yield


def forget_clone_of_the_world() -> None:
    """DeepSpeed 0.19.8, utils/groups.py: made once for a process."""
    from deepspeed.utils import groups

    groups._WORLD_GROUP = None


def train_with_a_slow_writer(argv: list[str]) -> str:
    """`train`, where rank 0 writes the model for longer than a collective may take; "saved", or what ended the run."""
    from torch.distributed.distributed_c10d import _set_pg_timeout

    from tests.helpers.cases import train
    from zero_recipes.training.trainer import ZeroSFTTrainer

    limit, usual = timedelta(seconds=1), timedelta(minutes=10)
    save_model, save = ZeroSFTTrainer.save_model, ZeroSFTTrainer._save

    def quickly_ending(self, *arguments, **keywords):
        distributed.barrier()
        _set_pg_timeout(limit, distributed.group.WORLD)
        save_model(self, *arguments, **keywords)
        distributed.barrier()
        _set_pg_timeout(usual, distributed.group.WORLD)

    def slowly(self, *arguments, **keywords):
        for _ in range(2 if distributed.get_rank() == 0 else 0):  # as long as two collectives that nobody answers
            with contextlib.suppress(RuntimeError):
                alone_forever(limit)
        save(self, *arguments, **keywords)

    with contextlib.ExitStack() as stack:
        stack.enter_context(mock.patch.object(ZeroSFTTrainer, "save_model", quickly_ending))
        stack.enter_context(mock.patch.object(ZeroSFTTrainer, "_save", slowly))
        try:
            train(argv)
            return "saved"
        except RuntimeError as error:
            return str(error)


def alone_forever(limit: timedelta) -> None:
    """Wait for what nobody sends, until the time is over."""
    distributed.distributed_c10d._get_default_store().wait(["fault_cases/never"], limit)


def host_memory_of_loading(folder: str, ds_config: dict) -> dict[str, int]:
    """Bytes of tensors while from_pretrained loads at ZeRO stage 3: {"rise", "held"} at the most and afterwards.

    Without what it maps of files: the kernel takes such pages back.
    """
    from torch.profiler import ProfilerActivity, profile, record_function
    from transformers import AutoModelForCausalLM
    from transformers.integrations import HfDeepSpeedConfig

    from tests.helpers.plan_cases import STEP, rises

    announced = HfDeepSpeedConfig(ds_config)
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiled, record_function(STEP):
        model = AutoModelForCausalLM.from_pretrained(folder)
    held = sum(p.ds_tensor.numel() * p.ds_tensor.element_size() for p in model.parameters())
    del announced
    ((least, _),) = rises(profiled.profiler.kineto_results.experimental_event_tree())
    return {"rise": least, "held": held}


def bytes_read_at_resume(argv: list[str]) -> int:
    """The most bytes of tensors from files that live at one moment while DeepSpeed loads the checkpoint of a run."""
    import weakref

    from deepspeed.runtime.checkpoint_engine.torch_checkpoint_engine import TorchCheckpointEngine
    from torch.utils._pytree import tree_leaves

    from tests.helpers.cases import train

    load, read, most = TorchCheckpointEngine.load, {}, [0]

    def loaded(self, *arguments, **keywords):
        found = load(self, *arguments, **keywords)
        for tensor in tree_leaves(found):
            if isinstance(tensor, torch.Tensor):
                storage = tensor.untyped_storage()
                read[storage.data_ptr()] = (weakref.ref(storage), storage.nbytes())
        most.append(sum(size for alive, size in read.values() if alive() is not None))
        return found

    with mock.patch.object(TorchCheckpointEngine, "load", loaded):
        train(argv)
    return max(most)


def train_with_a_writer_that_fails(argv: list[str]) -> str:
    """What ends `train` where rank 0 cannot write the model."""
    from tests.helpers.cases import train
    from zero_recipes.training.trainer import ZeroSFTTrainer

    save = ZeroSFTTrainer._save

    def fail(self, *arguments, **keywords):
        if distributed.get_rank() == 0:
            raise OSError("no room")
        save(self, *arguments, **keywords)

    with mock.patch.object(ZeroSFTTrainer, "_save", fail):
        try:
            train(argv)
            return "saved"
        except (OSError, RuntimeError) as error:
            return f"{type(error).__name__}: {error}"


def sent_a_step(argv: list[str], patched: bool) -> dict[str, int]:
    """Bytes of one optimizer step by collective. Unpatched: stage 3 keeps its answers when the trace is dropped."""
    from deepspeed.runtime.zero.partitioned_param_coordinator import PartitionedParameterCoordinator as Coordinator

    from tests.helpers.cases import train
    from zero_recipes.libs import patches

    with contextlib.ExitStack() as stack:
        if not patched:
            faulty = getattr(Coordinator._invalidate_trace, "unpatched", Coordinator._invalidate_trace)
            stack.enter_context(mock.patch.object(Coordinator, "_invalidate_trace", faulty))
            stack.enter_context(mock.patch.object(patches, "forget_releases_with_the_trace", lambda: None))
        return train(argv)["metrics"]["communication_bytes_per_step"]
