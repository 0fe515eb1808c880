"""Known-bad combinations with the rules switched off: they go wrong as the findings say."""

import pytest

from tests.helpers import group
from tests.helpers.faults import FAULTS, argv_of

# rule of zero_recipes/checks/options.yaml: what DeepSpeed or transformers ends with
FAILURES = {
    "grad_accum_dtype": "NotImplementedError: unsupported mix of model_dtype",
    "gradient_scaling": "pre-scale gradients is not yet supported with ZeRO-2",
}
# the first fault of each rule, as (bad, fixed)
CASES = {fault.names: (fault.bad.keys, fault.fixed.keys) for fault in reversed(FAULTS) if fault.bad.keys is not None}


@pytest.mark.parametrize("name", FAILURES)
def test_with_the_check_off_it_fails(two, tmp_path, name):
    with pytest.raises(group.CaseFailed, match=FAILURES[name]):
        two.run("train_unchecked", argv=argv_of(tmp_path, **CASES[name][0]))


def test_gradients_that_are_no_mean(two, tmp_path):
    """Two processes: their sum is twice what the fixed twin has, silently."""
    norms = []
    for case in CASES["summed_gradients"]:
        argv = argv_of(tmp_path, **case, overwrite=True)
        norms.append(two.run("train_unchecked", argv=argv)[0]["metrics"]["grad_norm_history"])
    assert norms[0] == pytest.approx([2 * norm for norm in norms[1]], rel=1e-4)
