"""Lists of hosts: what they mean, what is refused; what an agent says, however it is cut."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tfring.errors import ConfigurationError
from tfring.launch import frames
from tfring.launch.hosts import Host, of_allocation, parse_hosts, read_hostfile
from tfring.transport import wire


def test_hosts():
    assert parse_hosts("host1:4, me@host2.example ,[fd00::3]:2,192.0.2.1:1") == [
        Host("host1", 4),
        Host("me@host2.example", 1),
        Host("fd00::3", 2),
        Host("192.0.2.1", 1),
    ]


@pytest.mark.parametrize(
    ("text", "what"),
    [
        ("", "'' in '' is not a host"),
        ("a,,b", "'' in 'a,,b' is not a host"),
        ("a:0", "Leave the host out"),
        ("a:-1", "'a:-1' in"),
        ("a:x", "'a:x' in"),
        ("a:1:2", "'a:1:2' in"),
        ("-oProxyCommand=x", "'-oProxyCommand=x' in"),
        ("me@-x", "not a host name"),
        ("-x@a", "'-x@a' in"),
        ("a b", "not a host name"),
        ("[fd00::zz]:1", "Not an IPv6 address"),
        ("a:2,b,a:3", 'Write it once: "a:5"'),
    ],
)
def test_wrong_hosts(text, what):
    with pytest.raises(ConfigurationError) as error:
        parse_hosts(text)
    assert what in str(error.value)


@settings(max_examples=300, deadline=None)
@given(st.text(alphabet="ab-@:[],.12 /$;'", max_size=20))
def test_any_text_is_hosts_or_refused_and_never_an_option_of_ssh(text):
    try:
        hosts = parse_hosts(text)
    except ConfigurationError:
        return
    assert hosts
    for host in hosts:
        assert not host.name.startswith("-") and not set(host.name) & set(" /$;'") and host.num_workers > 0


def test_hostfile(tmp_path):
    file = tmp_path / "hosts"
    file.write_text("# two racks\nhost1:4\nhost2 slots=2 max_slots=8  # as Open MPI has it\n\nhost3\n")
    assert read_hostfile(file) == [Host("host1", 4), Host("host2", 2), Host("host3", 1)]
    for text, what in [("", "names no host"), ("a slots=x\n", "a:x"), ("a\na\n", 'once: "a:2"')]:
        file.write_text(text)
        with pytest.raises(ConfigurationError, match=what):
            read_hostfile(file)
    with pytest.raises(ConfigurationError, match="cannot be read"):
        read_hostfile(tmp_path / "none")


def test_allocation():
    environ = {"SLURM_JOB_NODELIST": "node[1-3]", "SLURM_TASKS_PER_NODE": "2(x2),1", "SLURM_JOB_ID": "7"}
    assert of_allocation(environ) == [Host("node1", 2), Host("node2", 2), Host("node3", 1)]
    assert of_allocation(environ, 2) == [Host("node1", 2)]
    with pytest.raises(ConfigurationError, match=r"(?s)-n 6 asks for more .* job 7 of SLURM has tasks, 5.*sbatch -n 6"):
        of_allocation(environ, 6)


@settings(max_examples=100, deadline=None)
@given(
    st.lists(st.tuples(st.integers(0, 99), st.binary(max_size=30)), max_size=6),
    st.integers(1, 9),
    st.sampled_from([b"", b"Welcome to host1!\n", b"TFRING TFRIN"]),
)
def test_messages_of_an_agent_however_they_are_cut(messages, size, noise):
    stream = noise + frames.greeting("agent")
    stream += b"".join(wire.pack("output", data, rank=rank, stream="out") for rank, data in messages)
    agent = frames.Reader("agent", frames.TO_LAUNCHER)
    received = []
    for start in range(0, len(stream), size):
        received += agent.feed(stream[start : start + size])
    assert [(message.fields["rank"], message.data) for message in received] == messages


@pytest.mark.parametrize(
    "data",
    [
        wire.pack("started"),
        wire.pack("ended", rank=1, code=0, host="x"),
        wire.pack("ended", rank=-1, code=0),
        wire.pack("ended", rank=True, code=0),
        wire.pack("output", rank=0, stream="log"),
        wire.MAGIC + b"\xff" * 8,
    ],
)
def test_what_is_no_message_of_an_agent(data):
    agent = frames.Reader("agent", frames.TO_LAUNCHER)
    assert list(agent.feed(frames.greeting("agent"))) == []
    with pytest.raises(wire.WireError):
        list(agent.feed(data))
