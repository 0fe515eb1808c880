"""ZeRO-Infinity: states really go to the disk and back, losses are those of CPU offload, nothing stays behind."""

import json
from pathlib import Path

import pytest

from tests.helpers import cases, ending_cases, family_cases
from tests.helpers.group import CaseFailed
from tests.helpers.tiny import arguments, write_model, write_recipe
from zero_recipes.core.findings import Refusal
from zero_recipes.core.host import Host
from zero_recipes.engine.nvme import LOCK, SWAPPED, claimed
from zero_recipes.tools.plan.formulas import predict_by_formulas
from zero_recipes.tools.plan.job import job_of, model_config, read_recipe

STEPS = 3
MIXED = "zero3_offload_infinity"
pytestmark = pytest.mark.skipif(
    not Host().libaio_headers(), reason="libaio-dev is not installed: async_io cannot be compiled"
)


@pytest.fixture(scope="module")
def recipe(tmp_path_factory) -> Path:
    """A model of one layer whose parts on two ranks reach 1 MiB, below which DeepSpeed swaps nothing."""
    folder = tmp_path_factory.mktemp("infinity")
    model = write_model(folder / "large", hidden=512, intermediate=2304, layers=1)
    return write_recipe(folder, model_name_or_path=str(model), max_steps=STEPS, per_device_train_batch_size=1)


@pytest.fixture(scope="module")
def runs(two, recipe, tmp_path_factory) -> dict[str, list[dict]]:
    """{strategy: result by rank}, on NVMe with the folder's content while it trained."""
    folder = tmp_path_factory.mktemp("runs")
    disk = folder / "disk"
    disk.mkdir()
    found = {}
    configs = {name: Path(f"ds_configs/{name}.json") for name in ("zero3_offload", "zero3_infinity", MIXED)}
    plain = json.loads(configs["zero3_offload"].read_text())
    plain["zero_optimization"]["memory_efficient_linear"] = True  # as on NVMe: torch's own rounds otherwise
    configs["zero3_offload"] = folder / "plain.json"
    configs["zero3_offload"].write_text(json.dumps(plain))
    turned = json.loads(configs["zero3_infinity"].read_text())  # no file of its own is shipped
    turned["zero_optimization"]["offload_param"] = {"device": "cpu", "pin_memory": True}
    configs["optimizer_infinity"] = folder / "turned.json"
    configs["optimizer_infinity"].write_text(json.dumps(turned))
    for strategy, config in configs.items():
        argv = [str(recipe), "--output_dir", str(folder / strategy), "--deepspeed", str(config)]
        argv += ["--nvme_path", str(disk), "--save_model", "true"] if strategy.endswith("_infinity") else []
        # masters on NVMe begin with the 16-bit weights; for the comparison those of CPU offload do so, too
        more = {"disk": str(disk)}
        if strategy == "zero3_offload":
            more["left_out"] = "zero_recipes.training.masters.set_masters"
        found[strategy] = two.run(family_cases.train_and_look_at_swap_files, argv=argv, **more)
    return found


# what is swapped, by a word in its files' names, and bytes a parameter that stay in host memory
SWAPS = {"zero3_infinity": ("", 0), MIXED: ("bfloat16params", 12), "optimizer_infinity": ("optimizer", 2)}


