"""One step of a pipeline on this worker: the passes of its stage, forward and backward, and messages between stages.

```
stage s      receive inputs ─► forward ─► send outputs                  channel "control", from lower to higher stages
             receive gradients of outputs ─► backward ─► send those of inputs       "gradients", from higher to lower
```

A send may wait for its receive, so the two directions use two channels: neither waits for the other. Within a channel
all ranks handle the messages in the same order, by microbatch, then by source and destination. Computation follows the
order of the table by control dependencies, so a stage holds the activations of no more microbatches than the table has.

Losses and layers treat each microbatch like a replica: as a share of the batch (`tfring.step`), so that the sum of the
weighted gradients is the gradient of the whole batch.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import keras
import tensorflow as tf

from tfring import step
from tfring._keras import randomness
from tfring._keras.layers import all_layers
from tfring._keras.losses import undivided_loss
from tfring._keras.metrics import metrics_of
from tfring._keras.sharding import gradient_is_complete, stages
from tfring.cross_device_ops import values_of
from tfring.data.rows import num_rows, slice_rows
from tfring.errors import ConfigurationError
from tfring.parallel.combined_rows import refuse_combined_rows, spec_of_any_rows
from tfring.parallel.stages import Crossing, StagedModel
from tfring.reduction.pipeline_schedule import FORWARD, Schedule
from tfring.runtime import Ring


class Microbatch:
    """Some rows of this worker's batch.

    Attributes:
      number: The number of the microbatch, from 0.
      rows: The number of rows, an int or int64 scalar. If it is 0, the microbatch holds a row of another one, which
        does not count.
      share: The share of the rows of the worker's batch, a float64 scalar.
      enlarged: A power of two by which gradients are divided during the backward pass, since those of the mean over a
        microbatch can overflow float16 when those of the mean over the batch do not.
      step: The step that the losses and layers see while they compute the microbatch.
    """

    def __init__(self, number: int, count: int, element: Any, all_rows: Any, replicas: int) -> None:
        begin, end = number * all_rows // count, (number + 1) * all_rows // count
        self.number = number
        self.rows = end - begin
        if count > 1:
            begin = tf.minimum(begin, all_rows - 1)
            element = slice_rows(element, begin, tf.maximum(end, begin + 1))
        self.x, self.y, self.sample_weight = element
        self.share = tf.cast(self.rows, tf.float64) / tf.cast(all_rows, tf.float64)
        self.enlarged = float(1 << (count - 1).bit_length())
        around = step.current() or step.Step()
        share = self.share if around.share is None else around.share * self.share
        self.step = step.Step(share, share > 0, count * replicas, self.share)


class _Batch(NamedTuple):
    """Inputs, targets and weights of some rows."""

    x: Any
    y: Any
    sample_weight: Any


class Held:
    """The tensors that a stage keeps from a forward pass until its backward pass."""

    def __init__(self, microbatch: Microbatch, values: dict[int, Any]) -> None:
        self.microbatch = microbatch
        self.values = values  # by the id of a tensor of the model
        self.tape: tf.GradientTape | None = None  # None if the pass runs again
        self.loss: tf.Tensor | None = None
        self.seeds: list | None = None  # drawn by the first pass, if it runs again


class Passes:
    """Runs this worker's passes of a pipeline.

    Args:
      pipeline: The `Pipeline`, for its losses, metrics and optimizer.
      staged: The model of the pipeline, in stages.
      ring: The workers. Their mesh has the same number of stages.
      recompute: Whether forward passes run again before backward passes.
    """

    def __init__(self, pipeline: Any, staged: StagedModel, ring: Ring, recompute: bool) -> None:
        self._pipeline = pipeline
        self._staged = staged
        self._ring = ring
        self._recompute = recompute
        self.control = ring.along("pipeline", "control")
        self.gradients = ring.along("pipeline", "gradients")
        self.number = self.control.rank
        self.stage = staged.stages[self.number]
        self.is_last = self.number == len(staged.stages) - 1
        self._incoming = staged.into(self.number)
        self._outgoing = staged.out_of(self.number)
        self._looked_at: set = set()  # (training, has_loss) of the checks for combined rows that are done

    # -- steps -----------------------------------------------------------------------------------------------------

    def train(self, element: Any, schedule: Schedule) -> None:
        """Runs one training step: gradients, metrics, update."""
        microbatches = self._microbatches(element, schedule.num_microbatches)
        self._refuse_combined_rows(microbatches[0], training=True, has_loss=True)
        weights = self.stage.trainable_weights
        sums = [_Sum(weight) for weight in weights]
        counted = _LossTotal()
        held: dict[int, Held] = {}
        done: list[tf.Tensor] = []
        for task in schedule.tasks[self.number]:
            microbatch = microbatches[task.microbatch]
            if task.kind == FORWARD:
                values = self._received(microbatch)
                with tf.control_dependencies(done), step.running(microbatch.step):
                    one = self._first_pass(microbatch, values, counted)
                done = self._outputs(one) or done
                self._send(one)
                held[task.microbatch] = one
            else:
                given = self._received_gradients(held[task.microbatch])
                with tf.control_dependencies([*done, *given.values()]), step.running(microbatch.step):
                    one = held.pop(task.microbatch)
                    gradients, back = self._backward(one, weights, given, counted)
                    for total, gradient in zip(sums, gradients, strict=True):
                        total.add(gradient, microbatch)
                done = [tensor for total in sums for tensor in total.tensors()] + [g for g in back if g is not None]
                self._send_gradients(one, back)
        self._refuse_written(microbatches, self._recompute)
        self._update(weights, [total.value() for total in sums])
        self._share_metrics(counted)

    def test(self, element: Any, num_microbatches: int) -> None:
        """Updates the metrics with a batch."""
        counted = _LossTotal()
        self._forward_only(element, num_microbatches, counted, training=False)
        self._share_metrics(counted)

    def predict(self, x: Any, num_microbatches: int, training: bool | None = False) -> Any:
        """Returns the outputs for all rows, on all stages."""
        passed = self._forward_only((x, None, None), num_microbatches, None, training)
        outputs = []
        for number, tensor in enumerate(self._staged.model.outputs):
            if self.is_last:
                rows = [one.values[id(tensor)][: one.microbatch.rows] for one in passed]
                outputs.append(rows[0] if len(rows) == 1 else tf.concat(rows, 0))
                for to in range(self.number):
                    self.control.send(outputs[-1], to, name=f"output {number}")
            else:
                last = len(self._staged.stages) - 1
                outputs.append(self.control.receive(last, *_kind_of(tensor), name=f"output {number}"))
        return self._packed(outputs)

    def symbolic_outputs(self) -> Any:
        """Returns placeholders for the model's outputs, for calls in which Keras only needs dtypes and shapes."""
        outputs = []
        for tensor in self._staged.model.outputs:
            dtype, shape = _kind_of(tensor)
            outputs.append(tf.compat.v1.placeholder(dtype, shape))
        return self._packed(outputs)

    # -- passes ----------------------------------------------------------------------------------------------------

    def _microbatches(self, element: Any, count: int) -> list[Microbatch]:
        rows = num_rows(element)
        if rows is None:
            raise ConfigurationError(
                f"The batch has no rows, {tf.nest.flatten(element)}, but a Pipeline slices a batch by rows, along the "
                "first dimension of its tensors."
            )
        replicas = self._ring.num_replicas
        return [Microbatch(number, count, element, rows, replicas) for number in range(count)]

    def _forward_only(self, element: Any, count: int, counted: _LossTotal | None, training: bool | None) -> list[Held]:
        passed = []
        done: list[tf.Tensor] = []
        microbatches = self._microbatches(element, count)
        self._refuse_combined_rows(microbatches[0], training, has_loss=counted is not None)
        for microbatch in microbatches:
            values = self._received(microbatch)
            with tf.control_dependencies(done), step.running(microbatch.step):
                one = Held(microbatch, self.stage(values, training=training))
                if counted is not None:
                    self._count(one, self._loss_of(microbatch, one.values, training=False), counted)
            done = self._outputs(one)
            self._send(one)
            if self.is_last and counted is None:
                passed.append(one)
        self._refuse_written(microbatches, False)
        return passed

    def _refuse_combined_rows(self, microbatch: Microbatch, training: bool | None, has_loss: bool) -> None:
        """Refuses, once, a stage that computes something else from all rows than microbatch by microbatch."""
        if tf.executing_eagerly() or microbatch.step.parts == 1 or (training, has_loss) in self._looked_at:
            return
        self._looked_at.add((training, has_loss))
        crossing = _tensors(self._incoming)
        batch = _Batch(microbatch.x, microbatch.y, microbatch.sample_weight)
        specs = (
            tf.nest.map_structure(spec_of_any_rows, batch, expand_composites=False),
            [tf.TensorSpec(shape, dtype) for dtype, shape in map(_kind_of, crossing)],
        )

        def compute(given: Any) -> tuple[list, Any]:
            batch, received = given
            values = self._inputs(batch.x) | dict(zip(map(id, crossing), received, strict=True))
            values = self.stage(values, training=training)
            outputs = self._staged.model.outputs if self.is_last and not has_loss else ()
            leaving = [*_tensors(self._outgoing), *outputs]
            loss = self._loss_of(batch, values, bool(training)) if has_loss else None
            return [values[id(tensor)] for tensor in leaving], loss

        refuse_combined_rows(compute, specs, microbatch.step, f"stage {self.number + 1}")

    def _first_pass(self, microbatch: Microbatch, values: dict[int, Any], counted: _LossTotal) -> Held:
        one = Held(microbatch, values)
        if not self._recompute:
            self._taped(one, counted)
        elif not self.is_last:  # the last stage computes once, at its backward pass
            with randomness.recorded() as one.seeds:
                computed = self.stage(values, training=True)
            one.values = {**values, **{id(c.tensor): computed[id(c.tensor)] for c in self._outgoing}}
        return one

    def _taped(self, one: Held, counted: _LossTotal) -> None:
        one.tape = tf.GradientTape()
        with one.tape:
            one.tape.watch([value for value in self._differentiable(one.values)])
            one.values = self.stage(one.values, training=True)
            loss = self._loss_of(one.microbatch, one.values, training=True)
            optimizer = self._pipeline.optimizer
            one.loss = loss if loss is None or optimizer is None else optimizer.scale_loss(loss)
        self._count(one, loss, counted)

    def _differentiable(self, values: dict[int, Any]) -> list:
        """Returns the tensors that cross into this stage and may have a gradient."""
        return [values[id(tensor)] for tensor in _tensors(self._incoming) if values[id(tensor)].dtype.is_floating]

    def _backward(
        self, one: Held, weights: Sequence[Any], given: dict[int, tf.Tensor], counted: _LossTotal
    ) -> tuple[list, list]:
        """Returns the gradients of weights (None for a weight without one) and of tensors that enter this stage."""
        if one.tape is None:
            into = {id(tensor) for tensor in _tensors(self._incoming)} | {id(t) for t in self._staged.model.inputs}
            one.values = {key: value for key, value in one.values.items() if key in into}
            with contextlib.nullcontext() if one.seeds is None else randomness.replayed(one.seeds):
                self._taped(one, counted)
        assert one.tape is not None
        targets = [one.values[id(tensor)] for tensor in _tensors(self._outgoing) if id(tensor) in given]
        gradients = [given[id(tensor)] for tensor in _tensors(self._outgoing) if id(tensor) in given]
        if one.loss is not None:
            targets.append(one.loss)
            gradients.append(tf.ones_like(one.loss) / one.microbatch.enlarged)
        inputs = self._differentiable(one.values)
        made = one.tape.gradient(targets, [*weights, *inputs], output_gradients=gradients) if targets else []
        made = made or [None] * (len(weights) + len(inputs))
        back = [
            tf.zeros_like(x) if g is None else tf.convert_to_tensor(g)
            for x, g in zip(inputs, made[len(weights) :], strict=True)
        ]
        return made[: len(weights)], back

    # -- losses and metrics ----------------------------------------------------------------------------------------

    def _loss_of(self, batch: Microbatch | _Batch, values: dict[int, Any], training: bool) -> tf.Tensor | None:
        """Returns the sum of this stage's added losses, on the last stage with the compiled loss; None if none."""
        pipeline = self._pipeline
        if self.is_last:
            y_pred = self._packed([values[id(tensor)] for tensor in self._staged.model.outputs])
            return pipeline._compute_loss(
                x=batch.x, y=batch.y, y_pred=y_pred, sample_weight=batch.sample_weight, training=training
            )
        added = [pipeline._aggregate_additional_loss(loss) for loss in self.stage.losses]
        return tf.add_n([tf.convert_to_tensor(loss) for loss in added]) if added else None

    def _count(self, one: Held, loss: Any, counted: _LossTotal) -> None:
        """Updates the metrics and the mean of the loss, without the losses that other stages add."""
        pipeline, batch = self._pipeline, one.microbatch
        if not self.is_last:
            if loss is not None:
                counted.add(undivided_loss(loss), batch)
            return
        rows = tf.shape(tf.nest.flatten(batch.x)[0])[0]
        pipeline._loss_tracker.update_state(undivided_loss(loss), sample_weight=rows)
        if pipeline._compile_metrics is not None:
            y_pred = self._packed([one.values[id(tensor)] for tensor in self._staged.model.outputs])
            pipeline._compile_metrics.update_state(batch.y, y_pred, batch.sample_weight)

    def _share_metrics(self, counted: _LossTotal) -> None:
        """Gives all stages the state of all metrics, with one collective per dtype."""
        pipeline = self._pipeline
        owners = {id(m): s.number for s in self._staged.stages for m in _metrics_of_layers(s.parts)}
        last = len(self._staged.stages) - 1
        by_dtype: dict = {}
        for metric in metrics_of(pipeline):
            for variable in metric.variables:
                if all(variable is not other for _, other in by_dtype.get(variable.dtype, ())):
                    by_dtype.setdefault(variable.dtype, []).append((metric, variable))
        total = pipeline._loss_tracker.total
        for pairs in by_dtype.values():
            parts = []
            for metric, variable in pairs:
                value = tf.convert_to_tensor(values_of(variable.value)[0])
                value = value if owners.get(id(metric), last) == self.number else tf.zeros_like(value)
                parts.append(value + tf.cast(counted.total, value.dtype) if variable is total else value)
            summed = self.control.all_reduce(parts, name="state of metrics")
            for (_, variable), value in zip(pairs, summed, strict=True):
                values_of(variable.value)[0].assign(value)

    # -- update ----------------------------------------------------------------------------------------------------

    def _update(self, weights: Sequence[Any], gradients: Sequence[Any]) -> None:
        """Applies gradients. The optimizer sees all weights; those of other stages and their gradients are empty."""
        variables = self._pipeline.trainable_variables
        if not variables:
            return
        own = {id(weight): gradient for weight, gradient in zip(weights, gradients, strict=True)}
        every = [own[id(v)] if id(v) in own else stages.no_gradient(v) for v in variables]
        self._pipeline.optimizer.apply_gradients(zip(every, variables, strict=True))

    def _refuse_written(self, microbatches: Sequence[Microbatch], recompute: bool) -> None:
        """Refuses layers that write state, unless there is one pass: one process writes it once per step."""
        written = [variable for microbatch in microbatches for variable, *_ in microbatch.step.written]
        around = step.current()
        if len(microbatches) == 1 and not recompute:
            if around is not None:
                around.written.extend(microbatches[0].step.written)
        elif written:
            raise stages.repeated_write_error(written[0], len(microbatches), recompute)

    # -- messages --------------------------------------------------------------------------------------------------

    def _inputs(self, x: Any) -> dict[int, Any]:
        """Returns the values of the model's inputs."""
        model = self._staged.model
        return dict(zip(map(id, model.inputs), model._standardize_inputs(x), strict=True))

    def _received(self, microbatch: Microbatch) -> dict[int, Any]:
        """Returns the values with which a forward pass begins."""
        values = self._inputs(microbatch.x)
        for crossing in self._incoming:
            values[id(crossing.tensor)] = self.control.receive(
                crossing.source, *_kind_of(crossing.tensor), name=_name(crossing, microbatch)
            )
        return values

    def _outputs(self, one: Held) -> list[tf.Tensor]:
        """Returns the tensors that complete the forward pass."""
        tensors = [one.values[id(tensor)] for tensor in _tensors(self._outgoing)]
        if self.is_last:
            tensors += [one.values[id(t)] for t in self._staged.model.outputs if id(t) in one.values]
        return tensors if one.loss is None else [*tensors, one.loss]

    def _send(self, one: Held) -> None:
        for crossing in self._outgoing:
            value = one.values[id(crossing.tensor)]
            self.control.send(value, crossing.to, name=_name(crossing, one.microbatch))

    def _received_gradients(self, one: Held) -> dict[int, tf.Tensor]:
        """Receives the gradients of each tensor, by its id, summed over all stages that use it."""
        found: dict[int, tf.Tensor] = {}
        for crossing in _backwards(self._outgoing):
            value = one.values[id(crossing.tensor)]
            if value.dtype.is_floating:
                name = _name(crossing, one.microbatch)
                part = self.gradients.receive(crossing.to, value.dtype, value.shape, name=f"gradient of {name}")
                key = id(crossing.tensor)
                found[key] = found[key] + part if key in found else part
        return found

    def _send_gradients(self, one: Held, back: Sequence[tf.Tensor]) -> None:
        tensors = [tensor for tensor in _tensors(self._incoming) if one.values[id(tensor)].dtype.is_floating]
        gradients = dict(zip(map(id, tensors), back, strict=True))
        for crossing in _backwards(self._incoming):
            if id(crossing.tensor) in gradients:
                name = f"gradient of {_name(crossing, one.microbatch)}"
                self.gradients.send(gradients[id(crossing.tensor)], crossing.source, name=name)

    def _packed(self, outputs: Sequence[Any]) -> Any:
        packed = keras.tree.pack_sequence_as(self._staged.model._outputs_struct, outputs)
        return packed[0] if isinstance(packed, (list, tuple)) and len(packed) == 1 else packed


