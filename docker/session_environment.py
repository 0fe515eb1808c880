"""Writes this process's environment as lines that a shell reads, for sessions that do not inherit it, as those of ssh.

python session_environment.py          all variables of the pod, for /run/zero-recipes/environment.sh (entrypoint.sh)
python session_environment.py NAME...  these alone, for the image (Dockerfile)
"""

import os
import re
import shlex
import sys

# of one process or terminal, which each session has of its own
OWN = {"_", "HOME", "LOGNAME", "OLDPWD", "PWD", "SHELL", "SHLVL", "TERM", "USER"}


def lines(environment: dict[str, str], names: list[str]) -> str:
    """Write variables for any POSIX shell, whatever is in their values.

    A variable that the session has already is kept, except PATH: /etc/profile sets a short one.
    """
    written = ""
    for name in names:
        if name in environment and re.fullmatch(r"[A-Za-z_][A-Za-z0-9_]*", name):
            has_it = "" if name == "PATH" else f'[ "${{{name}+set}}" ] || '
            written += f"{has_it}export {name}={shlex.quote(environment[name])}\n"
    return written


if __name__ == "__main__":
    named = sys.argv[1:] or sorted(os.environ.keys() - OWN)
    sys.stdout.buffer.write(os.fsencode(lines(dict(os.environ), named)))
