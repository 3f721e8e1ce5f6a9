"""`RingStrategy(shard_optimizer=True)`: each worker updates its piece of every weight, and has the slots of it.

```
gradients of the worker ─► reduce_scatter ─► clip ─► update of the piece ─► all_gather ─► weights
                              (gradient of the piece)   (slots of the piece)
```

A piece is a variable of this worker, filled from the weight before each update: weights belong to the user, who may
assign them at any time. Keras' optimizer makes slots for pieces and updates them as it would weights. A slot takes
whole values and keeps its piece; files hold whole slots, gathered, so that they load anywhere.

What changes in `apply` is in `optimizers.py`; saving in `slots.py`.
"""

from __future__ import annotations

import contextlib
import dataclasses
from typing import Any

import numpy as np
import tensorflow as tf

from tfring._keras import large, stores
from tfring._keras.seam import seam
from tfring.cluster.mesh import axes_of
from tfring.cross_device_ops import values_of
from tfring.errors import ConfigurationError
from tfring.recognition import ring_of
from tfring.reduction.cuts import Cut, plan_cut
from tfring.reduction.owned import Owned
from tfring.reduction.placement import Placement
from tfring.ring.collectives import LocalCollectives

_ELEMENT_WISE = (
    *("Adadelta", "Adagrad", "Adam", "AdamW", "Adamax", "Ftrl", "Lion", "Nadam", "RMSprop", "SGD"),
    "ScheduleFreeAdamW",  # of Keras 3.14 on
)
_DELEGATING = ("LossScaleOptimizer", "MultiOptimizer")  # to others, which have the slots
DIVIDING = ("model", "data")  # the axes of a mesh over which a layer can be divided
_ACCUMULATOR = "gradient_accumulator"  # of each worker's own gradients, which are whole


class Shards:
    """What this worker has of the weights of one optimizer.

    Args:
      strategy: the RingStrategy.
      optimizer: of Keras, not built yet.
      variables: of Keras, to be trained.
    """

    def __init__(self, strategy, optimizer, variables):
        self.strategy = strategy
        self.key = optimizer._var_key  # of a weight; later of its piece too
        self.weights: dict = {}  # by their keys
        self.pieces: dict = {}  # by the keys of the weights
        self.keys: dict = {}  # of weights, by those of their pieces
        for variable in variables:
            is_value = getattr(variable, "overwrite_with_gradient", False)
            if is_value or cut_of(variable) is not None or hasattr(variable, "_tfring_table"):
                continue  # or a piece already, or a table, of which some rows are updated
            piece = _new_piece(strategy, variable)
            key = self.key(variable)
            self.weights[key], self.pieces[key], self.keys[self.key(piece)] = variable, piece, key

    def piece(self, variable):
        """The piece of a weight; None of one that is not cut."""
        return self.pieces.get(self.key(variable))

    def filled(self, variables) -> list:
        """The pieces, as the weights are now; weights that are not cut stand for themselves."""
        pieces = [self.piece(variable) for variable in variables]
        for variable, piece in zip(variables, pieces, strict=True):
            if piece is not None:
                piece.assign(variable)
        return [variable if piece is None else piece for variable, piece in zip(variables, pieces, strict=True)]

    def spread(self, variables, values) -> None:
        """Assigns to weights, on all ranks, what each rank has of them in pieces or slots."""
        gathered = gather(self.strategy.extended.gradient_ops, values, name="weights")
        for variable, value in zip(variables, gathered, strict=True):
            variable.assign(value)


def shards_of(optimizer) -> Shards | None:
    """What this worker has of an optimizer's weights; None where the optimizer is whole."""
    return getattr(optimizer, "_tfring_shards", None)


def cut_of(variable) -> Cut | Owned | Placement | None:
    """How the whole is cut of which a Keras variable holds a piece; None of a whole variable."""
    return getattr(variable, "_tfring_cut", None)


def axis_of(variable) -> str | None:
    """The axis of the mesh, or axes joined by "+", along which ranks hold the pieces of a Keras variable; None of a
    whole one."""
    return getattr(variable, "_tfring_axis", None)


def mark(variable, strategy, cut: Cut | Owned | Placement | None, axis: str = "data"):
    """Notes that a Keras variable holds this worker's piece of a whole, cut for the ranks along an axis or several."""
    variable._tfring_cut = cut
    variable._tfring_axis = axis
    variable._tfring_rank = strategy.mesh.coordinate(axis, strategy.cluster.rank)
    return variable


def gradient_is_complete(variable) -> bool:
    """Whether what a tape gives for a Keras variable is the gradient of the whole batch.

    Ranks along the data axis hold different pieces then. What makes their gradients weighs and sums over all rows on
    its way, and an optimizer does neither.
    """
    return "data" in axes_of(axis_of(variable) or "")


