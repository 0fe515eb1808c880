"""Configurations of other projects, run by this repository."""

from pathlib import Path


def set_by_launch(path: Path, num_processes: int | None) -> dict[str, str]:
    """What `accelerate launch --config_file path` sets for the processes that it starts, but where they meet."""
    import os

    from tests.helpers.accelerate_env import environment_of_launch

    environment = environment_of_launch(path, num_processes).items()
    left_out = ("PYTHON", "KMP", "OMP", "MASTER")
    return {name: text for name, text in environment if os.environ.get(name) != text and not name.startswith(left_out)}


def launched(argv: list[str], environment: dict[str, str]) -> dict:
    """`train`, in the environment of a launch."""
    import os

    from tests.helpers.cases import train

    os.environ.update(environment)
    return train(argv)
