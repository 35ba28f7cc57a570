"""Print the requirements of an extra of pyproject.toml: what pip installs without the package."""

import importlib
import sys
from pathlib import Path

# Python 3.10 has no tomllib, but pip vendors an equivalent.
toml = importlib.import_module("tomllib" if sys.version_info >= (3, 11) else "pip._vendor.tomli")
project = toml.loads((Path(__file__).parents[1] / "pyproject.toml").read_text())["project"]


def requirements(extra):
    """Return the requirements of an extra."""
    return project["optional-dependencies"][extra]


if __name__ == "__main__":
    print(*requirements(sys.argv[1]))
