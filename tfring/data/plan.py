"""Parses a user's `tf.data` pipeline, once for each dataset: `plan_of(dataset)`.

```
source ─► map ─► shuffle ─► map ─► batch ─► prefetch          as the user wrote it
         └────── rows ─────────┘         └─ batches ─┘        the steps of a Batching
```

Only steps with a known effect on the order and number of rows belong to `rows` and `batches`. Any other step, with all
steps before it, belongs to the source, of which every rank draws all rows.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NamedTuple, TypeVar

import tensorflow as tf

from tfring import _tf
from tfring.data import randomness
from tfring.data.records import Records, records_of
from tfring.data.rowwise import is_rowwise
from tfring.errors import ConfigurationError

# Operations with results that depend on how often they ran before.
_KEEPS = ("PyFunc", "EagerPyFunc", "Assign", "RngReadAndSkip", "RngSkip", "StatefulUniform", "StatefulStandardNormal")
_T = TypeVar("_T")
_BETWEEN_ROWS = ("map", "shuffle", "prefetch", "repeat", "take", "skip", "nothing")
_BETWEEN_BATCHES = (*_BETWEEN_ROWS, "cache")
_BY_ROW = {("keras.src.trainers.data_adapters.tf_dataset_adapter", "class_weights_map_fn")}  # maps of batches


class Batching(NamedTuple):
    """Holds a pipeline split into the steps of rows, the batch step and the steps of batches, which can be rebuilt.

    Attributes:
      source: The dataset of rows.
      rows: The steps from the source to the batch.
      batch: The step that makes batches.
      batches: The steps after it.
      whole: Whether a map of batches needs the rows of all workers.
      arrays: The arrays that the source slices, or the records that it reads, in its structure, if their numbers stand
        for the rows; otherwise None.
    """

    source: tf.data.Dataset
    rows: list[_tf.DatasetStep]
    batch: _tf.DatasetStep
    batches: list[_tf.DatasetStep]
    whole: bool
    arrays: Any

    @property
    def has_numbers_alone(self) -> bool:
        """Returns True if row numbers of slices can stand for all batches: no map changes rows or batches."""
        if self.arrays is None or any(isinstance(leaf, Records) for leaf in tf.nest.flatten(self.arrays)):
            return False
        return not any(step.kind == "map" for step in (*self.rows, *self.batches))


class InputPlan:
    """Holds what is known of a dataset. Each property is computed when it is first used.

    Attributes:
      dataset: The user's dataset.
      is_shared: Whether `share` made the dataset.
    """

    def __init__(self, dataset: tf.data.Dataset) -> None:
        self.dataset, self.is_shared = dataset, False
        self._kept: dict[Any, Any] = {}

    def kept(self, key: Any, make: Callable[[], _T]) -> _T:
        """Makes a value from the dataset once per key, so that the next epoch finds what a shuffle or a cache holds."""
        if key not in self._kept:
            self._kept[key] = make()
        return self._kept[key]

    @functools.cached_property
    def steps(self) -> list[_tf.DatasetStep]:
        """Every step of the pipeline, the last first."""
        return [_tf.dataset_step(each) for each in _tf.pipeline(self.dataset)]

    @functools.cached_property
    def graphs(self) -> list:
        """The graphs of the functions of all steps."""
        return [graph for step in self.steps for graph in _tf.graphs_of(step.dataset)]

    @functools.cached_property
    def seeds(self) -> list[int]:
        """The seeds of the shuffles."""
        return _tf.seeds_of(self.dataset)

    @functools.cached_property
    def depends_on_randomness(self) -> tuple[bool, ...]:
        """A bool for each component, whether ranks may hold different values of the same rows (`randomness.py`)."""
        return tuple(randomness.depends_on_randomness(self.dataset))

    @functools.cached_property
    def is_alike_in_each_pass(self) -> bool:
        """True if all iterators yield the same rows. A shuffle's depend on the number of iterators made before."""
        alike = {*_BETWEEN_BATCHES, "batch", "slices", "zip", "records"} - {"shuffle"}
        return {step.kind for step in self.steps} <= alike

    @functools.cached_property
    def keeps_between_passes(self) -> bool:
        """True if a pass depends on the draws of earlier passes. A cache keeps the order of the first pass."""
        if any(step.kind == "cache" for step in self.steps):
            return True
        return any(node.op.startswith(_KEEPS) for graph in self.graphs for node in _tf.nodes_of(graph))

    @functools.cached_property
    def constants(self) -> tuple[bool, ...]:
        """A bool for each component of batches, whether it is a constant beside the rows, such as a detector's anchors.

        A component has rows if its first dimension is known only when it is drawn. A component with a static first
        dimension is a constant, unless `drop_remainder` made it static. If all are static and no `batch` gives the
        number of rows, it is the number that most components have. If an element holds batches of different sizes, such
        as labelled and unlabelled rows, the largest are the rows; each replica gets the others in full.
        """
        counts = [_static_rows(spec) for spec in tf.nest.flatten(self.dataset.element_spec)]
        known = [count for count in counts if count is not None and count >= 0]
        sizes = set(known).intersection(_tf.static_batch_size(step.dataset) for step in self.steps)
        rows = max(sizes, default=None)
        if rows is None and None not in counts and known:
            rows = max(known, key=known.count)
        return tuple(count is not None and count >= 0 and count != rows for count in counts)

    @functools.cached_property
    def records(self) -> Records | None:
        """The records that the dataset reads; None if it reads none, or they cannot be read by position."""
        return records_of(_tf.dataset_step(self.dataset))

    @property
    def arrays(self) -> list[tf.Tensor | Records]:
        """The arrays or records whose row numbers stand for the rows. Ranks compare them first."""
        parts = self.batching(by_number=True)
        return [] if parts is None or parts.arrays is None else tf.nest.flatten(parts.arrays)

    def batching(self, *, by_number: bool) -> Batching | None:
        """Returns the split pipeline, or None if rows cannot be separated or nothing is gained.

        Args:
          by_number: Whether ranks have compared the arrays that the source may slice.
        """
        if not tf.executing_eagerly():
            return None
        return self.kept(("batching", by_number), lambda: self._take_apart(by_number))

    def _take_apart(self, by_number: bool) -> Batching | None:
        batches, batched = _tf.last_steps(
            self.dataset, lambda step: step.kind in _BETWEEN_BATCHES and not step.arguments.get("filename")
        )
        batch = _tf.dataset_step(batched)
        if batch.kind != "batch":
            return None
        rows, source = _tf.last_steps(
            batch.before, lambda step: step.kind in _BETWEEN_ROWS and not _draws_in_order(step)
        )
        if _tf.dataset_step(source).kind == "zip":
            source, maps = _zip_before_maps(source)
            rows = maps + rows
        maps_of_batches = [step for step in batches if step.kind == "map"]
        arrays = _arrays(source) if by_number else None
        if arrays is None:
            while rows and rows[0].kind != "map":  # cutting gains nothing before the first map
                source = rows.pop(0).dataset
            if not rows and not maps_of_batches:
                return None
        specs = (tf.TensorSpec, tf.RaggedTensorSpec, tf.SparseTensorSpec)
        if not all(isinstance(spec, specs) for spec in tf.nest.flatten(source.element_spec)):
            return None
        whole = not plan_of(batched).is_shared and not all(map(_maps_by_row, maps_of_batches))
        return Batching(source, rows, batch, batches, whole, arrays)

    def check_share(self) -> None:
        """Raises ConfigurationError if a step after `share` is not one that a Batching knows."""
        _, dataset = _tf.last_steps(self.dataset, lambda step: step.kind in _BETWEEN_BATCHES)
        if not plan_of(dataset).is_shared and any(plan_of(step.dataset).is_shared for step in self.steps):
            raise ConfigurationError(
                f"A {type(dataset).__name__.strip('_')} follows `tfring.data.share`, but only map, prefetch, repeat, "
                "take, skip, shuffle, cache and with_options may follow it. Move that step before `share`, or use "
                "`dataset.batch`."
            )


