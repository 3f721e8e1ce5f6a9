"""Processes that are no rank of the job are rejected, learn nothing, and do no harm; what hinders a start is named."""

import contextlib
import fcntl
import logging
import os
import pathlib
import resource
import signal
import socket
import stat
import subprocess
import sys
import threading
import time
from types import SimpleNamespace

import numpy as np
import pytest
import ranks

from tfring.cluster import parse_address
from tfring.errors import ConfigurationError, RendezvousError
from tfring.ring import link
from tfring.ring.communicator import Communicator
from tfring.transport import dial, handshake, mailbox, secret, sockets, wire
from tfring.transport import listener as listening
from tfring.transport.address import Address
from tfring.transport.listener import Listener

SECRET = "a secret of these tests, and no other's"
KEY = SECRET.encode()
ELSEWHERE = "192.0.2.77:20000"  # of a network for examples; nobody is there


def eventually(condition, seconds=20.0):
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


@pytest.fixture
def door():
    """Makes listeners of rank 0 of 2, served over TCP by a secret or because rank 1 is elsewhere."""
    opened = []

    def make(given_secret=SECRET, several_hosts=False):
        listener = socket.create_server(("127.0.0.1", 0))
        addresses = (f"127.0.0.1:{listener.getsockname()[1]}", ELSEWHERE if several_hosts else "127.0.0.1:1")
        cluster = SimpleNamespace(
            rank=0, world_size=2, addresses=addresses, listen_fd=listener.fileno(), secret=given_secret
        )
        opened.append(listener)
        return Listener.of(cluster), cluster

    yield make
    for listener in opened:
        Listener.close_at(listener.fileno())
        listener.close()


def over_tcp(cluster):
    return socket.create_connection(parse_address(cluster.addresses[0]), 10)


def hello_of(cluster, **changes):
    return {"job": handshake.job_id(cluster.addresses), "rank": 1, "to": 0, "seconds": 60, **changes}


def prove(cluster, key=KEY):
    channel = wire.Channel(over_tcp(cluster), time.monotonic() + 10, connects=True)
    channel.prove_first(key)
    return channel


def all_that_comes(connection):
    said = b""
    with contextlib.suppress(ConnectionError):
        while data := connection.recv(1 << 16):
            said += data
    return said


# ------------------------------------------------------------------------------------------------ what is said


def test_a_stranger_hears_a_challenge_and_no_more(door):
    _, cluster = door()
    said = b""
    with over_tcp(cluster) as connection:
        connection.sendall(wire.pack("challenge", bytes(32)) + wire.pack("proof", bytes(32)))
        said = all_that_comes(connection)
    (challenge,) = wire.Decoder(wire.Channel.CHALLENGES).feed(said)  # and nothing behind it
    assert len(challenge.data) == wire.CHALLENGE_BYTES


@pytest.mark.parametrize("key", [b"", b"another secret", KEY + b"x"])
def test_another_secret_is_not_let_in(door, key):
    gate, cluster = door()
    with pytest.raises(wire.NoProofError):
        prove(cluster, key)
    eventually(lambda: "does not match the secret" in gate.turned_away)
    prove(cluster).close()


