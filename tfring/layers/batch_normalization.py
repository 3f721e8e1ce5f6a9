"""Helpers for models with batch normalization: synchronize it, replace it, freeze it."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import keras

from tfring._keras.layers import all_layers
from tfring.layers.conversion import check_built, converted
from tfring.layers.sync_batch_normalization import SyncBatchNormalization


def to_sync_batch_normalization(
    model: keras.Model, *, synchronization: str = "all_reduce", sync_every: int = 1
) -> keras.Model:
    """Returns a copy of the model whose batch normalization sees the whole global batch; all weights are kept.

    Every `keras.layers.BatchNormalization` becomes a `SyncBatchNormalization`, also inside nested models and wrappers
    such as `TimeDistributed`. Call it in the scope of the strategy that will train the copy, then compile the copy: it
    is not compiled, and the optimizer of a compiled model is not copied.

    Args:
      model: A built functional or sequential model, such as one of `keras.applications`.
      synchronization: See `SyncBatchNormalization`.
      sync_every: See `SyncBatchNormalization`.

    Returns:
      A new model with the weights, names and `trainable` settings of the original.

    Raises:
      ValueError: If the model cannot be rebuilt layer by layer, or a custom layer hides batch normalization.

    >>> model = keras.Sequential([keras.Input((8,)), keras.layers.BatchNormalization()])
    >>> type(to_sync_batch_normalization(model).layers[0]).__name__
    'SyncBatchNormalization'
    """

    check_built(model)

    def synchronized(layer: keras.layers.Layer) -> SyncBatchNormalization:
        config = {**layer.get_config(), "synchronization": synchronization, "sync_every": sync_every}
        return SyncBatchNormalization.from_config(config)

    def copy_weights(old: keras.layers.Layer, new: keras.layers.Layer) -> None:
        new.set_weights(old.get_weights())

    return _converted(model, synchronized, copy_weights, may_remain=SyncBatchNormalization)


def to_group_normalization(model: keras.Model, *, groups: int | Callable[[int], int] = 32) -> keras.Model:
    """Returns a copy of the model with group normalization, which needs no rows of other devices.

    Each `keras.layers.BatchNormalization` (and `SyncBatchNormalization`) becomes a `keras.layers.GroupNormalization`
    with the same axis, epsilon, gamma and beta. Its moving averages are dropped. The copy computes a different
    function: train or fine-tune it. Other weights are kept.

    Args:
      model: A built functional or sequential model.
      groups: Number of groups of channels, which must divide the number of channels of each layer, or -1 for one group
        per channel. Or a function from the number of channels to the number of groups. Defaults to 32.

    Returns:
      A new model.

    Raises:
      ValueError: If `groups` does not divide the number of channels of a layer; see also
        `to_sync_batch_normalization`.

    References:
      Wu and He 2018, "Group Normalization", arXiv:1803.08494.

    >>> model = keras.Sequential([keras.Input((8,)), keras.layers.BatchNormalization()])
    >>> to_group_normalization(model, groups=4).layers[0].groups
    4
    """
    check_built(model)
    chosen = {}
    problems = []
    for layer in _batch_normalizations(model):
        channels = layer.moving_mean.shape[0]
        chosen[id(layer)] = number = groups(channels) if callable(groups) else groups
        if number != -1 and (number < 1 or channels % number):
            problems.append(f"{layer.name} has {channels} channels, groups={number}")
    if problems:
        raise ValueError(
            f"`groups` does not divide the number of channels: {'; '.join(problems)}. Pass another number, or a "
            "function such as `groups=lambda channels: math.gcd(32, channels)`."
        )

    def grouped(layer: keras.layers.Layer) -> keras.layers.GroupNormalization:
        config = layer.get_config()
        same = ["name", "trainable", "dtype", "axis", "epsilon", "center", "scale"]
        for kind in ("initializer", "regularizer", "constraint"):
            same += [f"beta_{kind}", f"gamma_{kind}"]
        return keras.layers.GroupNormalization.from_config(
            {"groups": chosen[id(layer)], **{key: config[key] for key in same}}
        )

    def copy_weights(old: keras.layers.Layer, new: keras.layers.Layer) -> None:
        for name in ("gamma", "beta"):
            if getattr(old, name) is not None:
                getattr(new, name).assign(getattr(old, name))

    return _converted(model, grouped, copy_weights, may_remain=())


def freeze_batch_normalization(model: keras.Model) -> list[keras.layers.Layer]:
    """Sets `trainable=False` on all batch normalization layers of a model, for fine-tuning on small batches.

    A frozen layer normalizes by its moving averages, learns nothing and communicates nothing. Compile the model
    afterwards, as Keras requires after any change of `trainable`.

    Args:
      model: Any Keras model, or layer.

    Returns:
      The layers that this call has frozen, to pass to `unfreeze_batch_normalization`.

    >>> model = keras.Sequential([keras.Input((8,)), keras.layers.BatchNormalization()])
    >>> [layer.trainable for layer in freeze_batch_normalization(model)]
    [False]
    """
    return _set_trainable(_batch_normalizations(model), False)


def unfreeze_batch_normalization(
    model: keras.Model, layers: list[keras.layers.Layer] | None = None
) -> list[keras.layers.Layer]:
    """Sets `trainable=True` on all batch normalization layers of a model; compile the model afterwards.

    Args:
      model: Any Keras model, or layer.
      layers: The layers to unfreeze, such as those that `freeze_batch_normalization` returned. Defaults to all.

    Returns:
      The layers that this call has changed.

    >>> model = keras.Sequential([keras.Input((8,)), keras.layers.BatchNormalization()])
    >>> frozen = freeze_batch_normalization(model)
    >>> [layer.trainable for layer in unfreeze_batch_normalization(model, frozen)]
    [True]
    """
    return _set_trainable(_batch_normalizations(model) if layers is None else layers, True)


def _set_trainable(layers: Sequence[keras.layers.Layer], value: bool) -> list[keras.layers.Layer]:
    changed = [layer for layer in layers if layer.trainable != value]
    for layer in changed:
        layer.trainable = value
    return changed


def _batch_normalizations(model: keras.layers.Layer) -> list[keras.layers.BatchNormalization]:
    return [layer for layer in all_layers(model) if isinstance(layer, keras.layers.BatchNormalization)]


def _converted(
    model: keras.Model,
    convert: Callable[[keras.layers.Layer], keras.layers.Layer],
    copy_weights: Callable[[keras.layers.Layer, keras.layers.Layer], None],
    may_remain: type | tuple[type, ...],
) -> keras.Model:
    """Returns a copy of `model` with `convert(layer)` for each batch normalization; only `may_remain` may be left."""

    def is_wanted(layer: keras.layers.Layer) -> bool:
        return type(layer) in (keras.layers.BatchNormalization, SyncBatchNormalization)

    copy = converted(model, is_wanted, convert, copy_weights)
    hidden = [layer for layer in _batch_normalizations(copy) if not isinstance(layer, may_remain)]
    if hidden:
        raise ValueError(
            "Custom layers make or derive from batch normalization, which cannot be replaced there: "
            f"{', '.join(layer.path for layer in hidden)}. Use the new layer in their source."
        )
    return copy
