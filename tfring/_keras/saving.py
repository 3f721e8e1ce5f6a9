"""Saves models: a file appears complete or not at all, whichever ranks save.

Every rank may save, or rank 0 alone. Each writes to a temporary path and renames, so that ranks that write the same
path replace each other's equal files, and any rank that has saved can read. For folders (`model.export`), that of
rank 0 remains. No rank waits for another, with two exceptions: if ranks hold shards or have to synchronize first, all
take part (`slots.py`), and `save` writes once for all ranks, which wait for it. While this process has a ring, a model
made outside the scope is saved like one made inside.
"""

from __future__ import annotations

import os
import pathlib
from collections.abc import Callable
from typing import Any

import tensorflow as tf

from tfring import _tf
from tfring._keras import atomic, calls, printing
from tfring._keras.seam import ring_of_model, seam
from tfring._keras.sharding import sharding_of, slots
from tfring.errors import ConfigurationError
from tfring.program import ShortTraceback
from tfring.runtime import Ring, ring_of_process


def save(model: Any, path: str | os.PathLike, **options: Any) -> None:
    """Saves a model once for all workers, and returns on every rank when the file is complete. All ranks call it.

    Rank 0 writes. If the path is on a local disk, only the workers of that host see the file.

    Args:
      model: A Keras model, made under a RingStrategy or not.
      path: `str` or `pathlib.Path`. Ends in `.weights.h5` for the weights only, in `.keras` or `.h5` for the model.
      **options: Keyword arguments of `model.save` or `model.save_weights`.

    Raises:
      Exception: If Keras fails to save. Rank 0 raises Keras' error.
      OSError: If rank 0 could not save. The other ranks raise it.

    >>> import keras, tempfile
    >>> model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])
    >>> path = tempfile.mkdtemp() + "/model.keras"
    >>> save(model, path)
    >>> keras.models.load_model(path).count_params()
    3
    """
    only_weights = str(path).endswith((".weights.h5", ".weights.json"))
    write = model.save_weights if only_weights else model.save
    ring = ring_of_model(model) or ring_of_process()
    if ring is None or ring.cluster.world_size == 1:
        write(path, **options)
        return
    with ShortTraceback(), calls.annotated_errors(ring, "tfring.save", {}):
        error = None
        with slots.full_values_of(model, keep=ring.cluster.is_chief):
            if ring.cluster.is_chief:
                try:
                    write(path, **options)
                except Exception as e:
                    error = e
        [has_failed] = ring.peers.largest([error is not None], name="tfring.save")
        if error is not None:
            raise error
        if has_failed:
            raise OSError(f"Rank 0 could not save the model to {str(path)!r}. Its own error gives the reason.")


def install() -> None:
    from keras.src.legacy.saving import legacy_h5_format
    from keras.src.models.model import Model
    from keras.src.saving import saving_lib

    @seam(saving_lib, "save_model")
    def save_model(
        original: Callable[..., Any], model: Any, filepath: Any, weights_format: str = "h5", zipped: bool = True
    ) -> None:
        with slots.full_values_of(model):
            if zipped:
                written_and_renamed(original, model, filepath, weights_format=weights_format, zipped=zipped)
            else:
                folder(model, filepath, lambda path: original(model, path, weights_format, zipped))

    def written_and_renamed(original: Callable[..., Any], model: Any, filepath: Any, *args: Any, **kwargs: Any) -> Any:
        path = _path_of_several(filepath, ring_of_model(model))
        if path is None or not path.parent.is_dir():  # Keras makes the folder or says that there is none
            return original(model, filepath, *args, **kwargs)
        with atomic.replace_files(path) as beside:
            return original(model, beside, *args, **kwargs)

    def folder(model: Any, filepath: Any, write: Callable[[Any], Any]) -> Any:
        ring = ring_of_model(model) or ring_of_process()
        path = _path_of_several(filepath, ring)
        if path is None:
            return write(filepath) if ring is None or ring.cluster.is_chief else None
        assert ring is not None  # otherwise no other rank would write the path
        path.parent.mkdir(parents=True, exist_ok=True)
        with atomic.replace_folder(path, ring.cluster.is_chief) as beside, printing.replaced(beside, str(filepath)):
            return write(beside)

    @seam(saving_lib, "save_weights_only")
    def save_weights_only(original: Callable[..., Any], model: Any, *args: Any, **kwargs: Any) -> Any:
        with slots.full_values_of(model):
            return written_and_renamed(original, model, *args, **kwargs)

    @seam(legacy_h5_format, "save_model_to_hdf5")
    def save_model_to_hdf5(original: Callable[..., Any], model: Any, *args: Any, **kwargs: Any) -> Any:
        sharded = [v for v in model.weights if sharding_of(v) is not None]
        if sharded:
            raise ConfigurationError(
                f"Keras' older format (.h5) cannot store {sharded[0].path!r}: each rank has a shard of this weight. "
                "Save a .keras or a .weights.h5 file."
            )
        with slots.full_values_of(model), slots.written_to_hdf5():
            return written_and_renamed(original, model, *args, **kwargs)

    @seam(Model, "export")
    def export(original: Callable[..., Any], self: Any, filepath: Any, *args: Any, **kwargs: Any) -> Any:
        sharded = [v for v in self.variables if sharding_of(v) is not None]
        if sharded:
            workers = sharded[0].value.distribute_strategy.world_size  # a model composed outside has no strategy
            raise ConfigurationError(
                f"export() runs in one process, but {sharded[0].path!r} is sharded over {workers} workers. Save the "
                "model with `tfring.save(model, path)`, load it in one process and export there."
            )
        with printing.on_rank_0(ring_of_model(self) or ring_of_process()):
            return folder(self, filepath, lambda path: original(self, path, *args, **kwargs))

    @seam(_tf.TrackableSaver, "save")
    def save_checkpoint(original: Callable[..., Any], self: Any, file_prefix: Any, *args: Any, **kwargs: Any) -> Any:
        path = _path_of_several(file_prefix, None) if tf.executing_eagerly() else None
        if path is None:
            return original(self, file_prefix, *args, **kwargs)
        path.parent.mkdir(parents=True, exist_ok=True)
        with atomic.replace_files(path) as beside:
            written = os.fsdecode(original(self, beside, *args, **kwargs).numpy())  # may end in a number
        return os.path.join(os.path.dirname(file_prefix), os.path.basename(written))


def _path_of_several(filepath: Any, ring: Ring | None) -> pathlib.Path | None:
    """Returns the path if several ranks may write it: those of `ring`, or otherwise of this process' ring."""
    ring = ring or ring_of_process()
    is_local = isinstance(filepath, (str, os.PathLike)) and "://" not in str(filepath)
    if ring is None or ring.cluster.world_size == 1 or not is_local:
        return None
    return pathlib.Path(os.path.abspath(filepath))
