"""What the server of tests/helpers/group.py imports once: each rank is forked from it with all this at hand."""

import functools
import importlib
from pathlib import Path

from zero_recipes.core.process import imported_for_good
from zero_recipes.engine.warnings import quieten

quieten()
# collecting after a case need not go through what is imported, which takes half a second
with imported_for_good():
    import cpuinfo
    from matplotlib.figure import Figure

    from tests.helpers.worker import remember
    from zero_recipes.training import card

    for name in (  # some of them a run imports later
        "tests.helpers.cases",
        "tests.helpers.forget",
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
    # a run's README.md is a third of its time on rank 0: its template is compiled here, and no losses are drawn, which
    # tests of cards and reports do in pytest's own process, and real launches
    card._template()
    Figure.savefig = lambda _, path, **__: Path(path).write_bytes(b"")