def test_a_listener_without_the_secret_hears_no_claim():
    """Whoever took the port first gets a proof he cannot check, and not a word of the job."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        heard = []

        def impostor():
            with listener.accept()[0] as connection:
                connection.sendall(wire.pack("challenge", os.urandom(32)) + wire.pack("proof", os.urandom(32)))
                heard.append(all_that_comes(connection))

        thread = threading.Thread(target=impostor)
        thread.start()
        cluster = SimpleNamespace(
            rank=1, world_size=2, addresses=(f"127.0.0.1:{listener.getsockname()[1]}", ELSEWHERE), secret=SECRET
        )
        found = dial.probe(cluster, 0, 10)
        thread.join()
    assert isinstance(found.problem, wire.NoProofError)
    kinds = wire.Format({"challenge": {}, "proof": {}}, max_data_bytes=32)
    assert [message.kind for message in wire.Decoder(kinds).feed(heard[0])] == ["challenge", "proof"]


def test_who_dials_a_host_that_does_not_answer_can_change_its_mind():
    with socket.create_server(("127.0.0.1", 0), backlog=0) as full, contextlib.ExitStack() as stack:
        address = full.getsockname()
        for _ in range(2):  # beyond these the kernel answers nobody
            waiting = stack.enter_context(socket.socket())
            waiting.setblocking(False)
            waiting.connect_ex(address)
        began = time.monotonic()
        wait_for = lambda: time.monotonic() < began + 0.5  # noqa: E731
        with pytest.raises(wire.GivenUpError):
            dial.dial(Address(*address), KEY, "probe", {}, network=True, seconds=4, wait_for=wait_for)
        assert 0.4 < time.monotonic() - began < 4
        with pytest.raises(TimeoutError):
            dial.dial(Address(*address), KEY, "probe", {}, network=True, seconds=0.3)


def recorded(cluster):
    """The bytes of a real rank's hello, message by message."""
    sent = []
    real = over_tcp(cluster)
    channel = wire.Channel(real, time.monotonic() + 10, connects=True)
    write = channel._write
    channel._write = lambda data, fds=(): (sent.append(data), write(data, fds))
    channel.prove_first(KEY)
    channel.send("probe", **hello_of(cluster))
    channel.receive(handshake.ANSWERS_TO_PROBE)
    channel.close()
    return sent


def test_replayed_and_reordered_handshakes(door):
    _, cluster = door()
    challenge, proof, hello = recorded(cluster)
    for replay in (
        [challenge, proof, hello],
        [challenge, hello, proof],
        [proof, challenge, hello],
        [hello],
        [challenge, challenge, proof, hello],
        [challenge, hello],
    ):
        with over_tcp(cluster) as connection:
            connection.sendall(b"".join(replay))
            said = all_that_comes(connection)
        assert len(said) <= len(challenge) and b"here" not in said
    # Within one conversation too: no message counts twice, or in another's place.
    with prove(cluster) as channel:
        hello = channel.packed("probe", **hello_of(cluster))
        later = channel.packed("probe", **hello_of(cluster))
        channel.socket.send(later)
        with pytest.raises(ConnectionError):
            channel.receive(handshake.ANSWERS_TO_PROBE)
    assert hello != later


def test_a_message_sent_back_is_not_the_others_proof(door):
    """A reflection: what the listening side says, said to it."""
    _, cluster = door()
    with over_tcp(cluster) as one, over_tcp(cluster) as two:
        one.sendall(wire.pack("challenge", bytes(32)))
        first = one.recv(1 << 12)
        two.sendall(first)  # the challenge of the one is that of the other
        second = two.recv(1 << 12)
        assert second != first
        two.sendall(wire.pack("proof", second[-32:]))
        assert all_that_comes(two) == b""


@pytest.mark.parametrize(("also_the_challenge", "why"), [(False, "does not match the secret"), (True, "no challenge")])
def test_a_proof_sent_back_to_its_maker_proves_nothing(also_the_challenge, why):
    """Replays a proof to its maker, by a listener that does not know the secret."""
    ours, theirs = socket.socketpair()
    channel = wire.Channel(ours, time.monotonic() + 10, connects=True)

    def impostor():
        challenge = theirs.recv(1 << 12)
        theirs.sendall(challenge if also_the_challenge else wire.pack("challenge", os.urandom(32)))
        with contextlib.suppress(OSError):  # it is gone
            theirs.sendall(theirs.recv(1 << 12))

    thread = threading.Thread(target=impostor)
    thread.start()
    with theirs, channel, pytest.raises(wire.WireError, match=why):
        channel.prove_first(KEY)
    thread.join()


