"""Print the libraries of pyproject.toml without their ranges, and without torch: what `make canary` installs."""

import re
import tomllib
from pathlib import Path

PROJECT = Path(__file__).resolve().parents[1] / "pyproject.toml"


def main() -> None:
    project = tomllib.loads(PROJECT.read_text())["project"]
    named = [*project["dependencies"], *(each for extra in project["optional-dependencies"].values() for each in extra)]
    names = [re.match(r"[\w.-]+", requirement)[0] for requirement in named]
    print(*(name for name in names if name != "torch"))


if __name__ == "__main__":
    main()
