"""Engines from the package index, each in an environment of its own under .cache/engines, made once."""

from __future__ import annotations

import fcntl
import pathlib
import subprocess
import sys

FOLDER = pathlib.Path(__file__).resolve().parents[3] / ".cache" / "engines"
_SECONDS = 300


def engine(*requirements: str, with_this_environment: bool = False) -> pathlib.Path:
    """The `bin` folder of an environment with these packages.

    Args:
      *requirements: What pip installs, `"mpich"`.
      with_this_environment: Whether it sees the packages of the running Python too, TensorFlow and tfring among them.

    Raises:
      subprocess.CalledProcessError: It could not be made; pip's words are in `stderr`.
    """
    folder = FOLDER / requirements[0]
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / "lock").open("w") as lock:  # several test runs may share the folder
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not (folder / "made").exists():
            _run(sys.executable, "-m", "venv", "--without-pip", folder)
            pip = [sys.executable, "-m", "pip", "--python", folder / "bin" / "python"]
            _run(*pip, "install", "--quiet", "--disable-pip-version-check", *requirements)
            (folder / "made").touch()
    if with_this_environment:
        theirs = next((folder / "lib").glob("python3*")) / "site-packages" / "parent.pth"
        parents = [path for path in sys.path if path.endswith("site-packages")]
        theirs.write_text("".join(f"import site; site.addsitedir({path!r})\n" for path in parents))
    return folder / "bin"


def _run(*command: str | pathlib.Path) -> None:
    subprocess.run(command, check=True, capture_output=True, text=True, timeout=_SECONDS)