@pytest.mark.parametrize(
    ("kind", "changes"),
    [
        ("probe", {"rank": -1}),
        ("probe", {"rank": True}),
        ("probe", {"rank": 1.0}),
        ("probe", {"rank": 1 << 64}),
        ("probe", {"job": "0" * 17}),
        ("probe", {"job": "../../../../etc/"}),
        ("probe", {"more": 1}),
        ("ring", {}),
        ("ring", {"ring": "x" * 201, "transport": "auto", "process": "0" * 32, "session": "0" * 32}),
        ("ring", {"ring": "x\x00", "transport": "auto", "process": "0" * 32, "session": "0" * 32}),
        ("ring", {"ring": "x", "transport": "udp", "process": "0" * 32, "session": "0" * 32}),
        ("steal", {}),
    ],
)
def test_a_hello_that_is_none(door, kind, changes):
    gate, cluster = door()
    with prove(cluster) as channel:
        channel.send(kind, **hello_of(cluster, **changes))
        with pytest.raises(ConnectionError):
            channel.receive(handshake.ANSWERS_TO_PROBE)
    assert not gate._pending


@pytest.mark.parametrize(
    ("changes", "why"), [({"to": 1}, "says that it is rank 0"), ({"job": "0" * 16}, "of another job")]
)
def test_who_wants_somebody_else_is_refused(door, changes, why):
    gate, cluster = door()
    with prove(cluster) as channel:
        channel.send("doctor", **hello_of(cluster, **changes))
        refused = channel.receive(wire.Format({"refused": handshake.REFUSED}))
        assert why in refused.fields["why"] and not gate._pending


# -------------------------------------------------------------------------------------------------- many of them


def test_a_hundred_silent_connections_take_no_thread_and_expire(door, monkeypatch):
    monkeypatch.setattr(listening, "_GREETING_SECONDS", 1.5)
    gate, cluster = door()
    threads = threading.active_count()
    with contextlib.ExitStack() as stack:
        silent = [stack.enter_context(over_tcp(cluster)) for _ in range(100)]
        eventually(lambda: len(gate._unauthenticated) == listening._MAX_UNAUTHENTICATED)
        assert threading.active_count() == threads
        prove(cluster).close()  # the oldest of the silent makes room
        assert silent[0].recv(1) == b"" and silent[30].recv(1) == b""
        dripping = stack.enter_context(over_tcp(cluster))
        began = time.monotonic()
        with pytest.raises(OSError):
            for byte in wire.pack("challenge", bytes(32)) * 100:
                dripping.send(bytes([byte]))
                time.sleep(0.05)
        assert time.monotonic() - began < 10
        eventually(lambda: not gate._unauthenticated)


def join_among_strangers(cluster):
    """Connections that come and go while the ring forms and works."""
    over = threading.Event()
    addresses = [parse_address(address) for address in cluster.addresses]

    def disturb():
        held = []
        for number in range(100_000):
            if over.is_set():
                break
            connection = socket.create_connection(addresses[number % len(addresses)], 10)
            connection.sendall((b"", b"GET / HTTP/1.1\r\n\r\n", wire.MAGIC, os.urandom(300))[number % 4])
            held = [*held, connection][-100:]
            time.sleep(0.001)
        for connection in held:
            connection.close()

    disturbing = threading.Thread(target=disturb)
    if cluster.rank == 1:
        disturbing.start()
        time.sleep(0.5)
    cluster.secret = SECRET
    with ranks.join(cluster) as ring:
        sums = [int(ring.all_reduce(np.int64(cluster.rank + i))) for i in range(300)]
        over.set()
    if cluster.rank == 1:
        disturbing.join()
    # The rings that come after it form as well.
    with ranks.join(cluster, name=f"{cluster.ring} again") as ring:
        return sums, int(ring.all_reduce(np.int64(1)))


def test_a_ring_forms_and_works_among_strangers():
    with ranks.Group(3) as group:
        group.start(3, join_among_strangers)
        for sums, again in group.outcomes():
            assert sums == [3 + 3 * i for i in range(300)] and again == 3


def test_running_out_of_descriptors_neither_spins_nor_ends_it(door):
    gate, cluster = door()
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    connections = [socket.socket() for _ in range(50)]
    taken = []
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (200, hard))
        with pytest.raises(OSError):
            while True:
                taken.append(os.open("/dev/null", os.O_RDONLY))
        began = time.process_time()
        for connection in connections:
            connection.connect(parse_address(cluster.addresses[0]))
        time.sleep(1.0)
        assert time.process_time() - began < 0.5
        assert gate._thread.is_alive()
    finally:
        for fd in taken:
            os.close(fd)
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    prove(cluster).close()
    for connection in connections:
        connection.close()


