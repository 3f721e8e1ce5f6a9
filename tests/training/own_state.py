"""Programs that keep state, metrics, functions and optimizers of their own: for `test_own_state.py`."""

from common import skewed_rows


def net(width=6):
    import keras

    inputs = keras.Input((4,))
    hidden = keras.layers.Dense(width, activation="tanh", name="hidden")(inputs)
    return inputs, keras.layers.Dense(1, name="out")(hidden)


def accumulating(every=3):
    """Gradient accumulation by hand, as many posts have it."""
    import keras
    import tensorflow as tf

    class Accumulating(keras.Model):
        def __init__(self, *args, **kwargs):
            super().__init__(*args, **kwargs)
            self.every = tf.constant(every)
            self.taken = tf.Variable(0, trainable=False)
            self.sums = [tf.Variable(tf.zeros_like(v.value), trainable=False) for v in self.trainable_variables]

        def train_step(self, data):
            self.taken.assign_add(1)
            x, y = data
            with tf.GradientTape() as tape:
                loss = self.compute_loss(x, y, self(x, training=True))
            gradients = tape.gradient(loss, self.trainable_variables)
            for total, gradient in zip(self.sums, gradients, strict=True):
                total.assign_add(gradient)
            tf.cond(tf.equal(self.taken, self.every), self.update, lambda: None)
            return {"loss": loss}

        def update(self):
            means = [total / float(every) for total in self.sums]
            self.optimizer.apply_gradients(zip(means, self.trainable_variables, strict=True))
            self.taken.assign(0)
            for total in self.sums:
                total.assign(tf.zeros_like(total))

    model = Accumulating(*net())
    model.compile(keras.optimizers.SGD(0.05), "mse")
    return model


def of_tensorflow():
    """A layer whose variables are TensorFlow's: a moving mean, a count of rows, a maximum."""
    import keras
    import tensorflow as tf

    class Normalize(keras.layers.Layer):
        def __init__(self):
            super().__init__()
            self.mean = tf.Variable(tf.zeros([4]), trainable=False)
            self.largest = tf.Variable(0.0, trainable=False)
            self.rows = tf.Variable(0, trainable=False)
            self.steps = tf.Variable(0, trainable=False)

        def call(self, x, training=False):
            mean, largest = tf.identity(self.mean), tf.identity(self.largest)
            if training:
                self.mean.assign_sub(0.1 * (self.mean - tf.reduce_mean(x, 0)))
                self.largest.assign(tf.maximum(self.largest, tf.reduce_max(x)))
                self.rows.assign_add(tf.shape(x)[0])
                self.steps.assign_add(1)
            return (x - mean) / (1.0 + largest)

    class Showing(keras.Sequential):
        def test_step(self, data):
            layer = self.layers[0]
            state = {name: getattr(layer, name) for name in ("mean", "largest", "rows", "steps")}
            return {**super().test_step(data), **{k: tf.reduce_sum(tf.cast(v, tf.float32)) for k, v in state.items()}}

    model = Showing([keras.layers.Input((4,)), Normalize(), keras.layers.Dense(1)])
    model.compile(keras.optimizers.SGD(0.05), "mse")
    return model


def metrics_that_assign():
    """Moving averages, last values, maxima by `where`."""
    import keras
    from keras import ops

    class Moving(keras.metrics.Metric):
        def __init__(self):
            super().__init__(name="moving")
            self.average = self.add_weight(shape=(), initializer="zeros", name="average")
            self.last = self.add_weight(shape=(), initializer="zeros", name="last")
            self.largest = self.add_weight(shape=(), initializer="zeros", name="largest")

        def update_state(self, y_true, y_pred, sample_weight=None):
            error = ops.mean(ops.square(y_true - y_pred))
            self.average.assign(0.9 * self.average + 0.1 * error)
            self.last.assign(error)
            most = ops.max(y_true)
            self.largest.assign(ops.where(most > self.largest, most, self.largest))

        def result(self):
            return {"average": self.average, "last": self.last, "largest": self.largest}

        def reset_state(self):
            self.average.assign(0.0)

    model = keras.Model(*net())
    model.compile(keras.optimizers.SGD(0.05), "mse", metrics=[Moving()])
    return model


