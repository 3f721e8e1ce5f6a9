"""A folder that `tfring launch` puts on a worker's path: Python runs its sitecustomize.py before the program."""
