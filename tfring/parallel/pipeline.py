"""Pipeline: a model in stages, each on its own worker, and batches in microbatches that pass through them."""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Sequence
from typing import Any

import keras
import tensorflow as tf

from tfring._keras.layers import all_layers
from tfring._keras.seam import ring_of_model
from tfring._keras.sharding import is_sharded_along, mark, stages
from tfring.errors import ConfigurationError
from tfring.parallel.passes import Passes
from tfring.parallel.stages import StagedModel, batch_normalizations, cut_model
from tfring.reduction.pipeline_schedule import Schedule, plan_schedule
from tfring.ring.collectives import RingCollectives
from tfring.runtime import Ring, current_ring


class Pipeline(keras.Model):
    """A model whose layers are distributed over the workers along the pipeline axis of a `tfring.RingStrategy`'s mesh.

    Each worker holds only the weights and the optimizer's slots of its stage, and only its shards of sharded layers in
    that stage. A batch is cut into microbatches, which pass through the stages one after the other. Their gradients are
    summed to the gradient of the whole batch. `fit`, `evaluate` and `predict` compute what the model itself computes in
    one process, and all workers get the same logs and predictions. With one stage, or without a strategy, the Pipeline
    is the model itself.

    The model is first made in full on every worker; its optimizer and activations are not. Files hold the model as one
    process writes it: all workers call `save` and `save_weights` (or `tfring.save`), and the files load into the model
    without a Pipeline, and into any number of stages.

    Args:
      model: A built `keras.Sequential` or functional model, made in the strategy's scope. Skip connections over stages,
        several inputs and several outputs are supported.
      stages: Names of the layers with which stages 2, 3, ... begin, in the order of `model.layers`: one name fewer than
        the size of the pipeline axis. `tfring.parallel.plan_stages` finds the names for stages that take equally long.
      num_microbatches: Number of parts into which the rows of a worker's batch are cut. Stages are idle for
        `(S - 1) / (M + S - 1)` of a step (with S stages and M microbatches). Defaults to 8.
      schedule: "1f1b" (default, PipeDream-flush, https://arxiv.org/abs/2006.09503) or "gpipe"
        (https://arxiv.org/abs/1811.06965). Both give the same results in the same time. A stage holds the activations
        of at most S microbatches with "1f1b", of all with "gpipe". See `tfring.parallel.plan_schedule`.
      recompute: Whether a stage keeps only its inputs, and computes its forward pass again before the backward pass.
        Dropout draws the same values. Defaults to False.
      **kwargs: `name` of `keras.Model`.

    Raises:
      ConfigurationError: If one process would compute something different; if a name is not that of a layer, or there
        are too many or too few names; if two stages use the same weight, the model has its own steps, a mask crosses
        stages, or a BatchNormalization trains with several microbatches or `recompute`. In `compile`, if a loss is a
        mean by sample weights or masks, with several microbatches. In `fit`, if the optimizer does not work element by
        element (Adafactor, Lamb, Muon).

    >>> model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(8, name="a"), keras.layers.Dense(1, name="b")])
    >>> pipeline = Pipeline(model, stages=["b"], num_microbatches=4)
    >>> pipeline.compile("sgd", "mse")
    >>> pipeline.predict(tf.zeros([3, 4]), verbose=0).shape
    (3, 1)
    """

    def __init__(
        self,
        model: keras.Model,
        stages: Sequence[str],
        num_microbatches: int = 8,
        schedule: str = "1f1b",
        recompute: bool = False,
        **kwargs: Any,
    ) -> None:
        staged = cut_model(model, stages)
        ring = ring_of_model(model)
        if ring is None and current_ring() is not None:
            raise ConfigurationError(
                f"Model {model.name!r} was made outside of the scope of its Pipeline's strategy. Move the lines that "
                "make it inside `with strategy.scope():`."
            )
        self._schedule: Schedule = plan_schedule(schedule, len(staged.stages), num_microbatches)
        with contextlib.nullcontext() if ring is None else ring.scope():
            super().__init__(**{"name": f"pipeline_of_{model.name}", "dtype": model.dtype_policy, **kwargs})
        self.model = model
        if hasattr(model, "output_names"):  # the keys of losses and metrics
            self.output_names = model.output_names
        self.num_microbatches = num_microbatches
        self._passes: Passes | None = None
        if ring is not None and ring.mesh.pipeline > 1:
            self._divide(staged, ring, bool(recompute))
        self.built = True

    def _divide(self, staged: StagedModel, ring: Ring, recompute: bool) -> None:
        """Assigns each stage to its workers."""
        _check(self.model, staged, ring, self._schedule, recompute)
        passes = Passes(self, staged, ring, recompute)
        _check_channels(passes, self._schedule)
        stages.refuse_new_weights()
        for stage in staged.stages:
            for variable in stage.variables:
                mark(variable, stage=stage.number)
            for variable in stage.weights:
                stages.give(ring, variable, stage.number)
        self._passes = passes

    # -- steps -----------------------------------------------------------------------------------------------------

    @property
    def losses(self) -> list:
        """Returns the losses that layers of this worker's stage add."""
        passes = vars(self).get("_passes")
        return super().losses if passes is None else passes.stage.losses

    def call(self, inputs: Any, training: bool | None = None) -> Any:
        if self._passes is None:
            return self.model(inputs, training=training)
        if stages.is_symbolic():
            return self._passes.symbolic_outputs()
        return self._passes.predict(inputs, 1, training)

    def train_step(self, data: Any) -> Any:
        if self._passes is None:
            return super().train_step(data)
        schedule = self._schedule
        if self.run_eagerly:  # one thread then handles both channels
            schedule = plan_schedule("gpipe", schedule.num_stages, schedule.num_microbatches)
        self._passes.train(keras.utils.unpack_x_y_sample_weight(data), schedule)
        return self.get_metrics_result()

    def test_step(self, data: Any) -> Any:
        if self._passes is None:
            return super().test_step(data)
        self._passes.test(keras.utils.unpack_x_y_sample_weight(data), self.num_microbatches)
        return self.get_metrics_result()

    def predict_step(self, data: Any) -> Any:
        if self._passes is None:
            return super().predict_step(data)
        x, _, _ = keras.utils.unpack_x_y_sample_weight(data)
        return self._passes.predict(x, self.num_microbatches)

    def compile(self, *args: Any, **kwargs: Any) -> None:
        given = inspect.signature(super().compile).bind(*args, **kwargs).arguments
        if self._passes is not None and given.get("jit_compile", "auto") not in (False, "auto"):
            raise ConfigurationError(
                f"jit_compile={given['jit_compile']} cannot be used with a Pipeline of several stages: XLA would "
                "compile parts of its passes in its own order. Leave it out."
            )
        super().compile(*args, **kwargs)
        if self._passes is not None and self.num_microbatches > 1:
            _check_losses(given.get("loss"))
        # So that the model's files hold the optimizer and the arguments of `compile`.
        self.model.compile(**{**given, "optimizer": self.optimizer, "jit_compile": False})

    def quantize(self, *args: Any, **kwargs: Any) -> None:
        if self._passes is None:
            return super().quantize(*args, **kwargs)
        raise stages.full_weights_error("quantize()")

    # -- files -----------------------------------------------------------------------------------------------------

    def save(self, *args: Any, **kwargs: Any) -> Any:
        """Calls `save` of the model that the Pipeline was made from. All workers call it."""
        return self.model.save(*args, **kwargs)

    def save_weights(self, *args: Any, **kwargs: Any) -> Any:
        """Calls `save_weights` of the model that the Pipeline was made from. All workers call it."""
        return self.model.save_weights(*args, **kwargs)

    def load_weights(self, *args: Any, **kwargs: Any) -> Any:
        """Calls `load_weights` of the model that the Pipeline was made from.

        It loads files of that model and of Pipelines with any number of stages.
        """
        return self.model.load_weights(*args, **kwargs)


