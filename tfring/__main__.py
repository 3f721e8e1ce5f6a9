"""Makes `python -m tfring` the same as `tfring`."""

import sys

from tfring.launch.cli import main

if __name__ == "__main__":
    sys.exit(main())
