"""The data of real runs is made once, by one process."""

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
