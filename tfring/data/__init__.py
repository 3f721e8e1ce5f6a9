"""Gives each replica its share of every global batch."""

from tfring.data.arrays import ArrayBatches, InPlace, in_place, mapped
from tfring.data.cache_files import own_file as own_cache_file
from tfring.data.distribute import agreed_cardinality, distribute, distribute_for_keras, is_sliced, undistributed
from tfring.data.pipeline import arrays_of, share, yields_alike
from tfring.data.rows import (
    bounds,
    forget_rows,
    has_static_rows,
    num_rows,
    one_row_at_least,
    slice_rows,
    split_rows,
    static_rows,
    with_inner_shape,
    with_open_rows,
)
from tfring.data.shares import Shares

__all__ = [
    "ArrayBatches",
    "InPlace",
    "Shares",
    "agreed_cardinality",
    "arrays_of",
    "bounds",
    "distribute",
    "distribute_for_keras",
    "forget_rows",
    "has_static_rows",
    "in_place",
    "is_sliced",
    "mapped",
    "num_rows",
    "one_row_at_least",
    "own_cache_file",
    "share",
    "slice_rows",
    "split_rows",
    "static_rows",
    "undistributed",
    "with_inner_shape",
    "with_open_rows",
    "yields_alike",
]