class _Sum:
    """The gradient of a weight, summed over microbatches."""

    def __init__(self, variable: Any) -> None:
        self._variable = variable
        self._weighs = not gradient_is_complete(variable)
        self._total: Any = None

    def add(self, gradient: Any, microbatch: Microbatch) -> None:
        if gradient is None:
            return
        sparse = isinstance(gradient, tf.IndexedSlices)
        values = gradient.values if sparse else gradient
        weight = microbatch.enlarged * (microbatch.share if self._weighs else tf.ones_like(microbatch.share))
        values = tf.math.multiply_no_nan(values, tf.cast(weight, values.dtype))
        if not sparse:
            self._total = values if self._total is None else self._total + values
        elif self._total is None:
            self._total = tf.IndexedSlices(values, gradient.indices, gradient.dense_shape)
        else:
            total = self._total
            indices = tf.concat([total.indices, gradient.indices], 0)
            self._total = tf.IndexedSlices(tf.concat([total.values, values], 0), indices, gradient.dense_shape)

    def tensors(self) -> list[tf.Tensor]:
        if self._total is None:
            return []
        return [self._total.values if isinstance(self._total, tf.IndexedSlices) else self._total]

    def value(self) -> Any:
        """Returns the total, or zeros if no microbatch has a gradient, since other stages need one for every weight."""
        return stages.no_gradient(self._variable) if self._total is None else self._total


