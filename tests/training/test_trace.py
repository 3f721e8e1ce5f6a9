"""`RingStrategy(trace=...)` in real training, and what `tfring report` makes of it."""

from __future__ import annotations

import collections
import json
import pathlib
import re
import shutil
import sys
import time

import pytest
from common import skewed_rows
from harness import strategy, workers
from test_steps import bits, small_model

from tfring.launch import cli
from tfring.report import files, sentences, timeline
from tfring.ring import clocks, trace


def trained(folder, steps_per_execution=1):
    """Several buckets, validation, two epochs; with a trace or without."""
    import keras

    ring = strategy(trace=folder, bucket_bytes=64)
    keras.utils.set_random_seed(3)
    x, y = skewed_rows()
    with ring.scope():
        model = small_model("adam", steps_per_execution=steps_per_execution)
    model.fit(x, y, epochs=2, batch_size=10, verbose=0, validation_data=(x[:30], y[:30]))
    counts = [channel.communicator.statistics()["collectives"] for channel in ring.ring.channels]
    ring.close()
    return bits(model), counts


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """The folder of a traced run, and what its ranks returned."""
    folder = tmp_path_factory.mktemp("trace")
    return folder, workers(2).run(trained, str(folder))


def test_tracing_changes_no_bit_and_no_number_of_collectives(run):
    _, traced = run
    for (got, (control, gradients)), (want, (plain_control, plain_gradients)) in zip(
        traced, workers(2).run(trained, None), strict=True
    ):
        assert got == want
        assert gradients == plain_gradients
        # The clock's own, before and after: gathers, and the number of the run.
        control["all_gather"] -= 2 * (clocks.ROUNDS + 1)
        control["broadcast"] -= 1
        assert control == plain_control


def with_metrics(folder):
    import keras

    ring = strategy(trace=folder)
    with ring.scope():
        model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(3, activation="relu"), keras.layers.Dense(2)])
        metrics = ["accuracy", keras.metrics.SparseTopKCategoricalAccuracy(1)]
        model.compile("adam", keras.losses.SparseCategoricalCrossentropy(from_logits=True), metrics=metrics)
    x, y = skewed_rows(64)
    model.fit(x, y[:, 0] > 0, batch_size=8, verbose=0)
    ring.close()


def test_a_step_exchanges_its_status_and_gradients_alone(tmp_path, capsys):
    """Metrics are reduced at the end of an epoch, and reading a variable exchanges nothing."""
    workers(2).run(with_metrics, str(tmp_path))
    collectives = chrome(tmp_path, capsys)[1]["collectives"]
    assert {each["name"] for each in collectives if each["calls"] >= 8} - {"initial value of a variable"} == {
        "status",
        "gradients/bucket_0",
    }


def chrome(folder, capsys):
    """The trace, and the document, as the command makes them."""
    file = folder / "trace.json"
    assert cli.main(["report", str(folder), "--json", "--trace", str(file)]) == 0
    return json.loads(file.read_text()), json.loads(capsys.readouterr().out)


