"""`tfring bench` with real processes: what it prints, that it adds up, and what it says where it cannot measure."""

from __future__ import annotations

import json
import re
import sys

import pytest
from commands import ended, environment, tf_config
from engines import namespaces

from tfring.bench.options import FACTORS

BENCH = [sys.executable, "-m", "tfring.launch.cli", "bench"]


def document(process):
    return json.loads(ended(process)[0])


def test_three_on_this_machine(start):
    out, err = ended(start([*BENCH, "-n", "3", "--op", "all_reduce,all_to_all", "--sizes", "4,1M"]))
    assert err == ""
    title, limit, terms, training, _, blank, columns, units, *lines = out.splitlines()
    assert title == "tfring bench: 3 ranks on 1 host, from tfring launch" and blank == ""
    reached = "which copying memory reaches when every rank copies, all at once"
    assert re.fullmatch(rf"Limit: [\d.]+ GB/s per rank, {reached}", limit)
    assert terms.startswith("time: of one call; algbw: ") and "all_reduce sums gradients" in training
    assert columns.split() == [
        "collective",
        "size",
        "count",
        "dtype",
        "time",
        "algorithm",
        "algbw",
        "busbw",
        "of",
        "limit",
    ]
    assert units.split() == ["bytes", "us", "GB/s", "GB/s"]
    sizes = [("all_reduce", "4", "1"), ("all_reduce", "1048576", "262144")]
    sizes += [("all_to_all", "12", "1"), ("all_to_all", "1048572", "87381")]  # as much for each
    assert [tuple(line.split()[:3]) for line in lines] == sizes
    assert [line.split()[5] for line in lines] == ["flat", "ring", "flat", "flat"]


def test_the_document(start):
    options = ["--op", ",".join(FACTORS), "--sizes", "8K", "--dtype", "float16", "--json"]
    found = document(start([*BENCH, "-n", "2", *options], TFRING_TRANSPORT="tcp"))
    assert found["schema"] == 1 and found["dtype"] == "float16"
    assert found["cluster"] == {"source": "tfring launch", "world_size": 2, "hosts": [[0, 1]]}
    assert found["limit"]["kind"] == "raw socket" and found["limit"]["gigabytes_per_second"] > 0
    assert [each["op"] for each in found["results"]] == list(FACTORS)
    for each in found["results"]:
        assert (each["size"], each["dtype"]) == (8192, "float16") and each["microseconds"] > 0
        assert each["count"] * 2 * (1 if each["op"] in ("all_reduce", "broadcast", "reduce") else 2) == 8192
        assert each["algbw"] == pytest.approx(8192 / each["microseconds"] / 1e3)
        assert each["busbw"] == pytest.approx(each["algbw"] * FACTORS[each["op"]](2))
        assert each["share_of_limit"] == pytest.approx(each["busbw"] / found["limit"]["gigabytes_per_second"])


@pytest.mark.parametrize("ranks, op, factor", [(2, "all_reduce", 1), (4, "all_reduce", 1.5), (4, "broadcast", 1)])
def test_factors_of_nccl_tests(ranks, op, factor):
    assert FACTORS[op](ranks) == factor


def test_the_algorithm_wanted(start):
    options = ["--op", "all_reduce", "--sizes", "4,1M", "--json"]
    found = document(start([*BENCH, "-n", "2", *options], TFRING_ALGORITHM="bruck"))
    assert [each["algorithm"] for each in found["results"]] == ["bruck", "bruck"]


def test_two_ranks_on_each_of_two_hosts(start):
    problem = namespaces.why_not()
    if problem:
        pytest.skip(f"no network namespaces: {problem}")
    with namespaces.hosts(2) as hosts:
        addresses = [f"{hosts[rank % 2].name}:{20600 + rank}" for rank in range(4)]  # round-robin
        secret = "the four of them know it"
        command = [*BENCH, "--op", "all_reduce", "--sizes", "4,4M", "--json"]
        first, *others = [
            start(hosts[rank % 2].command(*command), TF_CONFIG=tf_config(addresses, rank), TFRING_SECRET=secret)
            for rank in range(4)
        ]
        found = document(first)
        assert found["cluster"] == {"source": "TF_CONFIG", "world_size": 4, "hosts": [[0, 2], [1, 3]]}
        assert found["limit"]["kind"] == "raw socket"
        assert [each["algorithm"] for each in found["results"]] == ["flat", "two_level"]
        assert [ended(each) for each in others] == [("", "")] * 3


def test_a_plot(start, tmp_path, all_packages):
    file = tmp_path / "bench.png"
    ended(start([*BENCH, "-n", "2", "--op", "all_reduce,broadcast", "--sizes", "4,4K", "--plot", str(file)]))
    assert file.read_bytes().startswith(b"\x89PNG\r\n")


def test_a_plot_without_matplotlib(start, tmp_path):
    (tmp_path / "sitecustomize.py").write_text("import sys\nsys.modules['matplotlib'] = None\n")
    path = f"{tmp_path}:{environment().get('PYTHONPATH', '')}"
    out, err = ended(start([*BENCH, "-n", "2", "--plot", str(tmp_path / "bench.png")], PYTHONPATH=path), 2)
    assert out == "" and "pip install matplotlib" in err and not (tmp_path / "bench.png").exists()


def test_a_plot_nowhere(start, all_packages):
    out, err = ended(start([*BENCH, "-n", "2", "--plot", "/nowhere/bench.png"]), 2)
    assert out == "" and "cannot write a file in /nowhere" in err


@pytest.mark.parametrize(
    "options, message",
    [
        ([], "tfring bench -n 2"),
        (["--op", "all_sum"], "not one of the collectives all_reduce, all_gather"),
        (["--sizes", "4,4X"], "'4X' is not a whole number of bytes"),
        (["--sizes", "0"], "'0' is not a whole number of bytes"),
        (["--dtype", "string"], "invalid choice: 'string'"),
    ],
)
def test_misuse(start, options, message):
    out, err = ended(start([*BENCH, *options]), 2)
    assert out == "" and message in err
