"""Examples of the pages, run as they stand there, with what a reader has: files, a model, a function of their own."""

import pathlib
import re
import textwrap

import numpy as np
import pytest
from common import assert_equal, skewed_rows, train_both
from harness import strategy, workers

DOCS = pathlib.Path(__file__).parents[2] / "docs"


def run_example(page, containing, names):
    """Runs the one example of a page that has a text, and returns the names that it has then."""
    blocks = re.findall(r"^```python\n(.*?)^```", (DOCS / page).read_text(), re.M | re.S)
    [example] = [block for block in blocks if containing in block]
    exec(textwrap.dedent(example), names)
    return names


def drawn_by_replicas(ring, dataset):
    """Returns the rows that this rank draws, as lists by component."""
    rows = []
    for batch in ring.experimental_distribute_dataset(dataset):
        shares = [ring.experimental_local_results(component) for component in batch]
        for share in zip(*shares, strict=True):
            rows += zip(*(component.numpy().tolist() for component in share), strict=True)
    return list(zip(*rows, strict=True))


def records(folder):
    """Returns the numbers of the rows that this rank draws from TFRecords, which each rank reads for itself."""
    import os

    import tensorflow as tf

    import tfring

    def parse(record):
        return tf.io.parse_single_example(record, {"x": tf.io.FixedLenFeature([], tf.int64)})["x"]

    ring = strategy()
    names = {"tf": tf, "tfring": tfring, "strategy": ring, "parse": parse}
    before = os.getcwd()
    os.chdir(folder)  # where the example's `train/` is
    try:
        dataset = run_example("data.md", "AutoShardPolicy.OFF", names)["dataset"]
        [drawn] = drawn_by_replicas(ring, dataset.map(lambda x: (x,)))
    finally:
        os.chdir(before)
    return drawn


def images(folder):
    """Returns the labels that this rank draws of images cut before they are augmented."""
    import keras

    import tfring

    ring = strategy()
    names = {"keras": keras, "tfring": tfring, "folder": f"{folder}/images", "augment": lambda x: x / 255}
    batches = run_example("data.md", "image_dataset_from_directory(folder", names)["batches"]
    pixels, labels = drawn_by_replicas(ring, batches)
    assert np.max(pixels) <= 1
    return labels


@pytest.mark.parametrize("read", [records, images])
def test_each_row_is_drawn_by_one_rank(read, tmp_path):
    import keras
    import tensorflow as tf

    for shard in range(4):
        (tmp_path / "train").mkdir(exist_ok=True)
        with tf.io.TFRecordWriter(str(tmp_path / f"train/{shard}.tfrecord")) as writer:
            for i in range(shard * 5, shard * 5 + 5):
                feature = tf.train.Feature(int64_list=tf.train.Int64List(value=[i]))
                example = tf.train.Example(features=tf.train.Features(feature={"x": feature}))
                writer.write(example.SerializeToString())
    for label in range(7):
        (tmp_path / "images" / f"class {label}").mkdir(parents=True)
        keras.utils.save_img(tmp_path / f"images/class {label}/image.png", np.full((4, 4, 3), 30 * label))
    drawn = workers(2).run(read, str(tmp_path))
    assert sorted(number for rank in drawn for number in rank) == list(range(20 if read is records else 7))
    assert all(drawn)


def losses():
    """Trains with the losses that compare rows, with labels of either shape."""
    import keras
    import tensorflow as tf

    import tfring

    names = {"keras": keras, "tf": tf, "tfring": tfring, "temperature": 0.5}
    run_example("custom_training.md", "def contrastive", names)
    ring = strategy()
    x, y = skewed_rows(41)
    labels = (np.arange(41) % 3).astype("float32")

    def make(loss, units):
        model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(units, "sigmoid")])
        model.compile(keras.optimizers.SGD(0.1), loss)
        return model

    cases = {
        "contrastive, [n]": ("contrastive", 3, labels),
        "contrastive, [n, 1]": ("contrastive", 3, labels[:, None]),
        "dice": ("dice", 1, (y > y.mean()).astype("float32").reshape(41, 1)),
    }
    return {
        case: train_both(ring, lambda loss=loss, units=units: make(names[loss], units), x, targets)
        for case, (loss, units, targets) in cases.items()
    }


def test_losses_that_compare_rows_equal_one_process():
    assert_equal(workers(2).run(losses))


def quick_start(folder):
    """Runs the program of the quick start, which saves a file, and returns the loss that it has then."""
    import os

    before = os.getcwd()
    os.chdir(folder)
    try:
        return run_example("quickstart.md", "tfring.RingStrategy()", {})["loss"]
    finally:
        os.chdir(before)


def test_quick_start_prints_what_the_page_shows(tmp_path):
    printed = set(re.findall(r"rank \d of \d: loss (\S+)", (DOCS / "quickstart.md").read_text()))
    losses = [f"{loss:.4f}" for n in (1, 2) for loss in workers(n).run(quick_start, str(tmp_path))]
    assert set(losses) == printed and len(printed) == 1
    assert (tmp_path / "model.keras").stat().st_size > 1000
