"""`python -m tfring.doctor.entry`: what `tfring doctor` runs as each rank of a cluster."""

import argparse
import sys

from tfring.doctor.examination import DEFAULT_SECONDS, examine

if __name__ == "__main__":
    parser = argparse.ArgumentParser(prog="tfring doctor")
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--timeout", type=float, default=DEFAULT_SECONDS)
    parser.add_argument("--not-ready-code", type=int, default=1)
    arguments = parser.parse_args()
    sys.exit(examine(arguments.timeout, as_json=arguments.json, not_ready_code=arguments.not_ready_code))
