"""One seed for what a program draws without giving one, on all ranks alike, from before it begins.

It imports nothing of tfring, for `tfring launch` has each worker run it before the program does (`launch/hook`).
"""

from __future__ import annotations

import hashlib
import os
import random
import sys
import traceback
from collections.abc import Callable
from typing import Any

_HOOK = "_tfring_seeding"  # this file, as a worker's hook has loaded it

_seed: int | None = None


def current() -> int | None:
    """Returns the seed that this process has been given; None without."""
    return getattr(sys.modules.get(_HOOK), "_seed", None) if _seed is None else _seed


def apply_from_environment(after_import: Callable[[str, Callable[[Any], None]], None]) -> None:
    """Seeds this process by TFRING_SEED, if that is a number; of anything else `tfring.config` speaks.

    Args:
      after_import: That of `tfring.imports`.
    """
    seed = os.environ.get("TFRING_SEED", "").strip()
    if seed.isascii() and seed.isdecimal() and int(seed) < 2**32:
        apply(int(seed), after_import)


def apply(seed: int, after_import: Callable[[str, Callable[[Any], None]], None]) -> None:
    """Seeds Python's `random`, and NumPy and `tf.data` when they are imported, or now.

    NumPy's generators that are made without a seed (`numpy.random.default_rng()`) differ from each other, and so do
    shuffles of `tf.data`, which keep another order in every epoch. TensorFlow's global seed is left unset, for with it
    Keras would have one order in all epochs. What asks the system itself (`secrets`, `uuid`, `tempfile`) is left alone.

    Args:
      seed: From 0 to 2**32 - 1.
      after_import: That of `tfring.imports`.
    """
    global _seed
    _seed = seed
    random.seed(seed)
    after_import("numpy.random", lambda module: _seed_numpy(module, seed))
    after_import("tensorflow.python.data.util.random_seed", lambda module: _seed_tf_data(module, seed))


def _seed_numpy(numpy_random: Any, seed: int) -> None:
    numpy_random.seed(seed)
    # Where generators without a seed take their bits from.
    numpy_random.bit_generator.randbits = random.Random(f"tfring {seed}").getrandbits


def _seed_tf_data(random_seed: Any, seed: int) -> None:
    original, seeds = random_seed.get_seed, PlacedSeeds()
    seeds.begin(seed)

    def get_seed(seed: Any) -> Any:
        context = sys.modules["tensorflow.python.eager.context"]
        return original(seed if seed is not None or context.global_seed() is not None else seeds.next_seed())

    random_seed.get_seed = get_seed


class PlacedSeeds:
    """Seeds of unseeded transformations: from a base and from where in the program they are made.

    By place and not by number: a dataset that only one rank makes does not shift the others.
    """

    def __init__(self) -> None:
        self.base: int | None = None
        self._made: dict[str, int] = {}

    def begin(self, base: int | None) -> None:
        """Counts from a base, beginning at 0: other processes need not have made what this one made before."""
        self.base = base
        self._made.clear()

    def next_seed(self) -> int:
        """Returns another one for each place, and for each time that this place asks."""
        place = "|".join(f"{frame.name}:{frame.lineno}" for frame in traceback.extract_stack(limit=24)[:-2])
        number = self._made[place] = self._made.get(place, -1) + 1
        digest = hashlib.sha256(f"{self.base}|{place}|{number}".encode()).digest()
        return int.from_bytes(digest[:7], "little")
