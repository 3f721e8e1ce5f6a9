"""keras.utils.get_file, called by all workers at once."""

import os
import zipfile

import pytest
from harness import workers

FILES, BYTES = 20, 500_000


def download(folder):
    """As Keras' datasets: the archive alone, then one that is extracted; each is read at once."""
    import keras

    import tfring

    tfring.RingStrategy()  # from the first on
    url = f"file://{folder}/data.zip"
    for _ in range(3):
        path = keras.utils.get_file("a.zip", url, cache_dir=folder)
        with zipfile.ZipFile(path) as archive:
            assert archive.testzip() is None
        extracted = keras.utils.get_file("b.zip", url, cache_dir=folder, extract=True)
        assert os.path.basename(extracted) == "b_extracted"
        for i in range(FILES):
            with open(os.path.join(extracted, "in", f"{i}.bin"), "rb") as file:
                assert file.read() == bytes([i]) * BYTES
    return sorted(name for name in os.listdir(os.path.join(folder, "datasets")) if name[0] != ".")


@pytest.mark.parametrize("n", [2, 3])
def test_files_that_all_workers_download_are_whole(tmp_path, n):
    with zipfile.ZipFile(tmp_path / "data.zip", "w") as archive:
        for i in range(FILES):
            archive.writestr(f"in/{i}.bin", bytes([i]) * BYTES)
    assert workers(n).run(download, str(tmp_path)) == [["a.zip", "b.zip", "b_extracted"]] * n
