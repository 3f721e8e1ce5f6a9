"""Marks tensors of a step with what tfring knows them to be, or takes them for; the analysis reads the marks.

A mark is an attribute of an Identity, which goes along with the graph where TensorFlow copies it.
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
    """Returns a tensor marked for the analysis: what it is.

    Args:
      tensor: A dense tensor.
      what: "rows", a replica's rows along the first axis; "gradients of rows", of its own loss, a mean; "full", the
        same on all replicas; "mean", a replica's part of a mean over rows, weighted by them; "share", a replica's rows
        over those of the batch; "parts", a tensor that ragged or sparse rows are made of; "drawn", what random numbers
        come from, other on each replica; "own", what tfring computes with from here on, as in `replicas.own`.
    """
    assert what in DECLARATIONS, what
    return _marked(tensor, {_DECLARED: what})


def declare_looked_up(rows: Any, ids: Any) -> Any:
    """Returns rows of a table, marked for the analysis: there is one for each id.

    Args:
      rows: `[*ids.shape, ...]`.
      ids: A tensor of the same graph.
    """
    return rows if tf.executing_eagerly() else _marked(rows, {_DECLARED: "looked up", _LIKE: ids.name})


def expect_upstream(tensor: Any, what: str, name: str) -> Any:
    """Returns a tensor whose gradient, as it comes in, is expected to be something; tfring's own backward pass follows.

    Args:
      tensor: A dense tensor.
      what: As of `expect`.
      name: Of the gradient, for the user.
    """
    if tf.executing_eagerly() or not tensor.dtype.is_floating:
        return tensor
    return _tf.with_gradient(tf.identity, lambda gradient: declare(expect(gradient, what, name), "own"))(tensor)


def declare_gradient(tensor: Any, what: str = "gradients of rows") -> Any:
    """Returns a tensor whose gradient is declared.

    Around what exchanges rows with other replicas: what becomes of gradients within is not looked at.

    Args:
      tensor: A dense tensor.
      what: As of `declare`.
    """
    if tf.executing_eagerly() or not tensor.dtype.is_floating:
        return tensor
    return _tf.with_gradient(tf.identity, lambda gradient: declare(gradient, what))(tensor)


def expect(tensor: Any, what: str, name: str, like: Any = None) -> Any:
    """Returns a tensor, with a note of what the step takes it for: the analysis looks whether it is, or makes it so.

    Args:
      tensor: A dense tensor.
      what: "mean", whose mean over replicas, weighted by rows, is that of one process; "sum", whose sum over replicas
        is, of one without rows as well; "added", which is such parts as a variable holds plus parts of the batch;
        "same", on all replicas; "concatenated", what replicas give one after another is; "rows"; "gradients of rows";
        "rows of gradients", that are added up, and their "ids of gradients".
      name: Of the tensor, for the user.
      like: Of what is added to, what the variable holds; of ids, the rows of gradients that they are those of.
    """
    assert what in EXPECTATIONS, what
    if tf.executing_eagerly():  # tensors have no names
        return tensor
    attributes = {_EXPECTED: what, _NAME: name}
    return _marked(tensor, attributes if like is None else {**attributes, _LIKE: like.name})


def expect_gradient(gradient: Any, name: str) -> Any:
    """Returns a gradient, dense or of rows, with a note that it is to be that of a mean over rows."""
    if not isinstance(gradient, tf.IndexedSlices):
        return expect(gradient, "mean", name)
    values = expect(gradient.values, "rows of gradients", name)
    ids = expect(gradient.indices, "ids of gradients", name, like=values)
    return tf.IndexedSlices(values, ids, gradient.dense_shape)


def declare_batch(element: Any) -> Any:
    """Returns a batch marked for the analysis: which are a replica's rows.

    Args:
      element: Any structure; of its dense tensors those whose first dimension is open have rows, and ragged and sparse
        tensors have.
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
    """Returns a declared ragged or sparse tensor whose number of rows is known to be such."""
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
    """Returns what an operation declares."""
    return _attribute(op, _DECLARED)


def like(op: Any) -> str | None:
    """Returns the name of the ids that what is declared is looked up by, of what is added to, or of the rows of ids."""
    return _attribute(op, _LIKE)


def expected(op: Any) -> tuple[str, str] | None:
    """Returns what an operation expects, and of what."""
    what = _attribute(op, _EXPECTED)
    return None if what is None else (what, _attribute(op, _NAME) or "")


def _attribute(op: Any, name: str) -> str | None:
    if op.type != "Identity":
        return None
    attributes = op.node_def.attr  # a message of its own each time
    return attributes[name].s.decode() if name in attributes else None