@dataclasses.dataclass(frozen=True)
class Division:
    """The ranks over which a layer is divided: those along an axis of a strategy's mesh, or this process alone.

    Attributes:
      strategy: the RingStrategy; None for this process alone.
      axis: "model" or "data".
    """

    strategy: Any = None
    axis: str = "data"

    @classmethod
    def of(cls, axis: str | None, layer: str, instead: str) -> Division:
        """That of a layer that is built under the strategy in scope.

        Args:
          axis: "model" or "data"; None for the model axis where the mesh has one, else the data axis.
          layer: what it is called, for errors.
          instead: what to use instead, for errors.

        Raises:
          ConfigurationError: for several replicas a process.
        """
        if not tf.distribute.has_strategy():
            return cls()
        strategy = tf.distribute.get_strategy()
        ring = ring_of(strategy)
        here = strategy.num_replicas_in_sync if ring is None else len(ring.extended.worker_devices)
        if here > 1:
            raise ConfigurationError(
                f"A {layer} works for one replica of each worker. Received: {type(strategy).__name__} with {here} "
                f"replicas in this process. Give each worker one device, or use {instead}."
            )
        if ring is None:
            return cls()
        axis = axis or ("model" if ring.mesh.model > 1 else "data")
        return cls(ring, axis) if ring.mesh.size_along(axis) > 1 else cls()

    @property
    def is_alone(self) -> bool:
        return self.strategy is None

    @property
    def collectives(self):
        """Those of its ranks, on the channel of everything but gradients."""
        return LocalCollectives() if self.is_alone else self.strategy.extended.along(self.axis)

    @property
    def world(self):
        """Those of all workers."""
        return LocalCollectives() if self.is_alone else self.strategy.extended.world

    def add_weight(self, add_weight, cut: Cut | Placement, initializer, **options):
        """The weight of a layer that holds this worker's piece.

        Args:
          add_weight: the layer's.
          cut: how the whole is divided.
          initializer: called with the shape of the piece, and its dtype.
          **options: for `add_weight`.
        """
        own = contextlib.nullcontext() if self.is_alone else self.strategy.extended.variables_of_worker()
        with own:
            shape = cut.shape_of(self.collectives.rank)
            variable = add_weight(shape=shape, initializer=initializer, **options)
        return variable if self.is_alone else mark(variable, self.strategy, cut, self.axis)


class InitialPiece:
    """The initializer of a piece: of the whole that one process draws, with the values of rank 0.

    Args:
      initializer: of Keras, for the whole.
      cut: how it is divided.
      division: over whom.
    """

    def __init__(self, initializer, cut: Cut, division: Division):
        self._initializer = initializer
        self._cut = cut
        self._division = division

    def __call__(self, shape, dtype=None):
        from keras.src.backend.common.stateless_scope import in_stateless_scope

        if in_stateless_scope():  # while Keras looks what shapes come out
            return tf.zeros(shape, dtype)
        whole = tf.convert_to_tensor(self._initializer(self._cut.shape, dtype=dtype))
        [whole] = self._division.world.broadcast([whole], name="initial value of a weight in pieces")
        return tf.reshape(whole, self._cut.lined_up)[self._cut.part(self._division.collectives.rank)]


def check_axis(axis: str | None) -> None:
    """Raises ConfigurationError for what layers cannot be divided over."""
    if axis not in (None, *DIVIDING):
        raise ConfigurationError(f"`axis` is one of {DIVIDING} or None. Received: axis={axis!r}")


def whole_shape(variable) -> tuple[int, ...]:
    """The shape of a variable in one process."""
    cut = cut_of(variable)
    return tuple(variable.shape if cut is None else cut.shape)


def gather(ops, variables, *, name: str) -> list[tf.Tensor]:
    """The whole values of variables, on all ranks; `ops` is a RingAllReduce, `name` is for errors."""
    values = [held_of(variable) for variable in variables]
    cuts = [cut_of(variable) for variable in variables]
    chosen = [i for i, cut in enumerate(cuts) if cut is not None]
    whole = ops.gather_full([values[i] for i in chosen], [cuts[i] for i in chosen], name=name)
    for i, value in zip(chosen, whole, strict=True):
        values[i] = value
    return values


def piece_of(variable, value):
    """What a variable keeps of a value: of a whole one its piece, if it holds a piece."""
    cut = cut_of(variable)
    if cut is None:
        return value
    rank = variable._tfring_rank
    if cut.lined_up == cut.shape == tuple(getattr(value, "shape", ())) and not tf.is_tensor(value):
        return taken(cut, value, rank)  # of an array in a file nothing else is read
    value = held_of(value)
    if value.shape != cut.shape:
        return value
    return tf.reshape(taken(cut, tf.reshape(value, cut.lined_up), rank), cut.shape_of(rank))


