"""`python -m tfring.doctor` is `tfring doctor`."""

import sys

from tfring.launch.cli import main

if __name__ == "__main__":
    sys.exit(main(["doctor", *sys.argv[1:]]))
