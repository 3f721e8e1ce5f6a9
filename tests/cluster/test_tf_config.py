"""TF_CONFIG: what it means, what is refused, and that the corrected text in an error is one that works."""

import json
import re
import shlex

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from tfring.cluster import Cluster
from tfring.errors import ConfigurationError


def config(task=None, **cluster):
    return {"cluster": cluster, **({"task": {"type": task[0], "index": task[1]}} if task else {})}


@pytest.mark.parametrize(
    ("tf_config", "rank", "addresses"),
    [
        (config(("worker", 0), worker=["a:1"]), 0, ("a:1",)),
        (config(("worker", 1), worker=["a:1", "b:1"]), 1, ("a:1", "b:1")),
        (config(("worker", "1"), worker=["a:1", "b:1"]), 1, ("a:1", "b:1")),
        (config(("chief", 0), worker=["b:1"], chief=["a:1"]), 0, ("a:1", "b:1")),
        (config(("worker", 0), worker=["b:1"], chief=["a:1"]), 1, ("a:1", "b:1")),
        (config(("worker", 0), worker=["b:1"], evaluator=["e:1"]), 0, ("b:1",)),
        (config(("worker", 0), worker=["b:1"], ps=[]), 0, ("b:1",)),
        (config(("evaluator", 0), worker=["b:1", "c:1"], evaluator=["e:1"]), 0, ()),
        (config(("evaluator", 0), worker=["b:1", "c:1"]), 0, ()),
        ({**config(("worker", 0), worker=["b:1"]), "environment": "cloud", "rpc_layer": "grpc"}, 0, ("b:1",)),
        ({}, 0, ()),
        ({"cluster": {}, "task": {}}, 0, ()),
    ],
)
def test_rank_and_addresses(tf_config, rank, addresses):
    cluster = Cluster.from_tf_config(json.dumps(tf_config))
    assert (cluster.rank, cluster.addresses) == (rank, addresses)
    assert cluster.world_size == max(1, len(addresses))
    assert Cluster.from_tf_config(tf_config) == cluster


@pytest.mark.parametrize("text", ["", "  ", "{}"])
def test_empty_is_alone(text):
    assert Cluster.from_tf_config(text) == Cluster.alone()


def test_ranks_of_one_host_share_it():
    cluster = Cluster.from_tf_config(
        config(("worker", 3), worker=["a:1", "b:1", "localhost:1", "127.0.0.1:2", "[::1]:3", "A:2"])
    )
    assert (cluster.local_rank, cluster.local_world_size, cluster.num_nodes) == (1, 3, 3)


WRONG = [
    ("{'cluster': {}}", "not JSON.*double quotes"),
    ('{"cluster": ', "not JSON"),
    ("[" * 100_000, "not JSON"),
    ("null", "not a JSON object"),
    ('["a:1"]', "not a JSON object"),
    ({"task": {"type": "worker", "index": 0}}, 'no "cluster"'),
    (config(worker=["a:1", "b:1"]), 'no "task"'),
    ({**config(worker=["a:1"]), "task": "worker"}, '"task" that is not an object'),
    ({"cluster": ["a:1"], "task": {"type": "worker", "index": 0}}, '"cluster" that is not an object'),
    (config(("worker", 0), worker="a:1,b:1"), "not a list of addresses"),
    (config(("worker", 0), worker={"0": "a:1"}), "not a list of addresses"),
    (config(("worker", 0), worker=3), "not a list of addresses"),
    (
        config(("worker", 2), worker=["a:1", "b:1"]),
        "task index 2; 'worker' lists 2, so .* from 0 to 1",
    ),
    (config(("worker", -1), worker=["a:1"]), "task index -1"),
    (config(("worker", True), worker=["a:1", "b:1"]), "task index True"),
    (config(("worker", None), worker=["a:1"]), "task index None"),
    (config(("worker", 0.0), worker=["a:1"]), "task index 0.0"),
    (config(("chief", 0), worker=["a:1"]), "task type 'chief', which is not one of its jobs: worker"),
    (config(("worker", 0), worker=["a:1", "a:1"]), "'a:1' to both worker 0 and worker 1"),
    (config(("worker", 0), chief=["a:1"], worker=["A:01"]), "'A:01' to both chief 0 and worker 0"),
    (config(("worker", 0), worker=["a:65535", "a:65535"]), "'a:65535' to both"),
    (
        config(("worker", 3), chief=["a:1"], worker=["a:1", "a:2", "b:1", "a:1", "b:1"]),
        "'a:1' to both chief 0 and worker 0",
    ),
    (config(("worker", 0), worker=["a:1"], ps=["p:1"]), "parameter servers.*Start the workers only"),
    (config(("ps", 0), worker=["a:1"], ps=["p:1"]), "parameter servers"),
    (config(("ps", 0), worker=["a:1"]), "parameter server"),
    (config(("ps", 0), ps=["p:1"]), "parameter servers"),
    (config(("master", 0), master=["a:1"], worker=["b:1"]), "a job 'master'"),
    (config(("trainer", 1), trainer=["a:1", "b:1"]), "a job 'trainer'"),
    (config(("chief", 1), chief=["a:1", "b:1"], worker=["c:1"]), "more than one chief"),
    (config(("evaluator", 0), evaluator=["e:1"]), "lists no worker"),
]


