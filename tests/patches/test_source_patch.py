"""The change to TensorFlow's source, on a file that has the places it looks for and nothing else."""

import subprocess
import sys

import pytest

KERNEL = """\
class Other {
  void Compute() { if (col_params_.instance.shape.num_elements() == 0) { keep(); } }
};

class CollectiveGatherOpKernel : public Base {
  void ComputeAsync() {
    if (col_params_.instance.shape.num_elements() == 0) {
      col_params_.instance.shape = output_shape;
    } else {
      Check(same, [] { return Error("Inconsistent output shapes, got "); });
    }
    Go();
  }
};

class Last {};
"""
CHANGED = KERNEL.replace(
    """\
    if (col_params_.instance.shape.num_elements() == 0) {
      col_params_.instance.shape = output_shape;
    } else {
      Check(same, [] { return Error("Inconsistent output shapes, got "); });
    }
""",
    "    col_params_.instance.shape = output_shape;\n",
)


@pytest.fixture
def tree(tmp_path):
    """A source tree; tree(version) gives its path."""

    def make(version, kernel=KERNEL):
        major, minor, patch = version.split(".")
        core = tmp_path / "tensorflow" / "core"
        (core / "kernels").mkdir(parents=True)
        (core / "public").mkdir()
        (core / "kernels" / "collective_ops.cc").write_text(kernel)
        (core / "public" / "version.h").write_text(
            f"#define TF_MAJOR_VERSION {major}\n#define TF_MINOR_VERSION {minor}\n#define TF_PATCH_VERSION {patch}\n"
        )
        return tmp_path

    return make


def run(source_patch, *arguments):
    command = [sys.executable, source_patch.__file__, *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, timeout=60)


def kernel_of(tree):
    return (tree / "tensorflow" / "core" / "kernels" / "collective_ops.cc").read_text()


@pytest.mark.parametrize("version", ["1.14.0", "1.15.5", "2.0.4", "2.1.0"])
def test_lets_the_shape_follow_the_step(source_patch, tree, version):
    source = tree(version)

    checked = run(source_patch, source, "--check")
    assert checked.returncode == 0, checked.stderr
    assert kernel_of(source) == KERNEL
    done = run(source_patch, source)

    assert done.returncode == 0, done.stderr
    assert done.stdout == checked.stdout
    assert kernel_of(source) == CHANGED
    again = run(source_patch, source)
    assert again.returncode != 0
    assert "already made" in again.stderr


def test_refuses_a_version_that_has_the_change(source_patch, tree):
    done = run(source_patch, tree("2.2.0"))
    assert done.returncode != 0
    assert "2.2 and later have it. Found: 2.2" in done.stderr


@pytest.mark.parametrize(
    "kernel",
    [
        "",
        KERNEL.replace("Inconsistent output shapes", "Something else"),
        KERNEL.replace("output_shape;", "other;"),
    ],
)
def test_refuses_what_it_does_not_recognise(source_patch, tree, kernel):
    source = tree("1.15.0", kernel)
    done = run(source_patch, source)
    assert done.returncode != 0
    assert kernel_of(source) == kernel


def test_refuses_a_folder_that_is_not_tensorflow(source_patch, tmp_path):
    done = run(source_patch, tmp_path)
    assert done.returncode != 0
    assert "is not a source tree of TensorFlow" in done.stderr
