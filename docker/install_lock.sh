#!/bin/sh
# requirements.lock into .venv, on top of the torch that python3 has: a CUDA image carries it already.
# With INSTALL_TORCH=1 pip may download the locked torch where python3 has none, or another version.
set -eu
locked=$(sed -n 's/^torch==//p' requirements.lock)
# from the metadata, without its local part (+cu130): an import of torch takes seconds
present=$(python3 -c 'from importlib.metadata import version; print(version("torch"))' 2>/dev/null || echo none)
if [ "${present%%+*}" != "$locked" ] && [ -z "${INSTALL_TORCH:-}" ]; then
    echo "refused: the base image's torch is $present, requirements.lock says $locked" >&2
    echo "    why: pip would replace it by a download of gigabytes, perhaps for another CUDA than the image's nvcc." >&2
    echo "   fix:  --build-arg BASE_IMAGE=... with an image that carries torch $locked," >&2
    echo "         or --build-arg INSTALL_TORCH=1 to download it all the same." >&2
    exit 1
fi
sh scripts/check_machine.sh python3

# A virtual environment that sees the base's packages: pip counts the base's torch as installed, and neither
# "externally managed" nor a package of the distribution that pip cannot remove is in the way.
python3 -m venv --system-site-packages .venv
.venv/bin/pip install --quiet --no-cache-dir --disable-pip-version-check -r requirements.lock
.venv/bin/python -c 'import torch; print("torch", torch.__version__, "from", torch.__path__[0])'
