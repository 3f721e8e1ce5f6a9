"""Builds the documentation as a site: `python docs/build_site.py [folder]`, by default build/site.

    pip install ".[docs]" && python docs/build_site.py

The site keeps the layout of the repository, so that a link between pages is the same in both. Its pages are README.md,
those of docs/, the READMEs of examples, benchmarks and patches, and an API reference made from docstrings. A link to
nothing, or to a heading that is not there, fails the build.
"""

from __future__ import annotations

import argparse
import html.parser
import json
import os
import pathlib
import re
import shutil
import subprocess
import sys
import tempfile
import urllib.parse

ROOT = pathlib.Path(__file__).resolve().parents[1]
LINK = re.compile(r"\]\(([^)#\s]+)(#[^)]*)?\)")

# The chapters by what a reader wants to do. A page without a title here has that of its first heading.
NAVIGATION: list[dict[str, str | list[str | dict[str, str]]]] = [
    {
        "Start": [
            {"tfring": "README.md"},
            "docs/quickstart.md",
            "docs/migration.md",
            {"Will it be faster?": "docs/speed.md"},
            {"What is equal": "docs/exactness.md"},
            "docs/features.md",
            "docs/compatibility.md",
            "examples/README.md",
        ]
    },
    {
        "Train": [
            "docs/data.md",
            {"Metrics, logs and state": "docs/metrics_and_state.md"},
            {"Custom training": "docs/custom_training.md"},
            {"Batch normalization": "docs/sync_batch_normalization.md"},
            {"Saving": "docs/saving.md"},
            {"Functions for scripts": "docs/scripts.md"},
            {"The Keras family": "docs/family.md"},
            {"Ten questions": "docs/questions.md"},
        ]
    },
    {
        "Recommenders": [
            {"Sharded embeddings": "docs/sharded_embeddings.md"},
            "docs/parameter_servers.md",
            "docs/delayed_synchronization.md",
        ]
    },
    {
        "Large models": [
            {"Which parallelism": "docs/parallelism.md"},
            {"Sharded dense layers": "docs/sharded_dense.md"},
            {"Pipelines": "docs/pipeline.md"},
        ]
    },
    {
        "Clusters": [
            {"Start on a cluster": "docs/clusters.md"},
            {"The launcher": "docs/launcher.md"},
            "docs/gpus.md",
            {"Who waits for whom": "docs/report.md"},
            "docs/security.md",
            {"Variables": "docs/environment.md"},
        ]
    },
    {
        "When it fails": [
            "docs/errors.md",
            "docs/faults.md",
            {"Restarts": "docs/restarts.md"},
            "docs/server_failures.md",
        ]
    },
    {
        "Reference": [
            {"API": "docs/api.md"},
            "docs/collectives.md",
            "docs/scale.md",
            "docs/glossary.md",
            "docs/architecture.md",
            "docs/engine.md",
            "CHANGELOG.md",
            "CONTRIBUTING.md",
            "BUILD.md",
            {"Old TensorFlow": "patches/README.md"},
            {"Building for old TensorFlow": "patches/BUILD.md"},
        ]
    },
    {
        "Benchmarks": [
            "benchmarks/training/README.md",
            "benchmarks/training/figures.md",
            *(
                f"benchmarks/{name}/README.md"
                for name in ("input", "collectives", "delay", "servers", "equality", "faults", "gpu", "kernels", "rows")
            ),
        ]
    },
    {"Decisions": [f"docs/decisions/{path.name}" for path in sorted((ROOT / "docs" / "decisions").glob("*.md"))]},
]

