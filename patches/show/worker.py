"""One worker of the reproduction, or the single process it is compared with; runs on the old TensorFlow.

Reads one JSON object from standard input (see ``show.py``), trains, prints one line of JSON a trained case, and
stays until its standard input is closed, because a worker that leaves early takes its server from the others.
Without TF_CONFIG it is the reference: one process, no strategy, the batches of all workers end to end.
"""

import json
import os
import sys
import tempfile

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
os.environ["CUDA_VISIBLE_DEVICES"] = ""
import numpy as np

NUM_WORKERS = 2
NUM_IDS, DIM = 30, 8
BATCH, STEPS, LAST_BATCH = 1024, 12, 100


def num_ids(case, step, rank):
    """Returns the number of different ids (1 to 29; 0 never occurs) in the worker's batch."""
    if case == "equal":
        return 10 + step % 4
    if case == "different":
        return 10 + (step + rank) % 4
    if case == "no_rows":
        return 0 if rank == 1 and step in (2, 7) else 10
    assert case == "last_batch"
    return NUM_IDS - 1


def batch(case, step, rank):
    """ids [batch] with -1 for "none", weights [batch, DIM], targets [batch]."""
    size = LAST_BATCH if case == "last_batch" and step >= STEPS - 2 else BATCH
    draw = np.random.RandomState(1000 * step + rank)
    pool = 1 + draw.permutation(NUM_IDS - 1)[: num_ids(case, step, rank)]
    weights = draw.normal(size=[size, DIM]).astype(np.float32)
    targets = draw.normal(size=[size]).astype(np.float32)
    if not len(pool):
        return np.full([size], -1, np.int64), weights, np.zeros_like(targets)
    return draw.permutation(np.resize(pool, size)).astype(np.int64), weights, targets


def batches(case, rank):
    """The worker's batches; without a rank those of all workers, joined step by step."""
    ranks = range(NUM_WORKERS) if rank is None else [rank]
    return [[np.concatenate(part) for part in zip(*(batch(case, step, r) for r in ranks))] for step in range(STEPS)]


def initial_table():
    return np.random.RandomState(7).normal(size=[NUM_IDS, DIM]).astype(np.float32)


def predict(table, bias, ids, weights, unique):
    """The dot product of each example's row (plus the bias, the dense variable) and weights; 0 without an id."""
    present = tf.reshape(tf.where(ids >= 0), [-1])
    real_ids = tf.gather(ids, present)
    if unique:  # as embedding_column does: the gradient has one row a different id
        different, position = tf.unique(real_ids)
        rows = tf.gather(tf.gather(table, different), position)
    else:  # as keras.layers.Embedding does: one row an example
        rows = tf.gather(table, real_ids)
    dots = tf.reduce_sum((rows + bias) * tf.gather(weights, present), axis=1)
    return tf.scatter_nd(tf.expand_dims(present, 1), dots, tf.cast(tf.shape(ids), tf.int64))


def loss_of(variables, data, case):
    """The mean over the local batch."""
    table, bias = variables
    ids, weights, targets = data
    return tf.reduce_mean(tf.square(predict(table, bias, ids, weights, case != "last_batch") - targets))


V1 = {
    "SGD": lambda t: t.GradientDescentOptimizer(0.1),
    "Momentum": lambda t: t.MomentumOptimizer(0.1, 0.9),
    "Adagrad": lambda t: t.AdagradOptimizer(0.1),
    "Adam": lambda t: t.AdamOptimizer(0.01),
    "RMSProp+momentum": lambda t: t.RMSPropOptimizer(0.01, momentum=0.9),
}  # FtrlOptimizer makes its slots in a way no strategy of these versions supports, so FTRL comes from V2
V2 = {
    "SGD": lambda k, **name: k.SGD(0.1, **name),
    "Momentum": lambda k, **name: k.SGD(0.1, momentum=0.9, **name),
    "Adagrad": lambda k, **name: k.Adagrad(0.1, **name),
    "Adam": lambda k, **name: k.Adam(0.01, **name),
    "RMSProp+momentum": lambda k, **name: k.RMSprop(0.01, momentum=0.9, epsilon=1e-3, **name),
    "FTRL+l1": lambda k, **name: k.Ftrl(0.1, l1_regularization_strength=0.01, **name),
    "LazyAdam": lambda k, **name: lazy_adam_v2(**name),
}