def pasted(error):
    """The TF_CONFIG a shell would set from the corrected text."""
    (line,) = re.findall(r"^  TF_CONFIG=(.*)$", str(error), re.MULTILINE)
    (text,) = shlex.split(line)
    return text


@pytest.mark.parametrize(("tf_config", "rule"), WRONG)
def test_wrong_is_refused_with_a_text_that_works(tf_config, rule):
    text = tf_config if isinstance(tf_config, str) else json.dumps(tf_config)
    with pytest.raises(ConfigurationError, match=rule) as error:
        Cluster.from_tf_config(text)
    assert f":\n  {text}\nWrite:" in str(error.value)
    Cluster.from_tf_config(pasted(error.value))


def test_one_of_several_chiefs_stays_the_same_worker():
    tasks = {"chief": ["a:1", "b:1"], "worker": ["c:1", "d:1"]}
    for task, address in ((("chief", 1), "b:1"), (("worker", 0), "c:1")):
        with pytest.raises(ConfigurationError) as error:
            Cluster.from_tf_config(config(task, **tasks))
        corrected = Cluster.from_tf_config(pasted(error.value))
        assert corrected.addresses[corrected.rank] == address


def test_wrong_address_says_which():
    with pytest.raises(ConfigurationError, match=r'"worker" 1 a wrong address.*write "b:12345"'):
        Cluster.from_tf_config(config(("worker", 0), worker=["a:1", "b"]))


def test_round_trip():
    cluster = Cluster.from_hosts(["a:1", "[2001:db8::1]:2", "10.0.0.1:3"], rank=2)
    again = Cluster.from_tf_config(cluster.to_tf_config())
    assert (again.rank, again.addresses, again.num_nodes) == (2, cluster.addresses, 3)
    assert Cluster.from_tf_config(Cluster.alone().to_tf_config()) == Cluster.alone()


ANY_JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
    max_leaves=12,
)
ADDRESSES: st.SearchStrategy = st.sampled_from(
    ["a:1", "b:2", "B:2", "[::1]:5", "[::1", "a:0", "a:70000", "", "http://a:1", 7]
)
TASKS = st.fixed_dictionaries(
    {},
    optional={
        "type": st.sampled_from(["worker", "chief", "ps", "evaluator", "master"]) | ANY_JSON,
        "index": st.integers(-2, 4) | ANY_JSON,
    },
)
JOBS = st.dictionaries(
    st.sampled_from(["worker", "chief", "ps", "evaluator", "master", "odd"]),
    st.lists(ADDRESSES, max_size=4) | ANY_JSON,
    max_size=4,
)
NEARLY_RIGHT = st.fixed_dictionaries({}, optional={"cluster": JOBS | ANY_JSON, "task": TASKS | ANY_JSON})


@settings(max_examples=500, deadline=None)
@given((NEARLY_RIGHT | ANY_JSON).map(json.dumps) | st.text(max_size=40))
@example(json.dumps({"task": {"": None}, "cluster": {"chief": ["a:1"] * 4, "odd": ["a:1"] * 3}}))
def test_any_text_is_read_or_refused(text):
    """Nothing but ConfigurationError, and following its corrections ends in a text that works."""
    for _ in range(10):
        try:
            cluster = Cluster.from_tf_config(text)
        except ConfigurationError as error:
            if "a wrong address" in str(error):
                return
            corrected = pasted(error)
            assert corrected != text
            text = corrected
        else:
            assert 0 <= cluster.rank < cluster.world_size
            return
    raise AssertionError(f"Ten corrections were not enough: {text}")