class _LossTotal:
    """The sum of the losses that this stage's layers add, times the rows."""

    def __init__(self) -> None:
        self.total: Any = 0.0

    def add(self, loss: tf.Tensor, microbatch: Microbatch) -> None:
        rows = tf.where(microbatch.step.active, tf.cast(microbatch.rows, loss.dtype), 0)
        self.total = self.total + tf.math.multiply_no_nan(loss, rows)


def _metrics_of_layers(layers: Iterable[Any]) -> list:
    return [metric for part in layers for layer in all_layers(part) for metric in layer._metrics]


def _tensors(crossings: Sequence[Crossing]) -> list[keras.KerasTensor]:
    """Returns each tensor once, in order."""
    return list({id(crossing.tensor): crossing.tensor for crossing in crossings}.values())


def _backwards(crossings: Sequence[Crossing]) -> list[Crossing]:
    """Returns crossings in the order of the messages of backward passes: from later stages to earlier ones."""
    return sorted(crossings, key=lambda crossing: (-crossing.to, -crossing.source))


def _kind_of(tensor: keras.KerasTensor) -> tuple:
    return tf.as_dtype(tensor.dtype), [None, *tensor.shape[1:]]


def _name(crossing: Crossing, microbatch: Microbatch) -> str:
    return f"{crossing.name} of microbatch {microbatch.number}"