def plan_of(dataset: tf.data.Dataset) -> InputPlan:
    """Returns the plan of a dataset, which is stored in the dataset."""
    kept = vars(dataset)
    if "_tfring_plan" not in kept:
        kept["_tfring_plan"] = InputPlan(dataset)
    return kept["_tfring_plan"]


def share(batch_size: int, drop_remainder: bool = False) -> Callable[[tf.data.Dataset], tf.data.Dataset]:
    """Replaces `dataset.batch(batch_size)`, so that maps after it run on this worker's rows alone.

    A map of batches may use all rows of its batch, so by default every rank runs it on all rows and slices the result,
    unless its operations are known to treat each row independently. `share` declares that all following maps do so. The
    batches are those of `dataset.batch`, and without a strategy nothing else changes.

    Args:
      batch_size: Number of rows of a batch over all workers.
      drop_remainder: Whether to drop a last batch with fewer rows. Defaults to `False`.

    Returns:
      A function for `dataset.apply`.

    >>> rows = tf.data.Dataset.range(5)
    >>> batches = rows.apply(share(2)).map(lambda x: 10 * x, num_parallel_calls=2).prefetch(1)
    >>> [batch.tolist() for batch in batches.as_numpy_iterator()]
    [[0, 10], [20, 30], [40]]
    """

    def apply(dataset: tf.data.Dataset) -> tf.data.Dataset:
        batched = dataset.batch(batch_size, drop_remainder)
        _tf.set_element_spec(batched, dataset.batch(batch_size).element_spec)  # for maps of any number of rows
        plan_of(batched).is_shared = True
        return batched

    return apply