@pytest.mark.parametrize("name", SWAPS)
def test_states_go_to_the_disk_and_losses_are_those_of_cpu_offload(runs, name):
    """Swap files hold each rank's masters and moments (12 bytes an element), its parameters, or both."""
    (kind, in_memory), metrics, plain = SWAPS[name], runs[name][0]["metrics"], runs["zero3_offload"][0]["metrics"]
    assert metrics["strategy"] == (name if name == "zero3_infinity" else MIXED)
    assert metrics["loss_history"] == pytest.approx(plain["loss_history"], rel=1e-4)
    assert metrics["exact_master_weights"] is False
    assert metrics["loss_history"][-1] < metrics["loss_history"][0] - 0.5
    for rank, result in enumerate(runs[name]):
        mine = {file: size for file, size in result["swapped"].items() if f"/rank{rank}/" in f"/{file}"}
        assert mine and all(kind in file for file in mine)
        states = sum(size for file, size in mine.items() if "optimizer" in file and "gradient" not in file)
        assert states == pytest.approx(0 if name == MIXED else 12 * metrics["parameters"] // 2, rel=0.05)
        held = result["metrics"]["model_state_bytes"][rank]
        assert held["offloaded_disk"] == sum(mine.values())
        assert held["offloaded_host"] >= in_memory * metrics["parameters"] // 2
    disk = Path(runs[name][0]["output_dir"]).parent / "disk"
    assert [path.name for path in disk.iterdir()] == [LOCK], "swap files are gone"
    assert all(result["swapped"] == {} for result in runs["zero3_offload"])


def test_the_plan_knows_the_swap_files_to_the_byte(runs, recipe):
    """Masters, moments and gradients in fp32 and weights in 16 bits, less what is below 1 MiB; and the buffer that
    takes all ranks' weights of the largest sub-group (here the whole model)."""
    own = read_recipe(recipe, [])
    for name in ("zero3_offload", "zero3_infinity", MIXED):
        ds_config = json.loads(Path(f"ds_configs/{name}.json").read_text())
        planned = predict_by_formulas(job_of(own, model_config(own.settings), name, ds_config, 2))
        held = [result["metrics"]["model_state_bytes"][rank] for rank, result in enumerate(runs[name])]
        assert [states["offloaded_disk"] for states in held] == [planned.model_state_bytes.offloaded_disk] * 2
        assert planned.nvme_bytes == sum(states["offloaded_disk"] for states in held)
        reserved = [size for result in runs[name] for size in result["reserved"]]
        expected = 0 if name == "zero3_offload" else 2 * 2 * 2 * planned.parameters // 2
        assert sum(reserved) == pytest.approx(expected, rel=0.02)


def test_a_folder_in_use_is_refused_and_its_files_stay(two, recipe, tmp_path):
    """The other run's swap files have the names that this run would delete and write."""
    argv = arguments(recipe, "zero3_infinity", tmp_path / "out")
    with claimed(tmp_path):
        theirs = tmp_path / SWAPPED / "optimizer" / "rank0" / "0_1.tensor.swp"
        theirs.parent.mkdir(parents=True)
        theirs.write_text("states")
        refused = two.run(ending_cases.refusal_of, argv=[*argv, "--nvme_path", str(tmp_path)])
        assert refused == [f"another run swaps to {tmp_path} [ZR622]"] * 2
        assert theirs.read_text() == "states"


def test_what_a_killed_run_left_is_deleted(tmp_path, capsys):
    left = tmp_path / SWAPPED / "optimizer" / "rank7"
    left.mkdir(parents=True)
    with claimed(tmp_path):
        assert not (tmp_path / SWAPPED).exists() and "of a killed run" in capsys.readouterr().out
        with pytest.raises(Refusal, match="another run swaps"), claimed(tmp_path):
            pass


@pytest.mark.private
def test_prefetching_is_still_to_be_refused(two, tmp_path):
    """Fails when DeepSpeed prefetches what is on NVMe: then drop the finding in checks/deepspeed_rules.py."""
    # with more or fewer layers it does not fail
    model = write_model(tmp_path / "large", hidden=512, intermediate=2304, layers=2)
    recipe = write_recipe(tmp_path, model_name_or_path=str(model), max_steps=STEPS, per_device_train_batch_size=1)
    config = json.loads(Path("ds_configs/zero3_infinity.json").read_text())
    config["zero_optimization"] |= {"stage3_prefetch_bucket_size": 5 * 10**7, "stage3_max_live_parameters": 10**9}
    argv = [str(recipe), "--output_dir", str(tmp_path / "out"), "--deepspeed", json.dumps(config)]
    with pytest.raises(CaseFailed, match="already assigned swap buffer id"):
        two.run(cases.train_unchecked, argv=[*argv, "--nvme_path", str(tmp_path)])
