"""The example learns, and its figures do not depend on the number of workers."""

from __future__ import annotations

import json
import pathlib
import subprocess
import sys

import numpy as np
import pytest

EXAMPLES = pathlib.Path(__file__).resolve().parents[2] / "examples"
LAUNCH_SECONDS = 100
TOLERANCE = 1e-3

sys.path.insert(0, str(EXAMPLES))
import compare_workers  # noqa: E402
import movielens_data  # noqa: E402
from movielens_quality import ndcg  # noqa: E402


@pytest.fixture(scope="session")
def data_folder():
    """MovieLens-100K where the example keeps it; downloaded where it is not there."""
    movielens_data.fetch()
    return movielens_data.DEFAULT_FOLDER


@pytest.fixture(scope="session")
def data(data_folder):
    return movielens_data.load(data_folder)


@pytest.fixture(scope="module")
def runs(data_folder, tmp_path_factory):
    """Figures of a short training, alone and with two workers."""
    folder = tmp_path_factory.mktemp("movielens")
    arguments = ["--epochs", "2", "--max-ratings", "20000", "--learning-rate", "0.01", "--output-dir", folder]
    alone = [sys.executable, EXAMPLES / "movielens.py"]
    two = [sys.executable, "-m", "tfring.launch", "-n", "2", EXAMPLES / "movielens.py"]
    figures = []
    for number, command in enumerate([alone, two]):
        file = folder / f"{number}.json"
        done = subprocess.run(
            [*command, *arguments, "--json", file], capture_output=True, text=True, timeout=LAUNCH_SECONDS
        )
        assert done.returncode == 0, done.stdout + done.stderr
        figures.append({**json.loads(file.read_text()), "output": done.stdout})
    return figures


def test_figures_are_those_of_one_worker(runs):
    alone, two = runs
    assert (alone["workers"], two["workers"]) == (1, 2)
    for metric, value in alone["metrics"].items():
        assert two["metrics"][metric] == pytest.approx(value, abs=TOLERANCE)
    for curve, values in alone["history"].items():
        assert two["history"][curve] == pytest.approx(values, abs=TOLERANCE)
    assert two["baselines"] == alone["baselines"]


def test_it_learns(runs):
    for figures in runs:
        assert figures["metrics"]["rmse"] < figures["baselines"]["mean rating"]["rmse"] - 0.1
        assert figures["history"]["train_rmse"][1] < figures["history"]["train_rmse"][0]


def test_workers_send_bytes(runs):
    alone, two = runs
    assert alone["bytes_sent"] == [0]
    assert len(two["bytes_sent"]) == 2
    # 36 steps: more than counts of rows, less than 60,234 float32 weights in each of them.
    assert all(36 * 10_000 < sent < 36 * 4 * 60_234 for sent in two["bytes_sent"])


def test_only_rank_0_prints(runs):
    assert runs[1]["output"].count("this model") == 1


def test_held_out_are_the_newest_ratings_of_each_user(data, data_folder):
    assert (len(data.train.stars), len(data.held_out.stars)) == (90_404, 9_596)
    rows = np.loadtxt(data_folder / "ml-100k.inter", skiprows=1, dtype=np.int64)
    when = {(user - 1, movie - 1): seconds for user, movie, _, seconds in rows}

    def times(ratings, user):
        mine = ratings.features["user"] == user
        return [when[user, movie] for movie in ratings.features["movie"][mine]]

    for user in (0, 404, 942):
        assert max(times(data.train, user)) <= min(times(data.held_out, user))


def test_features_are_those_of_the_files(data):
    assert data.num_categories == {
        "user": 943, "age": 7, "gender": 2, "occupation": 21, "movie": 1682, "year": 73,
    }  # fmt: skip
    assert data.train.features["genres"].shape == (90_404, 19)
    toy_story = data.train.features["movie"] == 0  # Animation, Children's, Comedy
    assert np.all(data.train.features["genres"][toy_story].sum(1) == 3)


def test_ndcg_by_hand():
    user = np.array([7, 7, 7, 9, 9, 8])
    stars = np.array([5, 1, 3, 4, 4, 2])
    # User 9 gave the same to all and user 8 rated once: left out. User 7's movies are ordered 1, 5, 3 stars.
    predicted = np.array([3.0, 4.0, 2.0, 1.0, 2.0, 3.0])
    found = 1 / np.log2(2) + 31 / np.log2(3) + 7 / np.log2(4)
    best = 31 / np.log2(2) + 7 / np.log2(3) + 1 / np.log2(4)
    assert ndcg(user, stars, predicted) == pytest.approx(found / best)
    assert ndcg(user, stars, predicted, places=1) == pytest.approx(1 / 31)
    assert ndcg(user, stars, stars) == 1
    # All alike: each place gets the mean gain.
    alike = 13 * (1 / np.log2(2) + 1 / np.log2(3) + 1 / np.log2(4))
    assert ndcg(user, stars, np.zeros(6)) == pytest.approx(alike / best)


def test_data_that_cannot_be_had_says_what_to_do(tmp_path, monkeypatch):
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path))
    folder = tmp_path / "data"
    with pytest.raises(movielens_data.DataError, match="downloaded elsewhere, into"):
        movielens_data.fetch(folder)
    assert not list(folder.iterdir())


def test_damaged_data_is_refused(tmp_path, data_folder):
    for name in ("ml-100k.user", "ml-100k.item", "ml-100k.inter"):
        (tmp_path / name).write_bytes((data_folder / name).read_bytes())
    lines = (tmp_path / "ml-100k.inter").read_text().splitlines()[:-1]
    (tmp_path / "ml-100k.inter").write_text("\n".join(lines) + "\n")
    with pytest.raises(movielens_data.DataError, match=r"99,999 rows, and .* 100,000"):
        movielens_data.load(tmp_path)


def test_comparison_finds_what_differs():
    def run(rmse, curve):
        return {
            "metrics": {"rmse": rmse, "ndcg_at_10": 0.9},
            "history": {"train_rmse": curve, "held_out_rmse": [1.0, 1.0]},
        }

    same, other, strayed = run(0.95, [1.0, 0.9]), run(0.953, [1.0, 0.9]), run(0.95, [1.01, 0.9])
    assert compare_workers.largest_difference([same, same]) == 0
    assert compare_workers.largest_difference([same, same, other]) == pytest.approx(0.003)
    assert compare_workers.largest_difference([same, strayed]) == pytest.approx(0.01)
