"""The steps of the Dockerfile that run without Docker; docker/smoke.sh builds the image and trains in it."""

import os
import re
import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
LOCKED_TORCH = re.search(r"^torch==(\S+)$", (ROOT / "requirements.lock").read_text(), re.MULTILINE)[1]


def entrypoint_in(folder: Path, user: int = 1234, **more: str) -> subprocess.CompletedProcess:
    """The entrypoint with the volume in `folder`. What only root can do writes its arguments instead."""
    volume, binaries = folder / "workspace", folder / "bin"
    binaries.mkdir(exist_ok=True)
    text = (ROOT / "docker" / "entrypoint.sh").read_text().replace("/workspace", str(volume))
    for path in ("/usr/sbin", "/home", "/run"):
        text = text.replace(f"{path}/", f"{binaries if path == '/usr/sbin' else folder}/")
    (folder / "entrypoint.sh").write_text(text)
    stubs = {"id": f"echo {user}", "lscpu": "echo Flags: none", "python": "echo 1", "find": ":"}
    stubs |= dict.fromkeys(("chown", "ssh-keygen", "sshd", "setpriv"), 'echo "${0##*/} $*" >&2')
    for name, line in stubs.items():
        (binaries / name).write_text(f"#!/bin/sh\n{line}\n")
        (binaries / name).chmod(0o755)
    caches = {"HF_HOME": "huggingface", "TORCH_EXTENSIONS_DIR": "torch_extensions", "TRITON_CACHE_DIR": "triton"}
    variables = {name: f"{volume}/cache/{path}" for name, path in caches.items()}
    variables |= {"PATH": f"{binaries}{os.pathsep}{os.environ['PATH']}", "HOME": "/nowhere"} | more
    command = ["sh", str(folder / "entrypoint.sh"), "sh", "-c", "echo $HOME"]
    return subprocess.run(command, env=variables, capture_output=True, text=True)


def test_another_user_finds_the_folders_and_a_home_or_is_refused(tmp_path):
    (tmp_path / "workspace").mkdir()
    ran = entrypoint_in(tmp_path)
    assert (ran.returncode, ran.stdout) == (0, f"{tmp_path}/workspace/cache\n"), ran.stderr
    cache = tmp_path / "workspace" / "cache"
    assert sorted(path.name for path in cache.iterdir()) == ["huggingface", "torch_extensions", "triton"]
    shutil.rmtree(cache)
    cache.write_text("a file where a folder is needed")
    ran = entrypoint_in(tmp_path)
    assert ran.returncode == 2 and ran.stderr.startswith(f"refused: {cache}/huggingface cannot be written to by user")


def test_sshd_starts_where_a_pod_has_a_public_key(tmp_path):
    assert [line.split()[0] for line in entrypoint_in(tmp_path, user=0).stderr.splitlines()] == ["setpriv"]
    ran = entrypoint_in(tmp_path, user=0, PUBLIC_KEY="ssh-ed25519 AAAA me@here")
    key = tmp_path / "recipes" / ".ssh" / "authorized_keys"
    assert (ran.returncode, key.read_text(), key.stat().st_mode & 0o777) == (0, "ssh-ed25519 AAAA me@here\n", 0o600)
    assert key.parent.stat().st_mode & 0o777 == 0o700
    called = [line.split()[0] for line in ran.stderr.splitlines()]
    assert called == ["chown", "ssh-keygen", "sshd", "setpriv"], "the command runs as recipes, after sshd"


@pytest.mark.parametrize(
    ("base_torch", "variables", "taken"),
    [
        (LOCKED_TORCH, {}, True),
        (f"{LOCKED_TORCH}+cu130", {}, True),
        (f"{LOCKED_TORCH}0", {}, False),
        (None, {}, False),
        (None, {"INSTALL_TORCH": "1"}, True),
    ],
)
def test_the_lock_is_installed_on_the_locked_torch_alone(tmp_path, base_torch, variables, taken):
    for name in ("docker", "scripts", "bin"):
        (tmp_path / name).mkdir()
    for name in ("requirements.lock", "docker/install_lock.sh"):
        shutil.copy(ROOT / name, tmp_path / name)
    (tmp_path / "scripts" / "check_machine.sh").write_text("echo would install; exit 3\n")
    python = tmp_path / "bin" / "python3"
    python.write_text("#!/bin/sh\n" + (f"echo {base_torch}\n" if base_torch else "exit 1\n"))
    python.chmod(0o755)
    path = f"{tmp_path / 'bin'}{os.pathsep}{os.environ['PATH']}"
    command = ["sh", "docker/install_lock.sh"]
    ran = subprocess.run(command, cwd=tmp_path, env={"PATH": path} | variables, capture_output=True, text=True)
    assert ran.returncode == (3 if taken else 1)
    assert ("would install" in ran.stdout) == taken == ("refused: " not in ran.stderr)