def test_the_trace_is_sound(run, capsys):
    folder, _ = run
    found, document = chrome(folder, capsys)
    assert found["displayTimeUnit"] == "ms"
    names = {(e["pid"], e["tid"]): e["args"]["name"] for e in found["traceEvents"] if e["name"] == "thread_name"}
    threads = collections.defaultdict(list)
    for event in found["traceEvents"]:
        assert event["ph"] in ("X", "M") and event["ts"] >= 0
        if event["ph"] == "X":
            assert event["dur"] >= 0
            threads[event["pid"], names[event["pid"], event["tid"]]].append(event)
    for pid in (0, 1):
        assert {name for p, name in threads if p == pid} == {
            *("Python: steps", "what the step does", "input", "collectives: control", "collectives: gradients")
        }
    for events in threads.values():  # the spans of a thread lie inside or beside each other
        open_until = []
        for event in sorted(events, key=lambda e: (e["ts"], -e["dur"])):
            while open_until and open_until[-1] <= event["ts"] + 0.002:
                open_until.pop()
            assert not open_until or event["ts"] + event["dur"] <= open_until[-1] + 0.002
            open_until.append(event["ts"] + event["dur"])
    calls = {
        pid: [e for (p, _), events in threads.items() if p == pid for e in events if e["cat"] == "collective"]
        for pid in (0, 1)
    }
    assert len(calls[0]) == len(calls[1]) > 50
    for event in calls[0] + calls[1]:
        args = event["args"]
        assert args["waited_us"] >= 0 and args["added_us"] >= 0 and args["moved_us"] >= 0
        assert args["waited_us"] + args["moved_us"] + args["added_us"] <= event["dur"] + 0.01
        assert args["last"] == 1 - event["pid"]
    # Both ranks' versions of a collective overlap. Groups are not in this run, so number and name tell it.
    versions = [{(e["tid"], e["name"], e["args"]["sequence"]): e for e in calls[pid]} for pid in (0, 1)]
    assert versions[0].keys() == versions[1].keys()
    for key, mine in versions[0].items():
        theirs = versions[1][key]
        assert mine["ts"] <= theirs["ts"] + theirs["dur"] and theirs["ts"] <= mine["ts"] + mine["dur"]
    # What the document says: 9 batches an epoch, 3 of validation, and nothing of a step is counted twice.
    assert document["missing"] == [] and document["ended"] == [0, 1] and document["lost"] == {"0": 0, "1": 0}
    for kind, count in (("train", 18), ("test", 6)):
        for row in document["steps"][kind]["ranks"].values():
            assert row["count"] + row["built"] == count and row["built"] >= 1
            parts = sum(row[name] for name in ("input", "Python", "dispatch", "compute", "waiting", "moving", "adding"))
            assert parts == pytest.approx(row["milliseconds"]) and row["milliseconds"] > 0
            assert sum(row["waits_for"].values()) == pytest.approx(row["waiting"])
    for row in document["steps"]["train"]["ranks"].values():
        assert row["gradients"] > 0 and 0 <= row["gradients_hidden_share"] <= 1 and row["input"] > 0
    assert document["summary"][0].startswith("The run trained for 18 steps, ") and 3 <= len(document["summary"]) <= 5
    gradients = [c for c in document["collectives"] if c["ring"] == "gradients"]
    assert gradients and all(c["calls"] == 18 and c["kind"] == "all_reduce" for c in gradients)


def test_steps_of_one_execution_draw_their_own_batches(tmp_path):
    workers(2).run(trained, str(tmp_path), 3)
    for rank in files.read(tmp_path).ranks:
        assert len([step for step in rank.steps if step.kind == "train"]) == 6
        assert rank.totals["input"]["count"] >= 18 + 6
        assert len([call for call in rank.calls if call.name == "gradients/bucket_0"]) == 18


def steps_of_all_kinds(folder, watches):
    """Steps of `predict`, whose outputs wait for the end unless a callback sees them, and of single batches."""
    import keras

    ring = strategy(trace=folder)
    x, y = skewed_rows()
    with ring.scope():
        model = small_model(steps_per_execution=2 if watches else 1)
    watching = keras.callbacks.LambdaCallback(on_predict_batch_end=lambda batch, logs: None)
    for _ in range(2):
        model.predict(x[:50], batch_size=10, verbose=0, callbacks=[watching] if watches else [])
    for function in (model.test_on_batch, model.train_on_batch):
        for _ in range(3):
            function(x[:10], y[:10])
    ring.close()


@pytest.mark.parametrize(
    ("watches", "built"),
    [(False, [True] + 9 * [False]), (True, [True, False, True, False, False, False])],  # of 2, 2 and 1 batches
)
def test_a_step_that_builds_a_graph_is_not_in_the_means(watches, built, tmp_path, capsys):
    workers(2).run(steps_of_all_kinds, str(tmp_path), watches)
    document = chrome(tmp_path, capsys)[1]
    expected = {"predict": built, "test": [True, False, False], "train": [True, False, False]}
    for rank in files.read(tmp_path).ranks:
        for kind, flags in expected.items():
            assert [step.built for step in rank.steps if step.kind == kind] == flags, kind
            row, total = document["steps"][kind]["ranks"][str(rank.rank)], rank.totals["steps"][kind]
            assert (row["count"], row["built"]) == (flags.count(False), flags.count(True))
            assert (total["count"], total["built"]) == (flags.count(False), flags.count(True))
    assert cli.main(["report", str(tmp_path)]) == 0
    title = f"predict: mean milliseconds of {built.count(False)} steps (without {built.count(True)} in which a graph"
    assert title in capsys.readouterr().out


