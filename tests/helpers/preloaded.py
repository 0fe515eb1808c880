"""What the server of tests/helpers/group.py imports once: each rank is forked from it with all this at hand."""

import gc
import importlib

from zero_recipes.compat.warnings import quieten

quieten()
import tests.helpers.cases  # noqa: E402
import tests.helpers.forget  # noqa: E402, F401
from tests.helpers.remembered import remember  # noqa: E402

for name in (  # what a run imports later
    "deepspeed.module_inject.auto_ep_layer",
    "deepspeed.runtime.superoffload",
    "transformers.models.gpt_neox.modeling_gpt_neox",
    "transformers.models.llama.modeling_llama",
    "zero_recipes.checkpoint.verify",
    "zero_recipes.trainer.trainer",
):
    importlib.import_module(name)
remember()
gc.freeze()  # what is imported stays: collecting after a case need not go through it, which takes half a second