def means_and_counts():
    """Metrics that add up a mean, or a sum, of each batch and count batches; Keras' Sum of a number a batch."""
    import keras
    from keras import ops

    class OfBatches(keras.metrics.Metric):
        def __init__(self, kind, count_dtype="float32"):
            super().__init__(name=f"{kind} by {count_dtype}")
            self.kind = kind
            self.total = self.add_weight(shape=(), initializer="zeros", name="total")
            self.count = self.add_weight(shape=(), initializer="zeros", name="count", dtype=count_dtype)

        def update_state(self, y_true, y_pred, sample_weight=None):
            error = ops.square(y_true - y_pred)
            value = {"mean": ops.mean, "sum": ops.sum, "shifted": lambda e: 0.5 * ops.mean(e) - 1.0}[self.kind](error)
            if self.kind == "shifted":
                self.total.assign(self.total - value)
                self.count.assign(self.count + 2.0)
            else:
                self.total.assign_add(value)
                self.count.assign_add(1)

        def result(self):
            return self.total / ops.cast(self.count, "float32")

    class Counting(keras.Model):
        def __init__(self, *args, **kwargs):
            super().__init__(*args, **kwargs)
            self.batches = keras.metrics.Sum(name="batches")

        @property
        def metrics(self):
            return [*super().metrics, self.batches]

        def test_step(self, data):
            self.batches.update_state(1.0)
            return {**super().test_step(data), "batches": self.batches.result()}

    model = Counting(*net())
    metrics = [OfBatches("mean"), OfBatches("mean", "int32"), OfBatches("sum"), OfBatches("shifted")]
    model.compile(keras.optimizers.SGD(0.05), "mse", metrics=metrics)
    return model


def with_signature():
    """A function with an `input_signature` that writes, one that XLA compiles, a `tf.Variable` that is trained."""
    import keras
    import tensorflow as tf

    class Scaled(keras.layers.Layer):
        def build(self, shape):
            self.mean = self.add_weight(shape=(4,), initializer="zeros", trainable=False)
            self.scale = tf.Variable(1.0)

        @tf.function(input_signature=[tf.TensorSpec([None, 4], tf.float32)])
        def move(self, x):
            self.mean.assign(0.9 * self.mean + 0.1 * tf.reduce_mean(x, 0))

        @tf.function(jit_compile=True)
        def squash(self, x):
            return tf.tanh(x) * 2.0

        def call(self, x, training=False):
            mean = tf.identity(tf.convert_to_tensor(self.mean))
            if training:
                self.move(x)
            return self.squash(x - mean) * self.scale

    class Trained(keras.Sequential):
        def train_step(self, data):
            x, y = data
            scale = self.layers[0].scale
            with tf.GradientTape() as tape:
                loss = self.compute_loss(x, y, self(x, training=True))
            gradients, of_scale = tape.gradient(loss, [self.trainable_variables, scale])
            scale.assign_sub(0.01 * of_scale)
            self.optimizer.apply(gradients, self.trainable_variables)
            return {"loss": loss, "scale": tf.identity(scale)}

    model = Trained([keras.layers.Input((4,)), Scaled(), keras.layers.Dense(1)])
    model.compile(keras.optimizers.SGD(0.01), "mse")
    return model


def as_advised():
    """What warnings advise, from the rows of all: codes, a balance loss and a root."""
    import keras
    from keras import ops

    import tfring

    class Codes(keras.layers.Layer):
        def build(self, shape):
            self.sums = self.add_weight(shape=(3, 4), initializer="zeros", trainable=False, name="sums")

        def call(self, x, training=False):
            rows = tfring.gather_for_loss(x)
            sums = ops.convert_to_tensor(self.sums)
            if training:
                codes = ops.one_hot(ops.cast(ops.abs(rows[:, 0]), "int32") % 3, 3)
                self.sums.assign(0.9 * self.sums + 0.1 * ops.matmul(ops.transpose(codes), rows))
            shares, means = ops.softmax(rows), ops.mean(ops.softmax(2 * rows), 0)
            self.add_loss(4.0 * ops.sum(ops.mean(shares, 0) * means))
            return x + 0.01 * ops.sum(sums, 0)

    class Root(keras.metrics.Mean):
        def update_state(self, y_true, y_pred, sample_weight=None):
            y_true, y_pred = tfring.gather_for_loss([y_true, y_pred])
            super().update_state(ops.sqrt(ops.mean(ops.square(y_true - y_pred))))

    inputs = keras.Input((4,))
    hidden = Codes()(keras.layers.Dense(4, activation="tanh")(inputs))
    model = keras.Model(inputs, keras.layers.Dense(1)(hidden))
    model.compile(keras.optimizers.SGD(0.05), "mse", metrics=[Root(name="root")])
    return model


