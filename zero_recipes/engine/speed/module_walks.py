"""A step at stage 3 walks through each layer's modules for each gather and release, and three times through the model.

Library: DeepSpeed 0.19.8, runtime/zero/partitioned_param_coordinator.py (`get_all_parameters`).
Upstream: none found.
Here: the parameters of a module are remembered.
"""

from weakref import WeakKeyDictionary

from zero_recipes.engine.replacing import replaces


def apply() -> None:
    """Let stage 3 walk through each module once for its parameters. Call it before each engine is built."""
    from deepspeed.runtime.zero import partitioned_param_coordinator

    remembered = WeakKeyDictionary()

    @replaces(partitioned_param_coordinator, "get_all_parameters")
    def get_all_parameters(walk, module, recurse=False):
        if not recurse:
            return walk(module)
        if module not in remembered:
            remembered[module] = list(module.named_parameters())
        return [*remembered[module], *module.ds_external_parameters()]
