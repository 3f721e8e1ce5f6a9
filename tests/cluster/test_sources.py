"""Variables of engines, replayed from recorded samples: their meaning, rejections, precedence where engines nest."""

import contextlib
import json
import re
import shlex
import socket
import sys
import types

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from tfring.cluster import Cluster, allocation, detect, for_hosts, launch_variables
from tfring.cluster.detection import SOURCES, find
from tfring.cluster.unresolved import UnresolvedCluster
from tfring.errors import ConfigurationError

# Recorded: torchrun of torch 2 (source), Open MPI 5.0.11 and 4.1 (without most of what nobody reads), MPICH 5.0.2,
# Intel MPI 2021.19, SLURM 22.05.
TORCHRUN = {
    "RANK": "1",
    "LOCAL_RANK": "1",
    "WORLD_SIZE": "4",
    "LOCAL_WORLD_SIZE": "2",
    "GROUP_RANK": "0",
    "MASTER_ADDR": "node1",
    "MASTER_PORT": "29500",
    "TORCHELASTIC_RUN_ID": "none",
    "TORCHELASTIC_RESTART_COUNT": "0",
    "TORCHELASTIC_USE_AGENT_STORE": "False",
}
OPEN_MPI = {
    "OMPI_COMM_WORLD_RANK": "1",
    "OMPI_COMM_WORLD_SIZE": "2",
    "OMPI_COMM_WORLD_LOCAL_RANK": "1",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "2",
    "OMPI_VERSION": "5.0.11",
    "PMIX_RANK": "1",
    "PMIX_NAMESPACE": "prterun-node1-16356@1",
}
OPEN_MPI_4 = {
    "OMPI_COMM_WORLD_RANK": "1",
    "OMPI_COMM_WORLD_SIZE": "2",
    "OMPI_COMM_WORLD_LOCAL_RANK": "0",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "1",
    "OMPI_MCA_ess_base_jobid": "1531576321",
    "OMPI_MCA_orte_hnp_uri": "1531576320.0;tcp://192.0.2.1,192.0.2.65:33911",
}
MPICH = {
    "PMI_RANK": "1",
    "PMI_SIZE": "2",
    "PMI_FD": "11",
    "PMI_HOSTNAME": "node1",
    "MPI_LOCALRANKID": "1",
    "MPI_LOCALNRANKS": "2",
    "HYDI_CONTROL_FD": "7",
}
INTEL_MPI = {
    "PMI_RANK": "1",
    "PMI_SIZE": "2",
    "PMI_FD": "11",
    "MPI_LOCALRANKID": "1",
    "MPI_LOCALNRANKS": "2",
    "I_MPI_HYDRA_UUID": "f1400000-e9ab-773f-c860-060061353e5c",
    "HYDRA_BSTRAP_LOCALHOST": "node1",
}
SLURM_BATCH = {
    "SLURM_JOB_ID": "17",
    "SLURM_JOB_NODELIST": "node[001-002]",
    "SLURM_LOCALID": "0",
    "SLURM_NODEID": "0",
    "SLURM_NTASKS": "3",
    "SLURM_PROCID": "0",
    "SLURM_TASKS_PER_NODE": "2,1",
}
SLURM = {
    **SLURM_BATCH,
    "SLURM_NODEID": "1",
    "SLURM_PROCID": "2",
    "SLURM_STEP_ID": "0",
    "SLURM_STEP_NODELIST": "node[001-002]",
    "SLURM_STEP_NUM_NODES": "2",
    "SLURM_STEP_NUM_TASKS": "3",
    "SLURM_STEP_TASKS_PER_NODE": "2,1",
}
KUBERNETES = {"JOB_COMPLETION_INDEX": "2", "TFRING_NUM_WORKERS": "4", "KUBERNETES_SERVICE_HOST": "192.0.2.1"}
# Vertex AI, as its users have printed it.
VERTEX = (
    '{"cluster":{"workerpool0":["cmle-training-workerpool0-b644f12a34-0:2222"],"workerpool1":['
    '"cmle-training-workerpool1-b644f12a34-0:2222","cmle-training-workerpool1-b644f12a34-1:2222"]},'
    '"environment":"cloud","task":{"type":"workerpool1","index":1},'
    '"job":"{\\"python_module\\":\\"\\",\\"package_uris\\":[],\\"job_args\\":[]}","open_ports":[3333]}'
)
# Kubeflow's TFJob (kubeflow/training-operator, tensorflow.go): the chief, "environment", names of services.
KUBEFLOW = (
    '{"cluster":{"chief":["train-chief-0.default.svc:2222"],"worker":["train-worker-0.default.svc:2222"]},'
    '"task":{"type":"worker","index":0},"environment":"cloud"}'
)
KUBEFLOW_DYNAMIC = (
    '{"sparseCluster":{"worker":{"1":"train-worker-1.default.svc:2222"},"ps":[]},"task":{"type":"worker","index":1}}'
)


