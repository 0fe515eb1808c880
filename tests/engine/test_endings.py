"""Whatever breaks in a run, its metrics.json says so with what was known by then, and what was saved is not lost."""

from tests.helpers.tiny import arguments, write_recipe

KEYS = {"save_model": True, "max_steps": 3, "sample_prompts": 3, "sample_max_new_tokens": 2}
KEYS |= {"dataset_test_split": "train", "save_strategy": "steps", "save_steps": 2}


def test_out_of_memory_while_the_weights_are_loaded(one, tmp_path):
    path = write_recipe(tmp_path, **KEYS)
    argv = [str(path), "--output_dir", str(tmp_path / "out")]
    (ended,) = one.run("sample_cases.break_at", argv=argv, point="load", error="MemoryError", words="no room")
    row = ended["metrics"]
    assert (row["status"], row["error"], row["name"]) == ("oom", "MemoryError: no room", "recipe")
    assert (row["failure"]["phase"], row["world_size"], row["strategy"]) == ("model", 1, "single")
    (ended,) = one.run("sample_cases.break_at", argv=[*argv[:2], str(tmp_path / "no")], point="load", error="Refusal")
    assert ended["error"][0] == "Refusal" and not (tmp_path / "no").exists()


def test_a_save_that_fails_on_both_ranks(two, tmp_path):
    path = write_recipe(tmp_path, **KEYS | {"save_strategy": "no"})
    argv = arguments(path, "zero1", tmp_path / "out")
    row = two.run("sample_cases.break_at", argv=argv, point="save", error="OSError", words="[/x]")[0]["metrics"]
    assert (row["status"], row["failure"]["phase"]) == ("failed", "save") and "OSError: [/x]" in row["error"]
    assert len(row["loss_history"]) == 3
