"""Why a mixture with test_split_size is not what `trl sft` makes of it: TRL's split has no seed."""

import json

import numpy
from datasets import disable_caching, enable_caching
from transformers import set_seed
from trl import DatasetMixtureConfig, get_dataset

from tests.helpers.tiny import settings_with
from zero_recipes.data.load import load_splits


def test_trls_split_is_drawn_from_the_global_generator(tmp_path):
    """TRL 1.16, scripts/utils.py, get_dataset. Fails once TRL seeds it: load_splits then need not call set_seed."""
    (tmp_path / "train.jsonl").write_text("".join(json.dumps({"text": str(i)}) + "\n" for i in range(200)))
    mixture = DatasetMixtureConfig(datasets=[{"path": str(tmp_path)}], test_split_size=0.2)

    def drawn(seed: int) -> list[str]:
        numpy.random.seed(seed)
        return get_dataset(mixture)["test"]["text"]

    def ours(seed: int) -> list[str]:
        numpy.random.seed(seed + 1000)  # whatever was drawn before
        settings = settings_with(seed=seed, datasets=[{"path": str(tmp_path)}], test_split_size=0.2)
        return load_splits(settings)[0]["test"]["text"]

    disable_caching()
    try:
        assert drawn(1) != drawn(2), "two launches of `trl sft` test on different rows"
        assert ours(3) == ours(3) != ours(4)
        set_seed(3)
        assert get_dataset(mixture)["test"]["text"] == ours(3), "TRL's own split, once it is seeded"
    finally:
        enable_caching()