@pytest.mark.parametrize(
    ("environ", "rank", "world_size", "host", "port"),
    [
        (TORCHRUN, 1, 4, "node1", 29500),
        ({**TORCHRUN, "LOCAL_WORLD_SIZE": "4"}, 1, 4, "127.0.0.1", 29500),
        ({**TORCHRUN, "TORCHELASTIC_USE_AGENT_STORE": "True"}, 1, 4, "node1", None),
        ({**TORCHRUN, "MASTER_ADDR": "fd00::1"}, 1, 4, "fd00::1", 29500),
        ({"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "localhost", "MASTER_PORT": "1"}, 0, 2, "localhost", 1),
        ({"RANK": "0", "WORLD_SIZE": "1"}, 0, 1, "127.0.0.1", None),
        (OPEN_MPI, 1, 2, "127.0.0.1", None),
        ({**OPEN_MPI, "OMPI_COMM_WORLD_LOCAL_SIZE": "1"}, 1, 2, "node1", None),
        ({**OPEN_MPI, "OMPI_COMM_WORLD_LOCAL_SIZE": "1", **SLURM_BATCH}, 1, 2, "node001", None),
        (OPEN_MPI_4, 1, 2, "192.0.2.1", None),
        (MPICH, 1, 2, "127.0.0.1", None),
        ({**MPICH, "MPI_LOCALNRANKS": "1", "LSB_HOSTS": "a a b"}, 1, 2, "a", None),
        (INTEL_MPI, 1, 2, "127.0.0.1", None),
        (SLURM, 2, 3, "node001", None),
        ({**SLURM, "SLURM_STEP_NODELIST": "n7", "SLURM_STEP_TASKS_PER_NODE": "3"}, 2, 3, "127.0.0.1", None),
        ({**SLURM, "TFRING_RENDEZVOUS": "gate"}, 2, 3, "gate", None),
        ({**SLURM, "TFRING_RENDEZVOUS": "[fd00::7]:20001"}, 2, 3, "fd00::7", 20001),
        ({**SLURM, "TFRING_PORT": "20002"}, 2, 3, "node001", 20002),
        ({**KUBERNETES, "TFRING_RENDEZVOUS": "train-0.train"}, 2, 4, "train-0.train", 20000),
    ],
)
def test_place_and_where_to_meet(environ, rank, world_size, host, port):
    found = find(environ)
    assert isinstance(found, UnresolvedCluster)
    unresolved = found.overridden(environ)
    assert (unresolved.rank, unresolved.world_size, unresolved.host, unresolved.port) == (rank, world_size, host, port)


def test_ranks_of_a_job_agree_on_its_name_and_others_do_not():
    for environ, rank, job in [
        (TORCHRUN, "RANK", "TORCHELASTIC_RESTART_COUNT"),
        (OPEN_MPI, "OMPI_COMM_WORLD_RANK", "PMIX_NAMESPACE"),
        (OPEN_MPI_4, "OMPI_COMM_WORLD_RANK", "OMPI_MCA_ess_base_jobid"),
        (INTEL_MPI, "PMI_RANK", "I_MPI_HYDRA_UUID"),
        (SLURM, "SLURM_PROCID", "SLURM_STEP_ID"),
    ]:
        assert find(environ).job == find({**environ, rank: "0"}).job != find({**environ, job: "9"}).job


@pytest.mark.parametrize(
    "environ",
    [
        {},
        SLURM_BATCH,
        {"SLURM_JOB_ID": "17", "SLURM_NTASKS": "2"},  # the shell of salloc
        {"RANK": "3"},
        {"WORLD_SIZE": "1", "MASTER_ADDR": "node1"},
        {"CLUSTER_SPEC": ""},
    ],
)
def test_alone(environ):
    assert detect(environ=environ) == Cluster.alone()


def test_a_batch_script_of_several_tasks_is_alone_and_says_so():
    with pytest.warns(UserWarning, match=r"trains alone.*job 17.*2 tasks.*srun python train.py"):
        assert detect(environ={"SLURM_JOB_ID": "17", "SLURM_NTASKS": "2"}) == Cluster.alone()


def test_kubernetes_host_names(monkeypatch):
    monkeypatch.setattr(socket, "getfqdn", lambda: "my-train-2.train.default.svc.cluster.local")
    unresolved = find(KUBERNETES)
    assert (unresolved.rank, unresolved.world_size) == (2, 4)
    assert (unresolved.host, unresolved.port) == ("my-train-0.train.default.svc.cluster.local", 20000)
    for name in ("my-train-2", "my-train-3.train", "other"):
        monkeypatch.setattr(socket, "getfqdn", lambda name=name: name)
        with pytest.raises(ConfigurationError, match="subdomain: train"):
            find(KUBERNETES)


def test_kubernetes_without_a_number_of_workers_is_alone_and_says_so():
    with pytest.warns(UserWarning, match=r"(?s)trains alone.*TFRING_NUM_WORKERS"):
        assert detect(environ={"JOB_COMPLETION_INDEX": "2"}) == Cluster.alone()


def test_vertex():
    cluster = detect(environ={"CLUSTER_SPEC": VERTEX})
    assert (cluster.rank, cluster.world_size, cluster.num_nodes) == (2, 3, 3)
    assert cluster.addresses[0] == "cmle-training-workerpool0-b644f12a34-0:2222"
    servers = VERTEX.replace("workerpool1", "workerpool2")
    with pytest.raises(ConfigurationError, match=r"workerpool0 is the chief.*parameter servers"):
        detect(environ={"CLUSTER_SPEC": servers})
    evaluator = VERTEX.replace('"type":"workerpool1"', '"type":"workerpool3"')
    assert detect(environ={"CLUSTER_SPEC": evaluator}).source == "Vertex AI's CLUSTER_SPEC (evaluator)"


def test_kubeflow():
    cluster = detect(environ={"TF_CONFIG": KUBEFLOW})
    assert (cluster.rank, cluster.world_size) == (1, 2)
    assert "environment" not in cluster.to_tf_config()
    with pytest.raises(ConfigurationError, match="enableDynamicWorker off"):
        detect(environ={"TF_CONFIG": KUBEFLOW_DYNAMIC})


def test_ray_train(monkeypatch):
    context = types.SimpleNamespace(
        get_world_rank=lambda: 1, get_world_size=lambda: 3, get_experiment_name=lambda: "movies"
    )
    monkeypatch.setitem(sys.modules, "ray.train", types.SimpleNamespace(get_context=lambda: context))
    unresolved = find({})
    assert (unresolved.rank, unresolved.world_size, unresolved.source) == (1, 3, "Ray Train")
    # TensorflowTrainer's TF_CONFIG and TorchTrainer's variables come first.
    assert find(TORCHRUN).source == "torchrun-style variables"

    def elsewhere():
        raise RuntimeError("not in a worker")

    monkeypatch.setitem(sys.modules, "ray.train", types.SimpleNamespace(get_context=elsewhere))
    assert find({}) is None


@pytest.mark.parametrize(
    ("environ", "rule"),
    [
        ({**TORCHRUN, "MASTER_PORT": ""}, "are missing: .*without MASTER_PORT.*Write:.*export RANK"),
        ({"RANK": "0", "MASTER_ADDR": "a"}, "without WORLD_SIZE, MASTER_PORT"),
        ({**TORCHRUN, "RANK": "4"}, "RANK=4, WORLD_SIZE=4: RANK must be from 0 to WORLD_SIZE - 1"),
        ({**TORCHRUN, "RANK": "one"}, "'one': RANK must be a whole number"),
        ({**TORCHRUN, "MASTER_PORT": "http"}, "'http' are not rank 0's host and port"),
        ({**TORCHRUN, "MASTER_ADDR": "no de"}, "'no de'.* not rank 0's host"),
        ({"WORLD_SIZE": "2", "MASTER_ADDR": "a", "MASTER_PORT": "1"}, "RANK is missing.*export RANK"),
        ({"OMPI_COMM_WORLD_RANK": "1"}, "no OMPI_COMM_WORLD_SIZE: OMPI_COMM_WORLD_SIZE must be a whole number"),
        ({**OPEN_MPI, "OMPI_COMM_WORLD_RANK": "2"}, "Open MPI gives .*must be from 0.*mpirun"),
        ({**MPICH, "PMI_SIZE": "-1"}, "PMI_SIZE must be a whole number"),
        ({**MPICH, "MPI_LOCALNRANKS": "1"}, "which host rank 0 is.*-genv TFRING_RENDEZVOUS"),
        ({**SLURM, "SLURM_PROCID": "3"}, "SLURM_PROCID must be from 0.*srun"),
        ({**SLURM, "SLURM_STEP_NODELIST": "node[1-2"}, "brackets.*scontrol show hostnames"),
        ({**SLURM, "SLURM_STEP_TASKS_PER_NODE": "2,2"}, "2,2.*SLURM_STEP_NUM_TASKS in all"),
        ({**SLURM, "SLURM_STEP_TASKS_PER_NODE": "2(y3)"}, r"2\(y3\)', not written like \"2\(x3\),1\""),
        ({**SLURM, "TFRING_RENDEZVOUS": "a:b"}, "host of rank 0.*export TFRING_RENDEZVOUS"),
        ({**SLURM, "TFRING_PORT": "0"}, "TFRING_PORT='0' is not a port"),
        ({**KUBERNETES, "JOB_COMPLETION_INDEX": "4"}, "JOB_COMPLETION_INDEX must be.*In the manifest"),
        ({"CLUSTER_SPEC": "{"}, "is not a JSON object.*Write"),
        ({"CLUSTER_SPEC": '{"cluster": {}}'}, "is not a JSON object.*'task'"),
        ({"CLUSTER_SPEC": '{"cluster": {"workerpool0": ["a"]}, "task": {"type": "workerpool0", "index": 0}}'}, "port"),
    ],
)
def test_wrong_variables(environ, rule):
    with pytest.raises(ConfigurationError, match=f"(?s){rule}"):
        detect(environ=environ)


@pytest.mark.parametrize("setting", ["TFRING_PORT_RANGE=9-8", "TFRING_PORT_RANGE=a", "TFRING_PORT_RANGE=1-70000"])
def test_wrong_port_range(setting, monkeypatch):
    from tfring import config

    name, value = setting.split("=")
    with pytest.raises(ConfigurationError, match="two ports such as"):
        config.read(name, {name: value})


LAUNCHED = launch_variables.write(Cluster.from_hosts(["a:1", "a:2"], rank=0))
TF_CONFIG = {"TF_CONFIG": Cluster.from_hosts(["a:1", "b:1"], rank=1).to_tf_config()}


@pytest.mark.parametrize(
    ("inner", "outer"),
    [
        (LAUNCHED, SLURM),
        (LAUNCHED, KUBERNETES | {"TFRING_RENDEZVOUS": "a"}),
        (TORCHRUN, SLURM),
        (OPEN_MPI, SLURM),
        (MPICH, SLURM),
        (TF_CONFIG, KUBERNETES | {"TFRING_RENDEZVOUS": "a"}),
        (OPEN_MPI, {"CLUSTER_SPEC": VERTEX}),
    ],
)
def test_what_was_started_last_wins(inner, outer):
    assert find({**outer, **inner}).source == find(inner).source != find(outer).source


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (LAUNCHED, TF_CONFIG),
        (TF_CONFIG, TORCHRUN),
        (TF_CONFIG, SLURM),
        (TF_CONFIG, {"CLUSTER_SPEC": VERTEX}),
        (TORCHRUN, OPEN_MPI),
        ({"TF_CONFIG": for_hosts(["a"])[0]}, SLURM),  # three lone trainings
    ],
)
def test_sources_that_contradict(one, other):
    with pytest.raises(ConfigurationError, match="contradict") as error:
        detect(environ={**one, **other})
    assert find(one).source in str(error.value) and find(other).source in str(error.value)
    assert str(error.value).count("\n  unset ") == 2


