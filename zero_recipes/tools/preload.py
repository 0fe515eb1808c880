"""Imports of a run, for the process from which `forked` makes its ranks: those that do not begin to use CUDA.

A process forked from one that uses CUDA cannot use it. PEFT imports bitsandbytes, which looks at the cards at once
(bitsandbytes 0.50, cuda_specs.py `get_compute_capabilities`), and the trainers of transformers and TRL import PEFT:
each rank imports these by itself, a fifth of the time of all imports.
"""

import importlib

from zero_recipes.engine.warnings import quiet_imports

with quiet_imports():
    for name in ("torch._dynamo", "torch.distributed.tensor", "transformers.modeling_utils", "datasets", "deepspeed"):
        importlib.import_module(name)