# Public names by chapter of the API reference, as `tfring.` has them.
API = {
    "Strategy and cluster": (
        "RingStrategy",
        "Delayed",
        "ParameterServerStrategy",
        "SparseOptions",
        "Mesh",
        "Cluster",
        "ClusterResolver",
        "Communicator",
    ),
    "In a program": (
        *("rank", "world_size", "local_rank", "local_world_size", "is_chief", "barrier", "print_once"),
        "notebook.run",
        *("all_reduce", "all_gather", "broadcast", "gather_for_loss", "save", "SyncBatchNormalization"),
    ),
    "Layers": (
        "layers.ShardedEmbedding",
        "layers.DistributedEmbedding",
        "layers.TableConfig",
        "layers.FeatureConfig",
        "layers.ShardedDense",
        "layers.ShardedMultiHeadAttention",
        "layers.to_sync_batch_normalization",
        "layers.to_group_normalization",
        "layers.freeze_batch_normalization",
        "layers.unfreeze_batch_normalization",
    ),
    "Models in parts": (
        "parallel.Pipeline",
        "parallel.plan_schedule",
        "parallel.measure_layers",
        "parallel.plan_stages",
        "parallel.plan_tables",
        "parallel.shard_embeddings",
    ),
    "Callbacks and schedules": (
        "callbacks.Backup",
        "callbacks.CheckFinite",
        "callbacks.Throughput",
        "callbacks.chief_only",
        "callbacks.WarmUp",
        "schedules.Scaled",
    ),
    "Data": ("data.share",),
    "Errors": (
        "errors.TfringError",
        "errors.Reason",
        "errors.ConfigurationError",
        "errors.UnsupportedTensorFlowError",
        "errors.NativeLibraryError",
        "errors.RendezvousError",
        "errors.MismatchError",
        "errors.PeerLostError",
        "errors.CollectiveTimeoutError",
        "errors.NotFiniteError",
    ),
}


# Before the text of a page that the search leaves out: one of figures is on top for most words otherwise.
NOT_SEARCHED = "---\nsearch:\n  exclude: true\n---\n\n"

# Drawings and output of a hundred columns fit a screen of 1,280 points. On one of 500 tables wrap and code scrolls.
STYLE = """
.md-grid { max-width: 72rem; }
.md-typeset pre > code { font-size: 0.6rem; }
.md-typeset .doc-signature pre > code { white-space: pre-wrap; }
.md-typeset table:not([class]) td code { overflow-wrap: anywhere; }
@media (max-width: 31.25em) {
  .md-typeset table:not([class]) { font-size: 0.55rem; }
  .md-typeset table:not([class]) :is(th, td) { min-width: 0; padding: 0.5em; overflow-wrap: anywhere; }
  .md-typeset pre > code { font-size: 0.5rem; }
}
"""
# Light or dark as the system is, and a button to change it.
PALETTE = [
    {
        "media": f"(prefers-color-scheme: {name})",
        "scheme": scheme,
        "primary": "indigo",
        "toggle": {"icon": f"material/{icon}", "name": f"Switch to {other}"},
    }
    for name, scheme, icon, other in (
        ("light", "default", "weather-night", "dark"),
        ("dark", "slate", "weather-sunny", "light"),
    )
]
FEATURES = [
    *("navigation.tabs", "navigation.sections", "navigation.footer", "navigation.top", "toc.follow"),
    *("content.code.copy", "search.highlight", "search.suggest"),
]


def main() -> int:
    parser = argparse.ArgumentParser(description="Builds the documentation as a site.")
    default = ROOT / "build" / "site"
    parser.add_argument("folder", nargs="?", type=pathlib.Path, default=default, help="default: build/site")
    folder = parser.parse_args().folder.resolve()
    with tempfile.TemporaryDirectory() as name:
        sources = pathlib.Path(name, "pages")
        for page in pages():
            copy(page, sources)
            for target in linked_files(page):
                copy(target, sources)
        (sources / "docs" / "api.md").write_text(api_page())
        (sources / "site.css").write_text(STYLE)
        configuration = pathlib.Path(name, "mkdocs.yml")  # JSON is YAML
        configuration.write_text(json.dumps(settings(sources, folder)))
        command = [sys.executable, "-m", "mkdocs", "build", "--quiet", "--strict", "--config-file", str(configuration)]
        code = subprocess.run(command, env={"NO_MKDOCS_2_WARNING": "1", **os.environ}).returncode
    dead = dead_links(folder)
    print("".join(f"{page} links to {link}, which is not there\n" for page, link in dead), end="", file=sys.stderr)
    if not (code or dead):
        print(f"{len(pages())} pages. See them, with their search: {sys.executable} -m http.server -d {folder}")
    return code or int(bool(dead))