def slow_input(folder):
    """Rank 1's batches come late."""
    import numpy as np
    import tensorflow as tf

    ring = strategy(trace=folder)
    x, y = skewed_rows()

    def sleep(x, y):
        if ring.cluster.rank == 1:
            time.sleep(0.1)
        return x, y

    def prepare(x, y):
        shapes = x.shape, y.shape
        x, y = tf.numpy_function(sleep, [x, y], [np.float32, np.float32])
        return tf.ensure_shape(x, shapes[0]), tf.ensure_shape(y, shapes[1])

    dataset = tf.data.Dataset.from_tensor_slices((x[:80], y[:80])).batch(10, drop_remainder=True).map(prepare)
    options = tf.data.Options()
    options.experimental_distribute.auto_shard_policy = tf.data.experimental.AutoShardPolicy.OFF
    with ring.scope():
        model = small_model()
    model.fit(dataset.with_options(options), epochs=2, verbose=0)
    ring.close()


def test_the_report_names_the_rank_with_the_slow_input(tmp_path, capsys):
    workers(2).run(slow_input, str(tmp_path))
    document = chrome(tmp_path, capsys)[1]
    first, second = (document["steps"]["train"]["ranks"][rank] for rank in "01")
    assert second["input"] > 30 and second["input"] > 2 * first["input"]
    assert first["waits_for"]["1"] > 20 and first["waiting"] > 2 * second["waiting"]
    assert document["findings"][0].startswith("train: the others wait for rank 1, ")
    assert "its input takes" in document["findings"][0]
    assert cli.main(["report", str(tmp_path)]) == 0
    out = capsys.readouterr().out
    assert f"rank 0 waits {first['waiting']:.2f} ms a step, {first['waits_for']['1']:.2f} of it for rank 1" in out
    assert document["findings"][0] in out
    # First what the run did and what to look at, then tables.
    did, communication, slow, advice = document["summary"]
    steps = first["count"] + first["built"]
    assert re.fullmatch(rf"The run trained for {steps} steps, [\d.]+ per second, so [\d.]+ s not counting the .*", did)
    exposed = r"Exposed communication \(not overlapped by computation\) takes \d+ % of a step: \d+ % is waiting "
    assert re.match(rf"{exposed}for other ranks", communication)
    assert re.fullmatch(r"Rank 1 is slow, by [\d.]+ ms a step, and the others wait for it\.", slow)
    assert advice == "Its input is slow: look at the files that it reads and their preprocessing (docs/data.md)."
    _, summary, table, *_ = out.split("\n\n")
    assert " ".join(summary.split()) == " ".join(document["summary"]) and table.startswith("train: mean ")


def squares(folder):
    """A loss with a value for each pair of rows, whose sums over the rows before need those of all rows."""
    import tensorflow as tf

    def products(rows):
        return rows @ tf.transpose(rows)

    converted = tf.autograph.to_graph(products)  # its file has another name on each rank

    def loss(y_true, y_pred):
        pairs = converted(y_pred)
        sums = tf.cumsum(pairs, 0)
        return tf.reduce_mean(sums) + tf.reduce_mean((y_true - y_pred) ** 2)

    ring = strategy(trace=folder)
    x, y = skewed_rows()
    with ring.scope():
        model = small_model()
        model.compile("sgd", loss)
    model.fit(x[:90], y[:90], batch_size=30, verbose=0)
    ring.close()