def scalar_metrics(**options):
    import keras
    from keras import ops

    def r2(y_true, y_pred):
        rest = ops.sum(ops.square(y_true - y_pred))
        return 1 - rest / (ops.sum(ops.square(y_true - ops.mean(y_true))) + 1e-7)

    def rmse(y_true, y_pred):
        return ops.sqrt(ops.mean(ops.square(y_true - y_pred)))

    def share(y_true, y_pred):
        return ops.mean(ops.cast(y_pred > 0, "float32"))

    def dice(y_true, y_pred):
        return keras.losses.dice(ops.cast(y_true > 0, "float32"), ops.sigmoid(y_pred))

    model = keras.Model(*net())
    model.compile(
        keras.optimizers.SGD(0.05), "mse", metrics=[r2, rmse, share, dice, "mae"], weighted_metrics=[r2], **options
    )
    return model


def weighted_means():
    """Means of a number a batch, by the same weight."""
    import keras
    import tensorflow as tf

    class Tracking(keras.Model):
        def __init__(self, *args, **kwargs):
            super().__init__(*args, **kwargs)
            self.by_one = keras.metrics.Mean(name="by_one")
            self.by_rows = keras.metrics.Mean(name="by_rows")

        @property
        def metrics(self):
            return [self.by_one, self.by_rows]

        def test_step(self, data):
            x, y = data
            loss = tf.reduce_mean(tf.square(y - self(x)))
            self.by_one.update_state(loss, sample_weight=1.0)
            self.by_rows.update_state(loss, sample_weight=tf.shape(x)[0])
            return {m.name: m.result() for m in self.metrics}

    model = Tracking(*net())
    model.compile(keras.optimizers.SGD(0.05), "mse")
    return model


def decorated(everything=True):
    """`tf.function` within a step: on a layer, and on a metric, a helper with a loss that is a sum, a `train_step`."""
    import keras
    import tensorflow as tf

    class Moving(keras.layers.Layer):
        def build(self, shape):
            self.mean = self.add_weight(shape=(4,), initializer="zeros", trainable=False)
            self.rows = self.add_weight(shape=(), dtype="int32", initializer="zeros", trainable=False)

        @tf.function
        def call(self, x, training=False):
            mean = tf.convert_to_tensor(self.mean)
            if training:
                self.mean.assign(0.9 * self.mean + 0.1 * tf.reduce_mean(x, 0))
                self.rows.assign_add(tf.shape(x)[0])
            total = 0.0
            for i in tf.range(2):  # AutoGraph's
                total += tf.cast(i, tf.float32)
            return x - mean * total

    class Absolute(keras.metrics.Metric):
        def __init__(self):
            super().__init__(name="absolute")
            self.total = self.add_weight(shape=(), initializer="zeros")
            self.count = self.add_weight(shape=(), initializer="zeros")

        @tf.function
        def update_state(self, y_true, y_pred, sample_weight=None):
            self.total.assign_add(tf.reduce_sum(tf.abs(y_true - y_pred)))
            self.count.assign_add(tf.cast(tf.shape(y_true)[0], tf.float32))

        def result(self):
            return self.total / self.count

    sums = keras.losses.MeanSquaredError(reduction="sum")

    @tf.function
    def helper(y, p):
        return sums(y, p)

    class Decorated(keras.Sequential):
        @tf.function
        def train_step(self, data):
            x, y = data
            with tf.GradientTape() as tape:
                pred = self(x, training=True)
                loss = helper(y, pred) / 20.0 + 0.1 * helper(y[:, 0], pred[:, 0]) / 20.0
            gradients = tape.gradient(loss, self.trainable_variables)
            self.optimizer.apply(gradients, self.trainable_variables)
            return {"loss": loss, **self.compute_metrics(x, y, pred)}

    model = (Decorated if everything else keras.Sequential)([keras.layers.Input((4,)), Moving(), keras.layers.Dense(1)])
    model.compile(keras.optimizers.SGD(0.01), "mse", metrics=[Absolute()])
    return model


