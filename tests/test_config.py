"""docs/environment.md has every variable that config.py knows, in its words; and no file reads another."""

from __future__ import annotations

import pathlib
import re

from tfring import config

ROOT = pathlib.Path(__file__).parents[1]


def row(name):
    setting = config.SETTINGS[name]
    default = {None: "", True: "1", False: "0"}.get(setting.default, setting.default)
    default = f"{default:g}" if isinstance(default, float) else default
    return f"| `{name}` | {setting.legal} | {default} | {setting.meaning} |"


def test_the_document_has_every_variable():
    text = (ROOT / "docs" / "environment.md").read_text()
    assert sorted(re.findall(r"^\| `TFRING_.*$", text, re.MULTILINE)) == sorted(map(row, config.SETTINGS))


def test_no_other_variable_is_read():
    """Names in texts and code of the package; those of C's preprocessor have no quotes."""
    named = {
        name
        for file in (ROOT / "tfring").rglob("*.py")
        for name in re.findall(r"[\"'](TFRING_[A-Z_]+)[\"']", file.read_text())
    }
    assert named and named <= set(config.SETTINGS)
