"""``python -m wagma`` is the command ``wagma``."""

import sys

from wagma.cli import main

if __name__ == "__main__":
    sys.exit(main())
