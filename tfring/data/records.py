"""Records of TFRecord files, by number: each rank indexes the files once and reads only its own records.

```
files ─► numbers of files, in the user's order ─► numbers of records ─► … ─► this worker's ─► its records
```
"""

from __future__ import annotations

import concurrent.futures
import os

import numpy as np
import tensorflow as tf
import xxhash

from tfring import _tf
from tfring.ring import library, ops

_STEPS = ("shuffle", "prefetch", "repeat", "take", "skip", "nothing")  # between the names of files and the reads
_THREADS = 16  # that index records, each in one file


class Records:
    """Holds the positions of the records of files.

    Args:
      paths: Paths of the files.
      indices: int64 `[records, 3]` for each file: the position, length and data checksum of each record.
      reads: The dataset that reads the files. Its order of the files is kept.
      steps: The steps between the names of the files and `reads`.
    """

    def __init__(self, paths: list[bytes], indices: list[np.ndarray], reads: tf.data.Dataset, steps: list) -> None:
        self.reads, self.steps = reads, steps
        self.bounds = np.cumsum([0, *map(len, indices)])
        self._paths = tf.constant(paths, tf.string)
        ends = [int(index[-1, :2].sum()) + 16 if len(index) else 0 for index in indices]
        self._sizes = tf.constant(ends, tf.int64)
        places = np.concatenate([np.zeros([0, 3], np.int64), *indices])
        places[:, 1:], places[:, 0] = places[:, :2].copy(), np.repeat(np.arange(len(paths)), np.diff(self.bounds))
        self._places = tf.constant(places)
        self.files = [_described(path, index) for path, index in zip(paths, indices, strict=True)]

    def __len__(self) -> int:
        return int(self.bounds[-1])

    @property
    def in_order(self) -> bool:
        """Returns True if the files are read one after another, as they were given."""
        return not self.steps and _tf.reads_in_turn(self.reads)

    def rows(self, numbers: tf.Tensor) -> tf.Tensor:
        """Returns the records of int64 numbers `[n]`."""
        return ops.read_records(self._paths, self._sizes, tf.gather(self._places, numbers))


def records_of(step: _tf.DatasetStep) -> Records | None:
    """Returns the records that a step reads; None if it reads none, or they cannot be read by position."""
    if step.kind != "records" or not library.OPS.exists():
        return None
    steps, files = _tf.last_steps(step.arguments["files"], lambda step: step.kind in _STEPS)
    names = _tf.dataset_step(files).arguments.get("arrays")
    if not isinstance(names, tf.Tensor) or names.shape.rank != 1:
        return None
    paths = names.numpy().tolist()
    if not all(map(os.path.isfile, paths)):  # paths of TensorFlow's other file systems are not
        return None
    try:
        with concurrent.futures.ThreadPoolExecutor(_THREADS) as pool:
            indices = list(pool.map(ops.index_records, paths))
    except tf.errors.OpError:  # TensorFlow raises it again when it reaches that file
        return None
    return Records(paths, indices, step.arguments["reads"], steps)


def _described(path: bytes, index: np.ndarray) -> list[str]:
    """Returns a description of a file, and a digest of all lengths and checksums, which ranks compare."""
    name = b"/".join(path.split(b"/")[-2:]).decode(errors="replace")
    digest = xxhash.xxh3_64(index[:, 1:].tobytes()).hexdigest()
    return [f"{len(index)} records of {int(index[:, 1].sum())} bytes in {name}, digest {digest}", digest]
