"""The data of real runs: made once by one process, mixed as TRL mixes it."""

from pathlib import Path

import yaml

from tests.helpers.tiny import write_recipe


def test_rows_are_made_once_by_one_process_and_kept(two, tmp_path):
    """Rank 0 tokenises both splits, rank 1 nothing; a second run finds them, a run with other arguments does not."""
    path = write_recipe(tmp_path, max_steps=1, eval_strategy="steps", eval_steps=1)
    argv = [str(path), "--output_dir", str(tmp_path / "out"), "--overwrite", "true"]
    cache = str(tmp_path / "cache")
    assert two.run("splits_tokenised", argv=argv, cache=cache) == [2, 0]
    assert two.run("splits_tokenised", argv=argv, cache=cache) == [0, 0]
    assert two.run("splits_tokenised", argv=[*argv, "--max_length", "99"], cache=cache) == [2, 0]
    assert (tmp_path / "out.previous" / "metrics.json").is_file(), "an overwritten run is kept"


def test_a_mixture_of_data_sets_trains_and_is_resolved(one, tmp_path):
    """`datasets:` with test_split_size, TRL's mixture, as in pythia-full.yaml."""
    path = write_recipe(tmp_path, eval_strategy="steps", eval_steps=3, sample_prompts=2, sample_max_new_tokens=3)
    recipe = yaml.safe_load(path.read_text())
    files = {"path": "json", "data_files": str(Path(recipe.pop("dataset_name")) / "train.jsonl")}
    path.write_text(yaml.safe_dump(recipe | {"datasets": [files], "test_split_size": 0.1}))
    one.run("train", argv=[str(path), "--output_dir", str(tmp_path / "out")])
    resolved = yaml.safe_load((tmp_path / "out" / "recipe.resolved.yaml").read_text())
    assert resolved["datasets"] == [files]
    assert (tmp_path / "out" / "samples.jsonl").read_text().count("\n") == 2
