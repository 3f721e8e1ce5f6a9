"""`tfring report folder`."""

from __future__ import annotations

import json
import pathlib
import sys

from tfring.report import chrome, files, picture, sentences, summary, table


def run(
    folder: pathlib.Path, as_json: bool = False, trace: pathlib.Path | None = None, plot: str | None = None
) -> int:
    """Prints the report of a folder.

    Args:
      folder: Folder to which the ranks wrote.
      as_json: Whether to print one JSON document (docs/report.md) instead of text.
      trace: File for the trace of all ranks, in Chrome's format.
      plot: File for a picture of a few steps, such as steps.png. Needs matplotlib.

    Returns:
      The exit code: 0, or 1 if there is nothing to report on or a file cannot be read or written.
    """
    try:
        found = files.read(folder)
        if trace is not None:
            trace.write_text(json.dumps(chrome.trace(found), separators=(",", ":")))
        if plot is not None:
            picture.draw(found, plot)
    except (files.ReportError, OSError) as error:
        print(f"tfring report: {error}", file=sys.stderr)
        return 1
    document = summary.document(found)
    document["summary"] = sentences.of(document)
    print(json.dumps(document) if as_json else table.text(document))
    if trace is not None and not as_json:
        print(f"\nTrace of all ranks: {trace} (open it in https://ui.perfetto.dev)")
    return 0