def metrics_of_functions():
    """Metrics whose methods are each a `tf.function`, in a `compile` of a model whose steps are Keras' own."""
    import keras
    import tensorflow as tf

    class Ratio(keras.metrics.Metric):
        def __init__(self):
            super().__init__(name="ratio")
            self.total = self.add_weight(shape=(), initializer="zeros")
            self.count = self.add_weight(shape=(), initializer="zeros")

        @tf.function
        def update_state(self, y_true, y_pred, sample_weight=None):
            self.total.assign_add(tf.reduce_sum(tf.abs(y_true - y_pred)))
            self.count.assign_add(tf.reduce_sum(tf.abs(y_true)))

        @tf.function
        def result(self):
            return self.total / self.count

    model = keras.Sequential([keras.layers.Input((4,)), keras.layers.Dense(1)])
    model.compile(keras.optimizers.SGD(0.01), "mse", metrics=[Ratio()])
    return model


def compiled_again():
    """A function of the layer's keeps its graph over a second `compile` and `fit`."""
    import keras

    model = decorated(everything=False)
    model.compile(keras.optimizers.SGD(0.01), "mse", metrics=["mae"])
    fit = model.fit

    def twice(*args, **kwargs):
        fit(*args, **kwargs)
        model.compile(keras.optimizers.SGD(0.01), "mse", metrics=["mae"])
        return fit(*args, **kwargs)

    model.fit = twice
    return model


def with_memory(write, rows=lambda x: x, dtype="float32"):
    """A model with a queue or a memory of rows, by `write(memory, rows)` in its step."""
    import keras
    import tensorflow as tf

    class Remembering(keras.Model):
        def __init__(self, *args, **kwargs):
            super().__init__(*args, **kwargs)
            self.memory = self.add_weight(shape=(100, 4), initializer="zeros", trainable=False, name="memory")
            self.other = tf.Variable(tf.zeros([100, 4]), trainable=False, name="other")

        def train_step(self, data):
            logs = super().train_step(data)
            write(self, rows(data[0]))
            return {**logs, "memory": tf.reduce_sum(tf.abs(self.memory[::7] + self.other[::7]))}

    def make():
        model = Remembering(*net())
        model.compile(keras.optimizers.SGD(0.05), "mse")
        return model

    return make


def queue(model, rows):
    import tensorflow as tf

    model.memory.assign(tf.concat([rows, model.memory], 0)[:100])


def scatter(model, rows):
    import tensorflow as tf

    ids = tf.range(tf.shape(rows)[0])[:, None]
    model.memory.assign(tf.tensor_scatter_nd_update(model.memory, ids, rows))


def scatter_update(model, rows):
    import tensorflow as tf

    model.other.scatter_update(tf.IndexedSlices(rows, tf.range(tf.shape(rows)[0])))


def gathered(x):
    import tfring

    return tfring.gather_for_loss(x)


def counting():
    """Rows counted by a float and by an integer, which logs show; a count of steps that a branch sets back."""
    import keras
    import tensorflow as tf

    class Counting(keras.Model):
        def __init__(self, *args, **kwargs):
            super().__init__(*args, **kwargs)
            self.seen = self.add_weight(shape=(), initializer="zeros", trainable=False, name="seen")
            self.rows = self.add_weight(shape=(), dtype="int32", initializer="zeros", trainable=False, name="rows")
            self.steps = self.add_weight(shape=(), dtype="int32", initializer="zeros", trainable=False, name="steps")
            self.positive = tf.Variable(0.0, trainable=False)

        def train_step(self, data):
            x, y = data
            logs = super().train_step(data)
            before = tf.convert_to_tensor(self.rows)
            self.seen.assign_add(tf.cast(tf.shape(x)[0], "float32"))
            self.rows.assign_add(tf.shape(x)[0])
            self.steps.assign_add(1)
            self.positive.assign_add(tf.reduce_sum(tf.cast(y > 0, tf.float32)))
            tf.cond(tf.equal(self.steps, 3), lambda: self.steps.assign(0), lambda: tf.constant(0))
            return {
                **logs, "seen": self.seen, "rows": tf.convert_to_tensor(self.rows), "before": before,
                "steps": self.steps, "positive": tf.identity(self.positive),
            }  # fmt: skip

    model = Counting(*net())
    model.compile(keras.optimizers.SGD(0.05), "mse")
    return model