def lazy_adam_v2(**name):
    """Adam whose moments move only in the rows of the gradient, for tf.keras; contrib holds it for TensorFlow 1."""

    class LazyAdam(tf.keras.optimizers.Adam):
        def _resource_apply_sparse(self, grad, var, indices, **unused):
            step = tf.cast(self.iterations + 1, tf.float32)
            m, v = self.get_slot(var, "m"), self.get_slot(var, "v")
            new_m = 0.9 * tf.gather(tf.convert_to_tensor(m), indices) + 0.1 * grad
            new_v = 0.999 * tf.gather(tf.convert_to_tensor(v), indices) + 0.001 * grad * grad
            rate = 0.01 * tf.sqrt(1 - 0.999**step) / (1 - 0.9**step)
            delta = rate * new_m / (tf.sqrt(new_v) + 1e-7)
            return tf.group(
                tf.compat.v1.scatter_update(m, indices, new_m),
                tf.compat.v1.scatter_update(v, indices, new_v),
                tf.compat.v1.scatter_sub(var, indices, delta),
            )

    return LazyAdam(0.01, **name)


def v1_optimizer(name):
    if name == "LazyAdam":
        from tensorflow.contrib.opt import LazyAdamOptimizer

        return LazyAdamOptimizer(0.01)
    return V1[name](tf.compat.v1.train)


def minimize(name, loss, variables, num_replicas, in_estimator=False):
    """The update of one table in a graph, by the optimizer a script of that version would use.

    The gradients of the replicas are summed, so their mean losses are divided by the number of replicas; inside an
    Estimator the optimizers of TensorFlow 1 do that themselves.
    """
    if name in V1 or (name == "LazyAdam" and is_v1()):
        return v1_optimizer(name).minimize(loss / (1 if in_estimator else num_replicas), var_list=list(variables))
    optimizer = v2_optimizer(name)
    gradients = tf.gradients(loss / num_replicas, list(variables))
    return optimizer.apply_gradients(list(zip(gradients, variables)))


def v2_optimizer(name, scope="once"):
    """Its variables get names of their own: the session of a worker outlives the models trained in it."""
    return V2[name](tf.keras.optimizers, name="%s_%s_optimizer" % (scope, slug(name)))


def is_v1():
    return tf.__version__.startswith("1.")


def replicas(strategy):
    return strategy.num_replicas_in_sync if strategy else 1


def slug(name):
    return name.lower().replace("+", "_")


# --- loop: a session in TensorFlow 1, a tf.function in 2 ---------------------------------------------------------


def local(strategy, variable):
    return strategy.experimental_local_results(variable)[0] if strategy else variable


def variables_v1(name):
    return [
        tf.compat.v1.get_variable(slug(name), initializer=initial_table(), use_resource=True),
        tf.compat.v1.get_variable(slug(name) + "_bias", initializer=np.zeros([DIM], np.float32), use_resource=True),
    ]


