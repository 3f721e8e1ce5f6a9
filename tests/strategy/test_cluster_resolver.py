"""`tfring.ClusterResolver` under a strategy of TensorFlow's own; a cluster that changes after the strategy is made."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import textwrap

import pytest

CONFIG = json.dumps({"cluster": {"worker": ["127.0.0.1:1", "127.0.0.1:2"]}, "task": {"type": "worker", "index": 0}})


def run(script, tmp_path, n=None, code=0):
    path = tmp_path / "script.py"
    path.write_text(textwrap.dedent(script))
    launcher = [] if n is None else ["-m", "tfring.launch", "-n", str(n)]
    environ = {name: text for name, text in os.environ.items() if name != "TF_CONFIG"}
    environ |= {"TF_CPP_MIN_LOG_LEVEL": "2", "CUDA_VISIBLE_DEVICES": "-1"}
    done = subprocess.run(
        [sys.executable, *launcher, str(path)],
        env=environ,
        capture_output=True,
        text=True,
        timeout=120,
        stdin=subprocess.DEVNULL,
    )
    assert done.returncode == code, f"{done.stdout}\n{done.stderr}"
    return done


def test_it_serves_a_strategy_of_tensorflow(tmp_path):
    """At the addresses of `tfring launch`, whose sockets it gives up to TensorFlow's servers."""
    done = run(
        """
        import tensorflow as tf, tfring
        resolver = tfring.ClusterResolver()
        strategy = tf.distribute.MultiWorkerMirroredStrategy(cluster_resolver=resolver)
        assert strategy.num_replicas_in_sync == 2, strategy.num_replicas_in_sync
        assert type(strategy) is tf.distribute.MultiWorkerMirroredStrategy

        @tf.function
        def total():
            def of_replica():
                mine = tf.constant(resolver.task_id + 1.0)
                return tf.distribute.get_replica_context().all_reduce("sum", mine)
            return strategy.run(of_replica)

        print("total", float(total()), resolver.master().startswith("grpc://127.0.0.1:"))
        """,
        tmp_path,
        n=2,
    )
    assert sorted(done.stdout.splitlines()) == ["[1] total 3.0 True", "total 3.0 True"]


def test_the_ring_takes_its_own_and_gives_it(tmp_path):
    done = run(
        """
        import tensorflow as tf, tfring
        given = tfring.ClusterResolver()
        strategy = tfring.RingStrategy(cluster_resolver=given)
        assert strategy.cluster == given.cluster and strategy.cluster_resolver is given
        assert strategy.num_replicas_in_sync == 2
        total = strategy.run(lambda: tf.distribute.get_replica_context().all_reduce("sum", tf.constant(1.0)))
        assert float(total) == 2.0

        theirs = tfring.RingStrategy(given.cluster).cluster_resolver
        assert isinstance(theirs, tfring.ClusterResolver)
        spec = theirs.cluster_spec().as_dict()
        assert spec == {"worker": list(given.cluster.addresses)}
        assert (theirs.task_type, theirs.task_id) == ("worker", given.cluster.rank)
        assert theirs.num_accelerators() == {"GPU": 0}
        assert (theirs.environment, theirs.rpc_layer) == ("", "grpc")
        other = 1 - theirs.task_id
        assert theirs.master("worker", other) == "grpc://" + spec["worker"][other]
        assert theirs.master(rpc_layer="") == spec["worker"][theirs.task_id]
        """,
        tmp_path,
        n=2,
    )
    assert done.stdout == ""


def test_alone():
    import tensorflow as tf

    import tfring

    resolver = tfring.ClusterResolver(tfring.Cluster.alone())
    assert resolver.cluster_spec().as_dict() == {} and resolver.master() == ""
    assert (resolver.task_type, resolver.task_id) == (None, None)
    assert isinstance(resolver, tf.distribute.cluster_resolver.ClusterResolver)
    assert tfring.RingStrategy(cluster_resolver=resolver).cluster.world_size == 1
    twice = r"cluster=Cluster\(rank=0.* and cluster_resolver=<.*Resolver.* exclude each other"
    with pytest.raises(tfring.errors.ConfigurationError, match=twice):
        tfring.RingStrategy(resolver.cluster, cluster_resolver=resolver)


CASES = [  # how the strategy is made, what the environment says afterwards, what is warned of
    ("", "CONFIG", "TF_CONFIG says rank 0 of 2"),
    ("", "'broken'", "not JSON"),
    ("", "None", ""),
    ("", "'{}'", ""),
    ("tfring.Cluster.alone()", "CONFIG", ""),
    ("cluster_resolver=tfring.ClusterResolver()", "CONFIG", ""),
]
WARNED = """
    import json, os, warnings
    import numpy as np
    import keras, tfring
    CONFIG = {config!r}

    def said(strategy, tf_config):
        with strategy.scope():
            model = keras.Sequential([keras.Input([1]), keras.layers.Dense(1)])
            model.compile("sgd", "mse", run_eagerly=True)
        if tf_config:
            os.environ["TF_CONFIG"] = tf_config
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            for number in range(2):
                os.environ["SLURM_PROCID"] = str(number)  # one that says nothing by itself
                model.fit(np.ones([4, 1]), np.ones([4, 1]), verbose=0)
        os.environ.pop("TF_CONFIG", None)
        strategy.close()
        return [str(each.message) for each in caught if "RingStrategy() was made" in str(each.message)]

    print(json.dumps([{calls}]))
    """


def test_another_cluster_after_the_strategy(tmp_path):
    calls = ", ".join(f"said(tfring.RingStrategy({made}), {tf_config})" for made, tf_config, _ in CASES)
    script = WARNED.format(config=CONFIG, calls=calls)
    for (made, tf_config, words), said in zip(CASES, json.loads(run(script, tmp_path).stdout), strict=True):
        if not words:
            assert said == [], (made, tf_config)
            continue
        [warning] = said
        for part in ("RingStrategy() was made", "no source describes a cluster", words):
            assert part in warning, (made, tf_config)