def count(cut: Cut | Owned | Placement, rank: int) -> int:
    """How many rows of the lined-up whole a rank has; or columns or elements, what it is cut between."""
    return sum(len(range(*rows.indices(cut.lined_up[cut.dimension]))) for rows in cut.slices(rank))


def taken(cut: Cut | Owned | Placement, whole, rank: int):
    """A rank's piece of a lined-up whole: a tensor, an array, or one in a file."""
    pieces = [whole[(*[slice(None)] * cut.dimension, rows)] for rows in cut.slices(rank)]
    if len(pieces) == 1:
        return pieces[0]
    return (tf.concat if tf.is_tensor(whole) else np.concatenate)(pieces, cut.dimension)


def clipped(clip, optimizer, strategy, gradients, axes) -> list:
    """As Keras' `_clip_gradients`, here `clip`, of whole variables.

    `axes` says of each gradient along which axis others have other pieces of it; None where it is whole.
    """
    limit = optimizer.clipnorm or optimizer.global_clipnorm
    if not limit or limit < 0:
        return clip(optimizer, gradients)
    wide = tf.float64 if any(g.dtype == tf.float64 for g in gradients) else tf.float32
    squares = tf.stack([tf.reduce_sum(tf.square(tf.cast(_values(g), wide))) for g in gradients])
    for axis in sorted({axis for axis in axes if axis}):
        collectives = strategy.extended.along(axis, "gradients")
        [everyones] = collectives.all_reduce([squares], name="squares of gradients")
        squares = tf.where(tf.constant([a == axis for a in axes]), everyones, squares)
    if optimizer.clipnorm:
        scales = limit / tf.maximum(tf.sqrt(squares), limit)
    else:
        norm = tf.sqrt(tf.reduce_sum(squares))
        scales = tf.fill(squares.shape, limit / tf.maximum(norm, limit) + (norm - norm))  # NaN for an infinite norm
    return [_scaled(g, tf.cast(scales[i], g.dtype)) for i, g in enumerate(gradients)]


def _values(gradient):
    return gradient.values if isinstance(gradient, tf.IndexedSlices) else gradient


def _scaled(gradient, scale):
    if isinstance(gradient, tf.IndexedSlices):
        return tf.IndexedSlices(gradient.values * scale, gradient.indices, gradient.dense_shape)
    return gradient * scale


def held_of(value) -> tf.Tensor:
    """What a variable of Keras or TensorFlow holds on this worker, or another value as a tensor."""
    import keras

    value = value.value if isinstance(value, keras.Variable) else value
    return tf.convert_to_tensor(values_of(value)[0])


def _new_piece(strategy, variable):
    import keras

    cut = plan_cut(variable.shape, strategy.cluster.world_size)
    with strategy.extended.variables_of_worker():
        piece = keras.Variable(
            "zeros",
            shape=cut.shape_of(strategy.cluster.rank),
            dtype=variable.dtype,
            trainable=False,
            name="piece",
        )
    piece._path = getattr(variable, "path", None) or variable.name.replace(":", "_")  # after which slots are named
    return mark(piece, strategy, cut)


def is_element_wise(optimizer) -> bool:
    """Whether an optimizer is known to compute element by element."""
    import keras

    kind = type(optimizer)
    known = kind.__name__ in _ELEMENT_WISE and kind is getattr(keras.optimizers, kind.__name__, None)
    return known or bool(vars(kind).get("element_wise", False))


def refuse_unless_element_wise(optimizer, rule: str, way_out: str) -> None:
    """Raises ConfigurationError for an optimizer of which nobody knows that it computes element by element."""
    if is_element_wise(optimizer):
        return
    kind = type(optimizer)
    raise ConfigurationError(
        f"{rule}, so an optimizer has to update each element "
        "from its own gradient and slots alone. Adafactor, Lamb and Muon need whole weights; of a class that is not "
        f"Keras' own nobody knows. Received: {kind.__name__} {optimizer.name!r}. Use another optimizer, such as "
        f"AdamW, or {way_out}; a class of your own that computes element by element, and makes its "
        "slots by `add_optimizer_variables` or `add_variable_from_reference`, says so by the class attribute "
        "`element_wise = True`."
    )