def loop_v1(strategy, config, case, names):
    """One graph holds a table an optimizer; a step moves all of them."""
    with tf.Graph().as_default():
        session_config = tf.compat.v1.ConfigProto()
        if strategy:
            session_config = strategy.update_config_proto(session_config)
        with strategy.scope() if strategy else tf.name_scope("reference"):
            feeds = [
                tf.compat.v1.placeholder(tf.int64, [None]),
                tf.compat.v1.placeholder(tf.float32, [None, DIM]),
                tf.compat.v1.placeholder(tf.float32, [None]),
            ]
            models = [variables_v1(n) for n in names]

            def step():
                return tf.group(
                    *[
                        minimize(name, loss_of(variables, feeds, case), variables, replicas(strategy))
                        for name, variables in zip(names, models)
                    ]
                )

            train = strategy.experimental_run_v2(step) if strategy else step()
            train = tf.group(*strategy.experimental_local_results(train)) if strategy else train
            initialize = tf.compat.v1.global_variables_initializer()
        with tf.compat.v1.Session(config["server"].target if strategy else "", config=session_config) as sess:
            sess.run(initialize)
            for data in batches(case, config["rank"]):
                sess.run(train, dict(zip(feeds, data)))
            tables = [local(strategy, table) for table, _ in models]
            return dict(zip(names, sess.run(tables)))


def loop_v2(strategy, config, case, names):
    with strategy.scope() if strategy else tf.name_scope("reference"):
        models = [
            (tf.Variable(initial_table(), name=slug(n)), tf.Variable(tf.zeros([DIM]), name=slug(n) + "_bias"))
            for n in names
        ]
        optimizers = [v2_optimizer(n) for n in names]

    def step(*data):
        for variables, optimizer in zip(models, optimizers):
            with tf.GradientTape() as tape:
                loss = loss_of(variables, data, case) / replicas(strategy)
            optimizer.apply_gradients(list(zip(tape.gradient(loss, variables), variables)))

    @tf.function(
        input_signature=[
            tf.TensorSpec([None], tf.int64),
            tf.TensorSpec([None, DIM], tf.float32),
            tf.TensorSpec([None], tf.float32),
        ]
    )
    def train(*data):
        if strategy:
            (strategy.run if hasattr(strategy, "run") else strategy.experimental_run_v2)(step, args=data)
        else:
            step(*data)

    for data in batches(case, config["rank"]):
        train(*[tf.constant(d) for d in data])
    return dict((n, local(strategy, table).numpy()) for n, (table, _) in zip(names, models))


# --- Keras -------------------------------------------------------------------------------------------------------


def keras_fit(strategy, config, case, names):
    return dict((name, keras_fit_one(strategy, config, case, name)) for name in names)


def keras_fit_one(strategy, config, case, name):
    class Rows(tf.keras.layers.Layer):
        def build(self, _):
            self.table = self.add_weight(
                "table",
                [NUM_IDS, DIM],
                dtype=tf.float32,
                initializer=tf.compat.v1.constant_initializer(initial_table()),
            )
            self.bias = self.add_weight("bias", [DIM], dtype=tf.float32, initializer="zeros")
            self.built = True

        def call(self, inputs):
            ids, weights = inputs
            return tf.expand_dims(
                predict(self.table, self.bias, tf.reshape(ids, [-1]), weights, case != "last_batch"), 1
            )

    if is_v1():
        tf.keras.backend.clear_session()
    with strategy.scope() if strategy else tf.name_scope("reference"):
        ids = tf.keras.Input([1], dtype=tf.int64)
        weights = tf.keras.Input([DIM])
        model = tf.keras.Model([ids, weights], Rows(name="%s_%s" % (case, slug(name)))([ids, weights]))
        model.compile(v2_optimizer(name, case), "mse")
    data = None
    for size in [BATCH, LAST_BATCH] if case == "last_batch" else [BATCH]:
        pieces = [piece for piece in batches(case, config["rank"]) if len(piece[0]) in (size, size * NUM_WORKERS)]
        ids, weights, targets = [np.concatenate(part) for part in zip(*pieces)]
        pieces = tf.data.Dataset.from_tensor_slices(((ids[:, None], weights), targets[:, None]))
        pieces = pieces.batch(size * NUM_WORKERS)  # the global batch: a worker cuts it into as many as there are
        data = data.concatenate(pieces) if data else pieces
    options = tf.data.Options()
    distribute = options.experimental_distribute
    if hasattr(distribute, "auto_shard_policy"):
        distribute.auto_shard_policy = tf.data.experimental.AutoShardPolicy.OFF
    else:
        distribute.auto_shard = False
    model.fit(data.with_options(options), epochs=1, steps_per_epoch=STEPS, verbose=0)
    return model.get_weights()[0]