class Anchors(html.parser.HTMLParser):
    """The links and the anchors of a page."""

    def __init__(self, page: pathlib.Path) -> None:
        super().__init__()
        self.links: list[str] = []
        self.anchors: set[str] = set()
        self.feed(page.read_text())

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        for name, value in attrs:
            if name in ("href", "src") and value:
                self.links.append(value)
            elif name in ("id", "name") and value:
                self.anchors.add(value)


def dead_links(folder: pathlib.Path) -> list[tuple[str, str]]:
    """Returns the page and the link, of each link within a site that leads to no file, or to no anchor of one."""
    found = {page: Anchors(page) for page in sorted(folder.rglob("*.html"))}
    dead = []
    for page, anchors in found.items():
        for link in anchors.links:
            url = urllib.parse.urlsplit(link)
            path, fragment = urllib.parse.unquote(url.path), urllib.parse.unquote(url.fragment)
            if url.scheme or url.netloc:
                continue
            there = pathlib.Path(os.path.normpath((folder if path.startswith("/") else page.parent) / path.lstrip("/")))
            there = page if not path else there / "index.html" if there.is_dir() else there
            if not there.exists() or (fragment and there in found and fragment not in found[there].anchors):
                dead.append((str(page.relative_to(folder)), link))
    return dead


def pages() -> list[pathlib.Path]:
    """Returns the Markdown files of the site; the API reference is made."""
    entries = [entry for chapter in NAVIGATION for listed in chapter.values() for entry in listed]
    paths = [path for entry in entries for path in (entry.values() if isinstance(entry, dict) else [entry])]
    return [ROOT / path for path in paths if path != "docs/api.md"]


def linked_files(page: pathlib.Path) -> list[pathlib.Path]:
    """Returns pictures and sources that a page links to."""
    found = []
    for target, _ in LINK.findall(page.read_text()):
        path = (page.parent / target).resolve()
        if "://" not in target and path.suffix != ".md" and path.is_relative_to(ROOT) and path.is_file():
            found.append(path)
    return found


def copy(path: pathlib.Path, sources: pathlib.Path) -> None:
    place = path.relative_to(ROOT)
    target = sources / place
    target.parent.mkdir(parents=True, exist_ok=True)
    shutil.copyfile(path, target)
    if place.parts[0] == "benchmarks" and path.suffix == ".md":
        target.write_text(NOT_SEARCHED + target.read_text())


def api_page() -> str:
    """Returns the reference as mkdocstrings reads it, a heading for each chapter."""
    lines = ["# API reference", ""]
    for chapter, names in API.items():
        lines += [f"## {chapter}", ""]
        for name in names:
            lines += [f"::: tfring.{name}", "    options:", "      heading_level: 3", ""]
    return "\n".join(lines)


def settings(sources: pathlib.Path, folder: pathlib.Path) -> dict:
    """Returns the configuration of MkDocs."""
    options = {
        "docstring_style": "google",
        "show_source": False,
        "show_root_heading": True,
        "show_root_full_path": True,
        "members_order": "source",
        "filters": ["!^_"],
        "inherited_members": False,
        "show_if_no_docstring": False,
        "show_bases": False,
        "separate_signature": True,
    }
    return {
        "site_name": "tfring",
        "site_description": "Distributed training of Keras 3 models on TensorFlow",
        "docs_dir": str(sources),
        "site_dir": str(folder),
        "use_directory_urls": False,
        "nav": NAVIGATION,
        "theme": {
            "name": "material",
            "font": False,  # no other host is asked for anything
            "features": FEATURES,
            "palette": PALETTE,
        },
        "extra_css": ["site.css"],
        "plugins": [
            "search",
            {"mkdocstrings": {"handlers": {"python": {"paths": [str(ROOT)], "options": options}}}},
        ],
        "markdown_extensions": [
            "tables",
            "attr_list",
            {"toc": {"permalink": True}},
            "pymdownx.superfences",
            {"pymdownx.highlight": {"use_pygments": True}},
        ],
    }


if __name__ == "__main__":
    sys.exit(main())
