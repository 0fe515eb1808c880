"""The steps of the Dockerfile that run without Docker: its scripts, and its entrypoint in a mount namespace.

docker/smoke.sh builds the image and trains in it.
"""

import os
import re
import shlex
import shutil
import subprocess
import sys
from functools import cache
from pathlib import Path

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from tests.helpers.tiny import ROOT
from zero_recipes.checks import machine
from zero_recipes.core.host import Host

LOCKED_TORCH = re.search(r"^torch==(\S+)$", (ROOT / "requirements.lock").read_text(), re.MULTILINE)[1]


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


# the entrypoint with stand-ins for what only root can do


def entrypoint_in(folder: Path, user: int = 1234, **more: str) -> subprocess.CompletedProcess:
    """The entrypoint with the volume in `folder`. What only root can do writes its arguments instead."""
    volume, binaries = folder / "workspace", folder / "bin"
    binaries.mkdir(exist_ok=True)
    text = (ROOT / "docker" / "entrypoint.sh").read_text().replace("/workspace", str(volume))
    for path in ("/home", "/run"):
        text = text.replace(f"{path}/", f"{folder}/")
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
    called = [line.split()[0] for line in entrypoint_in(tmp_path, user=0).stderr.splitlines()]
    assert called == ["chown", "setpriv"], "a key decides about sshd"
    ran = entrypoint_in(tmp_path, user=0, PUBLIC_KEY="ssh-ed25519 AAAA me@here")
    key = tmp_path / "recipes" / ".ssh" / "authorized_keys"
    assert (ran.returncode, key.read_text(), key.stat().st_mode & 0o777) == (0, "ssh-ed25519 AAAA me@here\n", 0o600)
    assert key.parent.stat().st_mode & 0o777 == 0o700
    called = [line.split()[0] for line in ran.stderr.splitlines()]
    assert called == ["chown", "chown", "ssh-keygen", "sshd", "setpriv"], "the command comes after sshd"


# the entrypoint, where root is root: in a mount namespace with a volume, a user `recipes` and the image's paths

# unshare's way to a namespace with several users: as root, else by the numbers of /etc/subuid
NAMESPACES = (
    ["unshare", "--mount", "--propagation", "private"],
    ["unshare", "--user", "--map-root-user", "--map-auto", "--mount"],
)
# A root of its own: the folders of this machine, all but those that the image fills. It ends with its shell.
MACHINE = r"""
set -eu
folder=$1 root=$1/root; shift
mount -t tmpfs tmpfs "$root"
for entry in /* /opt/*; do
    case $entry in /home | /opt | /run | /workspace) continue ;; esac
    if [ -L "$entry" ]; then
        cp -P "$entry" "$root$entry"
    elif [ -d "$entry" ]; then
        mkdir -p "$root$entry"
        mount --rbind "$entry" "$root$entry"
    fi
done
mkdir -p "$root/home/recipes" "$root/run" "$root/workspace" "$root/stand-ins" "$root/opt/zero-recipes/docker"
mount --bind "$folder/volume" "$root/workspace"
mount --bind "$folder/stand-ins" "$root/stand-ins"
mount --bind "$folder/docker" "$root/opt/zero-recipes/docker"
mount --bind "$folder/profile.d" "$root/etc/profile.d"
mount --bind "$folder/passwd" "$root/etc/passwd"
mount --bind "$folder/group" "$root/etc/group"
chown 1000:1000 "$root/home/recipes"
exec chroot "$root" "$@"
"""
# In the place of sshd: runs what it would run for `ssh HOST COMMAND` and `ssh HOST`, as it does.
SSHD = r"""#!/bin/bash
for word; do case $word in SetEnv=*) set_env=${word#SetEnv=} ;; esac; done
session() {
    setpriv --reuid=recipes --regid=recipes --init-groups \
        env -i HOME=/home/recipes USER=recipes PATH=/usr/bin:/bin LANG=C.UTF-8 "$set_env" "$@"
}
session bash -c 'env -0; bash -c true' >/stand-ins/command
session bash -lc 'env -0' >/stand-ins/login
stat -c '%a %U %G' /run/zero-recipes/environment.sh >/stand-ins/file
setpriv --reuid=65534 --regid=65534 --clear-groups cat /run/zero-recipes/environment.sh >>/stand-ins/file 2>&1 || true
"""
STAND_INS = {
    "lscpu": "#!/bin/sh\necho Flags: none\n",
    "ssh-keygen": "#!/bin/sh\n",
    "sshd": SSHD,
    # the packages' versions are another matter
    "python": f'#!/bin/sh\ncase $1 in -I) exec {shlex.quote(sys.executable)} "$@" ;; esac\necho 1\n',
    "no-chown": '#!/bin/sh\ncase "$*" in */workspace*) exit 1 ;; esac\nexec /bin/chown "$@"\n',
}
HARD = {"HF_TOKEN": 'hf_it\'s "a" $HOME `id` \\ \n second line ', "RUNPOD_POD_ID": "pod 1", "LANG": "de_DE.UTF-8"}


