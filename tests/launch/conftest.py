"""Two network namespaces, which stand for two hosts: each has its own interfaces and routes, a veth pair joins them."""

import os
import shutil
import subprocess

import pytest

HOSTS = ("10.77.0.1", "10.77.0.2")


def _ip(*arguments: str) -> subprocess.CompletedProcess:
    return subprocess.run(["ip", *arguments], capture_output=True, text=True)


@pytest.fixture(scope="module")
def namespaces():
    """Names of two joined network namespaces; each one's interface is called as it is."""
    if shutil.which("ip") is None:
        pytest.skip("two hosts on one machine need network namespaces, and there is no `ip` (package iproute2)")
    names = [f"zr{os.getpid()}{side}" for side in "ab"]
    orders = [("netns", "add", name) for name in names]
    orders.append(("link", "add", names[0], "netns", names[0], "type", "veth", "peer", names[1], "netns", names[1]))
    for name, address in zip(names, HOSTS, strict=True):
        orders.append(("-n", name, "addr", "add", f"{address}/24", "dev", name))
        orders += [("-n", name, "link", "set", device, "up") for device in (name, "lo")]
    try:
        for order in orders:
            done = _ip(*order)
            if done.returncode:
                pytest.skip(f"two hosts on one machine need network namespaces: ip {' '.join(order)}: {done.stderr}")
        yield names
    finally:
        for name in names:
            _ip("netns", "del", name)
