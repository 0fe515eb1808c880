"""What the server of tests/helpers/group.py imports once: each rank is forked from it with all this at hand."""

import functools
import gc
import importlib

from zero_recipes.engine.warnings import quieten

quieten()
import cpuinfo  # noqa: E402

import tests.helpers.cases  # noqa: E402, F401
import tests.helpers.forget  # noqa: E402, F401
from tests.helpers.worker import remember  # noqa: E402

for name in (  # what a run imports later
    "deepspeed.module_inject.auto_ep_layer",
    "deepspeed.runtime.superoffload",
    "transformers.models.gpt_neox.modeling_gpt_neox",
    "transformers.models.llama.modeling_llama",
    "zero_recipes.tools.verify",
    "zero_recipes.training.trainer",
):
    importlib.import_module(name)
remember()
# DeepSpeed asks twice for each kernel that it loads, which takes a second each time: once for all ranks
cpuinfo.get_cpu_info = functools.cache(cpuinfo.get_cpu_info)
cpuinfo.get_cpu_info()
gc.freeze()  # what is imported stays: collecting after a case need not go through it, which takes half a second
