"""The patch replaces, refuses and puts back, on a TensorFlow that is only a name."""

import sys
import types

import pytest


class Slices:
    """Stands for IndexedSlices."""

    values = indices = None


@pytest.fixture
def tensorflow(monkeypatch):
    """A TensorFlow of modules without content; set its __version__."""
    modules = types.SimpleNamespace()
    for name in (
        "tensorflow",
        "tensorflow.python",
        "tensorflow.python.distribute",
        "tensorflow.python.distribute.cross_device_ops",
        "tensorflow.python.distribute.cross_device_utils",
    ):
        module = types.ModuleType(name)
        monkeypatch.setitem(sys.modules, name, module)
        parent, _, child = name.rpartition(".")
        if parent:
            setattr(sys.modules[parent], child, module)
        setattr(modules, name.rpartition(".")[2], module)

    class CollectiveAllReduce:
        _num_workers = 2

        def reduce_implementation(self, reduce_op, value, destinations, *options):
            return ("reduced", value, options)

        def batch_reduce_implementation(self, reduce_op, pairs, *options):
            return [("reduced", value, options) for value, _ in pairs]

    modules.cross_device_ops.CollectiveAllReduce = CollectiveAllReduce
    modules.cross_device_utils.is_indexed_slices = lambda value: isinstance(value, Slices)
    modules.tensorflow.IndexedSlices = Slices
    modules.tensorflow.__version__ = "1.15.5"
    return modules


@pytest.mark.parametrize("version", ["1.14.0", "1.15.5", "2.0.4", "2.1.1", "2.2.0", "2.5.0"])
def test_applies_and_is_undone(patch, tensorflow, version):
    tensorflow.tensorflow.__version__ = version
    reducer = tensorflow.cross_device_ops.CollectiveAllReduce
    before = dict(vars(reducer))

    assert patch.apply(batch_size=5) is True
    assert vars(reducer) != before
    patch.undo()

    assert dict(vars(reducer)) == before
    assert not hasattr(tensorflow.cross_device_utils, "global_batch_size")
    patch.undo()  # nothing left to do


@pytest.mark.parametrize(
    "version", ["1.13.1", "1.14.1", "1.15.0-rc3", "1.15.5+nv22.1", "2.1.0-rc1", "2.2.0-rc4", "2.5.9"]
)
def test_refuses_a_version_it_does_not_know_by_name(patch, tensorflow, version):
    tensorflow.tensorflow.__version__ = version
    before = dict(vars(tensorflow.cross_device_ops.CollectiveAllReduce))

    with pytest.raises(RuntimeError, match="does not know TensorFlow " + version.replace("+", r"\+")):
        patch.apply(batch_size=5)

    assert dict(vars(tensorflow.cross_device_ops.CollectiveAllReduce)) == before


@pytest.mark.parametrize("version", ["2.6.0", "2.11.1", "2.21.0", "3.0.0"])
def test_leaves_a_healthy_version_alone_and_says_so(patch, tensorflow, version, caplog):
    tensorflow.tensorflow.__version__ = version
    before = dict(vars(tensorflow.cross_device_ops.CollectiveAllReduce))

    assert patch.apply(batch_size=5) is False

    assert dict(vars(tensorflow.cross_device_ops.CollectiveAllReduce)) == before
    assert f"TensorFlow {version} needs no patch" in caplog.text


@pytest.mark.parametrize("numbers", [{"batch_size": 0}, {"batch_size": 2.5}, {"ids_per_example": -1}])
def test_refuses_numbers_that_make_no_room(patch, tensorflow, numbers):
    with pytest.raises(ValueError, match=next(iter(numbers))):
        patch.apply(**numbers)


def test_the_attribute_of_the_published_recipe_counts_before_and_after_apply(patch, tensorflow):
    utils = tensorflow.cross_device_utils
    patch.apply()
    assert utils.global_batch_size == 1024
    patch.undo()

    utils.global_batch_size = 77
    patch.apply()
    assert utils.global_batch_size == 77
    patch.apply(batch_size=5)
    assert utils.global_batch_size == 5
    patch.undo()
    assert utils.global_batch_size == 77


def test_pads_sparse_values_with_the_name_of_their_variable_and_leaves_dense_ones(patch, tensorflow, monkeypatch):
    monkeypatch.setattr(patch, "pad_rows", lambda rows, capacity, name: ("padded", rows, capacity, name))
    monkeypatch.setattr(patch, "unpad_rows", lambda rows, capacity, name: ("unpadded", rows, capacity, name))
    monkeypatch.setattr(patch, "_replicas", lambda value: [value])
    patch.apply(batch_size=5, ids_per_example=3)
    tensorflow.tensorflow.IndexedSlices = object  # a bare value for _map_values, padded or not
    reducer = tensorflow.cross_device_ops.CollectiveAllReduce()
    table, bias = types.SimpleNamespace(name="table:0"), types.SimpleNamespace(name="bias:0")
    rows = Slices()

    sparse, dense = reducer.batch_reduce_implementation("SUM", [(rows, table), (1.0, bias)], "hint")

    padded = ("padded", rows, 15, "table:0")
    assert sparse == ("unpadded", ("reduced", padded, ("hint",)), 15, "table:0")
    assert dense == ("reduced", 1.0, ("hint",))
    assert reducer.reduce_implementation("SUM", rows, table) == (
        "unpadded",
        ("reduced", padded, ()),
        15,
        "table:0",
    )
    assert reducer.reduce_implementation("SUM", 1.0, bias) == ("reduced", 1.0, ())


def test_a_replica_alone_has_nobody_to_gather_from(patch, tensorflow):
    patch.apply(batch_size=5)
    reducer = tensorflow.cross_device_ops.CollectiveAllReduce()
    reducer._num_workers = 1
    rows = Slices()
    assert reducer.reduce_implementation("SUM", rows, "variable") == ("reduced", rows, ())


def test_parses_as_python_3_5():
    import ast
    import pathlib

    text = pathlib.Path(__file__).parents[2].joinpath("patches", "tfring_sparse_patch.py").read_text()
    ast.parse(text, feature_version=(3, 5))