def test_an_exchange_of_a_step_names_its_line_and_larger_batches_are_not_advised(tmp_path, capsys):
    workers(2).run(squares, str(tmp_path))
    document = chrome(tmp_path, capsys)[1]
    lines = pathlib.Path(__file__).read_text().splitlines()
    [line] = [number for number, text in enumerate(lines, 1) if text.endswith("sums = tf.cumsum(pairs, 0)")]
    names = [each["name"] for each in document["collectives"] if each["name"].startswith("step, exchange ")]
    [name] = [name for name in names if name.endswith(f": rows of batch x batch for Cumsum (test_trace.py:{line})")]
    assert f"step, exchange 1: rows for MatMul (test_trace.py:{line - 1})" in names
    for change in ({"waiting": 40}, {"moving": 30}, {"dispatch": 60}):
        told = " ".join(sentences.of({**of_ranks(change, change), "collectives": document["collectives"]}))
        assert "No rank is slower than the others" in told and "larger batch" not in told
        if "dispatch" not in change:
            assert f'first of all "{name}", which grows with the square of the batch.' in told
    gradients = [each for each in document["collectives"] if each["ring"] == "gradients"]
    assert "use a larger batch" in " ".join(
        sentences.of({**of_ranks({"waiting": 40}, {"waiting": 40}), "collectives": gradients})
    )
    whole = [*gradients, {**document["collectives"][0], "name": "the whole batch"}]
    told = " ".join(sentences.of({**of_ranks({"waiting": 40}, {"waiting": 40}), "collectives": whole}))
    assert "Some steps are computed from the whole batch on each rank" in told and "larger batch" not in told


def of_ranks(*changes, servers=0, kind="train"):
    """A document with what the sentences read; every rank's step takes 100 ms, of which it computes the rest."""
    ranks = {}
    for rank, change in enumerate(changes):
        row = {**dict.fromkeys(("input", "Python", "dispatch", "waiting", "server", "moving", "adding"), 0.0), **change}
        row.setdefault("milliseconds", 100.0)
        row["compute"] = row["milliseconds"] - sum(value for name, value in row.items() if name != "milliseconds")
        ranks[str(rank)] = {**row, "count": 50, "waits_for": {str((rank + 1) % len(changes)): row["waiting"]}}
    whole = {
        rank: {"steps": {kind: {"count": 60, "milliseconds": row["milliseconds"]}}} for rank, row in ranks.items()
    }
    return {"steps": {kind: {"ranks": ranks}}, "whole_run": whole, "num_servers": servers, "collectives": []}


@pytest.mark.parametrize(
    ("document", "says"),
    [
        (of_ranks({}, {}), ["takes 0 % of a step", "No rank is slower", "computing, which is what a step is for"]),
        (of_ranks({"input": 60}, {"input": 70}), ["No rank is slower", "Most of the rest is input: prefetch"]),
        (of_ranks({"dispatch": 60}, {"dispatch": 60}), ["Most of the rest is the start of steps"]),
        (
            of_ranks({"waiting": 40}, {"waiting": 40}),
            ["takes 40 % of a step: 40 % is waiting for other ranks", "in turns. Give each its own"],
        ),
        (of_ranks({"waiting": 50}, {"Python": 55}), ["Rank 1 is slow, by 50 ms a step, and the others", "a callback"]),
        (
            of_ranks({"moving": 30}, {"adding": 30}),
            ["takes 30 % of a step: 0 % is waiting for other ranks", "Measure the network"],
        ),
        (of_ranks({"server": 30}, {"server": 30}, servers=1), ["requests to the servers below"]),
        (of_ranks({"milliseconds": 20.0}, {"Python": 80}), ["Rank 1 is slow, by 80 ms a step, and no rank waits for"]),
        (of_ranks({"Python": 90}), ["60 steps, 10 per second, so 6 s", "Most of a step is Python"]),
        (of_ranks({}, {}, kind="predict"), ["The run predicted for 60 steps"]),
    ],
)
def test_what_a_run_did_and_what_to_look_at(document, says):
    told = sentences.of(document)
    assert 2 <= len(told) <= 5
    for words in says:
        assert words in " ".join(told), told


def test_a_run_without_steps():
    row = {"collectives": 7, "seconds_in_collectives": 1.5, "seconds_waited_for": {"1": 0.5}}
    [told] = sentences.of({"steps": {}, "whole_run": {"0": row}, "num_servers": 0})
    assert "but 7 collectives. They took 1.5 s on the slowest rank; a rank waited for others for at most 0.5 s" in told


