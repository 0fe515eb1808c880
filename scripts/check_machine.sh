#!/bin/sh
# Checks for everything that pip cannot install. usage: check_machine.sh [PYTHON]. Exits 1 and names what is missing.
python=${1:-python3}
missing=""
command -v git >/dev/null 2>&1 || missing="$missing git"
command -v g++ >/dev/null 2>&1 || command -v c++ >/dev/null 2>&1 || missing="$missing g++"
if ! command -v "$python" >/dev/null 2>&1; then
    missing="$missing python3 python3-dev python3-venv"
else
    if ! "$python" -c 'import sys; sys.exit(sys.version_info < (3, 11))'; then
        echo "refused: $("$python" --version) is too old" >&2
        echo "    why: requirements.lock holds packages that need Python 3.11 or later." >&2
        echo "   fix: make demo PYTHON=python3.12, or another interpreter of at least 3.11." >&2
        exit 1
    fi
    "$python" -c 'import ensurepip, venv' >/dev/null 2>&1 || missing="$missing python3-venv"
    "$python" -c 'import os, sys, sysconfig; sys.exit(not os.path.exists(os.path.join(sysconfig.get_path("include"), "Python.h")))' \
        || missing="$missing python3-dev"
fi
if [ -n "$missing" ]; then
    echo "refused: this machine lacks$missing" >&2
    echo "    why: DeepSpeed compiles its communication and Adam kernels on first use; without a compiler and" >&2
    echo "         Python's headers every launch fails." >&2
    echo "   fix: apt-get install$missing (or your system's packages of the same purpose)" >&2
    exit 1
fi
