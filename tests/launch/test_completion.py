"""`tfring completion`: what bash completes from it, and that it has the commands and options of the parser."""

from __future__ import annotations

import argparse
import re
import shutil
import subprocess
import sys

import pytest

from tfring.launch import cli

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
    "tfring launch -n 2 train.py --ho": [],  # the program's own
    "tfring launch -n 2 train.py tr": ["train.py"],
    "tfring launch --log-dir ": ["a folder"],
    "tfring launch --max-restarts ": [],
    "tfring bench --dtype fl": ["float16", "float32", "float64"],
    "tfring bench --dtype = bf": ["bfloat16"],  # of --dtype=bf bash makes three words
    "tfring bench --json --d": ["--dtype"],
    "tfring report ": ["a folder"],
    "tfring unknown --": [],
}


def completion(shell):
    command = [sys.executable, "-m", "tfring", "completion", shell]
    return subprocess.run(command, capture_output=True, text=True, check=True, timeout=60).stdout


def test_bash_completes(tmp_path):
    (tmp_path / "train.py").touch()
    (tmp_path / "a folder").mkdir()
    script = ASK.format(command=f"{sys.executable} -m tfring")
    for line, expected in EXPECTED.items():
        command = ["bash", "--norc", "-c", script, "bash", *line.split(" ")]
        done = subprocess.run(command, capture_output=True, text=True, timeout=60, cwd=tmp_path)
        assert not done.stderr, done.stderr
        assert sorted(word for word in done.stdout.split("\n") if word) == sorted(expected), line


def test_options_are_those_of_the_parser():
    [commands] = [a.choices for a in cli._parser()._actions if isinstance(a, argparse._SubParsersAction)]
    assert list(commands) == COMMANDS
    text = completion("bash")
    for name, parser in commands.items():
        [offered] = re.findall(rf"'{name} -'\) .*-W \$'([^']*)'", text)
        shown = [o for a in parser._actions if a.help != argparse.SUPPRESS for o in a.option_strings]
        assert offered.split("\\n") == shown


def test_zsh_reads_the_function_of_bash():
    first, _, rest = completion("zsh").partition("\n")
    assert first == "autoload -Uz +X bashcompinit && bashcompinit" and rest == completion("bash")


@pytest.mark.skipif(not shutil.which("zsh"), reason="no zsh")
def test_zsh_evaluates_it():
    script = f'autoload -Uz compinit && compinit -D -u && eval "$({sys.executable} -m tfring completion zsh)"'
    command = ["zsh", "-f", "-c", script + " && whence -w _tfring && print ${_comps[tfring]}"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert done.stdout.splitlines()[0] == "_tfring: function" and "_tfring" in done.stdout.splitlines()[1], done
