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


PATTERNS = [line for line in (ROOT / ".dockerignore").read_text().split("\n") if line and not line.startswith("#")]


def excluded(path: str) -> bool:
    """What the patterns say of a path: the last line that matches it, or a folder above it, decides (moby,
    patternmatcher: `MatchesOrParentMatches`)."""
    above = [path, *(parent.as_posix() for parent in Path(path).parents if parent.name)]
    found = False
    for line in PATTERNS:
        pattern = re.escape(line.removeprefix("!")).replace(r"\*\*/", "(.*/)?").replace(r"\*", "[^/]*")
        if any(re.fullmatch(pattern, one) for one in above):
            found = not line.startswith("!")
    return found


def entered(folder: str) -> bool:
    """Whether the walk goes into an excluded folder: only where an exception begins with its name, letter by letter
    (moby, archive.go; buildah 1.28 left out all of `!zero_recipes/**/*.py` below the first level)."""
    return not excluded(folder) or any(line.startswith(f"!{folder}/") for line in PATTERNS)


def ignored(path: str) -> bool:
    """Does .dockerignore keep this path out of the build?"""
    folders = [parent.as_posix() for parent in Path(path).parents if parent.name]
    return excluded(path) or not all(map(entered, folders))


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


def test_all_that_is_under_version_control_is_in_the_build_context():
    if not (ROOT / ".git").exists() or shutil.which("git") is None:
        pytest.skip("not a git checkout")
    tracked = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=True).stdout.split()
    present = [path for path in tracked if (ROOT / path).exists()]
    assert len(present) > 300
    assert [path for path in present if ignored(path)] == []


SECRETS = [
    ".env",
    ".netrc",
    ".git/config",
    ".git-credentials",
    ".ssh/id_ed25519",
    ".cache/huggingface/token",
    ".aws/credentials",
    ".docker/config.json",
    "id_rsa",
    "token",
    "key.pem",
    "credentials.json",
    "workspace/cache/huggingface/token",
    "workspace/cache/huggingface/stored_tokens",
    "workspace/.netrc",
    "workspace/output/full/model.safetensors",
    "recipes/.env",
    "recipes/.hidden.yaml",
    "recipes/token",
    "recipes/private/mine.yaml",
    "scripts/.netrc",
    "docker/config.json",
    "tests/.env",
    "tests/helpers/token",
    "zero_recipes/.netrc",
    "zero_recipes/core/.secret.json",
    "docs/id_rsa",
    "tiny_world/base/.env",
    "wandb/run-1/config.yaml",
]
MADE_ON_THE_HOST = [
    ".venv/bin/python",
    ".venv/lib/python3.11/site-packages/torch/version.py",
    "build/lib/zero_recipes/cli/main.py",
    "output/demo/metrics.json",
    "zero_recipes/__pycache__/cli.cpython-311.pyc",
    "tests/unit/__pycache__/cached.py",
    ".pytest_cache/README.md",
    "zero_recipes.egg-info/PKG-INFO",
    "docs/demo/loss.png.part",
]


@pytest.mark.parametrize("path", SECRETS + MADE_ON_THE_HOST)
def test_the_image_gets_neither_secrets_nor_what_the_host_made(path: str):
    assert ignored(path)


def test_no_layer_is_given_a_secret():
    """Arguments and variables of a build stay readable in the image's history."""
    given = " ".join(values("ARG") + values("ENV")).lower()
    assert not re.search("token|password|secret|api_key|credential", given)
    assert not values("ADD")
    assert all("--mount=type=secret" not in run and "netrc" not in run for run in values("RUN"))


def test_the_command_does_not_run_as_root():
    assert "useradd --create-home --uid 1000 recipes" in " ".join(values("RUN"))
    entrypoint = (ROOT / "docker" / "entrypoint.sh").read_text()
    dropped = entrypoint.index("exec setpriv --reuid=recipes --regid=recipes --init-groups")
    assert dropped < entrypoint.index("compiled_for"), "what reads the volume runs after root was left"
    assert dropped < entrypoint.index('exec "$@"')


def entrypoint_in(folder: Path, writable: bool) -> subprocess.CompletedProcess:
    """The entrypoint as an ordinary user, on a volume in `folder`."""
    volume = folder / "workspace"
    volume.mkdir()
    text = (ROOT / "docker" / "entrypoint.sh").read_text().replace("/workspace", str(volume))
    (folder / "entrypoint.sh").write_text(text)
    binaries = folder / "bin"
    binaries.mkdir()
    for name, line in (("id", "echo 1234"), ("lscpu", "echo Flags: none"), ("python", "echo 1")):
        (binaries / name).write_text(f"#!/bin/sh\n{line}\n")
        (binaries / name).chmod(0o755)
    if not writable:
        (volume / "cache").write_text("a file where a folder is needed")
    variables = {key: value.replace("/workspace", str(volume)) for key, value in environment().items()}
    variables |= {"PATH": f"{binaries}{os.pathsep}{os.environ['PATH']}", "HOME": "/nowhere"}
    return subprocess.run(
        ["sh", str(folder / "entrypoint.sh"), "sh", "-c", "echo $HOME"], env=variables, capture_output=True, text=True
    )


def test_another_user_finds_the_folders_and_a_home(tmp_path: Path):
    ran = entrypoint_in(tmp_path, writable=True)
    assert (ran.returncode, ran.stdout) == (0, f"{tmp_path}/workspace/cache\n"), ran.stderr
    made = sorted(path.name for path in (tmp_path / "workspace" / "cache").iterdir())
    assert made == ["huggingface", "torch_extensions", "triton"]


def test_a_volume_that_cannot_be_written_to_is_refused(tmp_path: Path):
    ran = entrypoint_in(tmp_path, writable=False)
    assert ran.returncode == 2
    assert ran.stderr.startswith(f"refused: {tmp_path}/workspace/cache/huggingface cannot be written to by user 1234")


def test_caches_and_outputs_are_on_the_volume():
    variables = environment()
    assert variables["HF_HOME"] == "/workspace/cache/huggingface"
    assert variables["TORCH_EXTENSIONS_DIR"] == "/workspace/cache/torch_extensions"
    assert variables["TRITON_CACHE_DIR"] == "/workspace/cache/triton"
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


def test_nccl_finds_infiniband_and_triton_its_compiler():
    """NCCL loads libibverbs and a provider; Triton compiles with gcc (of g++) and Python.h."""
    (installed,) = [command for command in values("RUN") if "apt-get install" in command]
    assert {"libibverbs1", "ibverbs-providers", "g++", "python3-dev"} <= set(installed.split())


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
