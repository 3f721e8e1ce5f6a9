"""`python -m tfring.bench` is `tfring bench`."""

import sys

from tfring.launch.cli import main

if __name__ == "__main__":
    sys.exit(main(["bench", *sys.argv[1:]]))