def test_sources_that_agree():
    agreeing = {**TF_CONFIG, "RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "a", "MASTER_PORT": "1"}
    assert detect(environ=agreeing).source == "TF_CONFIG"
    assert detect(environ={**TF_CONFIG, **SLURM, "SLURM_PROCID": "0", **ONE_TASK}).source == "TF_CONFIG"


ONE_TASK = {"SLURM_STEP_NUM_TASKS": "1", "SLURM_STEP_TASKS_PER_NODE": "1", "SLURM_STEP_NODELIST": "node001"}


def test_an_evaluator_is_in_no_ring_whatever_the_engine_says():
    evaluator = json.dumps({"cluster": {"worker": ["a:1", "b:1"]}, "task": {"type": "evaluator", "index": 0}})
    assert detect(environ={"TF_CONFIG": evaluator, **SLURM}).world_size == 1


# ------------------------------------------------------------------------------------------------------- host lists


@pytest.mark.parametrize(
    ("text", "hosts"),
    [
        ("node[001-003,7]", ["node001", "node002", "node003", "node7"]),
        ("n1", ["n1"]),
        ("n1,n2.example", ["n1", "n2.example"]),
        ("a[9-11]b[1,3]", ["a9b1", "a9b3", "a10b1", "a10b3", "a11b1", "a11b3"]),
        ("x[1-2],y,z[05]", ["x1", "x2", "y", "z05"]),
    ],
)
def test_host_list(text, hosts):
    assert allocation.expand(text) == hosts


@pytest.mark.parametrize(
    "text", ["", "a[", "a]", "a[1", "a[[1]]", "a[2-1]", "a[x]", "a,,b", "a[1-]", "a b", "a[0-999999999]"]
)
def test_wrong_host_list(text):
    with pytest.raises(ConfigurationError, match="is written like") as error:
        allocation.expand(text)
    assert repr(text) in str(error.value)


HOSTS = st.from_regex(r"[a-z][a-z0-9.]{0,8}", fullmatch=True)


@settings(max_examples=200, deadline=None)
@given(st.lists(HOSTS, min_size=1, max_size=5), st.integers(0, 9999), st.integers(0, 20), st.integers(1, 5))
def test_host_list_round_trip(plain, first, more, width):
    ranged = f"node[{first:0{width}}-{first + more:0{width}}]"
    expected = [f"node{number:0{width}}" for number in range(first, first + more + 1)]
    assert allocation.expand(",".join([*plain, ranged])) == [*plain, *expected]


@settings(max_examples=300, deadline=None)
@given(st.text(alphabet="an01[]-,.x() ", max_size=20))
def test_any_text_is_a_host_list_or_refused(text):
    for parser in (allocation.expand, allocation.per_node):
        with contextlib.suppress(ConfigurationError):
            assert parser(text)


NAMES = sorted({name for source in SOURCES for name in source.variables} - {"TFRING_LISTEN_FD"})
VALUES = st.sampled_from(["", "0", "1", "2", "3", "a:1,b:1", "node[1-2]", "2,1", "x", "٣", KUBEFLOW, VERTEX]) | st.text(
    alphabet=st.characters(exclude_characters="\0", exclude_categories=["Cs"]), max_size=8
)


@settings(max_examples=400, deadline=None)
@given(st.dictionaries(st.sampled_from(NAMES), VALUES, max_size=6))
@example({"SLURM_STEP_ID": "0", "SLURM_PROCID": "0"})
@example({"RANK": "0", "WORLD_SIZE": "9" * 5000, "MASTER_ADDR": "a", "MASTER_PORT": "1"})
def test_any_environment_is_a_place_or_refused(environ):
    try:
        found = find(environ)
    except ConfigurationError as error:
        assert str(error)
    else:
        assert found is None or 0 <= found.rank < found.world_size


# -------------------------------------------------------------------------------------------------------- TF_CONFIG


def test_tf_config_for_hosts():
    texts = for_hosts(["node1", "node2:9000", "fd00::1", "[fd00::2]", "[fd00::3]:7"], workers_per_host=2, port=100)
    clusters = [Cluster.from_tf_config(text) for text in texts]
    assert [cluster.rank for cluster in clusters] == list(range(10))
    assert [cluster.local_rank for cluster in clusters] == [0, 1] * 5
    assert clusters[3].addresses == (
        *("node1:100", "node1:101", "node2:9000", "node2:9001", "[fd00::1]:100", "[fd00::1]:101"),
        *("[fd00::2]:100", "[fd00::2]:101", "[fd00::3]:7", "[fd00::3]:8"),
    )


@pytest.mark.parametrize("hosts", [[], "node1", ["a", "A"], ["a:b"], ["a b"], ["[fd00::1"]])
def test_tf_config_for_wrong_hosts(hosts):
    with pytest.raises(ConfigurationError):
        for_hosts(hosts)


def test_commands_in_errors_are_ones_to_paste():
    with pytest.raises(ConfigurationError) as error:
        detect(environ={"CLUSTER_SPEC": "x"})
    command = re.findall(r"^  (CLUSTER_SPEC=.*)$", str(error.value), re.MULTILINE)[0]
    name, _, value = shlex.split(command)[0].partition("=")
    assert detect(environ={name: value}).world_size == 1