@cache
def namespace() -> list[str] | str:
    """How to start a command in a namespace of its own, or why that cannot be."""
    why = "unshare is missing"
    for command in NAMESPACES if shutil.which("unshare") else ():
        probe = [*command, "setpriv", "--reuid=1000", "--regid=1000", "--clear-groups", "true"]
        ran = subprocess.run(probe, capture_output=True, text=True)
        if ran.returncode == 0:
            return command
        why = ran.stderr.strip()
    return why


def pod(folder: Path, allows_chown: bool = True, **variables: str) -> subprocess.CompletedProcess:
    """The entrypoint as root of a machine of its own, whose volume is `folder`/volume."""
    command = namespace()
    if isinstance(command, str):
        pytest.skip(f"namespaces with several users are not allowed here: {command}")
    shutil.copytree(ROOT / "docker", folder / "docker")
    (folder / "docker" / "image.sh").write_text("export HF_HOME=/image\n")
    for name in ("root", "volume", "stand-ins", "profile.d"):
        (folder / name).mkdir(exist_ok=True)
    shutil.copy(ROOT / "docker" / "profile.sh", folder / "profile.d" / "zero-recipes.sh")
    (folder / "passwd").write_text("root:x:0:0::/root:/bin/sh\nrecipes:x:1000:1000::/home/recipes:/bin/bash\n")
    (folder / "group").write_text("root:x:0:\nrecipes:x:1000:\n")
    for name, script in STAND_INS.items():
        if name != "no-chown" or not allows_chown:
            file = folder / "stand-ins" / name.removeprefix("no-")
            file.write_text(script)
            file.chmod(0o755)
    caches = {"HF_HOME": "huggingface", "TORCH_EXTENSIONS_DIR": "torch_extensions", "TRITON_CACHE_DIR": "triton"}
    variables |= {name: f"/workspace/cache/{path}" for name, path in caches.items()}
    variables["PATH"] = "/stand-ins:/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
    started = ["sh", "/opt/zero-recipes/docker/entrypoint.sh", "sh", "-c", "id -un; echo $HOME"]
    run = [*command, "sh", "-c", MACHINE, "sh", str(folder), *started]
    return subprocess.run(run, env=variables, capture_output=True, text=True, cwd="/")


def test_a_session_of_ssh_has_what_the_pod_was_started_with(tmp_path, monkeypatch):
    ran = pod(tmp_path, PUBLIC_KEY="ssh-ed25519 AAAA me@here", **HARD)
    assert (ran.returncode, ran.stdout) == (0, "recipes\n/home/recipes\n"), ran.stderr
    monkeypatch.setattr(Path, "is_mount", lambda self: True)
    for name in ("command", "login"):
        text = (tmp_path / "stand-ins" / name).read_text()
        session = dict(line.split("=", 1) for line in text.split("\0")[:-1])
        for key in ("HF_TOKEN", "RUNPOD_POD_ID"):
            assert session[key] == HARD[key], name
        assert session["LANG"] == "C.UTF-8", "the client's own"
        assert session["HF_HOME"] == "/workspace/cache/huggingface" and session["PATH"].startswith("/stand-ins:")
        assert "BASH_ENV" not in session, "a script in the session would read it again"
        found = list(machine.volume_findings(Path("out"), Host(environment=session)))
        assert [finding.code for finding in found] == ["ZR615"]
    mode, *refused = (tmp_path / "stand-ins" / "file").read_text().splitlines()
    assert mode == "440 root recipes" and "Permission denied" in refused[0]


@pytest.mark.parametrize(("mode", "allows_chown", "code"), [(0o755, True, 0), (0o755, False, 2), (0o777, False, 0)])
def test_a_volume_that_forbids_chown_is_used_or_refused(tmp_path, mode, allows_chown, code):
    volume = tmp_path / "volume"
    volume.mkdir()
    volume.chmod(mode)
    ran = pod(tmp_path, allows_chown)
    assert ran.returncode == code, ran.stderr
    if code:
        assert "refused: /workspace/cache/huggingface cannot be written to by user 1000" in ran.stderr
    else:
        assert ran.stdout == "recipes\n/home/recipes\n"


@settings(max_examples=3)
@example(["it's\n$(touch ran) `id` \"\\ "])
@given(st.lists(st.text(st.characters(exclude_characters="\0", exclude_categories=["Cs"]), max_size=30), min_size=20))
def test_values_reach_any_shell_as_they_are(values):
    variables = {f"A{number}": value for number, value in enumerate(values)}
    script = str(ROOT / "docker" / "session_environment.py")
    started_with = variables | {"a.b": "no name for a shell", "PWD": "the pod's"}
    written = subprocess.run([sys.executable, "-I", script], env=started_with, capture_output=True, check=True).stdout
    for shell in ("sh", "bash"):
        read = subprocess.run([shell], env={}, input=written + b"\nenv -0", capture_output=True, check=True).stdout
        found = dict(os.fsdecode(line).split("=", 1) for line in read.split(b"\0")[:-1])
        assert {name: found[name] for name in variables} == variables
        assert "a.b" not in found and found.get("PWD") != "the pod's"
