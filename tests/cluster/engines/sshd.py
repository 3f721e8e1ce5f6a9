"""An sshd on each host that takes one key, made for the purpose; as root, with Debian's openssh-server."""

from __future__ import annotations

import contextlib
import os
import pathlib
import shutil
import subprocess
import tempfile
import time
from collections.abc import Iterator, Sequence

from engines import namespaces

PORT = 2222
_SSHD = shutil.which("sshd") or "/usr/sbin/sshd"


def why_not() -> str | None:
    """Returns what this machine lacks; None if it lacks nothing."""
    if not os.path.exists(_SSHD) or shutil.which("ssh") is None:
        return "sshd or ssh is missing (tests/cluster/engines/install.sh)"
    return namespaces.why_not()


@contextlib.contextmanager
def running(hosts: Sequence[namespaces.Host]) -> Iterator[pathlib.Path]:
    """sshd on every host; the configuration with which ssh gets there."""
    pathlib.Path("/run/sshd").mkdir(mode=0o755, exist_ok=True)  # where it wants to chroot to
    started = []
    with tempfile.TemporaryDirectory(prefix="tfring-sshd-") as name:
        folder = pathlib.Path(name)
        for key in ("host_key", "key"):
            subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", folder / key], check=True)
        shutil.copy(folder / "key.pub", folder / "authorized_keys")
        (folder / "sshd_config").write_text(
            f"Port {PORT}\nHostKey {folder}/host_key\nAuthorizedKeysFile {folder}/authorized_keys\nPidFile none\n"
            "UsePAM no\nStrictModes no\nPasswordAuthentication no\nPermitRootLogin prohibit-password\n"
        )
        (folder / "config").write_text(
            f"Port {PORT}\nIdentityFile {folder}/key\nIdentitiesOnly yes\nStrictHostKeyChecking no\n"
            "UserKnownHostsFile /dev/null\nLogLevel ERROR\n"
        )
        try:
            for host in hosts:
                with (folder / f"{host.name}.log").open("wb") as log:
                    command = host.command(_SSHD, "-D", "-e", "-f", str(folder / "sshd_config"))
                    started.append(subprocess.Popen(command, stdout=log, stderr=log, stdin=subprocess.DEVNULL))
            for host in hosts:
                _wait_for(host, folder)
            yield folder / "config"
        finally:
            for process in started:
                process.terminate()
                process.wait()


def _wait_for(host: namespaces.Host, folder: pathlib.Path) -> None:
    probe = host.command("ssh", "-F", str(folder / "config"), "-o", "BatchMode=yes", host.name, "true")
    deadline = time.monotonic() + 20
    while (done := subprocess.run(probe, capture_output=True, text=True)).returncode:
        log = (folder / f"{host.name}.log").read_text()
        assert time.monotonic() < deadline, f"sshd on {host.name}: {done.stderr}\n{log}"
        time.sleep(0.1)
