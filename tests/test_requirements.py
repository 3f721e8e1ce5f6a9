"""No TensorFlow, or one tfring cannot run on: an error with the line to type."""

import subprocess
import sys

import pytest

from tfring._requirements import check_keras, check_version
from tfring.errors import ConfigurationError, UnsupportedTensorFlowError


def test_without_tensorflow_the_error_has_the_line_to_type(tmp_path):
    code = (
        "import sys\n"
        "sys.modules['tensorflow'] = None  # what the import system takes for a missing package\n"
        "import tfring\n"
        "assert tfring.Cluster.alone().world_size == 1\n"
        "try:\n"
        "    tfring.RingStrategy\n"
        "except ImportError as error:\n"
        "    print(error)\n"
    )
    run = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, check=True, timeout=60, capture_output=True)
    assert 'pip install "tensorflow-cpu>=' in run.stdout.decode()


@pytest.mark.parametrize("version", ["1.15.5", "2.17.1", "2.9.0"])
def test_an_old_tensorflow_is_refused_by_name(version):
    with pytest.raises(UnsupportedTensorFlowError, match=rf"TensorFlow {version} is installed, .*Type: pip install"):
        check_version(version)


def test_a_newer_tensorflow_is_warned_of():
    with pytest.warns(UserWarning, match=r"TensorFlow 2\.99\.0-rc1 is installed"):
        check_version("2.99.0-rc1")


def test_an_old_keras_is_refused_by_name():
    with pytest.raises(ConfigurationError, match=r'Keras 3\.13\.2 is installed.*Type: pip install "keras>=3\.14"'):
        check_keras("3.13.2")


def test_a_newer_keras_is_warned_of():
    with pytest.warns(UserWarning, match=r'Keras 3\.99\.0 is installed.* pip install "keras<3\.\d+"'):
        check_keras("3.99.0")
