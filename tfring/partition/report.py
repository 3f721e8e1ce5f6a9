"""Reports to a user why the rows of a step cannot be divided, and at which lines."""

from __future__ import annotations

import pathlib
import sys
from collections.abc import Sequence
from typing import Any

from tfring.partition.analysis import Analysis, Finding, dependency_names, root
from tfring.partition.conversions import Full
from tfring.partition.marks import expected
from tfring.partition.rules import RULES
from tfring.partition.types import is_drawn, is_sharded

# The reasons why rows are not divided, and advice.
REASONS = {
    "rows": ("rows are combined here, or may be, in a way that is not divided among replicas", ""),
    "parts": (
        "rows in ragged and sparse tensors are divided only in steps of Keras' own layers and losses",
        " Make them dense before the step, for example with `ragged.to_tensor(shape=...)`.",
    ),
    "replicas": (
        "this is written for one of several replicas: it uses its number or exchanges values with others",
        " Write the step for all rows of the batch, as for one process.",
    ),
}

_SHOWN = 6
_NAMES = 3
_LIBRARIES = ("tensorflow", "keras", "tfring")
_BELOW = ("/src/backend/", "/src/ops/", "/src/utils/")  # folders of a library: parts of losses and layers
_GENERATED = "__autograph_generated_file"  # by `tf.autograph.to_graph`, with another name in each process
_STEPS = ("replica_fn", "on_replica")  # the functions that trace a replica's step; that of `predict`


_WHOLE = (
    "each worker computes the whole batch, because its rows cannot be divided. The result is that of one process, and "
    "the step takes as long."
)


def text_of_whole(reason: Sequence[Finding] | str, step: str) -> str:
    """Returns the message of a step that each worker computes from the whole batch.

    Args:
      reason: The findings, or a sentence if no operations are known.
      step: Name of the step, such as "train_step of Functional 'model'".
    """
    if isinstance(reason, str):
        return f"{step}: {_WHOLE} {reason}"
    causes: dict[tuple[str, str], tuple[Any, list[str]]] = {}
    for finding in reason:
        _, names = causes.setdefault((finding.reason, _line(finding.op)), (finding.op, []))
        if finding.name not in names:
            names.append(finding.name)
    lines = [f"{step}: {_WHOLE}"]
    for (why, line), (op, names) in list(causes.items())[:_SHOWN]:
        what, advice = REASONS[why]
        more = f" and {len(names) - _NAMES} more" if len(names) > _NAMES else ""
        kind = f"`{op.type}` of the gradient" if "gradient_tape" in op.name else f"`{op.type}`"
        lines.append(f"  {line} ({kind}): {what}. It reaches {', '.join(names[:_NAMES])}{more}.{advice}")
    if len(causes) > _SHOWN:
        lines.append(f"  ... and {len(causes) - _SHOWN} more.")
    lines.append("See docs/exactness.md, Steps of the whole batch.")
    return "\n".join(lines)


def text_of_gathered(analysis: Analysis, step: str) -> str | None:
    """Returns the message of operations that each replica computes from all rows because they have no rule; or None.

    Args:
      analysis: Analysis of a step with an edited graph.
      step: See `text_of_whole`.
    """
    of_all_rows = [edit.op for edit, *_ in analysis.edits if edit.conversion == Full() and is_sharded(edit.value)]
    gathered = [op for op in of_all_rows if op.type not in RULES]
    lines = list({_line(op): f"{_line(op)} (`{op.type}`)" for op in gathered}.values())
    if not lines:
        return None
    more = f" and {len(lines) - _NAMES} more" if len(lines) > _NAMES else ""
    return (
        f"{step}: each replica computes these operations from the rows of all replicas, because they may combine rows: "
        f"{', '.join(lines[:_NAMES])}{more}. The result is correct, but they take as long as in one process. See "
        "docs/exactness.md, One rule for the step."
    )


def combined_rows(analysis: Analysis) -> tuple[str, str]:
    """Returns the operations that combine rows of several replicas, and those that may, with the user's lines.

    Args:
      analysis: Analysis of a computation of replicas on their own rows, which is not edited.

    Returns:
      A tuple of two texts, empty if there are no such operations. Operations that may combine rows have no rule.
    """
    ops = [edit.op for edit, *_ in analysis.edits if not is_drawn(edit.value)]
    marked = dependency_names(ops[0].graph, expected) if ops else ()
    combine = [*(finding.op for finding in analysis.findings), *(root(op) for op in ops if op.name in marked)]
    do, may = ({_line(op): op.type for op in combine if (op.type in RULES) is has_rule} for has_rule in (True, False))
    return "" if may else _listed(do), _listed(may)  # results of operations that may combine rows are not known


def _listed(lines: dict[str, str]) -> str:
    """Returns the first few lines, each with its operation."""
    return ", ".join([f"{line} (`{kind}`)" for line, kind in lines.items()][:_NAMES])


def users_line(op: Any) -> str | None:
    """Returns the user's line in the step that made an operation, such as "train.py:12"; None if there is none."""
    own = [frame for frame in _frames_in_step(op) if _library(frame) is None]
    return _place(own[-1]) if own else None


def _line(op: Any) -> str:
    """Returns the user's line in the step that made an operation; if there is none, the library's."""
    inner = _frames_in_step(op)
    own = [frame for frame in inner if _library(frame) is None]
    named = [frame for frame in inner if not any(folder in frame.filename for folder in _BELOW)]
    if not inner:
        return op.name
    frame = (own or named or inner)[-1]
    return f"{_place(frame)} in {frame.name}"


def _frames_in_step(op: Any) -> list[Any]:
    """Returns the frames of the user and of Keras in which a step made an operation, outermost first."""
    frames = list(op.traceback or ())
    of_steps = (i for i, frame in enumerate(frames) if frame.name in _STEPS and _library(frame) == "tfring")
    begin = max(of_steps, default=0)
    inner = [frame for frame in frames[begin + 1 :] if _library(frame) not in ("tensorflow", "tfring")]
    return [frame for frame in inner if not pathlib.Path(frame.filename).name.startswith(_GENERATED)]


def _place(frame: Any) -> str:
    return f"{pathlib.Path(frame.filename).name}:{frame.lineno}"


def _library(frame: Any) -> str | None:
    """Returns the library of a frame, None for the user's own files."""
    for name in _LIBRARIES:
        folder = getattr(sys.modules.get(name), "__file__", None)
        if folder is not None and frame.filename.startswith(f"{pathlib.Path(folder).parent}/"):
            return name
    return None