def test_who_waits_to_be_taken_leaves_when_it_is_gone_or_its_time_is_over(door):
    gate, cluster = door()
    more = {"ring": "x", "transport": "tcp", "encrypts": False, "process": "0" * 32, "session": "0" * 32}
    gone, patient = prove(cluster), prove(cluster)
    gone.send("ring", **hello_of(cluster), **more)
    patient.send("data", **hello_of(cluster, seconds=2), session="1" * 32)
    eventually(lambda: len(gate._pending) == 2)
    gone.close()
    eventually(lambda: [connection.kind for connection in gate._pending] == ["data"])
    with pytest.raises(ConnectionError):
        patient.receive(handshake.ANSWERS_TO_PROBE)
    assert not gate._pending
    patient.close()


def with_many_files(cluster, transport):
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (4096, hard))
    files = [os.open("/dev/null", os.O_RDONLY) for _ in range(1100)]
    try:
        with ranks.join(cluster, transport=transport) as ring:
            return int(ring.all_reduce(np.int64(cluster.rank))), ring.transport[0]
    finally:
        for fd in files:
            os.close(fd)
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


@pytest.mark.parametrize("transport", ["tcp", "shm"])
def test_more_than_1024_open_files(transport):
    assert ranks.run(3, with_many_files, transport) == [(3, transport)] * 3


# ------------------------------------------------------------------------------------------------ users of one host


def as_another_user(program, *arguments):
    if os.geteuid() != 0:
        pytest.skip("only root becomes another user")
    imports = "import contextlib, os, socket, sys, time"  # before it may no longer read where Python lies
    code = f"{imports}; os.setgroups([]); os.setgid(65534); os.setuid(65534)\n{program}"
    return subprocess.Popen(
        [sys.executable, "-c", code, *arguments], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )


def test_on_one_host_nobody_comes_in_over_tcp_without_a_secret(door):
    gate, cluster = door(given_secret=None)
    with over_tcp(cluster) as connection:
        connection.sendall(wire.pack("challenge", bytes(32)))
        connection.settimeout(0.5)
        with pytest.raises(TimeoutError):
            connection.recv(1)
    assert not gate._unauthenticated
    assert dial.probe(cluster, 0, 5).rank == 0  # by this user, through the Unix socket


def test_another_user_does_not_come_in(door):
    gate, _ = door(given_secret=None)
    name = sockets.local_name("127.0.0.1", gate.port)
    process = as_another_user(
        "connection = socket.socket(socket.AF_UNIX); connection.connect(sys.argv[1].replace('@', '\\0'))\n"
        "print(connection.recv(100))",
        name.replace("\0", "@"),
    )
    assert process.communicate(timeout=30)[0].strip() == "b''" and process.returncode == 0
    assert gate.turned_away == f"process {process.pid} of user 65534: it belongs to another user"


def test_another_user_that_knocks_in_a_loop_keeps_nobody_busy(door):
    gate, cluster = door(given_secret=None)
    name = sockets.local_name("127.0.0.1", gate.port)
    process = as_another_user(
        "end = time.monotonic() + 2\n"
        "while time.monotonic() < end:\n"
        "    with contextlib.suppress(OSError), socket.socket(socket.AF_UNIX) as connection:\n"
        "        connection.settimeout(0.5); connection.connect(sys.argv[1].replace('@', '\\0'))",
        name.replace("\0", "@"),
    )
    began = time.monotonic()
    process.communicate(timeout=30)
    pauses = (time.monotonic() - began) / listening._PAUSE_SECONDS
    assert 0 < gate._num_unwelcome <= (pauses + 2) * listening._UNWELCOME_AT_ONCE
    assert dial.probe(cluster, 0, 5).rank == 0


