"""Writes and reads large values in Keras' files a block of rows at a time. Keras copies each value in full."""

from __future__ import annotations

from typing import Any

import numpy as np

from tfring.blocks import LARGE_BYTES, rows_of_a_block


class Stored:
    """A large array in a file. Indexing with slices reads blocks of it and keeps the part that the slices select.

    Args:
      dataset: An h5py dataset.
    """

    def __init__(self, dataset: Any) -> None:
        self._dataset = dataset
        self.shape = tuple(dataset.shape)
        self.dtype = dataset.dtype

    def __getitem__(self, part: Any) -> np.ndarray:
        rows, *inner = part if isinstance(part, tuple) else (part,)
        wanted = range(*rows.indices(self.shape[0]))
        empty = self._dataset[0:0][(slice(None), *inner)]
        result = np.empty((len(wanted), *empty.shape[1:]), self.dtype)
        step = rows_of_a_block(self) // wanted.step + 1  # of the wanted rows
        for begin in range(0, len(wanted), step):
            these = wanted[begin : begin + step]
            block = self._dataset[these[0] : these[-1] + 1]
            result[begin : begin + step] = block[(slice(None, None, wanted.step), *inner)]
        return result

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray:
        return self._dataset[...].astype(dtype or self.dtype)


class InBlocks:
    """An entry of a Keras file that returns large values as `Stored`."""

    def __init__(self, store: Any) -> None:
        self._store = store

    def __getitem__(self, key: str) -> Any:
        group = _group_of(self._store)
        dataset = group[key] if group is not None and key in group else None
        if dataset is None or "dtype" in dataset.attrs or dataset.nbytes < LARGE_BYTES:  # e.g. bfloat16, as bytes
            return self._store[key]
        return Stored(dataset)

    def __len__(self) -> int:
        return len(self._store)

    def keys(self) -> Any:
        return self._store.keys()

    def __contains__(self, key: str) -> bool:
        return key in self.keys()


def _group_of(store: Any) -> Any:
    """Returns the h5py group of an entry of a file; None for files of another format."""
    import h5py

    group = getattr(store, "_h5_entry_group", None)
    return group if isinstance(group, h5py.Group) else None


def write(store: Any, key: str, value: np.ndarray) -> None:
    """Writes a large value to an entry of a Keras file."""
    if not store._h5_entry_initialized:
        store._create_h5_group(store._h5_entry_path)
    dataset = _group_of(store).create_dataset(key, value.shape, value.dtype)
    step = rows_of_a_block(value)
    for begin in range(0, len(value), step):
        dataset[begin : begin + step] = value[begin : begin + step]
