"""Seeds random numbers that a program draws without a seed, the same on all ranks, before the program begins.

This module imports nothing of tfring, because `tfring launch` runs it in each worker before the program
(`launch/hook`).
"""

from __future__ import annotations

import hashlib
import os
import random
import sys
import traceback
from collections.abc import Callable
from typing import Any

_HOOK = "_tfring_seeding"  # the name under which a worker's hook has loaded this file

_seed: int | None = None


def current() -> int | None:
    """Returns the seed of this process; None if it has none."""
    return getattr(sys.modules.get(_HOOK), "_seed", None) if _seed is None else _seed


def apply_from_environment(after_import: Callable[[str, Callable[[Any], None]], None]) -> None:
    """Seeds this process with TFRING_SEED if that is a number below 2**32; `tfring.config` reports invalid values.

    Args:
      after_import: `tfring.imports.after_import`.
    """
    seed = os.environ.get("TFRING_SEED", "").strip()
    if seed.isascii() and seed.isdecimal() and int(seed) < 2**32:
        apply(int(seed), after_import)


def apply(seed: int, after_import: Callable[[str, Callable[[Any], None]], None]) -> None:
    """Seeds Python's `random` now, and NumPy and `tf.data` once they are imported, or now if they already are.

    NumPy generators without a seed (`numpy.random.default_rng()`) still differ from each other. So do shuffles of
    `tf.data`, and their order still changes in every epoch. TensorFlow's global seed is left unset, because with it
    Keras would use the same order in all epochs. Modules that draw from the system (`secrets`, `uuid`, `tempfile`) are
    left alone.

    Args:
      seed: An integer from 0 to 2**32 - 1.
      after_import: `tfring.imports.after_import`.
    """
    global _seed
    _seed = seed
    random.seed(seed)
    after_import("numpy.random", lambda module: _seed_numpy(module, seed))
    after_import("tensorflow.python.data.util.random_seed", lambda module: _seed_tf_data(module, seed))


def _seed_numpy(numpy_random: Any, seed: int) -> None:
    numpy_random.seed(seed)
    # Generators without a seed take their bits from here.
    numpy_random.bit_generator.randbits = random.Random(f"tfring {seed}").getrandbits


def _seed_tf_data(random_seed: Any, seed: int) -> None:
    original, seeds = random_seed.get_seed, PlacedSeeds()
    seeds.begin(seed)

    def get_seed(seed: Any) -> Any:
        context = sys.modules["tensorflow.python.eager.context"]
        return original(seed if seed is not None or context.global_seed() is not None else seeds.next_seed())

    random_seed.get_seed = get_seed


class PlacedSeeds:
    """Seeds for unseeded transformations, derived from a base and from the place in the program that creates them.

    They are counted for each place by itself, so that a dataset that only one rank creates does not shift the others.
    """

    def __init__(self) -> None:
        self.base: int | None = None
        self._made: dict[str, int] = {}

    def begin(self, base: int | None) -> None:
        """Restarts the counts at 0 from a base: other processes may not have created what this one created before."""
        self.base = base
        self._made.clear()

    def next_seed(self) -> int:
        """Returns a different seed for each calling place, and for each call from that place."""
        place = "|".join(f"{frame.name}:{frame.lineno}" for frame in traceback.extract_stack(limit=24)[:-2])
        number = self._made[place] = self._made.get(place, -1) + 1
        digest = hashlib.sha256(f"{self.base}|{place}|{number}".encode()).digest()
        return int.from_bytes(digest[:7], "little")