def test_another_user_that_takes_the_name_is_told_of():
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
        squatter = as_another_user(
            "entry = socket.socket(socket.AF_UNIX); entry.bind(sys.argv[1].replace('@', '\\0')); entry.listen()\n"
            "print('there', flush=True); sys.stdin.read()",
            sockets.local_name("127.0.0.1", port).replace("\0", "@"),
        )
        assert squatter.stdout.readline() == "there\n"
        addresses = (f"127.0.0.1:{port}", "127.0.0.1:1")
        cluster = SimpleNamespace(rank=0, world_size=2, addresses=addresses, listen_fd=listener.fileno())
        try:
            with pytest.raises(RendezvousError, match=f"process {squatter.pid} of user 65534 has taken its name"):
                Listener.of(cluster)
            found = dial.probe(cluster, 0, 0.5)  # nor does a rank of this user talk to it
        except PermissionError as error:
            found = error
        finally:
            squatter.communicate()
    assert "of user 65534" in str(found)


# ---------------------------------------------------------------------------------------------------- descriptors


def handed(**changes):
    """Makes the descriptors of a mailbox with one thing wrong."""
    box = mailbox.Mailbox()
    fds = {"memory": os.dup(box.for_peer[0]), "doorbell": os.dup(box.for_peer[1]), **changes}
    box.close()
    return list(fds.values())


def memory_file(size=mailbox.HEADER_BYTES + mailbox.CAPACITY_BYTES, seals=mailbox._SEALS):
    fd = os.memfd_create("x", os.MFD_ALLOW_SEALING)
    os.ftruncate(fd, size)
    fcntl.fcntl(fd, fcntl.F_ADD_SEALS, seals)
    return fd


def test_what_is_handed_over_is_looked_at(tmp_path):
    precious = tmp_path / "precious"
    precious.write_bytes(bytes(mailbox.HEADER_BYTES + mailbox.CAPACITY_BYTES))
    reader, writer = os.pipe()
    read_only = os.open(f"/proc/self/fd/{(of := memory_file())}", os.O_RDONLY)
    for fds, why in (
        (handed(memory=os.open(precious, os.O_RDWR)), "not a memory file"),
        (handed(memory=memory_file(size=4096)), "the wrong size"),
        (handed(memory=memory_file(seals=fcntl.F_SEAL_GROW | fcntl.F_SEAL_SHRINK)), "not sealed"),
        (handed(memory=memory_file(seals=0)), "not sealed"),
        (handed(memory=read_only), "not open for reading and writing"),
        (handed(doorbell=os.open(precious, os.O_WRONLY)), "not a pipe"),
        (handed(doorbell=reader), "not the write end"),
        (handed(doorbell=os.open("/dev/null", os.O_WRONLY)), "not a pipe"),
        (handed()[:1], "1 descriptors"),
        ([*handed(), writer], "3 descriptors"),
    ):
        other = link.Link(1, socket.socket())
        assert why in other.adopt_mailbox(fds), why
        assert other.transport == "tcp" and fds
        wire.close_all(fds)
        other.close()
    os.close(of)
    good = handed()
    one = link.Link(1, socket.socket())
    assert one.adopt_mailbox(good) is None and one.transport == "shm" and not good
    assert stat.S_ISFIFO(os.fstat(one.doorbell_fd).st_mode)
    with pytest.raises(OSError):  # so no bus error later
        os.ftruncate(one.mailbox_fd, 0)
    one.close()
    assert precious.read_bytes().count(0) == len(precious.read_bytes())


def test_descriptors_nobody_asked_for_are_not_kept():
    ours, theirs = socket.socketpair(socket.AF_UNIX)
    before = len(os.listdir("/proc/self/fd"))
    files = [os.open("/dev/null", os.O_RDONLY) for _ in range(5)]
    for max_fds in (0, 2):
        channel = wire.Channel(ours.dup(), time.monotonic() + 10, connects=True)
        socket.send_fds(theirs, [wire.pack("end")], files)
        got: list[int] = []
        with contextlib.suppress(wire.WireError):
            channel.receive(wire.Format({"end": {}}), got if max_fds else None, max_fds)
            assert max_fds == 0
        wire.close_all(got)
        channel.close()
    wire.close_all(files)
    assert len(os.listdir("/proc/self/fd")) == before
    ours.close()
    theirs.close()


