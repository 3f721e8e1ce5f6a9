"""`tfring.notebook.run` on two processes: results, output, failures, what goes along; the example, in a kernel too."""

from __future__ import annotations

import json
import pathlib
import signal
import subprocess
import sys

import pytest

import tfring
from tfring.errors import ConfigurationError
from tfring.notebook import run

ROOT = pathlib.Path(__file__).parents[2]
PROGRAM = """\
import math as numbers
from os.path import join
import tfring
from tfring.notebook import run

factor, names = 3, {"a": [float("inf")]}

def scaled(value, by=factor):
    return value * by

def work(number):
    print("hello of", tfring.rank(), flush=True)
    gathered = tfring.all_gather({"rank": tfring.rank(), "scaled": scaled(number)})
    return [gathered, numbers.floor(2.5), join("a", "b"), names["a"][0] > 1e300, (1, None)]
"""


def of_module(number):
    return [number * tfring.world_size(), tfring.all_gather(tfring.rank())]


def execute(folder, text, *, code=0, timeout=240):
    """Runs a program whose functions are those of `__main__`, as a notebook's are."""
    (folder / "program.py").write_text(text)
    command = [sys.executable, str(folder / "program.py")]
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=timeout, stdin=subprocess.DEVNULL, cwd=folder
    )
    assert done.returncode == code, done.stdout + done.stderr
    return done


def test_a_function_of_a_module(capsys):
    assert run(of_module, n=2, args=[3]) == [6, [0, 1]]


def test_a_function_of_a_notebook(tmp_path):
    done = execute(tmp_path, PROGRAM + 'import json\nprint("result", json.dumps(run(work, 2, [5])))')
    ranks = [{"rank": 0, "scaled": 15}, {"rank": 1, "scaled": 15}]
    [result] = [line for line in done.stdout.splitlines() if line.startswith("result ")]
    assert json.loads(result[7:]) == [ranks, 2, "a/b", True, [1, None]]
    assert "hello of 0" in done.stdout.splitlines() and "[1] hello of 1" in done.stdout.splitlines()


def test_the_rank_that_failed_is_named(tmp_path):
    text = "import tfring\nfrom tfring.notebook import run\n\ndef work():\n    if tfring.rank() == 1:\n"
    text += "        raise KeyError('the 7th')\n    tfring.barrier()\n\nrun(work)"
    done = execute(tmp_path, text, code=1)
    assert done.stderr.splitlines()[-1].startswith(
        "tfring.errors.TfringError: `work` failed on 2 workers: rank 1 failed first: exit code 1."
    )
    assert "KeyError: 'the 7th'" in done.stdout and "notebook.py" in done.stdout


def test_a_result_that_is_not_plain(tmp_path):
    text = "import numpy as np\nfrom tfring.notebook import run\n\ndef work():\n    return np.ones(3)\n\nrun(work, 1)"
    done = execute(tmp_path, text, code=1)
    assert "The function returned a ndarray, which JSON cannot represent." in done.stdout


def test_an_interrupt_ends_the_workers(tmp_path):
    text = "import os, time, tfring\nfrom tfring.notebook import run\n\ndef work():\n    tfring.barrier()\n"
    text += "    open(f'pid-{tfring.rank()}.tmp', 'w').write(str(os.getpid()))\n"
    text += "    os.rename(f'pid-{tfring.rank()}.tmp', f'pid-{tfring.rank()}')\n    time.sleep(600)\n\nrun(work)"
    (tmp_path / "program.py").write_text(text)
    program = subprocess.Popen(
        [sys.executable, "program.py"],
        cwd=tmp_path,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler),
    )
    from test_launch import assert_gone, pids

    both = pids(tmp_path, "pid-0", "pid-1")
    program.send_signal(signal.SIGINT)
    _, err = program.communicate(timeout=60)
    assert err.splitlines()[-1] == "KeyboardInterrupt"
    assert_gone(both)


def method_holder():
    class Holder:
        def method(self):
            pass

    return Holder.method


@pytest.mark.parametrize(
    "call, says",
    [
        (lambda: run(of_module, n=0), "`n` is 0, not a number of workers (an integer of at least 1)."),
        (lambda: run(of_module, n=True), "`n` is True, not a number of workers"),
        (lambda: run(lambda: 3), "must be defined with `def`, at the top level"),
        (lambda: run(method_holder()), "must be defined with `def`, at the top level"),
        (lambda: run(len), "must be defined with `def`, at the top level"),
        (lambda: run(of_module, args=[{1, 2}]), "`args` has a set, which JSON cannot represent."),
    ],
)
def test_the_door(call, says):
    with pytest.raises(ConfigurationError) as caught:
        call()
    assert says in str(caught.value)


def test_a_worker_starts_no_workers(monkeypatch):
    place = {"cluster": {"worker": ["a:1", "b:1"]}, "task": {"type": "worker", "index": 0}}
    monkeypatch.setenv("TF_CONFIG", json.dumps(place))
    with pytest.raises(ConfigurationError, match="`, which starts workers, was called on a worker"):
        run(of_module)


def test_what_cannot_go_along(tmp_path):
    text = "from tfring.notebook import run\nthing = object()\n\ndef work():\n    return thing\n\nrun(work)"
    done = execute(tmp_path, text, code=1)
    assert "`work` uses 'thing' of its notebook, a object," in done.stderr


@pytest.mark.long
def test_the_example_in_a_kernel(tmp_path):
    """Executes the cells of examples/notebook.ipynb; what workers print is the output of the cell that runs them."""
    import nbclient
    import nbformat

    notebook = nbformat.read(ROOT / "examples" / "notebook.ipynb", 4)
    nbclient.NotebookClient(notebook, timeout=240, resources={"metadata": {"path": str(tmp_path)}}).execute()
    _, _, two, alone = [
        "".join(output.get("text", "") for output in cell.outputs)
        for cell in notebook.cells
        if cell.cell_type == "code"
    ]
    assert "tfring: 2 workers on 1 host" in two and "Epoch 3/3" in two and "2 workers" not in alone
    assert "accuracy 0." in alone and (tmp_path / "notebook_model.keras").exists()
