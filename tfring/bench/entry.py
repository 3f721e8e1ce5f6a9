"""`python -m tfring.bench.entry`: what `tfring bench` runs as each rank of a cluster."""

import sys

from tfring.bench.options import Options
from tfring.bench.run import run

if __name__ == "__main__":
    sys.exit(run(Options.from_json(sys.argv[1])))
