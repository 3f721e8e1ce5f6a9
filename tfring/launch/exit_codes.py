"""Exit codes of `tfring launch` and its agents, beside those of the program; docs/launcher.md lists all."""

WRONG_OPTIONS = 2
INTERNAL_FAULT = 70  # EX_SOFTWARE
CANNOT_START = 71  # EX_OSERR
REFUSES_LAUNCHER = 76  # EX_PROTOCOL, that of an agent whose launcher is of another protocol
LOST_HOST = 255  # that of a worker whose host is lost; ssh's own too
