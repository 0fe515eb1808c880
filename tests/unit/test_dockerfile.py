"""What can be known of the image without building it; docker/smoke.sh builds it and trains in it."""

from __future__ import annotations

import os
import re
import shlex
import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
SCRIPTS = sorted((ROOT / "docker").glob("*.sh"))
NEEDED = [
    "run_sft.py",
    "Makefile",
    "pyproject.toml",
    "requirements.lock",
    "LICENSE",
    "README.md",
    "Dockerfile",
    *(
        str(path.relative_to(ROOT))
        for folder in ("zero_recipes", "recipes", "ds_configs", "accelerate_configs", "tiny_world", "scripts", "docker")
        for path in (ROOT / folder).rglob("*")
        if path.is_file() and "__pycache__" not in path.parts and path.suffix != ".part"
    ),
]


def instructions() -> list[tuple[str, str]]:
    """The Dockerfile as (INSTRUCTION, rest), comments dropped and continued lines joined."""
    lines = [line for line in (ROOT / "Dockerfile").read_text().splitlines() if not line.lstrip().startswith("#")]
    joined = "\n".join(lines).replace("\\\n", " ")
    return [tuple(line.split(maxsplit=1)) for line in joined.splitlines() if line.strip()]


def values(name: str) -> list[str]:
    return [rest for instruction, rest in instructions() if instruction == name]


def environment() -> dict[str, str]:
    return dict(pair.split("=", 1) for rest in values("ENV") for pair in shlex.split(rest))


def locked_torch() -> str:
    return re.search(r"^torch==(\S+)$", (ROOT / "requirements.lock").read_text(), re.MULTILINE)[1]


def ignored(path: str) -> bool:
    """Does .dockerignore keep this path, or a folder above it, out of the build?"""
    parts = Path(path).parts
    above = ["/".join(parts[: depth + 1]) for depth in range(len(parts))]
    patterns = [line for line in (ROOT / ".dockerignore").read_text().split("\n") if line and not line.startswith("#")]
    assert not any(pattern.startswith("!") for pattern in patterns), "exceptions are not read here"
    for pattern in patterns:
        regex = re.escape(pattern).replace(r"\*\*/", "(.*/)?").replace(r"\*", "[^/]*")
        if any(re.fullmatch(regex, one) for one in above):
            return True
    return False


def test_every_copied_file_exists_and_is_in_the_build_context():
    sources = [source for rest in values("COPY") for source in rest.split()[:-1]]
    assert sources[-1] == "."
    for source in sources[:-1]:
        assert (ROOT / source).is_file(), source
        assert not ignored(source), source


def test_scripts_that_run_in_the_image_exist():
    named = re.findall(r"(?:docker|scripts)/\w+\.sh", " ".join(values("RUN") + values("ENTRYPOINT")))
    assert set(named) == {"docker/install_lock.sh", "docker/entrypoint.sh"}
    assert all((ROOT / name).is_file() for name in named)


def test_dockerignore_keeps_what_a_run_needs():
    assert len(NEEDED) > 100
    assert [path for path in NEEDED if ignored(path)] == []


def test_dockerignore_leaves_out_what_the_host_made():
    made = [
        ".venv/bin/python",
        ".git/config",
        "output/demo/metrics.json",
        "zero_recipes/__pycache__/cli.cpython-311.pyc",
        ".pytest_cache/README.md",
        "zero_recipes.egg-info/PKG-INFO",
        ".env",
    ]
    assert [path for path in made if not ignored(path)] == []


def test_caches_and_outputs_are_on_the_volume():
    variables = environment()
    assert variables["HF_HOME"] == "/workspace/cache/huggingface"
    assert variables["TORCH_EXTENSIONS_DIR"] == "/workspace/cache/torch_extensions"
    assert "ln -s /workspace/output output" in " ".join(values("RUN"))
    assert "mkdir -p" in (entrypoint := (ROOT / "docker" / "entrypoint.sh").read_text())
    for needed in ('"$HF_HOME"', '"$TORCH_EXTENSIONS_DIR"', "/workspace/output", 'exec "$@"'):
        assert needed in entrypoint


