"""`python -m tfring.launch -n 4 train.py` is `tfring launch -n 4 train.py`."""

import sys

from tfring.launch.cli import main

if __name__ == "__main__":
    sys.exit(main(["launch", *sys.argv[1:]]))
