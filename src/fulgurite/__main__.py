"""Run the command line: ``python -m fulgurite``."""

import sys

from fulgurite.cli import main

if __name__ == "__main__":
    sys.exit(main())
