"""Exit codes of `tfring launch` and its agents, beside those of the program; docs/launcher.md lists all."""

WRONG_OPTIONS = 2
INTERNAL_FAULT = 70  # EX_SOFTWARE
CANNOT_START = 71  # EX_OSERR
REFUSES_LAUNCHER = 76  # EX_PROTOCOL: from an agent, if its launcher has another protocol
LOST_HOST = 255  # of a worker on a lost host; also the exit code of ssh itself
