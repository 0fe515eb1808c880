"""A recipe is code: it can name libraries to load into every process, and a model that brings its own program.

A run does what its recipe says. `zero-recipes check` only looks, also at recipes of strangers: it runs nothing of it
that was not requested on its own command line, and says so.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, MutableMapping, Sequence

from zero_recipes.core.findings import Finding, finding

# what other programs are found by, or load before they begin (ld.so(8), python(1), bash(1)), those of a compiler too
_LOADS_CODE = ("LD_", "DYLD_", "PYTHON", "BASH_", "HF_MODULES_CACHE", "CUDA_HOME", "CUDA_PATH", "NVCC", "TORCH_EXT")
_NAMES = {"PATH", "ENV", "CC", "CXX", "SHELL", "IFS", "CUDACXX", "PERL5LIB", "PERL5OPT", "GCC_EXEC_PREFIX"}


def take_back_loaders(environment: MutableMapping[str, str], before: Mapping[str, str]) -> list[str]:
    """Set the variables that make a process load code to what they were `before` the recipe was read; their names."""
    changed = [name for name in {*environment, *before} if environment.get(name) != before.get(name)]
    loaders = sorted(name for name in changed if name in _NAMES or name.startswith(_LOADS_CODE))
    for name in loaders:
        if name in before:
            environment[name] = before[name]
        else:
            environment.pop(name)
    return loaders


def without_remote_code(overrides: Sequence[str]) -> list[str]:
    """The overrides of a command line, with `trust_remote_code: false` unless they say something of it themselves."""
    said = any(word.lstrip("-").replace("-", "_").startswith("trust_remote_code") for word in overrides)
    return [*overrides] if said else [*overrides, "--trust_remote_code", "false"]


def recipe_code_findings(loaders: Sequence[str], remote_code: bool) -> Iterator[Finding]:
    """What was not run. `loaders`: variables of the recipe's `env:`; `remote_code`: the recipe trusts the model's."""
    if loaders:
        yield finding("ZR782", loaders=", ".join(loaders))
    if remote_code:
        yield finding("ZR783")


def due_to_missing_code(finding: Finding) -> bool:
    """An error that says no more than that the model's own code was not run."""
    said = re.search(r"trust_remote_code|contains custom code", finding.why)
    return finding.level == "error" and said is not None