def welford():
    """A metric whose state is no sum: what a replica adds depends on what it had."""
    import keras
    from keras import ops

    class Welford(keras.metrics.Metric):
        def __init__(self):
            super().__init__(name="welford")
            self.count = self.add_weight(shape=(), initializer="zeros", name="count")
            self.mean = self.add_weight(shape=(), initializer="zeros", name="mean")

        def update_state(self, y_true, y_pred, sample_weight=None):
            self.count.assign_add(ops.cast(ops.size(y_true), "float32"))
            self.mean.assign_add(ops.sum(y_true - self.mean) / self.count)

        def result(self):
            return 1.0 * self.mean

    model = keras.Model(*net())
    model.compile(keras.optimizers.SGD(0.05), "mse", metrics=[Welford()])
    return model


def penalized(kind):
    """Penalties and attacks by gradients of losses by inputs."""
    import keras
    import tensorflow as tf

    class Penalized(keras.Model):
        def target(self, x, y):
            pred = self(x, training=True)
            return {
                "mean": lambda: tf.reduce_mean(tf.square(y - pred)),
                "compiled": lambda: 0.5 * self.compute_loss(x, y, pred) + 0.1 * keras.ops.mean(pred),
                "sum": lambda: tf.reduce_sum(pred) / 20.0,
            }[kind]()

        def train_step(self, data):
            x, y = data
            with tf.GradientTape() as tape:
                with tf.GradientTape() as inner:
                    inner.watch(x)
                    target = self.target(x, y)
                gradient = inner.gradient(target, x)
                attacked = self(x + 5.0 * gradient, training=True)
                loss = tf.reduce_mean(tf.square(y - attacked)) + 0.1 * tf.reduce_mean(
                    tf.reduce_sum((20.0 * gradient) ** 2, -1)
                )
            gradients = tape.gradient(loss, self.trainable_variables)
            self.optimizer.apply_gradients(zip(gradients, self.trainable_variables, strict=True))
            return {"loss": loss}

    model = Penalized(*net())
    model.compile(keras.optimizers.SGD(0.001), "mse")
    return model


def own_optimizers(name):
    import keras
    from keras import ops

    class Applying(keras.optimizers.SGD):
        """Centralizes and normalizes gradients."""

        def apply(self, grads, trainable_variables=None):
            grads = [g / (ops.sqrt(ops.sum(ops.square(g))) + 1e-3) for g in grads]
            super().apply(grads, trainable_variables)

    class ApplyingGradients(keras.optimizers.Adam):
        """Signs of gradients."""

        def apply_gradients(self, grads_and_vars):
            return super().apply_gradients([(ops.sign(g) * ops.sqrt(ops.abs(g)), v) for g, v in grads_and_vars])

    class Both(Applying):
        def apply_gradients(self, grads_and_vars):
            return super().apply_gradients([(ops.clip(g, -0.2, 0.2), v) for g, v in grads_and_vars])

    optimizers = {
        "apply": lambda: Applying(0.05),
        "apply_gradients": lambda: ApplyingGradients(0.01),
        "both": lambda: Both(0.05),
        "accumulated": lambda: Applying(0.05, gradient_accumulation_steps=2),
    }

    class ByPairs(keras.Model):
        def train_step(self, data):
            import tensorflow as tf

            x, y = data
            with tf.GradientTape() as tape:
                loss = self.compute_loss(x, y, self(x, training=True))
            gradients = tape.gradient(loss, self.trainable_variables)
            self.optimizer.apply_gradients(zip(gradients, self.trainable_variables, strict=True))
            return {"loss": loss}

    model = (ByPairs if name in ("apply_gradients", "both") else keras.Model)(*net())
    model.compile(optimizers[name](), "mse")
    return model


