"""The functions of Keras and TensorFlow that are replaced: each once, with its parameters and the reason.

Whatever a subclass can express is in subclasses (bases.py, trainer.py, ring_optimizer.py, epochs.py, state.py,
strategy/replica_context.py). These functions belong to classes and modules that Keras chooses itself. A replacement
acts on objects of a RingStrategy and calls the original for all others. The first RingStrategy warns if Keras has
changed one. In addition, a descriptor replaces the attribute `_losses` of Keras' Layer (losses.py).
"""

from __future__ import annotations

from typing import NamedTuple


class Function(NamedTuple):
    """A function that is replaced.

    Attributes:
      parameters: Names of its parameters, in order.
      reason: Effect of the replacement on objects of a RingStrategy.
    """

    parameters: str
    reason: str


_LAYER = "keras.src.layers.layer.Layer"
_FILES = "keras.src.saving.saving_lib"
_HDF5 = "keras.src.legacy.saving.legacy_h5_format"

REPLACED = {
    # models
    f"{_LAYER}.add_weight": Function(
        "self, *args, shape, initializer, dtype, trainable, autocast, regularizer, constraint, aggregation, "
        "overwrite_with_gradient, name",
        "rejects a new weight of a layer whose weights a stage of a pipeline holds",
    ),
    "keras.src.layers.core.embedding.Embedding.call": Function(
        "self, inputs", "pulls the rows of a table that parameter servers hold"
    ),
    "tensorflow.python.framework.ops.reset_default_graph": Function(
        "", "keeps an open scope through `keras.backend.clear_session()`"
    ),
    # variables
    "keras.src.random.seed_generator.global_seed_generator": Function(
        "", "gives replicas, which run in threads, the generator of the thread of `fit`"
    ),
    "keras.src.random.seed_generator.SeedGenerator.next": Function(
        "self, ordered", "draws different numbers on each replica"
    ),
    # optimizers
    "tensorflow.python.training.optimizer.Optimizer.apply_gradients": Function(
        "self, grads_and_vars, global_step, name, skip_gradients_aggregation",
        "weights the gradients of a TensorFlow 1 optimizer",
    ),
    "keras.src.backend.tensorflow.numpy.add": Function("x1, x2", "adds empty shards, whose dimensions Keras drops"),
    # losses
    "keras.src.losses.loss.reduce_weighted_values": Function(
        "values, sample_weight, mask, reduction, dtype",
        "divides a sum by the replica's share, in pipelines and where workers train by themselves; outside of a step a "
        "loss in the scope is that of its rows",
    ),
    "tensorflow.python.ops.nn_impl_distribute.compute_average_loss": Function(
        "per_example_loss, sample_weight, global_batch_size", "the same, of a sum over a given number of rows"
    ),
    # metrics
    "keras.src.metrics.reduction_metrics.Mean.update_state": Function(
        "self, values, sample_weight", "weights a number by its replica's rows, in pipelines and with `Delayed`"
    ),
    # steps
    "tensorflow.python.eager.polymorphic_function.polymorphic_function.Function.__call__": Function(
        "self, *args, **kwds", "traces a user's function into the step that calls it"
    ),
    # data
    "keras.src.backend.tensorflow.trainer.TFEpochIterator.__new__": Function(
        "*args, **kwargs", "makes a RingEpochIterator for models of a RingStrategy"
    ),
    "tensorflow.python.data.util.random_seed.get_seed": Function(
        "seed", "gives unseeded transformations of `tf.data` the seed that ranks share"
    ),
    "tensorflow.python.ops.gen_dataset_ops.shuffle_dataset_v3": Function(
        "input_dataset, buffer_size, seed, seed2, seed_generator, output_types, output_shapes, "
        "reshuffle_each_iteration, metadata, name",
        "makes a generator of seeds that the shuffle of this worker's rows finds again",
    ),
    "tensorflow.python.data.ops.dataset_ops.DatasetV2.cache": Function(
        "self, filename, name", "gives each worker its own file"
    ),
    # printing
    "keras.src.utils.io_utils.print_msg": Function("message, line_break", "prints on rank 0"),
    "keras.src.models.model.Model.summary": Function(
        "self, line_length, positions, print_fn, expand_nested, show_trainable, layer_range",
        "prints on rank 0, and counts full weights",
    ),
    "keras.src.utils.summary_utils.count_params": Function("weights", "counts full weights"),
    # files
    "keras.src.utils.file_utils.urlretrieve": Function(
        "url, filename, reporthook, data", "downloads a complete file once per host for all workers that request it"
    ),
    "keras.src.utils.file_utils.extract_archive": Function(
        "file_path, path, archive_format", "puts only complete files in place if several workers extract them"
    ),
    f"{_FILES}.save_model": Function("model, filepath, weights_format, zipped", "writes to another name, then renames"),
    f"{_FILES}.save_weights_only": Function("model, filepath, max_shard_size, objects_to_skip", "the same"),
    f"{_HDF5}.save_model_to_hdf5": Function(
        "model, filepath, overwrite, include_optimizer", "the same, with full slots; rejects sharded weights"
    ),
    "keras.src.models.model.Model.export": Function(
        "self, filepath, format, verbose, input_signature, **kwargs", "the same, for a folder"
    ),
    "tensorflow.python.checkpoint.checkpoint.TrackableSaver.save": Function(
        "self, file_prefix, checkpoint_number, session, options", "writes to another name, then renames"
    ),
    "keras.src.utils.naming.to_snake_case": Function("name", "names weights in files by the class of Keras' layer"),
    f"{_FILES}.is_memory_sufficient": Function("model", "puts large full values into a file instead of memory"),
    f"{_FILES}.H5IOStore.__setitem__": Function("self, key, value", "writes a sharded weight by blocks"),
    f"{_LAYER}.get_weights": Function("self", "returns full weights"),
    f"{_LAYER}.set_weights": Function("self, weights", "accepts full weights"),
}
