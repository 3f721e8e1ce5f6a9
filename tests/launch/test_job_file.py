"""Options of a job from a file: `--config`, or the table of pyproject.toml."""

from __future__ import annotations

import subprocess
import sys

import pytest

FACTS = "import os\nprint(os.environ['TFRING_WORLD_SIZE'], os.environ['TFRING_CONNECT_TIMEOUT_SECONDS'])\n"


@pytest.fixture
def run(tmp_path):
    """Runs a command in a folder with `facts.py`, a program that prints what it was started with."""
    (tmp_path / "facts.py").write_text(FACTS)

    def run(*arguments, code=0):
        command = [sys.executable, "-m", "tfring", *arguments]
        done = subprocess.run(
            command, cwd=tmp_path, capture_output=True, text=True, stdin=subprocess.DEVNULL, timeout=60
        )
        assert done.returncode == code, f"{done.returncode}\n{done.stdout}\n{done.stderr}"
        return done

    return run


def test_a_file(run, tmp_path):
    (tmp_path / "job.toml").write_text('n = 2\nstart-timeout = 45.5\nlog-dir = "logs"\ntimestamps = true\n')
    lines = run("launch", "--config", "job.toml", "facts.py").stdout.splitlines()
    assert len(lines) == 2 and all(line.endswith(" 2 45.5") and line != "2 45.5" for line in lines)
    assert sorted(file.name for file in (tmp_path / "logs").iterdir()) == ["rank-0.log", "rank-1.log"]
    mine = ("-n", "1", "--start-timeout", "7", "--no-timestamps", "--log-dir", "others")
    assert run("launch", "--config", "job.toml", *mine, "facts.py").stdout == "1 7\n"
    assert [file.name for file in (tmp_path / "others").iterdir()] == ["rank-0.log"]


def test_pyproject(run, tmp_path):
    pyproject = tmp_path / "pyproject.toml"
    pyproject.write_text("[project]\nname = 'x'\n[tool.tfring.launch]\nn = 1\nstart-timeout = 9\n[tool.other]\na = 1\n")
    assert run("launch", "facts.py").stdout == "1 9\n"
    assert run("launch", "--config", "pyproject.toml", "facts.py").stdout == "1 9\n"
    (tmp_path / "job.toml").write_text("n = 1\nstart-timeout = 8\n")
    assert run("launch", "--config", "job.toml", "facts.py").stdout == "1 8\n"
    for without in ("[project]\nname = 'x'\n", "[tool.tfring.test-seconds]\nlaunch = 1\n"):
        pyproject.write_text(without)
        assert "set the number of workers" in run("launch", "facts.py", code=2).stderr
    pyproject.write_text("[tool.tfring.launch]\nn = 2\n")
    assert run("doctor").stdout.startswith("tfring doctor: this process alone")  # asked for nothing else


def test_the_number_of_workers_overrides_hosts(run, tmp_path):
    """And hosts a number; names of variables come together."""
    (tmp_path / "job.toml").write_text('hosts = "nowhere.invalid:2"\nstart-timeout = 5\nenv = ["HOME"]\n')
    assert run("launch", "--config", "job.toml", "-n", "1", "facts.py").stdout == "1 5\n"
    shown = run("launch", "--config", "job.toml", "--env", "PATH", "--dry-run", "facts.py").stdout
    assert "nowhere.invalid:\n" in shown and "  with HOME PATH " in shown
    (tmp_path / "job.toml").write_text("n = 2\n")
    assert "a:\n" in run("launch", "--config", "job.toml", "--hosts", "a:1", "--dry-run", "facts.py").stdout


def test_the_doctor_and_bench_take_those_they_have(run, tmp_path):
    (tmp_path / "job.toml").write_text("n = 2\nmax-restarts = 3\n")
    said = run("doctor", "--config", "job.toml").stdout
    assert "tfring doctor: 2 processes (ranks 0 and 1), from tfring launch" in said
    options = ("--op", "all_reduce", "--sizes", "4")
    assert "tfring bench: 2 ranks" in run("bench", "--config", "job.toml", *options).stdout


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("max-restart = 3", "job.toml: 'max-restart' is not an option of tfring launch. Did you mean max-restarts"),
        ("max_restarts = 3", "Did you mean max-restarts"),
        ("zzz = 3", "job.toml: 'zzz' is not an option of tfring launch. The options are"),
        ("dry-run = true", "'dry-run' is not an option"),
        ("np = 3", "'np' is not an option"),
        ("[tool.tfring.launch]\nn = 2", "'tool' is not an option"),
        ("n = true", "job.toml: n = True is not a string or a number"),
        ("n = [2]", "job.toml: n = [2] is not a string or a number"),
        ("n = 0", "tfring launch: job.toml: argument -n: '0' is not a whole number from 1 up"),
        ("timestamps = 1", "job.toml: timestamps = 1 is not true or false"),
        ("env = [1]", "job.toml: env = [1] is not a list of strings"),
        ("hosts = 'a'\nhostfile = 'b'", "job.toml: argument --hostfile: not allowed with argument --hosts"),
        ("n = ", "job.toml cannot be read"),
        (None, "job.toml cannot be read"),
    ],
)
def test_wrong_files(run, tmp_path, text, message):
    if text is not None:
        (tmp_path / "job.toml").write_text(text)
    done = run("launch", "--config", "job.toml", "facts.py", code=2)
    assert message in done.stderr and not done.stdout


@pytest.mark.parametrize("text", ["[tool.tfring]\nlaunch = 3", "tool = 3", "[tool]\ntfring = 3"])
def test_a_table_that_is_none(run, tmp_path, text):
    (tmp_path / "pyproject.toml").write_text(text)
    assert "pyproject.toml, [tool.tfring.launch] is not a table" in run("launch", "facts.py", code=2).stderr