# -------------------------------------------------------------------------------------------------------- secrets


def join_with(cluster, secrets, **kwargs):
    told = []
    handler = logging.Handler(logging.WARNING)
    handler.emit = lambda record: told.append(record.getMessage())
    logging.getLogger("tfring").addHandler(handler)
    if secrets[cluster.rank] is not None:
        os.environ["TFRING_SECRET"] = secrets[cluster.rank]
    try:
        with ranks.join(cluster, **kwargs) as ring:
            return int(ring.all_reduce(np.int64(cluster.rank))), ring.transport, told
    finally:
        os.environ.pop("TFRING_SECRET", None)


@pytest.mark.parametrize("transport", ["tcp", "shm"])
def test_ranks_that_share_a_secret(transport):
    with ranks.Group(2) as group:
        group.start(2, join_alike, transport)
        assert group.outcomes() == [(1, (transport, transport), [])] * 2


def join_alike(cluster, transport):
    return join_with(cluster, [SECRET] * 2, transport=transport)


def join_with_others(cluster, secrets):
    try:
        return join_with(cluster, secrets, connect_timeout_seconds=2.0)
    except RendezvousError as error:
        return str(error)


@pytest.mark.parametrize("secrets", [[SECRET, "another secret than that"], [SECRET, None]])
def test_ranks_with_different_secrets_say_so(secrets):
    with ranks.Group(2) as group:
        group.start(2, join_with_others, secrets)
        for told in group.outcomes():
            assert "TFRING_SECRET differs, or is set on some ranks only" in told or "of the secret" in told, told


def test_a_secret_in_a_file(tmp_path, monkeypatch):
    monkeypatch.delenv("TFRING_SECRET", raising=False)
    file = tmp_path / "secret"
    file.write_text(f"{SECRET}\n")
    monkeypatch.setenv("TFRING_SECRET_FILE", str(file))
    assert secret.of(None) == KEY
    file.write_text("short")
    with pytest.raises(ConfigurationError, match="which has 5 characters, is not at least 16 characters"):
        secret.of(None)
    monkeypatch.setenv("TFRING_SECRET_FILE", str(tmp_path / "none"))
    with pytest.raises(ConfigurationError, match=r"(?s)No such file.*openssl rand"):
        secret.of(None)
    monkeypatch.setenv("TFRING_SECRET", "pa55word")
    with pytest.raises(ConfigurationError) as error:
        secret.of(None)
    assert "at least 16 characters" in str(error.value) and "pa55word" not in str(error.value)


def test_a_secret_may_be_required(monkeypatch):
    monkeypatch.setenv("TFRING_REQUIRE_SECRET", "1")
    cluster = SimpleNamespace(rank=0, world_size=2, addresses=("127.0.0.1:1", "127.0.0.1:2"), listen_fd=None)
    with pytest.raises(ConfigurationError, match=r"(?s)TFRING_REQUIRE_SECRET=1 needs.*TFRING_SECRET_FILE="):
        Communicator.connect(cluster)
    alone = SimpleNamespace(rank=0, world_size=1, addresses=(), listen_fd=None)
    Communicator.connect(alone).close()


def test_rank_0_says_once_what_no_secret_means(door, caplog):
    gate, cluster = door(given_secret=None, several_hosts=True)
    Listener.of(cluster)
    gate.admit("0" * 16, 0, 2, True)
    (line,) = [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING]
    assert f"a process that reaches port {gate.port} of " in line and "TFRING_SECRET" in line and "\n" not in line
    prove(cluster, b"").close()
    caplog.clear()
    door(several_hosts=True)
    door(given_secret=None)
    assert not caplog.records


# --------------------------------------------------------------------------------------------------------- start-up


def try_to_join(cluster, changes, seconds):
    there = SimpleNamespace(**{**vars(cluster), **changes.get(cluster.rank, {})})
    began = time.monotonic()
    try:
        ranks.join(there, connect_timeout_seconds=seconds).close()
    except Exception as error:
        return type(error).__name__, str(error), time.monotonic() - began


