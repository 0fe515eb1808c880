"""What an exception of any library says: memory was short, a file was not written, or another rank has ended."""

import errno
import os
import re
import shutil
from pathlib import Path

from zero_recipes.core.run_end import PeerFailed

FULL = (errno.ENOSPC, errno.EDQUOT)
FULL_BYTES = 2**20  # free of a disk that is full: a write of many bytes fills it to the last block
# in messages of libraries whose errors are no OSError
WRITES_OF_TORCH = ("PytorchStreamWriter failed writing", "unexpected pos ")
WRITES = (*WRITES_OF_TORCH, "I/O error: ")
# in what gloo, NCCL and torch's store say where a peer has ended or does not answer
ECHOES = (
    "Connection closed by peer",
    "Connection reset by peer",
    "Connection refused",
    "Broken pipe",
    "gloo/transport",
    "NCCL error",
    "NCCL communicator was aborted",
    "DistNetworkError",
    "DistStoreError",
    "Socket Timeout",
    "Timed out waiting",
)


def is_out_of_memory(error: BaseException) -> bool:
    """Whether an exception says that memory was short, on the accelerator (cuBLAS's own words too) or on the host."""
    import torch  # here: the tools that only read runs do not wait for it

    if isinstance(error, (torch.OutOfMemoryError, MemoryError)):
        return True
    return re.search("out of memory|t allocate memory|status_alloc_failed", str(error).lower()) is not None


def is_unwritten(error: BaseException | None) -> bool:
    """Whether an exception, or what it was raised from, says that a file could not be written."""
    if error is None:
        return False
    if isinstance(error, OSError) or any(words in str(error) for words in WRITES):
        return True
    return is_unwritten(error.__cause__ or error.__context__)


def is_disk_full(error: BaseException | None, folder: Path) -> bool:
    """Whether an exception, or what it was raised from, says that the disk of `folder` was full.

    torch's writer in C++ (2.13, caffe2/serialize/inline_container.cc) does not say why: then it is what the disk says.
    """
    if error is None:
        return False
    text = str(error)
    if getattr(error, "errno", None) in FULL or any(os.strerror(number) in text for number in FULL):
        return True
    if any(words in text for words in WRITES_OF_TORCH) and shutil.disk_usage(folder).free < FULL_BYTES:
        return True
    return is_disk_full(error.__cause__ or error.__context__, folder)


def is_echo(error: BaseException | None) -> bool:
    """Whether an exception, or what it was raised from, says that another rank has failed or ended."""
    if error is None:
        return False
    message = f"{type(error).__name__}: {error}"
    if isinstance(error, PeerFailed) or any(words in message for words in ECHOES):
        return True
    return is_echo(error.__cause__)
