"""MovieLens-100K: 100,000 ratings that 943 people gave 1,682 movies in 1997 and 1998.

The data is GroupLens's (Harper and Konstan, "The MovieLens Datasets: History and Context", 2015). It is taken
out of the wheel of RecBole, which carries it as an example; RecBole itself is not installed.
"""

from __future__ import annotations

import csv
import os
import pathlib
import subprocess
import sys
import tempfile
import zipfile
from typing import NamedTuple

import numpy as np

DEFAULT_FOLDER = pathlib.Path(__file__).resolve().parents[1] / "data" / "ml-100k"

_WHEEL = "recbole-1.2.1-py3-none-any.whl"
_REQUIREMENT = "recbole==1.2.1"
_FOLDER_IN_WHEEL = "recbole/dataset_example/ml-100k"
_ROWS = {"ml-100k.user": 943, "ml-100k.item": 1_682, "ml-100k.inter": 100_000}
_DOWNLOAD_SECONDS = 300

_AGE_GROUPS = (18, 25, 35, 45, 50, 56)  # GroupLens's own, in MovieLens-1M
_HELD_OUT = 0.1


class DataError(Exception):
    """The data is not there and cannot be had, or is not what it should be."""


class Ratings(NamedTuple):
    """Some of the ratings.

    Attributes:
      features: an array for each input of the model: "user", "age", "gender", "occupation", "movie" and
        "year" int32 `[n]`, categories numbered from 0; "genres" float32 `[n, num_genres]` of 0 and 1.
      stars: float32 `[n]`, 1 to 5.
    """

    features: dict[str, np.ndarray]
    stars: np.ndarray


class MovieLens(NamedTuple):
    """The ratings, split by time, and the number of categories of each feature."""

    train: Ratings
    held_out: Ratings
    num_categories: dict[str, int]


def fetch(folder: pathlib.Path = DEFAULT_FOLDER) -> None:
    """Puts the three files into `folder`, unless they are there. Several processes may try at once.

    Raises:
      DataError: where they cannot be had; says what to do.
    """
    if all((folder / name).exists() for name in _ROWS):
        return
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder) as temporary:
        wheel = folder / _WHEEL
        if not wheel.exists():
            wheel = _download(folder, pathlib.Path(temporary))
        for name in _ROWS:
            extracted = pathlib.Path(temporary) / name
            try:
                with zipfile.ZipFile(wheel) as archive:
                    extracted.write_bytes(archive.read(f"{_FOLDER_IN_WHEEL}/{name}"))
            except (zipfile.BadZipFile, KeyError) as error:
                raise DataError(f"{wheel} is damaged: {error}. Remove it and start again.") from error
            _read(extracted)
        for name in _ROWS:
            os.replace(pathlib.Path(temporary) / name, folder / name)  # whole files only, whoever is looking


def _download(folder: pathlib.Path, destination: pathlib.Path) -> pathlib.Path:
    pip = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary", ":all:"]
    command = [*pip, "--dest", str(destination), _REQUIREMENT]
    try:
        subprocess.run(command, check=True, capture_output=True, text=True, timeout=_DOWNLOAD_SECONDS)
    except subprocess.TimeoutExpired:
        reason = f"not done within {_DOWNLOAD_SECONDS} seconds"
    except subprocess.CalledProcessError as error:
        reason = "\n".join(error.stderr.strip().splitlines()[-3:])
    else:
        return destination / _WHEEL
    raise DataError(
        f"MovieLens-100K could not be downloaded. Tried: {' '.join(command[1:])}\n{reason}\n"
        "Do one of these and start again:\n"
        "  - run it where pip reaches a package index or a mirror (`pip config set global.index-url URL`);\n"
        f"  - put the file {_WHEEL}, downloaded elsewhere, into {folder};\n"
        f"  - put {', '.join(_ROWS)} into {folder}."
    )


def load(folder: pathlib.Path = DEFAULT_FOLDER, max_ratings: int | None = None) -> MovieLens:
    """Reads the files that `fetch` put into `folder`.

    Each user's newest tenth of ratings is held out, the older ones train. (With one cut in time for all users
    71 % of the held-out ratings would come from people who have none to learn from: another question.)

    Args:
      folder: where the files are.
      max_ratings: keeps the oldest ones only, for a quick try.

    Raises:
      DataError: where the files are missing or damaged.
    """
    users = _read(folder / "ml-100k.user")
    movies = _read(folder / "ml-100k.item")
    ratings = _read(folder / "ml-100k.inter").astype(np.int64)
    ratings = ratings[np.lexsort((ratings[:, 1], ratings[:, 0], ratings[:, 3]))][:max_ratings]  # oldest first

    user_features = {
        "user": users[:, 0].astype(int) - 1,  # the files count from 1, in order
        "age": np.digitize(users[:, 1].astype(int), _AGE_GROUPS),
        "gender": _categories(users[:, 2]),
        "occupation": _categories(users[:, 3]),
    }
    movie_features = {
        "movie": movies[:, 0].astype(int) - 1,
        "year": _categories(movies[:, 2]),
    }
    num_categories = {k: int(v.max()) + 1 for k, v in {**user_features, **movie_features}.items()}

    user, movie = ratings[:, 0] - 1, ratings[:, 1] - 1
    features = {k: v[user].astype(np.int32) for k, v in user_features.items()}
    features |= {k: v[movie].astype(np.int32) for k, v in movie_features.items()}
    features["genres"] = _genres(movies[:, 3])[movie]
    stars = ratings[:, 2].astype(np.float32)

    def only(rows):
        return Ratings({k: v[rows] for k, v in features.items()}, stars[rows])

    held_out = _newest_of_each_user(user)
    return MovieLens(only(~held_out), only(held_out), num_categories)


def _read(path: pathlib.Path) -> np.ndarray:
    """The rows of a file below its header, as text `[rows, columns]`."""
    if not path.exists():
        raise DataError(f"There is no {path}. `fetch` puts it there.")
    with path.open(encoding="utf-8", newline="") as file:
        _, *rows = csv.reader(file, delimiter="\t", quoting=csv.QUOTE_NONE)
    if len(rows) != _ROWS[path.name]:
        raise DataError(
            f"{path} has {len(rows):,} rows, and that of MovieLens-100K {_ROWS[path.name]:,}. Remove it and start "
            "again."
        )
    return np.array(rows)


def _categories(column: np.ndarray) -> np.ndarray:
    """Numbers the distinct texts of a column from 0."""
    return np.unique(column, return_inverse=True)[1]


def _genres(column: np.ndarray) -> np.ndarray:
    """Texts such as "Action Comedy" as float32 `[rows, num_genres]`, 1 for each genre named."""
    named = [text.split() for text in column]
    genres = sorted(set().union(*named))
    return np.array([[genre in names for genre in genres] for names in named], np.float32)


def _newest_of_each_user(user: np.ndarray) -> np.ndarray:
    """Marks the last tenth of each user's rows."""
    newest = np.zeros(len(user), bool)
    for rows in (np.flatnonzero(user == u) for u in np.unique(user)):
        newest[rows[len(rows) - int(_HELD_OUT * len(rows)) :]] = True
    return newest