def as_element(components: tuple, spec: Any) -> Any:
    """Returns the arguments of a map's function as the one element that they form."""
    return components if type(spec) is tuple else components[0]


def _static_rows(spec: Any) -> int | None:
    """Returns the first dimension, None if it is not static, -1 if there is none."""
    shape = getattr(spec, "shape", None)
    if shape is None or shape == ():
        return -1
    shape = tf.TensorShape(shape)
    return shape[0] if shape.rank else None if shape.rank is None else -1


def _arrays(dataset: tf.data.Dataset) -> Any:
    """Returns the arrays that a dataset slices, or its records, in the structure of its rows; or None."""
    step = _tf.dataset_step(dataset)
    if step.kind == "records":
        return plan_of(dataset).records
    if step.kind != "zip":
        return step.arguments.get("arrays")
    datasets = step.arguments["datasets"]
    arrays = list(map(_arrays, tf.nest.flatten(datasets)))
    if any(of_one is None or (isinstance(of_one, Records) and not of_one.in_order) for of_one in arrays):
        return None
    return tf.nest.pack_sequence_as(datasets, arrays)


def _zip_before_maps(dataset: tf.data.Dataset) -> tuple[tf.data.Dataset, list[_tf.DatasetStep]]:
    """Returns a zip of the datasets before their maps, and the steps of these maps, applied after the zip."""
    datasets = _tf.dataset_step(dataset).arguments["datasets"]
    sources, maps = [], []
    for number, zipped in enumerate(tf.nest.flatten(datasets)):
        steps, source = _tf.last_steps(
            zipped, lambda step: step.kind in ("map", "prefetch", "nothing") and not _draws_in_order(step)
        )
        sources.append(source)
        maps += [(number, step.arguments) for step in steps if step.kind == "map"]
    if not maps:
        return dataset, []
    source = dataset = tf.data.Dataset.zip(datasets=tf.nest.pack_sequence_as(datasets, sources))
    made = []
    for number, arguments in maps:
        function = functools.partial(_mapped_component, datasets, dataset.element_spec, number, arguments["function"])
        dataset = dataset.map(function, num_parallel_calls=arguments["num_parallel_calls"])
        made.append(_tf.dataset_step(dataset))
    return source, made


def _mapped_component(datasets: Any, spec: Any, number: int, function: Any, *components: Any) -> Any:
    """Returns the row of a zip, with a map's function applied to one component."""
    rows = tf.__internal__.nest.flatten_up_to(datasets, as_element(components, spec))
    rows[number] = _tf.call_map_function(function, rows[number])
    return tf.nest.pack_sequence_as(datasets, rows)


def _draws_in_order(step: _tf.DatasetStep) -> bool:
    """Returns True if a map draws seeded random numbers, or writes variables, row after row, for all rows.

    One process does so in this order. In a parallel map the order depends on threads: there is no order to keep.
    """
    if step.kind != "map" or step.arguments["num_parallel_calls"] is not None:
        return False
    return any(
        any(node.attr[name].i for name in ("seed", "seed2") if name in node.attr)
        or node.op.startswith(("Assign", "RngReadAndSkip", "ResourceScatter"))
        for node in _tf.nodes_of(step.arguments["function"].function.graph)
    )


def _maps_by_row(step: _tf.DatasetStep) -> bool:
    function = step.arguments["python_function"]
    name = getattr(function, "__module__", ""), getattr(function, "__name__", "")
    return name in _BY_ROW or is_rowwise(step.arguments["function"], step.before.element_spec)
