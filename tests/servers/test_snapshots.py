"""Snapshots of a server in files: the last whole one of this job, and what was posted whole."""

import numpy as np
import pytest

from tfring.errors import ConfigurationError
from tfring.servers.snapshots import Snapshots


@pytest.fixture
def snapshots(tmp_path):
    made = Snapshots(str(tmp_path / "folder"), 1)
    made.begin("job")
    return made


def test_round_trip(snapshots, tmp_path):
    assert snapshots.read("job") is None, "there is none yet"
    snapshots.post({"name": "a"}, [np.arange(3.0)])
    snapshots.write({"job": "job", "time": 1.0}, [np.ones(2, "float32")])
    snapshots.write({"job": "job", "time": 2.0}, [np.zeros(2, "float32")])
    again = Snapshots(str(tmp_path / "folder"), 1)  # of a process that is started again
    (head, [array]), [(post, [posted])] = again.read("job")
    assert head["time"] == 2.0 and not array.any()
    assert post["name"] == "a" and posted.tolist() == [0.0, 1.0, 2.0]


def test_another_job_reads_none(snapshots, tmp_path):
    snapshots.write({"job": "job"}, [])
    assert snapshots.read("another") is None
    assert Snapshots(str(tmp_path / "folder"), 0).read("job") is None
    snapshots.begin("another")
    assert snapshots.read("job") is None


def test_what_was_cut_is_left_out(snapshots, tmp_path):
    snapshots.write({"job": "job"}, [np.ones(100)])
    snapshots.post({"name": "a"}, [np.ones(100)])
    snapshots.post({"name": "b"}, [np.ones(100)])
    posts, snapshot = (tmp_path / "folder" / f"server-1.{kind}" for kind in ("posts", "snapshot"))
    posts.write_bytes(posts.read_bytes()[:-1])
    _, found = snapshots.read("job")
    assert [head["name"] for head, _ in found] == ["a"]
    snapshots.post({"name": "c"}, [np.ones(100)])
    assert [head["name"] for head, _ in snapshots.read("job")[1]] == ["a", "c"]
    snapshot.write_bytes(snapshot.read_bytes()[:-100])
    assert snapshots.read("job") is None


def test_a_folder_that_cannot_be_written_is_refused(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigurationError, match="a folder that this server cannot write"):
        Snapshots(str(tmp_path / "file"), 0)