def test_the_makefile_finds_its_virtual_environment_in_the_image():
    folder = values("WORKDIR")[0]
    assert environment()["PATH"].startswith(f"{folder}/.venv/bin:")
    assert "touch .venv/.ready" in " ".join(values("RUN"))
    assert "$(VENV)/.ready: requirements.lock pyproject.toml" in (ROOT / "Makefile").read_text()


def test_the_base_image_carries_the_locked_torch():
    (base,) = [rest.removeprefix("BASE_IMAGE=") for rest in values("ARG") if rest.startswith("BASE_IMAGE=")]
    assert re.fullmatch(rf"pytorch/pytorch:{re.escape(locked_torch())}-cuda[\d.]+-cudnn\d+-devel", base)
    every = re.findall(r"pytorch/pytorch:([\d.]+)-", (ROOT / "Dockerfile").read_text())  # the comment's tag too
    assert set(every) == {locked_torch()}


def test_no_registry_is_named():
    text = (ROOT / "Dockerfile").read_text()
    assert not re.search(r"https?://|--(?:extra-)?index-url", text)
    assert not re.search(r"\b[\w-]+\.(?:io|com|org|net|dev)\b", text)


def test_apt_asks_nothing():
    for command in values("RUN"):
        if "apt-get install" in command:
            assert "DEBIAN_FRONTEND=noninteractive apt-get install -y --no-install-recommends" in command


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda path: path.name)
def test_scripts_are_whole(script: Path):
    shell = "bash" if "bash" in script.read_text().splitlines()[0] else "sh"
    subprocess.run([shell, "-n", script], check=True)


def install(folder: Path, base_torch: str | None, **variables: str) -> subprocess.CompletedProcess:
    """Run install_lock.sh beside a python3 that knows only the base's torch, and makes no environment."""
    for name in ("requirements.lock", "docker/install_lock.sh"):
        (folder / name).parent.mkdir(exist_ok=True)
        shutil.copy(ROOT / name, folder / name)
    (folder / "scripts").mkdir()
    (folder / "scripts" / "check_machine.sh").write_text("echo would install; exit 3\n")
    (folder / "bin").mkdir()
    python = folder / "bin" / "python3"
    python.write_text("#!/bin/sh\n" + (f"echo {base_torch}\n" if base_torch else "exit 1\n"))
    python.chmod(0o755)
    path = f"{folder / 'bin'}{os.pathsep}{os.environ['PATH']}"
    return subprocess.run(
        ["sh", "docker/install_lock.sh"],
        cwd=folder,
        env={"PATH": path, **variables},
        capture_output=True,
        text=True,
    )


@pytest.mark.parametrize("base_torch", ["{}", "{}+cu130", "{}+cpu"])
def test_the_locked_torch_is_taken_whatever_its_cuda(tmp_path: Path, base_torch: str):
    ran = install(tmp_path, base_torch.format(locked_torch()))
    assert (ran.returncode, ran.stdout) == (3, "would install\n")


@pytest.mark.parametrize("base_torch", ["2.1.0+cu121", "{}.post1", "{}0", None])
def test_another_torch_stops_the_build(tmp_path: Path, base_torch: str | None):
    ran = install(tmp_path, base_torch and base_torch.format(locked_torch()))
    assert ran.returncode == 1
    assert ran.stderr.startswith("refused: the base image's torch is ")
    assert f"requirements.lock says {locked_torch()}" in ran.stderr
    assert "INSTALL_TORCH=1" in ran.stderr


def test_a_build_argument_allows_the_download(tmp_path: Path):
    assert install(tmp_path, None, INSTALL_TORCH="1").stdout == "would install\n"