def many_steps(folder):
    ring = strategy(trace=folder)
    x, y = skewed_rows(num_rows=2 * (trace.STEPS_KEPT + 15))
    with ring.scope():
        model = small_model()
    for _ in range(2):
        model.fit(x, y, batch_size=2, verbose=0)
    for _ in range(3):
        model.train_on_batch(x[:4], y[:4])


def test_spans_end_and_totals_go_on(tmp_path):
    workers(2).run(many_steps, str(tmp_path))
    workers(2).run(time.sleep, 0)  # the strategy that nobody closed is closed by now
    for rank in files.read(tmp_path).ranks:
        assert len(rank.steps) == 2 * trace.STEPS_KEPT + 3
        total = rank.totals["steps"]["train"]
        assert total["count"] + total["built"] == 2 * (trace.STEPS_KEPT + 15) + 3
        buckets = [call for call in rank.calls if call.name == "gradients/bucket_0"]
        assert len(buckets) == len(rank.steps)
        [totals] = [t for t in rank.totals["collectives"] if t["name"] == "gradients/bucket_0"]
        assert totals["count"] == 2 * (trace.STEPS_KEPT + 15) + 3
        assert rank.ended and (tmp_path / f"rank-{rank.rank}.jsonl").stat().st_size < 2e6


def test_folders_that_make_no_report(run, tmp_path, capsys):
    folder, _ = run

    def said(code):
        assert cli.main(["report", str(tmp_path)]) == code
        out, err = capsys.readouterr()
        return err if code else out

    assert "holds no file rank-<rank>.jsonl" in said(1)
    shutil.copy(folder / "rank-1.jsonl", tmp_path)
    assert "Missing: the files of rank 0." in said(0)
    lines = (folder / "rank-0.jsonl").read_text().splitlines()
    other = {**json.loads(lines[0]), "run": 1}
    (tmp_path / "rank-0.jsonl").write_text("\n".join([json.dumps(other), *lines[1:]]))
    assert "holds files of 2 runs" in said(1)
    (tmp_path / "rank-0.jsonl").write_text("\n".join(lines[:-3]) + '\n{"type": "ca')
    assert "Cut short: rank 0 has not ended by itself" in said(0)
    (tmp_path / "rank-0.jsonl").write_text("\n".join([lines[0], "{", *lines[1:]]))
    assert "rank-0.jsonl, line 2, is not JSON" in said(1)
    (tmp_path / "rank-0.jsonl").write_text('{"type": "other"}\n')
    assert "is not a trace that this version of tfring reads" in said(1)


@pytest.mark.parametrize("beside", [50, 49])
def test_a_collective_is_hidden_where_an_eighth_of_it_was_computed_beside(beside):
    def bucket(number, begin, end, beside):
        numbers = (begin, end, end - begin, 0, beside, 4, 4, 4, number)
        return files.Call(*numbers, "all_reduce", "ring", 1, 0, timeline.GRADIENTS, "", f"bucket {number}")

    calls = [bucket(1, 200, 600, beside), bucket(2, 700, 900, 0)]
    marks = [files.Mark(f"{trace.READY} bucket 2", 650)]  # the last gradient was there, and the thread still busy
    steps = [files.Step("train", 0, 0, 1000, False)]
    [step] = timeline.steps(files.Rank(0, "here", calls, marks, steps, [], {}, {}, {}, True, 0))
    waiting = [(span.begin, span.end) for span in step.spans if span.category == "waiting"]
    assert (step.gradients, step.beside) == (600, beside)
    if beside >= 400 / 8:
        assert step.hidden == 400 and waiting == [(700, 900)]
    else:
        assert step.hidden == 0 and waiting == [(200, 600), (700, 900)]


def test_a_plot_without_matplotlib(run, monkeypatch, tmp_path, capsys):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    assert cli.main(["report", str(run[0]), "--plot", str(tmp_path / "steps.png")]) == 1
    assert "pip install matplotlib" in capsys.readouterr().err
