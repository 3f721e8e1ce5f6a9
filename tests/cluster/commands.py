"""Commands of tfring started as a user starts them: what the tests of `tfring doctor` and `tfring bench` share."""

from __future__ import annotations

import json
import os

SECONDS = 90
OTHERS = ("TFRING_", "TF_CONFIG", "SLURM_", "OMPI_", "PMI_", "RANK", "WORLD_SIZE", "MASTER_", "KERAS_")


def environment(**variables):
    kept = {name: text for name, text in os.environ.items() if not name.startswith(OTHERS)}
    return {**kept, **variables}


def tf_config(addresses, rank):
    return json.dumps({"cluster": {"worker": list(addresses)}, "task": {"type": "worker", "index": rank}})


def ended(process, code=0):
    out, err = process.communicate(timeout=SECONDS)
    assert process.returncode == code, f"{process.returncode}\n{out}\n{err}"
    return out, err
