"""`tfring completion`: what the shells complete from it."""

from __future__ import annotations

import shutil
import subprocess
import sys

import pytest

# Completes the last word of a command line as bash does on Tab, and prints what it may be.
ASK = """
eval "$({command} completion bash)"
COMP_WORDS=("$@") COMP_CWORD=$(($# - 1))
$(complete -p tfring | sed 's/.*-F \\([^ ]*\\) .*/\\1/')
printf '%s\\n' "${{COMPREPLY[@]}}"
"""
COMMANDS = ["launch", "doctor", "bench", "test", "report", "completion"]
EXPECTED = {
    "tfring ": COMMANDS,
    "tfring l": ["launch"],
    "tfring --v": ["--version"],
    "tfring completion ": ["bash", "zsh"],
    "tfring launch --ho": ["--hosts", "--hostfile", "--hosts-from"],
    "tfring launch --nnodes": [],  # another launcher's, which the parser refuses
    "tfring launch -n 2 ": ["train.py", "a folder"],
    "tfring launch -n 2 tr": ["train.py"],
    "tfring launch -n 2 train.py tr": ["train.py"],
    "tfring launch --log-dir ": ["a folder"],
    "tfring launch --max-restarts ": [],
    "tfring bench --dtype fl": ["float16", "float32", "float64"],
    "tfring bench --json --d": ["--dtype"],
    "tfring report ": ["a folder"],
}


def test_bash_completes(tmp_path):
    (tmp_path / "train.py").touch()
    (tmp_path / "a folder").mkdir()
    script = ASK.format(command=f"{sys.executable} -m tfring")
    for line, expected in EXPECTED.items():
        command = ["bash", "--norc", "-c", script, "bash", *line.split(" ")]
        done = subprocess.run(command, capture_output=True, text=True, timeout=60, cwd=tmp_path)
        assert not done.stderr, done.stderr
        assert sorted(word for word in done.stdout.split("\n") if word) == sorted(expected), line


@pytest.mark.skipif(not shutil.which("zsh"), reason="no zsh")
def test_zsh_evaluates_it():
    script = f'autoload -Uz compinit && compinit -D -u && eval "$({sys.executable} -m tfring completion zsh)"'
    command = ["zsh", "-f", "-c", script + " && print ${_comps[tfring]}"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0 and done.stdout.strip(), done