def programs():
    """Returns by name the maker of a model, and whether its logs are compared."""
    x, y = skewed_rows(83)  # batches of 20: the last one has 3 rows
    rows = x, y
    return {
        "accumulated by hand": (accumulating, rows),
        "tf.Variable": (of_tensorflow, rows),
        "metrics that assign": (metrics_that_assign, rows),
        "scalar metrics": (scalar_metrics, rows),
        "scalar metrics, eager": (lambda: scalar_metrics(run_eagerly=True), (x[:23], y[:23])),
        "means and counts": (means_and_counts, rows),
        "signature": (with_signature, rows),
        "weighted means": (weighted_means, rows),
        "decorated": (decorated, rows),
        "metrics of functions": (metrics_of_functions, rows),
        "compiled again": (compiled_again, rows),
        "as advised": (as_advised, rows),
        "queue": (with_memory(queue, gathered), rows),
        "scatter_update": (with_memory(scatter_update, gathered), rows),
        "counting": (counting, rows),
        **{name: (make, rows) for name, make in combining().items()},
        **{
            f"by inputs, {kind}": (lambda kind=kind: penalized(kind), rows)
            for kind in ("mean", "compiled", "sum")
        },
        **{
            f"optimizer, {name}": (lambda name=name: own_optimizers(name), rows)
            for name in ("apply", "apply_gradients", "both", "accumulated")
        },
    }


def combining():
    """Returns by name the makers of models whose state and losses combine rows in other ways than sums and means."""
    import keras
    import tensorflow as tf
    from keras import ops

    class Root(keras.metrics.Mean):
        def update_state(self, y_true, y_pred, sample_weight=None):
            super().update_state(ops.sqrt(ops.mean(ops.square(y_true - y_pred))))

    class OwnRoot(keras.metrics.Metric):
        def __init__(self):
            super().__init__(name="own_root")
            self.total = self.add_weight(shape=(), initializer="zeros", name="total")

        def update_state(self, y_true, y_pred, sample_weight=None):
            self.total.assign_add(ops.sqrt(ops.mean(ops.square(y_true - y_pred))))

        def result(self):
            return 1.0 * self.total

    class Codes(keras.layers.Layer):
        """As in a VQ-VAE."""

        def build(self, shape):
            self.sums = self.add_weight(shape=(3, 4), initializer="zeros", trainable=False, name="sums")

        def call(self, x, training=False):
            if training:
                codes = tf.one_hot(tf.cast(tf.abs(x[:, 0]), tf.int32) % 3, 3)
                self.sums.assign(0.9 * self.sums + 0.1 * tf.matmul(codes, x, transpose_a=True))
            return x

    class Moments(keras.layers.Layer):
        """As BayesFlow's Standardize: Welford's sums of squares, merged with a batch's."""

        def build(self, shape):
            self.mean = self.add_weight(shape=(4,), initializer="zeros", trainable=False, name="mean")
            self.squares = self.add_weight(shape=(4,), initializer="zeros", trainable=False, name="squares")
            self.count = self.add_weight(shape=(), initializer="zeros", trainable=False, name="count")

        def call(self, x, training=False):
            if training:
                count, mean, squares = ops.cast(ops.shape(x)[0], "float32"), ops.mean(x, 0), ops.var(x, 0)
                total, apart = self.count + count, mean - self.mean
                self.squares.assign(self.squares + count * squares + apart**2 * (self.count * count / total))
                self.mean.assign(0.9 * self.mean + 0.1 * mean)
                self.count.assign(total)
            return x

    class Adds(keras.layers.Layer):
        def __init__(self, kind):
            super().__init__(name=kind)

        def call(self, x):
            shares, means = ops.softmax(x), ops.mean(ops.softmax(2 * x), 0)
            balance = 4.0 * ops.sum(ops.mean(shares, 0) * means)  # of a Switch layer
            self.add_loss({"balance": balance, "summed": ops.sum(shares)}[self.name])
            return x

    def make(layer=None, metrics=()):
        def made():
            inputs = keras.Input((4,))
            model = keras.Model(inputs, keras.layers.Dense(1)(layer()(inputs) if layer else inputs))
            model.compile(keras.optimizers.SGD(0.05), "mse", metrics=[metric() for metric in metrics])
            return model

        return made

    class Last(keras.layers.Layer):
        def build(self, shape):
            self.last = self.add_weight((), "zeros", "int32", trainable=False, name="last")

        def call(self, x):
            self.last.assign(ops.cast(ops.max(x) * 1000, "int32"))
            return x

    writes = (queue, scatter, scatter_update)
    return {
        "root": make(metrics=[lambda: Root(name="root")]),
        "own root": make(metrics=[OwnRoot]),
        "codes": make(Codes),
        "moments": make(Moments),
        "balance": make(lambda: Adds("balance")),
        "summed": make(lambda: Adds("summed")),
        "last": make(Last),
        "welford": welford,
        **{f"rows, {write.__name__}": with_memory(write) for write in writes},
    }
