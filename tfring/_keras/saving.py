"""Saving: a file appears whole or not at all, whichever ranks save, and no rank waits for another.

Every rank may save, or rank 0 alone: each writes aside and renames, so that ranks which write the same path replace
equal files by each other, and whoever has saved can read. Folders (`model.export`) cannot be replaced at once: rank 0
writes them. `save` writes once for all. Where ranks share an optimizer all take part (`slots.py`).
"""

from __future__ import annotations

import os
import pathlib
import tempfile

import tensorflow as tf

from tfring._keras import slots
from tfring._keras.seam import ring_of_model, seam
from tfring._keras.sharding import cut_of
from tfring.errors import ConfigurationError
from tfring.recognition import current_ring


def save(model, path, **options) -> None:
    """Saves a model once for all workers, and returns on every rank when the file is whole. All ranks call it.

    Rank 0 writes; a path on a disk of its own is seen by the workers of that host only.

    Args:
      model: a Keras model, made under a RingStrategy or not.
      path: `str` or `pathlib.Path`; ends in `.weights.h5` for the weights alone, in `.keras` or `.h5` for the model.
      **options: of `model.save`, or of `model.save_weights`.

    Raises:
      Exception: on rank 0, what Keras raises.
      OSError: on the other ranks, where rank 0 could not save.

    >>> import keras, tempfile
    >>> model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])
    >>> path = tempfile.mkdtemp() + "/model.keras"
    >>> save(model, path)
    >>> keras.models.load_model(path).count_params()
    3
    """
    only_weights = str(path).endswith((".weights.h5", ".weights.json"))
    write = model.save_weights if only_weights else model.save
    strategy = ring_of_model(model)
    if strategy is None or strategy.cluster.world_size == 1:
        write(path, **options)
        return
    error = None
    with slots.whole_pieces(model, keep=strategy.cluster.is_chief):
        if strategy.cluster.is_chief:
            try:
                write(path, **options)
            except Exception as e:
                error = e
    [failed] = strategy.extended.world.all_reduce([tf.constant([int(error is not None)])], "max", name="saved")
    if error is not None:
        raise error
    if failed[0] > 0:
        raise OSError(f"Rank 0 could not save the model; its own error says why. Received: path={str(path)!r}")


def install():
    from keras.src.legacy.saving import legacy_h5_format
    from keras.src.models.model import Model
    from keras.src.saving import saving_lib

    @seam(saving_lib, "get_attr_skipset")
    def get_attr_skipset(original, obj_type):
        # Keras makes an optimizer to see which attributes it has. Its variables are no business of other ranks.
        if current_ring() is None:
            return original(obj_type)
        with tf.Graph().as_default():  # in which no scope was entered
            return original(obj_type)

    @seam(saving_lib, "save_model")
    def save_model(original, model, filepath, weights_format="h5", zipped=True):
        if zipped:
            return written_aside(original, model, filepath, weights_format=weights_format, zipped=zipped)
        with slots.whole_pieces(model, keep=is_writer(model)):
            return by_rank_0(original, model, filepath, weights_format=weights_format, zipped=zipped)

    def is_writer(model):
        strategy = ring_of_model(model)
        return strategy is None or strategy.cluster.is_chief

    def by_rank_0(original, model, *args, **kwargs):
        return original(model, *args, **kwargs) if is_writer(model) else None

    def written_aside(original, model, filepath, *args, **kwargs):
        with slots.whole_pieces(model):
            return renamed(original, model, filepath, *args, **kwargs)

    def renamed(original, model, filepath, *args, **kwargs):
        strategy = ring_of_model(model)
        if strategy is None or strategy.cluster.world_size == 1 or not _is_local(filepath):
            return original(model, filepath, *args, **kwargs)
        path = pathlib.Path(filepath)
        if not path.parent.is_dir():  # Keras makes the folder or says that there is none
            return original(model, filepath, *args, **kwargs)
        with tempfile.TemporaryDirectory(prefix=f".{path.name}-", dir=path.parent) as folder:
            result = original(model, os.path.join(folder, path.name), *args, **kwargs)
            for file in os.listdir(folder):  # weights may be several
                os.replace(os.path.join(folder, file), os.path.realpath(path.parent / file))
        return result

    seam(saving_lib, "save_weights_only")(written_aside)
    seam(legacy_h5_format, "save_model_to_hdf5")(written_aside)

    @seam(Model, "export")
    def export(original, self, *args, **kwargs):
        pieces = [v.path for v in self.variables if cut_of(v) is not None]
        if pieces:
            raise ConfigurationError(
                "An exported model runs in one process, and here each rank has a piece of a weight. Received: export() "
                f"of a model with {pieces[0]!r} over {ring_of_model(self).cluster.world_size} workers. Save it by "
                "`tfring.save(model, path)`, load that in one process and export there."
            )
        return by_rank_0(original, self, *args, **kwargs)


def _is_local(filepath) -> bool:
    return isinstance(filepath, (str, os.PathLike)) and "://" not in str(filepath)
