"""One rank of one contestant: `fit` of pictures in memory, in TFRecords, in a folder. Else as training/worker.py."""

from __future__ import annotations

import pathlib
import sys
import tempfile
import time

sys.path.insert(0, str(pathlib.Path(__file__).parents[1] / "training"))

import contest
import models
import numpy as np
import worker

TASK = models.TASKS["jpeg"]
FILES, SIDE = 1536, 256


class Pictures:
    """Mixed into a contestant of training/worker.py."""

    def pictures(self, kind: str, steps: int) -> float:
        """Returns the seconds of one call of `fit`; one of few steps is made before, untimed."""
        self.fitted = getattr(self, "fitted", {})
        if (kind, steps) not in self.fitted:
            model, pictures = self.compiled(TASK), self.dataset(kind, steps)
            model.fit(pictures, steps_per_epoch=3, verbose=0, callbacks=self.callbacks())
            self.fitted[kind, steps] = lambda: model.fit(pictures, verbose=0, callbacks=self.callbacks())
        begin = time.perf_counter()
        self.fitted[kind, steps]()
        return time.perf_counter() - begin

    def dataset(self, kind: str, steps: int):
        """Returns the batches; of a program that takes its share itself, those of its rows."""
        tf, data = self.tf, self.tf.data
        batch = TASK.batch // self.parts
        auto = {"num_parallel_calls": data.AUTOTUNE}

        def decode(file, label):
            picture = tf.io.decode_jpeg(file, channels=3)
            return tf.image.resize(tf.cast(picture, tf.float32) / 255, [64, 64]), label

        def parse(record):
            label = tf.cast(tf.io.decode_raw(tf.strings.substr(record, 0, 1), tf.uint8)[0], tf.int64)
            return decode(tf.strings.substr(record, 1, -1), label)

        def rows(dataset):
            return dataset.repeat().take(steps * batch)

        if kind == "memory":
            dataset = rows(data.Dataset.from_tensor_slices(self.files())).map(decode, **auto)
        elif kind == "records":
            dataset = rows(data.TFRecordDataset(self.paths(kind))).map(parse, **auto)
        else:
            read = self.keras.utils.image_dataset_from_directory
            pictures = read(self.paths(kind), batch_size=None, image_size=(64, 64), shuffle=False)
            dataset = rows(pictures).map(lambda picture, label: (picture / 255, label), **auto)
        return dataset.batch(batch).prefetch(2)

    def files(self) -> tuple[list[bytes], np.ndarray]:
        """Returns JPEG files of some 30 kB, and their labels; as `dataset`."""
        tf = self.tf
        noise = np.random.default_rng(0).integers(0, 255, (SIDE // 4, SIDE // 4, 3), dtype=np.uint8)
        image = tf.cast(tf.image.resize(noise, [SIDE, SIDE]), tf.uint8)
        shifts = range(self.part, FILES, self.parts)
        files = [tf.io.encode_jpeg(tf.roll(image, i, 0), quality=92).numpy() for i in shifts]
        return files, np.arange(self.part, FILES, self.parts) % 10

    def paths(self, kind: str):
        """Returns the names of four files of records, or of a folder."""
        self.folder = getattr(self, "folder", None) or tempfile.TemporaryDirectory(prefix="pictures-")
        files, labels = self.files()
        path = pathlib.Path(self.folder.name) / kind
        if kind == "records":
            for number in range(4):
                with self.tf.io.TFRecordWriter(f"{path}-{number}") as writer:
                    for file, label in list(zip(files, labels))[number::4]:  # noqa: B905 (old Pythons)
                        writer.write(bytes([label]) + file)
            return [f"{path}-{number}" for number in range(4)]
        for number, (file, label) in enumerate(zip(files, labels)):  # noqa: B905
            (path / str(label)).mkdir(parents=True, exist_ok=True)
            (path / f"{label}/{number:04}.jpg").write_bytes(file)
        return str(path)

    def size(self) -> float:
        """Returns the mean bytes of a file."""
        return float(np.mean(list(map(len, self.files()[0]))))


def main() -> None:
    name, *where = contest.place()
    worker.take_a_core(where[0])
    maker = worker.MAKERS[name]
    contestant = type(maker.__name__, (Pictures, maker), {})(*where)
    contest.serve(where[0], facts=contestant.facts, pictures=contestant.pictures, size=contestant.size)


if __name__ == "__main__":
    main()
