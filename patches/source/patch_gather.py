#!/usr/bin/env python3
"""Changes the gather in the source of TensorFlow 1.14 to 2.1, for people who build TensorFlow themselves.

    python3 patch_gather.py /path/to/tensorflow            changes tensorflow/core/kernels/collective_ops.cc
    python3 patch_gather.py /path/to/tensorflow --check    prints the change and leaves the file alone

The kernel keeps the output shape of its first step and fails where a later one differs (issue
https://github.com/tensorflow/tensorflow/issues/34250). The change, that of pull request
https://github.com/tensorflow/tensorflow/pull/34295 (in 2.2.0), lets the shape follow the step::

    if (<the shape kept is empty>) {
      <keep this shape>                    becomes      <keep this shape>
    } else {
      <fail where this shape differs>
    }

It is not enough where workers have different numbers of rows in one step: see ../README.md. What has to be found is
written below; nothing else of TensorFlow's text is needed, so one script serves every version.
"""

import argparse
import difflib
import os
import re
import sys

FILE = os.path.join("tensorflow", "core", "kernels", "collective_ops.cc")
VERSION_FILE = os.path.join("tensorflow", "core", "public", "version.h")
VERSIONS = ("1.14", "1.15", "2.0", "2.1")

CLASS = "class CollectiveGatherOpKernel "
CONDITION = "if (col_params_.instance.shape.num_elements() == 0) {"
KEEP = "col_params_.instance.shape = output_shape;"
FAILURE = "Inconsistent output shapes, got "


class NotFound(Exception):
    pass


def changed(text):
    """The text of the file with the change made; NotFound where it is not what the four versions have."""
    start = text.find(CLASS)
    end = text.find("\nclass ", start + 1)
    gather = text[start:end] if start >= 0 and end >= 0 else ""
    if gather.count(CONDITION) != 1:
        if KEEP in gather and FAILURE not in gather:
            raise NotFound("The change is already made.")
        raise NotFound("No %r in the class CollectiveGatherOpKernel." % CONDITION)
    first = gather.index(CONDITION)
    kept, after = block(gather, first + len(CONDITION) - 1)
    refused, after_else = block(gather, gather.index("{", after))
    if kept.strip() != KEEP or gather[after : gather.index("{", after)].strip() != "else" or FAILURE not in refused:
        raise NotFound("The condition is there, but not what it guarded in TensorFlow %s." % ", ".join(VERSIONS))
    return text[:start] + gather[:first] + KEEP + gather[after_else:] + text[end:]


def block(text, opening):
    """What stands between the brace at ``opening`` and its partner, and the position behind that one."""
    depth = 0
    for position in range(opening, len(text)):
        depth += {"{": 1, "}": -1}.get(text[position], 0)
        if depth == 0:
            return text[opening + 1 : position], position + 1
    raise NotFound("A brace is not closed.")


def version_of(source):
    """ "1.15" from the numbers in version.h."""
    with open(os.path.join(source, VERSION_FILE)) as file:
        text = file.read()
    return ".".join(re.search(r"#define TF_%s_VERSION (\d+)" % part, text).group(1) for part in ("MAJOR", "MINOR"))


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("source", help="the folder of TensorFlow's source")
    parser.add_argument("--check", action="store_true", help="print the change, write nothing")
    options = parser.parse_args()
    path = os.path.join(options.source, FILE)
    try:
        version = version_of(options.source)
        with open(path) as file:
            text = file.read()
    except (OSError, AttributeError) as error:
        return "%s is not a source tree of TensorFlow: %s" % (options.source, error)
    if version not in VERSIONS:
        return "This change is for TensorFlow %s; 2.2 and later have it. Found: %s" % (", ".join(VERSIONS), version)
    try:
        new = changed(text)
    except NotFound as error:
        return "%s: %s" % (path, error)
    lines = text.splitlines(True), new.splitlines(True)
    sys.stdout.writelines(difflib.unified_diff(*lines, fromfile="a/" + FILE, tofile="b/" + FILE, n=0))
    if not options.check:
        with open(path, "w") as file:
            file.write(new)
    return 0


if __name__ == "__main__":
    sys.exit(main())