def _check(
    model: keras.Model, staged: StagedModel, ring: Ring, schedule: Schedule, recompute: bool
) -> None:
    mesh = ring.mesh
    if len(staged.stages) != mesh.pipeline:
        raise ConfigurationError(
            f"`stages` has {len(staged.stages) - 1} names, which make {len(staged.stages)} stages, but {mesh} needs "
            f"one stage for each worker along the pipeline axis. Give the names of {mesh.pipeline - 1} layers that "
            "begin a stage."
        )
    given = [v for v in model.weights if is_sharded_along(v, "pipeline")]
    if given:
        raise ConfigurationError(
            f"The model is already in a Pipeline, which gave {given[0].path!r} to a stage. A model can be in only one "
            "Pipeline."
        )
    for layer in all_layers(model):
        if getattr(layer, "lora_enabled", False) or getattr(layer, "quantization_mode", None):
            raise stages.full_weights_error(f"{type(layer).__name__} {layer.name!r} has such weights")
    normalizations = batch_normalizations(model)
    if normalizations and (schedule.num_microbatches > 1 or recompute):
        layer = normalizations[0]
        raise ConfigurationError(
            f"{type(layer).__name__} {layer.name!r} computes statistics of rows in a Pipeline with "
            f"num_microbatches={schedule.num_microbatches}, recompute={recompute}. Those of a microbatch are not those "
            "of the batch, and recompute counts them twice. Freeze it (`trainable = False`), use LayerNormalization or "
            "GroupNormalization, or num_microbatches=1 and recompute=False."
        )
    fixed = [tensor.name for tensor in staged.model.inputs if tensor.shape[0] is not None]
    if fixed and schedule.num_microbatches > 1:
        raise ConfigurationError(
            f"An input of the model has a fixed number of rows, {fixed[0]!r}, but microbatches have fewer. Make it "
            "with keras.Input(shape), without a batch size."
        )


def _check_channels(passes: Passes, schedule: Schedule) -> None:
    """Raises ConfigurationError if TensorFlow has only one thread for the messages in both directions."""
    from tfring.ring import ops

    control, gradients = passes.control, passes.gradients
    assert isinstance(control, RingCollectives) and isinstance(gradients, RingCollectives)
    if not ops.share_a_token(control.communicator, gradients.communicator):
        return
    if schedule != plan_schedule("gpipe", schedule.num_stages, schedule.num_microbatches):
        raise ConfigurationError(
            f"TensorFlow has {ops.num_threads('inter')} inter-op threads, too few for schedule=\"1f1b\": activations "
            "and gradients travel at the same time, each on its own thread. Set "
            'tf.config.threading.set_inter_op_parallelism_threads(2), or use schedule="gpipe".'
        )


def _check_losses(losses: Any) -> None:
    for loss in tf.nest.flatten(losses):
        if getattr(loss, "reduction", None) == "mean_with_sample_weight":
            raise ConfigurationError(
                f"{type(loss).__name__} has reduction='mean_with_sample_weight', but such a mean of a batch cannot be "
                "computed from those of its microbatches. Use reduction='sum_over_batch_size', or num_microbatches=1."
            )
