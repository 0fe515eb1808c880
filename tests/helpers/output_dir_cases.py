"""A case of tests/helpers/group.py about the lock of the output folder."""

from pathlib import Path

from torch import distributed

from zero_recipes.checkpoint.output_dir import hold_output_dir, refuse_in_use
from zero_recipes.core.findings import Finding, Refusal


def held_and_refused(folder: str) -> str:
    """What a second start says while a run of this group holds the folder; then the run is refused itself."""
    said = "not refused"
    try:
        with hold_output_dir(Path(folder)):
            distributed.barrier()
            try:
                refuse_in_use(Path(folder))
            except Refusal as refusal:
                said = str(refusal)
            distributed.barrier()
            raise Refusal([Finding("ZR000", "", "", "")])
    except Refusal:
        distributed.barrier()
        return said
