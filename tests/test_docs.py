"""Pages: links and files that they name are there, examples are Python, the site builds, the reference is complete."""

from __future__ import annotations

import ast
import importlib
import importlib.util
import inspect
import pathlib
import re
import subprocess
import sys
import textwrap

import pytest

import tfring

ROOT = pathlib.Path(__file__).parents[1]
PAGES = sorted(
    page
    for page in ROOT.rglob("*.md")
    if not any(part.startswith(".") or part in ("build", "results", "data") for part in page.relative_to(ROOT).parts)
)
FENCE = re.compile(r"^( *)```(\w*)\n(.*?)^\1```", re.M | re.S)
LINK = re.compile(r"(?<!!)\[[^\]]*\]\(([^)\s]+)\)|!\[[^\]]*\]\(([^)\s]+)\)")
FILE = re.compile(r"`((?:benchmarks|docs|examples|patches|tests|tfring)/[\w./-]+\.\w+)`")
ROOMS = ("callbacks", "layers", "parallel")  # each with an `__all__` that is public


def build_site():
    spec = importlib.util.spec_from_file_location("build_site", ROOT / "docs" / "build_site.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def anchors(page: pathlib.Path) -> set[str]:
    """Returns the anchors of a page's headings, as its readers' programs derive them."""
    text = FENCE.sub("", page.read_text())
    headings = re.findall(r"^#+ (.*)$", text, re.M)
    plain = [re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", heading) for heading in headings]
    return {re.sub(r"[^\w\- ]", "", heading.lower()).strip().replace(" ", "-") for heading in plain}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links(page):
    text = FENCE.sub("", page.read_text())
    for target in (a or b for a, b in LINK.findall(text)):
        if "://" in target or target.startswith("mailto:"):
            continue
        path, _, anchor = target.partition("#")
        there = (page.parent / path).resolve() if path else page
        assert there.exists(), f"{target} leads to nothing"
        if anchor and there.suffix == ".md":
            assert anchor in anchors(there), f"{target}: {there.name} has no such heading"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_files_named_are_there(page):
    for name in FILE.findall(page.read_text()):
        assert (ROOT / name).exists(), f"{page.name} names {name}, which is not there"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_examples_are_python(page):
    for _, language, code in FENCE.findall(page.read_text()):
        if language == "python" and ">>>" not in code:
            ast.parse(textwrap.dedent(code))


# Results of functions in the reference, and a part of the strategy.
WITHOUT_AN_ENTRY = {"LayerCost", "PlannedStage", "PlannedTable", "Schedule", "StagePlan", "TablePlan", "RingAllReduce"}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_between_pages_have_titles(page):
    named = re.findall(r"\[([^\]\n]*\.md)\]\([^)]*\.md", FENCE.sub("", page.read_text()))
    assert not named, "a reader sees a title, not the name of a file"


def test_every_public_name_is_in_the_reference():
    listed = {name for names in build_site().API.values() for name in names}
    public = {
        name for name in tfring.__all__ if not name.startswith("_") and not inspect.ismodule(getattr(tfring, name))
    }
    for room in ROOMS:
        public |= {f"{room}.{name}" for name in importlib.import_module(f"tfring.{room}").__all__}
    public -= {"layers.SyncBatchNormalization"}  # stands there as tfring.SyncBatchNormalization
    assert {name for name in public - listed if name.split(".")[-1] not in WITHOUT_AN_ENTRY} == set()
    for name in listed:
        module, _, attribute = f"tfring.{name}".rpartition(".")
        assert hasattr(importlib.import_module(module), attribute), name


def test_a_dead_link_of_the_site_is_found(tmp_path):
    (tmp_path / "docs").mkdir()
    (tmp_path / "index.html").write_text(
        '<h1 id="top"></h1><a href="docs/a.html#here"></a><a href="docs/a.html#gone"></a><a href="#top"></a>'
        '<a href="docs"></a><img src="gone.png"><a href="https://elsewhere/gone"></a><a href="/docs/a.html"></a>'
    )
    (tmp_path / "docs" / "a.html").write_text('<a name="here"></a><a href="../index.html#top"></a><a href="b.md"></a>')
    dead = [
        ("docs/a.html", "b.md"),
        ("index.html", "docs/a.html#gone"),
        ("index.html", "docs"),
        ("index.html", "gone.png"),
    ]
    assert build_site().dead_links(tmp_path) == dead


def test_the_site_builds(tmp_path):
    """Without a dead link, which would end the build with 1."""
    done = subprocess.run(
        [sys.executable, ROOT / "docs" / "build_site.py", tmp_path / "site"],
        capture_output=True,
        text=True,
        timeout=300,
        env={"PATH": "", "NO_MKDOCS_2_WARNING": "1", "HOME": str(tmp_path)},
    )
    assert done.returncode == 0, done.stderr + done.stdout
    reference = (tmp_path / "site" / "docs" / "api.html").read_text()
    assert 'id="tfring.RingStrategy"' in reference and 'id="tfring.layers.ShardedEmbedding"' in reference
    found = (tmp_path / "site" / "search" / "search_index.json").read_text().lower()
    for words in ("quickstart", "early stopping", "uneven", "hangs"):
        assert words in found, f"a search for {words!r} finds nothing"