def install():
    import keras
    from keras.src.backend.tensorflow import core, optimizer
    from keras.src.optimizers import base_optimizer

    tf_optimizer = optimizer.TFOptimizer
    delegating = tuple(getattr(keras.optimizers, name) for name in _DELEGATING if hasattr(keras.optimizers, name))

    @seam(core.Variable, "_deferred_initialize")
    def deferred_initialize(original, self):
        if cut_of(self) is None:
            return original(self)
        with tf.distribute.get_strategy().extended.variables_of_worker():
            return original(self)

    # -- making slots ----------------------------------------------------------------------------------------------

    @seam(base_optimizer.BaseOptimizer, "build")
    def build(original, self, variables):
        strategy = ring_of(getattr(self, "_distribution_strategy", None))
        is_sharded = strategy is not None and strategy.shard_optimizer and strategy.cluster.world_size > 1
        if is_sharded and not isinstance(self, delegating):
            refuse_unless_element_wise(
                self, "shard_optimizer=True gives each worker a piece of every weight", "leave shard_optimizer out"
            )
            self._tfring_shards = Shards(strategy, self, variables)
        elif any(map(axis_of, variables)) and not isinstance(self, delegating):
            refuse_unless_element_wise(
                self, "A worker has a piece of each weight that is divided over workers", "layers that are not divided"
            )
        return original(self, variables)

    @seam(tf_optimizer, "add_variable_from_reference")
    def add_variable_from_reference(original, self, reference_variable, name=None, initializer="zeros"):
        shards, piece = shards_of(self), None
        if shards is not None and name != _ACCUMULATOR:
            piece = shards.piece(reference_variable)
        piece = reference_variable if piece is None else piece
        axis = axis_of(piece)
        if axis is None:
            return original(self, piece, name=name, initializer=initializer)
        strategy = piece.value.distribute_strategy
        with strategy.extended.variables_of_worker():
            slot = original(self, piece, name=name, initializer=initializer)
        return mark(slot, strategy, cut_of(piece), axis)

    @seam(tf_optimizer, "_var_key")
    def var_key(original, self, variable):
        key, shards = original(self, variable), shards_of(self)
        return key if shards is None else shards.keys.get(key, key)

    # -- whole values given to slots -------------------------------------------------------------------------------

    @seam(core.Variable, "assign")
    def assign(original, self, value):
        cut = cut_of(self)
        if isinstance(value, stores.Stored):
            if cut is not None and value.shape == cut.shape == cut.lined_up:
                return large.write_shard(self, cut, self._tfring_rank, value)
            value = np.asarray(value)
        return original(self, piece_of(self, value))

    @seam(tf_optimizer, "assign")
    def optimizer_assign(original, self, variable, value):  # a slot that begins as its weight
        return original(self, variable, piece_of(variable, value))

    @seam(base_optimizer.BaseOptimizer, "set_weights")
    def set_weights(original, self, weights):
        if shards_of(self) is not None:
            weights = [piece_of(v, w) for v, w in zip(self._variables, weights, strict=False)]
        return original(self, weights)

    # -- what an update does to weights, done to pieces ------------------------------------------------------------

    @seam(tf_optimizer, "_apply_weight_decay")
    def apply_weight_decay(original, self, variables):
        shards = shards_of(self)
        return original(self, variables if shards is None else shards.filled(variables))

    @seam(base_optimizer.BaseOptimizer, "_use_weight_decay")
    def use_weight_decay(original, self, variable):
        shards = shards_of(self)
        weight = None if shards is None else shards.weights.get(self._var_key(variable))
        return original(self, variable if weight is None else weight)  # whose name may be excluded

    @seam(tf_optimizer, "_backend_update_step")
    def backend_update_step(original, self, grads, trainable_variables, learning_rate):
        shards = shards_of(self)
        if shards is None:
            return original(self, grads, trainable_variables, learning_rate)
        pieces = [shards.piece(variable) for variable in trainable_variables]
        pairs = list(zip(trainable_variables, pieces, strict=True))
        original(self, grads, [variable if piece is None else piece for variable, piece in pairs], learning_rate)
        pairs = [(variable, piece) for variable, piece in pairs if piece is not None]
        return shards.spread([variable for variable, _ in pairs], [piece for _, piece in pairs])

    @seam(base_optimizer.BaseOptimizer, "_update_model_variables_moving_average")
    def update_model_variables_moving_average(original, self, trainable_variables):
        shards = shards_of(self)
        return original(self, trainable_variables if shards is None else shards.filled(trainable_variables))

    @seam(tf_optimizer, "_overwrite_model_variables_with_average_value")
    def overwrite_model_variables_with_average_value(original, self, trainable_variables):
        shards = shards_of(self)
        if shards is None:
            return original(self, trainable_variables)
        averages = zip(trainable_variables, self._model_variables_moving_average, strict=False)
        pairs = [(variable, average) for variable, average in averages if average is not None]
        for variable, average in pairs:
            if shards.piece(variable) is None:
                variable.assign(average)
        pairs = [(variable, average) for variable, average in pairs if shards.piece(variable) is not None]
        return shards.spread([variable for variable, _ in pairs], [average for _, average in pairs])