# --- Estimator ---------------------------------------------------------------------------------------------------


def estimator(strategy, config, case, names):
    def input_fn():
        def generate():
            for data in batches(case, config["rank"]):
                yield tuple(data)

        data = tf.data.Dataset.from_generator(
            generate, (tf.int64, tf.float32, tf.float32), ([None], [None, DIM], [None])
        )
        return data.map(lambda ids, weights, targets: ((ids, weights), targets))

    def model_fn(features, labels, mode):
        losses, updates = [], []
        for name in names:
            variables = variables_v1(name)
            losses.append(loss_of(variables, features + (labels,), case))
            updates.append(minimize(name, losses[-1], variables, replicas(strategy), in_estimator=True))
        updates.append(tf.compat.v1.assign_add(tf.compat.v1.train.get_or_create_global_step(), 1))
        return tf.estimator.EstimatorSpec(mode, loss=tf.add_n(losses), train_op=tf.group(*updates))

    folder = tempfile.mkdtemp(dir=config["folder"])
    run = tf.estimator.RunConfig(model_dir=folder, train_distribute=strategy, save_summary_steps=10**6)
    model = tf.estimator.Estimator(model_fn, config=run)
    if strategy:
        tf.estimator.train_and_evaluate(
            model, tf.estimator.TrainSpec(input_fn, max_steps=STEPS), tf.estimator.EvalSpec(input_fn, steps=1)
        )
    else:
        model.train(input_fn, max_steps=STEPS)
    if config["rank"]:
        return {}  # the first worker alone keeps the checkpoint
    return dict((n, model.get_variable_value(slug(n))) for n in names)


def fix(config):
    sys.path.insert(0, config["patch_folder"])
    import tfring_sparse_patch

    if config["fix"] == "runtime":
        if "global_batch_size" in config:  # as the published recipe sets it
            from tensorflow.python.distribute import cross_device_utils

            cross_device_utils.global_batch_size = config["global_batch_size"]
            tfring_sparse_patch.apply()
        else:
            tfring_sparse_patch.apply(**config.get("apply", {"batch_size": BATCH}))
        if config.get("undo"):
            tfring_sparse_patch.undo()
    elif config["fix"] == "kernel_alone":
        tfring_sparse_patch.use_gather_kernel(config["kernel"])
    elif config["fix"] == "kernel":
        tfring_sparse_patch.apply(gather_kernel=config["kernel"])


def main():
    config = json.loads(sys.stdin.readline())
    fix(config)
    strategy = None
    if config["rank"] is not None:
        experimental = tf.distribute.experimental
        strategy = experimental.MultiWorkerMirroredStrategy(experimental.CollectiveCommunication.RING)
    mode = config["mode"]
    if mode == "loop" and is_v1() and strategy:
        task = json.loads(os.environ["TF_CONFIG"])
        server = tf.distribute.Server(
            task["cluster"],
            job_name="worker",
            task_index=config["rank"],
            config=strategy.update_config_proto(tf.compat.v1.ConfigProto()),
        )
        config["server"] = server
    train = {"loop": loop_v1 if is_v1() else loop_v2, "keras": keras_fit, "estimator": estimator}[mode]
    for case in config["cases"]:
        tables = train(strategy, config, case, config["optimizers"])
        print(json.dumps({"case": case, "tables": dict((n, np.asarray(t).tolist()) for n, t in tables.items())}))
        sys.stdout.flush()
    sys.stdin.read()
    os._exit(0)  # the servers of these versions do not always stop


if __name__ == "__main__":
    import tensorflow as tf

    main()
