"""Random functions of rows and their gradients, edited: does every replica have what one process has?

TF_NUM_INTEROP_THREADS=32 python tests/partition/fuzz.py 0 2000        # seeds; for hours: more of them
"""

from __future__ import annotations

import collections
import itertools
import sys

import numpy as np
import replicas
import tensorflow as tf
from checks import check

SIZES = ((5, 3), (4, 1, 3), (2, 2, 2, 2))
SIZES_OF_THREADS = ((5, 3), (4, 1, 3), (6, 0, 2))
_UNARY = (tf.tanh, tf.abs, tf.square, tf.sqrt, tf.math.rsqrt, tf.sign, tf.nn.relu, tf.exp, tf.math.reciprocal)


def program(seed, length):
    """Returns a function of `x [n, 3, 4]`, `y [n, 4]`, ids `[n]`, a mask and a state, which returns all it computes."""

    def function(x, y, ids, mask, *state):
        random = np.random.default_rng(seed)
        weights = tf.constant(np.random.default_rng(1).normal(size=(4, 4)))
        count = tf.cast(tf.shape(x)[0], tf.float64)
        is_kept = tf.cast(mask, tf.bool)
        pool = [x, y, weights, tf.matmul(y, weights), tf.reduce_mean(x, 0), count, tf.reduce_sum(y, 0), *state * 3]
        if seed % 4 == 3:
            pool += [tf.cast(tf.size(tf.where(is_kept)), tf.float64), tf.reduce_mean(tf.boolean_mask(y, is_kept), 0)]

        def pick(fits=lambda tensor: True):
            found = [tensor for tensor in pool if fits(tensor)]
            return found[random.integers(len(found))] if found else None

        def like(tensor):
            def fits(other):
                sizes = zip(other.shape.as_list()[::-1], tensor.shape.as_list()[::-1], strict=False)
                return all(a == b or 1 in (a, b) for a, b in sizes)

            return pick(fits)

        def step():
            tensor = pick()
            rank = tensor.shape.rank
            axis = int(random.integers(rank)) if rank else None
            match int(random.integers(26)):
                case 0 | 1 | 2:
                    return _UNARY[random.integers(len(_UNARY))](tensor)
                case 3:
                    return tensor + like(tensor)
                case 4:
                    return tensor - like(tensor) * 0.5
                case 5:
                    return tensor * like(tensor)
                case 6:
                    return tensor / (like(tensor) + 0.0)
                case 7:
                    return tf.math.divide_no_nan(tensor, 1.5 + tf.abs(like(tensor)))
                case 8 | 9 if rank:
                    return tf.reduce_sum(tensor, axis, keepdims=bool(random.integers(2)))
                case 10 | 11 if rank:
                    return tf.reduce_mean(tensor, axis, keepdims=bool(random.integers(2)))
                case 12 if rank:
                    return tf.reduce_max(tensor, axis)
                case 13 if rank:
                    return tf.transpose(tensor, random.permutation(rank))
                case 14 if rank >= 2:
                    return tf.reshape(tensor, tf.concat([[-1], tf.shape(tensor)[2:]], 0))
                case 15 if rank:
                    return tf.nn.softmax(tensor, axis)
                case 16 if rank:
                    return tf.concat([tensor, tf.tanh(tensor)], axis)
                case 17 if rank < 4:
                    return tf.stack([tensor, tensor * 2.0], int(random.integers(rank + 1)))
                case 18 if rank and tensor.shape[0] is None:
                    return tf.boolean_mask(tensor, is_kept) if random.integers(2) else tensor[:2]
                case 19 if rank == 2:
                    other = pick(
                        lambda t: t.shape.rank == 2 and t.shape[0] is not None and t.shape[0] == tensor.shape[1]
                    )
                    return None if other is None else tf.matmul(tensor, other)
                case 20 if rank == 2:
                    return (
                        tf.matmul(tensor, tensor, transpose_a=True)
                        if random.integers(2)
                        else tf.einsum("ab,cb->ac", tensor, tensor)
                    )
                case 21:
                    return tf.math.unsorted_segment_sum(y, ids, 3)
                case 22:
                    return tf.gather(weights, ids)
                case 23:
                    return tf.where(tensor > 0.0, tensor, tf.zeros_like(tensor))
                case 24:
                    return tf.maximum(tensor, like(tensor))
                case 25:
                    return tf.while_loop(lambda i, a: i < 3, lambda i, a: (i + 1, a * 0.5 + tensor), (0, tensor))[1]
            return None

        made = 0
        while made < length:
            result = step()
            if result is not None:
                pool.append(result)
                made += 1
        return pool[3:]

    def with_gradients(x, y, ids, mask, *state):
        with tf.GradientTape(persistent=True) as tape:
            tape.watch([x, y])
            results = function(x, y, ids, mask, *state)
            loss = results[-1]
            total = tf.reduce_mean(loss) if seed % 3 else tf.reduce_sum(loss)
        return [*results, total, tape.gradient(total, x), tape.gradient(total, y)]

    def present(*rows):
        return [result for result in with_gradients(*rows) if result is not None]

    return present


def run(seed, length=8, in_threads=False, has_state=False):
    """Compares one program, on replicas of one process or of several, with one replica.

    Args:
      seed: of the program.
      length: how many operations are chosen.
      in_threads: whether replicas are threads that exchange what they have, one perhaps without rows.
      has_state: whether these hold parts of a variable, one without rows, too.

    Returns:
      The Analysis; None where TensorFlow refuses to run the program.
    """
    random = np.random.default_rng(1000 + seed)
    sizes = (SIZES_OF_THREADS if in_threads else SIZES)[seed % len(SIZES)]
    rows = sum(sizes)
    x, y = random.normal(size=(rows, 3, 4)), random.normal(size=(rows, 4))
    ids, mask = random.integers(0, 3, rows).astype(np.int32), random.integers(0, 2, rows).astype(np.int32)
    if seed % 2:
        mask[-sizes[-1] :] = 0  # one keeps none
    function = program(seed, length)
    held = random.normal(size=(len(sizes), 4)) if has_state else None
    try:
        state = [] if held is None else [np.sum(held, 0)]
        replicas.whole(lambda *rows: function(*rows, *map(tf.constant, state)), x, y, ids, mask)
    except (tf.errors.InvalidArgumentError, ValueError):
        return None
    if in_threads:
        return replicas.run(function, x, y, ids, mask, sizes=sizes, tolerance=1e-8, held=held)
    return check(function, x, y, ids, mask, sizes=sizes, tolerance=1e-8)


_KINDS = ((False, False), (True, False), (True, True))  # in threads, with a state


def main(first, last):
    said = collections.Counter()
    for seed, (in_threads, has_state) in itertools.product(range(first, last), _KINDS):
        try:
            ran = run(seed, in_threads=in_threads, has_state=has_state)
        except Exception as error:  # of any kind: the seed is what has to be seen
            lines = [line for line in str(error).splitlines() if line.strip() and "File" not in line]
            print(seed, in_threads, has_state, type(error).__name__, lines[:1], lines[-8:-1], flush=True)
            said["wrong"] += 1
            continue
        said["no program" if ran is None else "equal"] += 1
    print(dict(said))
    sys.exit(said["wrong"] > 0)


if __name__ == "__main__":
    main(*map(int, sys.argv[1:3]))
