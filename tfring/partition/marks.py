"""Marks tensors of a step with their known properties or with expectations; the analysis reads the marks.

A mark is an attribute of an Identity, which is kept when TensorFlow copies the graph.
"""

from __future__ import annotations

from typing import Any

import tensorflow as tf

from tfring import _tf

_DECLARED, _EXPECTED, _NAME, _LIKE = "_tfring_declared", "_tfring_expected", "_tfring_name", "_tfring_like"

DECLARATIONS = ("rows", "gradients of rows", "full", "mean", "share", "parts", "drawn", "own")
_OF_ROWS = ("rows", "gradients of rows", "rows of gradients", "ids of gradients")
EXPECTATIONS = ("mean", "sum", "added", "same", "concatenated", *_OF_ROWS)


def declare(tensor: Any, what: str) -> Any:
    """Returns a tensor that is marked with its known property for the analysis.

    Args:
      tensor: A dense tensor.
      what: "rows": a replica's rows along the first axis. "gradients of rows": gradients of its own loss, a mean.
        "full": the same on all replicas. "mean": a replica's part of a mean over rows, weighted by its rows. "share":
        the number of a replica's rows divided by that of the batch. "parts": a component of ragged or sparse rows.
        "drawn": a source of random numbers, different on each replica. "own": used by tfring's own operations from here
        on, as in `replicas.own`.
    """
    assert what in DECLARATIONS, what
    return _marked(tensor, {_DECLARED: what})


def declare_looked_up(rows: Any, ids: Any) -> Any:
    """Returns rows of a table, marked for the analysis as looked up, one for each id.

    Args:
      rows: Tensor of shape `[*ids.shape, ...]`.
      ids: A tensor of the same graph.
    """
    return rows if tf.executing_eagerly() else _marked(rows, {_DECLARED: "looked up", _LIKE: ids.name})


def expect_upstream(tensor: Any, what: str, name: str) -> Any:
    """Returns a tensor with an expectation on its incoming gradient, which tfring's own backward pass then uses.

    Args:
      tensor: A dense tensor.
      what: See `expect`.
      name: Name of the gradient, for the user.
    """
    if tf.executing_eagerly() or not tensor.dtype.is_floating:
        return tensor
    return _tf.with_gradient(tf.identity, lambda gradient: declare(expect(gradient, what, name), "own"))(tensor)


def declare_gradient(tensor: Any, what: str = "gradients of rows") -> Any:
    """Returns a tensor with a declared gradient.

    It is used around operations that exchange rows with other replicas: gradients inside are not analyzed.

    Args:
      tensor: A dense tensor.
      what: See `declare`.
    """
    if tf.executing_eagerly() or not tensor.dtype.is_floating:
        return tensor
    return _tf.with_gradient(tf.identity, lambda gradient: declare(gradient, what))(tensor)


def expect(tensor: Any, what: str, name: str, like: Any = None) -> Any:
    """Returns a tensor that is marked with an expectation, which the analysis verifies or satisfies by conversions.

    Args:
      tensor: A dense tensor.
      what: "mean": the mean over replicas, weighted by rows, is the tensor of one process. "sum": the sum over replicas
        is that tensor, including replicas without rows. "added": parts of such a sum that a variable holds, plus parts
        of the batch. "same": the same on all replicas. "concatenated": the concatenation over replicas is that tensor.
        "rows". "gradients of rows". "rows of gradients": rows that are added up. "ids of gradients": the ids of such
        rows.
      name: Name of the tensor, for the user.
      like: For "added", the content of the variable; for ids, their rows of gradients.
    """
    assert what in EXPECTATIONS, what
    if tf.executing_eagerly():  # tensors have no names
        return tensor
    attributes = {_EXPECTED: what, _NAME: name}
    return _marked(tensor, attributes if like is None else {**attributes, _LIKE: like.name})


def expect_gradient(gradient: Any, name: str) -> Any:
    """Returns a gradient, dense or of rows, with the expectation that it is the gradient of a mean over rows."""
    if not isinstance(gradient, tf.IndexedSlices):
        return expect(gradient, "mean", name)
    values = expect(gradient.values, "rows of gradients", name)
    ids = expect(gradient.indices, "ids of gradients", name, like=values)
    return tf.IndexedSlices(values, ids, gradient.dense_shape)


def declare_batch(element: Any) -> Any:
    """Returns a batch in which the rows of a replica are marked for the analysis.

    Args:
      element: Any structure. Dense tensors with an open first dimension have rows, as do ragged and sparse tensors.
    """

    def declared(leaf: Any) -> Any:
        if isinstance(leaf, (tf.RaggedTensor, tf.SparseTensor)):
            parts = tf.nest.flatten(leaf, expand_composites=True)
            parts = [declare(part, "parts") for part in parts]
            return _counted(leaf, tf.nest.pack_sequence_as(leaf, parts, expand_composites=True))
        if not isinstance(leaf, tf.Tensor) or leaf.dtype in (tf.variant, tf.resource) or not leaf.shape.rank:
            return leaf
        return declare(leaf, "rows") if leaf.shape[0] is None else leaf

    return tf.nest.map_structure(declared, element)


def _counted(leaf: Any, declared: Any) -> Any:
    """Returns a declared ragged or sparse tensor with its number of rows declared as well."""
    is_ragged = isinstance(leaf, tf.RaggedTensor)
    num_rows = leaf.nrows() if is_ragged else leaf.dense_shape[0]
    num_rows = tf.shape(declare(tf.zeros([num_rows], tf.uint8), "rows"), num_rows.dtype)[0]
    if not is_ragged:
        others = leaf.shape[1:]
        if not others.is_fully_defined():
            return declared
        return tf.SparseTensor(declared.indices, declared.values, tf.stack([num_rows, *others]))
    if leaf.uniform_row_length is not None:
        return declared
    return tf.RaggedTensor.from_value_rowids(declared.values, declared.value_rowids(), num_rows, validate=False)


def _marked(tensor: Any, attributes: dict[str, str]) -> Any:
    if tf.executing_eagerly():
        return tensor
    marked = tf.identity(tensor)
    for name, text in attributes.items():
        _tf.set_attribute(marked.op, name, text)
    return marked


def declared(op: Any) -> str | None:
    """Returns the declaration of an operation, or None."""
    return _attribute(op, _DECLARED)


def like(op: Any) -> str | None:
    """Returns the name of the tensor given as `ids` or `like` to a mark, or None."""
    return _attribute(op, _LIKE)


def expected(op: Any) -> tuple[str, str] | None:
    """Returns the expectation of an operation and the name of its tensor, or None."""
    what = _attribute(op, _EXPECTED)
    return None if what is None else (what, _attribute(op, _NAME) or "")


def _attribute(op: Any, name: str) -> str | None:
    if op.type != "Identity":
        return None
    attributes = op.node_def.attr  # creates a new message each time
    return attributes[name].s.decode() if name in attributes else None
