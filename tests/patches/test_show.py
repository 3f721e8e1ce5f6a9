"""Names, verdicts and texts of cells, and that the table in the README is complete and says what it must."""

import pathlib

import pytest

README = pathlib.Path(__file__).parents[2] / "patches" / "README.md"


def test_says_plainly_that_there_is_no_python_3_7(show, monkeypatch, capsys, tmp_path):
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("TFRING_PYTHON37", raising=False)
    monkeypatch.setattr("sys.argv", ["show.py", "--cache", str(tmp_path)])
    assert show.main() == 3
    assert "No Python 3.7 here" in capsys.readouterr().out
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    "outcomes, words",
    [
        ([(1, {}, "x Inconsistent output shapes, got [20], but expected is [22].\n"), (None, {}, "")],
         "Inconsistent output shapes, got [20], but expected is [22]"),
        ([(-6, {}, "F a.cc:1] Check failed: nullptr == x Use OP_REQUIRES_ASYNC"), (1, {}, "Socket closed")],
         "Check failed: nullptr == x Use OP_REQUIRES_ASYNC; abort"),
        ([(1, {}, "tensorflow.errors_impl.InternalError: From /job:worker/task:0:\nWhat it was\n [[x]]\n")] * 2,
         "What it was"),
        ([(None, {}, ""), (None, {}, "")], "hangs"),
        ([(-11, {}, ""), (None, {}, "")], "crash"),
    ],
)  # fmt: skip
def test_symptom(show, outcomes, words):
    assert show.symptom(outcomes) == words


def test_compare_finds_the_worst_row_and_a_touched_row_0(show):
    initial = [[1.0, 2.0], [3.0, 4.0]]
    tables = {"SGD": [[1.0, 2.0], [3.0, 4.5]], "Adam": [[1.0, 2.25], [3.0, 4.0]]}
    assert show.compare(tables, {"SGD": initial, "Adam": initial}, initial) == {
        "SGD": {"error": 0.5, "row_0_untouched": True},
        "Adam": {"error": 0.25, "row_0_untouched": False},
    }


@pytest.mark.parametrize(
    "error, untouched, agree, words",
    [
        (2.4e-7, True, True, "trains, 2.4e-07"),
        (0.0, True, True, "trains, 0.0e+00"),
        (0.33, True, True, "trains; wrong: Adam 0.3"),
        (0.0, False, True, "trains; wrong: Adam 0 (row 0 too)"),
        (0.0, True, False, "the workers differ"),
    ],
)
def test_cell(show, error, untouched, agree, words):
    compared = {"Adam": {"error": error, "row_0_untouched": untouched}}
    result = {"outcome": "trained", "optimizers": compared, "workers_agree": agree}
    assert show.cell(result) == words


def test_cells_are_kept_and_found_again(show, tmp_path):
    cells = show.Cells(str(tmp_path), "python3.7")
    key = ("1.15.5", "loop", "equal", "none")
    assert cells.load(*key) is None
    cells.save(key, {"outcome": "failed", "text": "it failed"})
    assert cells.load(*key)["text"] == "it failed"
    cells.show("1.15.5", "loop", "none", ["equal"])  # there already: nothing runs


def rows():
    """{row: {column: text}} of the table in the README."""
    text = README.read_text().split("<!-- table")[1].split("<!-- end of table -->")[0]
    lines = [[cell.strip() for cell in line.strip("|").split("|")] for line in text.splitlines() if "|" in line]
    head = [cell.strip("`/") for cell in lines[0]]
    return {line[0].strip("`"): dict(zip(head[1:], line[1:], strict=True)) for line in lines[2:]}


def test_the_readme_holds_the_whole_table(show):
    table = rows()
    assert list(table) == [f"{v}/{m}/{c}" for v in show.VERSIONS for m in show.MODES for c in show.CASES]
    assert not [row for row, cells in table.items() if "not run" in cells.values()]
    for row, cells in table.items():
        broken = show.numbers_of(row.split("/")[0]) < show.FIRST_THAT_TRAINS
        assert cells["none"].startswith("trains") != broken, (row, cells["none"])
        for fix in ["runtime", "kernel"] if broken else ["runtime"]:
            word, _, error = cells[fix].partition(", ")
            assert word == "trains", (row, fix)
            assert float(error) <= show.ROUNDING, (row, fix)
