"""`python -m tfring.report` is `tfring report`."""

import sys

from tfring.launch.cli import main

if __name__ == "__main__":
    sys.exit(main(["report", *sys.argv[1:]]))
