"""A run that is refused leaves its output folder as it was, whatever refuses it and however late."""

import json
from pathlib import Path

import pytest

from tests.helpers.damage import contents
from tests.helpers.tiny import write_recipe


@pytest.fixture(scope="module")
def earlier(one, tmp_path_factory) -> Path:
    """The recipe of a finished run, whose model and checkpoint lie in `out` beside it."""
    folder = tmp_path_factory.mktemp("earlier")
    path = write_recipe(folder, save_model=True, save_strategy="steps", save_steps=2, max_steps=2, sample_prompts=1)
    path.write_text(json.dumps(json.loads(path.read_text()) | {"eval_strategy": "steps"}))
    one.run("train", argv=[str(path), "--output_dir", str(folder / "out")])
    return path


def test_the_last_refusal_is_that_of_the_loaded_model(one, two, earlier):
    """Attention that the architecture does not have shows once the model is built; nothing is lost on either rank."""
    out = earlier.parent / "out"
    before = contents(out)
    assert {"metrics.json", "model.safetensors"} <= set(before) and any("checkpoint-2/" in name for name in before)
    given = [str(earlier), "--output_dir", str(out), "--overwrite", "true", "--attn_implementation", "eager"]
    for group in (one, two):
        said = group.run("refusal_of_a_built_model", argv=given)
        assert all("attn_implementation: eager was requested" in text and "[ZR406]" in text for text in said)
        assert contents(out) == before


def test_a_run_holds_its_folder_and_all_ranks_of_another_are_refused(two, tmp_path):
    out = tmp_path / "out"
    assert all("ZR747" in said for said in two.run("group_cases.held_and_refused", folder=str(out)))
    assert not out.exists(), "a run that is refused leaves nothing"
