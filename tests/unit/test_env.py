"""`zero-recipes env`: the machine as a run may use it, and the versions."""

import json
from importlib.metadata import Distribution, PackageNotFoundError, version

import yaml

from tests.helpers import fake_cuda
from tests.helpers.fake_machine import CONTAINER, DRIVER, SEEN, machine, may_lock
from zero_recipes.checks import machine as machines
from zero_recipes.core import units
from zero_recipes.core.host import Host
from zero_recipes.tools import env
from zero_recipes.tools import main as cli


def test_env_shows_a_pod_as_its_container_may_use_it(tmp_path, monkeypatch):
    fake_cuda.install(monkeypatch)
    monkeypatch.setattr("torch.version.cuda", "13.0")
    monkeypatch.setattr(machines, "refusal_of_cuda", lambda: "")
    files = DRIVER | CONTAINER | SEEN | may_lock(8388608)
    files |= {"/sys/fs/cgroup/memory.max": "500000000\n", "/sys/fs/cgroup/cpu.max": "100000 100000\n"}
    pod = machine(tmp_path, files, 7 * 10**9, NCCL_DEBUG="INFO", UNRELATED="x", HF_TOKEN="hf_abc", WANDB_API_KEY="w")
    found = env.machine(pod)
    (gpu,) = found["gpus"]
    assert gpu["memory"] == units.size(80 * fake_cuda.GIB)
    assert (found["memory"]["free"], found["memory"]["lockable"]) == ("500 MB", units.size(8 << 20))
    assert found["cpu"]["cores"] == 1 and found["infiniband"] == {"mlx5_0": False}
    assert {disk["free"] for disk in found["disks"]} == {units.size(7 * 10**9)}
    assert found["variables"]["NCCL_DEBUG"] == "INFO" and "UNRELATED" not in found["variables"]
    whole = json.dumps(found)
    assert "hf_abc" not in whole and "WANDB" not in whole and found["variables"]["HF_TOKEN"] == "(set, not shown)"
    assert found["cuda"]["driver"] == "550.54.15"
    monkeypatch.setattr(machines, "refusal_of_cuda", lambda: "too old")
    assert (env.machine(pod)["gpus"], env.machine(pod)["cuda"]["refusal"]) == ([], "too old")


def test_env_prints_a_page(capsys):
    assert cli.main(["env"]) == 0
    text, found = capsys.readouterr().out, env.machine(Host())
    assert found["cpu"]["name"] in text and found["memory"]["machine"] in text


def test_env_shows_the_versions_of_a_checkout_that_is_not_installed(monkeypatch, capsys):
    installed = Distribution.from_name

    def from_name(name):
        if name == "zero-recipes":
            raise PackageNotFoundError(name)
        return installed(name)

    monkeypatch.setattr(Distribution, "from_name", from_name)
    assert cli.main(["env"]) == 0
    versions = yaml.safe_load(capsys.readouterr().out)["versions"]
    assert versions["zero-recipes"] == "not installed" and versions["torch"] == version("torch")
