"""torch's CUDA build on a machine without a GPU: what a user's laptop has, and a pod whose GPU does not answer.

`make cuda-build` installs that build and runs this file, and all unit and planner tests, under it.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import run_sft
from zero_recipes.core.host import Host

ROOT = Path(__file__).resolve().parents[2]
BIN = Path(sys.executable).parent
QUICK = ["--max_steps", "2", "--sample_prompts", "0", "--eval_strategy", "no", "--save_model", "false"]
ARCHITECTURE = "9.0"  # H100 and H200
OPS = ("Quantizer", "FusedAdam", "CPUAdam", "AsyncIO")
# DeepSpeed 0.19.8 (op_builder/builder.py `jit_load`) leaves its flags for nvcc out where torch sees no GPU
COMPILE = """
import sys
import torch

torch.cuda.is_available = lambda: True
from deepspeed.ops import op_builder

loaded = getattr(op_builder, sys.argv[1] + "Builder")().load(verbose=False)
print("loaded", *(name for name in dir(loaded) if not name.startswith("_")))
"""

pytestmark = [
    pytest.mark.launch,
    pytest.mark.skipif(torch.version.cuda is None, reason="torch is a CPU build"),
    pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU"),
]


def ended(*command: str, **environment: str) -> subprocess.CompletedProcess:
    own = os.environ | environment
    return subprocess.run(command, cwd=ROOT, env=own, text=True, capture_output=True, timeout=900)


def test_the_whole_preflight_takes_the_cpu(tmp_path, monkeypatch, capfd):
    """Its parts are tested one by one, under whichever build; here they come together under this one."""
    monkeypatch.setenv("DS_ACCELERATOR", "")
    monkeypatch.chdir(ROOT)
    monkeypatch.delenv("DS_ACCELERATOR")
    run = run_sft.prepare(["recipes/tiny.yaml", "--output_dir", str(tmp_path)])
    assert (run.device, run.settings.use_cpu, os.environ["DS_ACCELERATOR"]) == ("cpu", True, "cpu")
    assert "why:" not in capfd.readouterr().out  # no finding


def test_check_has_nothing_to_say():
    done = ended(str(BIN / "zero-recipes"), "check", "recipes/tiny.yaml")
    assert done.returncode == 0 and "0 errors, 0 warnings" in done.stdout, done.stdout + done.stderr


def test_a_plan_for_a_gpu_is_that_of_the_cpu_build(tmp_path):
    """benchmarks/session/plans.json was made under it."""
    case = "2-pythia-410m-zero3"
    done = ended(
        sys.executable, "benchmarks/gpu_session.py", "--plan", case, HF_HOME=str(tmp_path)
    )  # none is kept there
    assert done.returncode == 0, done.stderr[-3000:]
    expected = json.loads((ROOT / "benchmarks" / "session" / "plans.json").read_text())["plans"][case]
    found = json.loads(done.stdout.splitlines()[-1])
    host, expected_host = found.pop("host_bytes"), expected.pop("host_bytes")
    assert found == expected
    assert len({host[when] - held for when, held in expected_host.items()}) == 1  # what importing this build takes


@pytest.mark.parametrize("strategy", ["single", "zero2", "zero3"])
def test_a_run_trains_on_the_cpu(tmp_path, strategy):
    script = ["run_sft.py", "recipes/tiny.yaml", *QUICK, "--output_dir", str(tmp_path)]
    launch = [str(BIN / "accelerate"), "launch", "--config_file", f"accelerate_configs/{strategy}.yaml"]
    done = ended(*([sys.executable] if strategy == "single" else launch), *script)
    assert done.returncode == 0, (done.stdout + done.stderr)[-4000:]
    metrics = json.loads((tmp_path / "metrics.json").read_text())
    assert (metrics["status"], metrics["device"], metrics["strategy"]) == ("ok", "cpu", strategy)


@pytest.mark.grid
@pytest.mark.skipif(Host().cuda_release() is None, reason="there is no nvcc")
@pytest.mark.parametrize("op", OPS)
def test_deepspeeds_ops_are_compiled_for_a_gpu(op, tmp_path):
    """They compile and load; what they compute only a GPU can show."""
    if op == "AsyncIO" and not Host().libaio_headers():
        pytest.skip("libaio-dev is not installed")
    driver = tmp_path / "libcuda.so"  # async_io is linked with it and calls nothing of it
    subprocess.run(["cc", "-shared", "-xc", "/dev/null", "-o", driver], check=True)
    where = dict.fromkeys(("TORCH_EXTENSIONS_DIR", "LIBRARY_PATH", "LD_LIBRARY_PATH"), str(tmp_path))
    where |= {"TORCH_CUDA_ARCH_LIST": ARCHITECTURE, "DS_ACCELERATOR": "cuda"}
    done = ended(sys.executable, "-c", COMPILE, op, **where, **toolkit())
    assert done.returncode == 0 and "loaded " in done.stdout, (done.stdout + done.stderr)[-4000:]


def toolkit() -> dict[str, str]:
    """CUDA_HOME where nvcc on the PATH is a wrapper, and headers that a small toolkit leaves to torch's packages."""
    nvcc = shutil.which("nvcc")
    homes = [os.environ.get("CUDA_HOME"), "/usr/local/cuda", nvcc and str(Path(nvcc).resolve().parents[1])]
    home = next(home for home in homes if home and Path(home, "include", "cuda_runtime_api.h").is_file())
    import nvidia

    found = {"CUDA_HOME": home}
    if not Path(home, "include", "cusparse.h").is_file():
        found["CPATH"] = ":".join(str(Path(folder, "cu13", "include")) for folder in nvidia.__path__)
    return found