def test_a_name_that_does_not_resolve_is_named():
    addresses = ("127.0.0.1:1", "nowhere.invalid:20000")
    cluster = SimpleNamespace(rank=0, world_size=2, addresses=addresses, listen_fd=None, ring="x")
    with socket.create_server(("127.0.0.1", 0)) as listener:
        cluster.listen_fd = listener.fileno()
        kind, told, seconds = try_to_join(cluster, {}, 1.0)
        Listener.close_at(listener.fileno())
    assert kind == "RendezvousError" and "rank 1 at nowhere.invalid:20000 (" in told and seconds < 10
    assert "not known" in told or "resolution" in told


def test_a_port_held_by_another_program_is_named():
    with socket.create_server(("127.0.0.1", 0)) as other, socket.create_server(("127.0.0.1", 0)) as listener:
        addresses = tuple(f"127.0.0.1:{each.getsockname()[1]}" for each in (other, listener))
        cluster = SimpleNamespace(rank=0, world_size=2, addresses=addresses, listen_fd=None, ring="x")
        kind, told, seconds = try_to_join(cluster, {}, 60.0)  # its own: at once
        assert kind == "RendezvousError" and seconds < 10
        assert f"Rank 0 cannot listen at {addresses[0]}" in told and "already in use" in told
        cluster.rank, cluster.listen_fd = 1, listener.fileno()
        kind, told, seconds = try_to_join(cluster, {}, 1.0)  # another rank's: after the limit
        Listener.close_at(listener.fileno())
        assert kind == "RendezvousError" and f"rank 0 at {addresses[0]} (no answer" in told and seconds < 10


def claim_rank_1(cluster):
    """Ranks 1 and 2 of 3 both take themselves for rank 1: one started twice, another never."""
    changes = {2: {"rank": 1}}
    return try_to_join(cluster, changes, 3.0)


def test_two_processes_of_one_rank_are_named():
    with ranks.Group(3) as group:
        group.start(3, claim_rank_1)
        outcomes = group.outcomes()
    assert all(kind == "RendezvousError" and seconds < 10 for kind, _, seconds in outcomes), outcomes
    assert any("says that it is rank 1" in told for _, told, _ in outcomes), outcomes


def test_the_same_address_twice_on_one_host_is_an_error_at_once():
    with socket.create_server(("127.0.0.1", 0)) as listener:
        addresses = (f"127.0.0.1:{listener.getsockname()[1]}", "127.0.0.1:1")
        cluster = SimpleNamespace(rank=0, world_size=2, addresses=addresses, listen_fd=listener.fileno())
        Listener.of(cluster)
        code = (
            "from types import SimpleNamespace\nfrom tfring.transport.listener import Listener\n"
            f"c = SimpleNamespace(rank=0, world_size=2, addresses={addresses!r}, listen_fd={listener.fileno()})\n"
            "Listener.of(c)"
        )
        second = subprocess.run(
            [sys.executable, "-c", code], pass_fds=[listener.fileno()], capture_output=True, text=True, timeout=60
        )
        Listener.close_at(listener.fileno())
    assert (
        f"process {os.getpid()} of user {os.geteuid()} has taken its name. Is every rank started once?" in second.stderr
    )


def test_wrong_messages_at_every_place_that_reads_them():
    """In a process of its own, for it looks at what that holds."""
    fuzz = str(pathlib.Path(__file__).with_name("fuzz_listeners.py"))
    done = subprocess.run([sys.executable, fuzz, "--messages", "1500"], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0 and done.stdout.count("1500 messages in") == 4, done.stdout + done.stderr


def test_a_forked_child_keeps_neither_port_nor_name(door):
    gate, cluster = door()
    child = os.fork()
    if child == 0:
        signal.pause()
        os._exit(0)
    try:
        name = sockets.local_name("127.0.0.1", gate.port)
        Listener.close_at(cluster.listen_fd)
        with socket.socket(socket.AF_UNIX) as again:
            eventually(lambda: bindable(again, name))
    finally:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)


def bindable(connection, name):
    try:
        connection.bind(name)
        return True
    except OSError:
        return False
