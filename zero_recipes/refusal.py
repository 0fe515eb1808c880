"""A refusal: a run that cannot go well ends before any weight is loaded, with one message and exit code 2."""

from __future__ import annotations

import json
import os
import sys
import time
from typing import NoReturn

REFUSED = 2


class Refusal(Exception):
    """What is wrong, why it cannot work, and how to cure it: one sentence or two each."""

    def __init__(self, what: str, why: str, cure: str):
        super().__init__(what)
        self.what, self.why, self.cure = what, why, cure

    def __str__(self) -> str:
        return f"refused: {self.what}\n    why: {self.why}\n   cure: {self.cure}"


def leave_refused(refusal: Refusal) -> NoReturn:
    """End this rank with exit code 2; rank 0 alone prints the message.

    accelerate and torchrun turn the code into 1 and close with a table of their own. They print in it what stands in
    TORCHELASTIC_ERROR_FILE (torch/distributed/elastic/multiprocessing/errors/error_handler.py), so the message goes
    there too and is the last thing read.
    """
    if int(os.environ.get("RANK", 0)) == 0:
        print(refusal, file=sys.stderr, flush=True)
    error_file = os.environ.get("TORCHELASTIC_ERROR_FILE")
    if error_file:
        message = str(refusal)
        extra = {"py_callstack": message, "timestamp": str(int(time.time()))}
        with open(error_file, "w") as file:
            json.dump({"message": {"message": message, "extraInfo": extra}}, file)
    sys.exit(REFUSED)
