#!/usr/bin/env python3
"""Shows the sparse gather bug and its fixes on the real thing: old TensorFlow, two workers, one command.

    python3 patches/show/show.py                              every cell of the table, then the table
    python3 patches/show/show.py '1.15.5/loop/equal/none'     one cell; any number of patterns may be given

A cell is VERSION/MODE/CASE/FIX. Each is run once and kept in ``--cache`` (environments, libraries, logs, results), so
a run that was stopped goes on where it was; ``--again`` runs its cells anew. ``--readme`` writes the table into
patches/README.md. It needs a Python 3.7 (``--python``, TFRING_PYTHON37, PATH or pyenv) and pip's package index, and
says so and ends with status 3 where there is none. Everything is plain Python; TensorFlow is in the environments.
"""

import argparse
import fnmatch
import glob
import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time

HERE = os.path.dirname(os.path.abspath(__file__))
PATCHES = os.path.dirname(HERE)

VERSIONS = ["1.14.0", "1.15.0", "1.15.5", "2.0.0", "2.1.0", "2.2.0"]
MODES = ["loop", "keras", "estimator"]
CASES = ["equal", "different", "last_batch", "no_rows"]
FIXES = ["none", "runtime", "kernel", "kernel_alone"]
OPTIMIZERS = ["SGD", "Momentum", "Adagrad", "Adam", "RMSProp+momentum", "FTRL+l1", "LazyAdam"]
FIRST_THAT_TRAINS = (2, 2)

# Table values are about 1 to 3, where neighbouring float32 numbers lie 2.4e-7 apart; twelve steps, sums of 2048
# products in another order. A padding row that reaches the optimizer shows as 1e-4 to 1.
ROUNDING = 2e-6

SYMPTOMS = [
    r"Inconsistent output shapes, got \[[\d,]+\], but expected is \[[\d,]+\]",
    r"Shape mismatch in the collective instance \d+",
    r"RecvBufResponse returned \d+ bytes where to_tensor expected \d+",
    r"Check failed: [^\n]*Use OP_REQUIRES_ASYNC",
]

# The Adagrad of tf.keras in 2.0.0 cannot update rows under a strategy for several workers (AttributeError in
# sparse_read, patched or not); a later compatibility date makes it take the fused kernel, as 2.1 always does.
ENVIRONMENT = {"2.0.": {"TF_FORWARD_COMPATIBILITY_DELTA_DAYS": "30"}}

PAIR_SECONDS = 60  # for a case that should fail; a hang is one of the symptoms
TRAINING_SECONDS = 600  # for all cases and optimizers in one pair of processes


class NoPython37(Exception):
    pass


def find_python37(given=None):
    """The path of a Python 3.7 that runs."""
    candidates = [given, os.environ.get("TFRING_PYTHON37"), shutil.which("python3.7")]
    if shutil.which("pyenv"):
        root = subprocess.run(["pyenv", "root"], stdout=subprocess.PIPE, universal_newlines=True).stdout.strip()
        candidates += sorted(glob.glob(os.path.join(root, "versions", "3.7.*", "bin", "python3.7")))
    for candidate in filter(None, candidates):
        probe = [
            candidate,
            "-c",
            "import sys, venv, ensurepip; assert sys.version_info[:2] == (3, 7); print(sys.executable)",
        ]
        try:
            found = subprocess.run(probe, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, universal_newlines=True)
        except OSError:
            continue
        if found.returncode == 0:
            return found.stdout.strip()
    raise NoPython37(
        "No Python 3.7 here (--python, TFRING_PYTHON37, python3.7 on PATH, pyenv): TensorFlow 1.14 to "
        "2.5 cannot be installed, so nothing was run."
    )


def numbers_of(version):
    return tuple(int(n) for n in version.split(".")[:2])


def requirements(version):
    """Returns pip's requirements beside TensorFlow itself, whose own bounds are too wide for today's packages."""
    pins = ["tensorflow==" + version, "protobuf<3.21"]
    if numbers_of(version) < (2, 3):
        pins += ["numpy<1.19", "h5py<3"]
    if numbers_of(version) >= (2, 6):
        pins += [package + "==%d.%d.*" % numbers_of(version) for package in ("keras", "tensorflow-estimator")]
    return pins


def environment(version, python37, cache):
    """The path of a Python with that TensorFlow; made at the first call."""
    folder = os.path.join(cache, "tensorflow-" + version)
    python = os.path.join(folder, "bin", "python")
    ready = os.path.join(folder, "ready")
    if not os.path.exists(ready):
        shutil.rmtree(folder, ignore_errors=True)
        say("making an environment with TensorFlow " + version)
        subprocess.run([python37, "-m", "venv", folder], check=True)
        subprocess.run([python, "-m", "pip", "install", "--quiet"] + requirements(version), check=True, timeout=1800)
        open(ready, "w").close()
    return python


def library(version, python, cache):
    """The gather kernel built for that TensorFlow."""
    path = os.path.join(cache, "gather-%s.so" % version)
    source = os.path.join(PATCHES, "kernel", "gather_kernel.cc")
    if not os.path.exists(path) or os.path.getmtime(path) < os.path.getmtime(source):
        say("building the gather kernel for TensorFlow " + version)
        built = subprocess.run(
            [python, os.path.join(PATCHES, "kernel", "build.py"), path],
            timeout=600,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            universal_newlines=True,
            env=clean_environment(version),
        )
        if built.returncode:
            raise RuntimeError("The gather kernel could not be built for TensorFlow %s:\n%s" % (version, built.stdout))
    return path


def say(*words):
    print(*words, file=sys.stderr)
    sys.stderr.flush()


# --- processes ---------------------------------------------------------------------------------------------------


def free_ports(count):
    sockets = [socket.socket() for _ in range(count)]
    for s in sockets:
        s.bind(("127.0.0.1", 0))
    ports = [s.getsockname()[1] for s in sockets]
    for s in sockets:
        s.close()
    return ports


def clean_environment(version):
    """Without what this process, or a TensorFlow 2 imported in it (TF2_BEHAVIOR), set for itself."""
    env = {k: v for k, v in os.environ.items() if not k.startswith(("TF_", "TF2_", "PYTHONPATH", "PYTHONHOME"))}
    for prefix, more in ENVIRONMENT.items():
        if version.startswith(prefix):
            env.update(more)
    return env


def run(version, python, config, ranks, log, seconds):
    """Runs one process a rank (``[None]``: the reference) and returns a list of (exit status, {case: tables}, text).

    The status is None for a process that had to be stopped. All of them are gone when this returns.
    """
    ports = free_ports(len(ranks))
    os.makedirs(os.path.dirname(log), exist_ok=True)
    scratch = tempfile.mkdtemp(prefix="tfring-patches-")
    processes, outs, errs = [], [], []
    try:
        for rank in ranks:
            env = clean_environment(version)
            if rank is not None:
                workers = ["127.0.0.1:%d" % port for port in ports]
                task = {"type": "worker", "index": rank}
                env["TF_CONFIG"] = json.dumps({"cluster": {"worker": workers}, "task": task})
            outs.append(os.path.join(scratch, "%s.out" % rank))
            errs.append("%s.%s.log" % (log, "reference" if rank is None else rank))
            with open(outs[-1], "w") as out, open(errs[-1], "w") as err:
                process = subprocess.Popen(
                    [python, os.path.join(HERE, "worker.py")],
                    stdin=subprocess.PIPE,
                    stdout=out,
                    stderr=err,
                    env=env,
                    universal_newlines=True,
                )
            processes.append(process)
            process.stdin.write(json.dumps(dict(config, rank=rank, folder=scratch, patch_folder=PATCHES)) + "\n")
            process.stdin.flush()
        deadline = time.time() + seconds
        while time.time() < deadline:
            if all(len(results(out)) == len(config["cases"]) for out in outs):
                break
            if any(process.poll() is not None for process in processes):
                deadline = min(deadline, time.time() + 5)  # the others may say more, or hang
                if all(process.poll() is not None for process in processes):
                    break
            time.sleep(0.2)
        statuses = [process.poll() for process in processes]
        for process in processes:
            process.stdin.close()  # done: leave
        for process in processes:
            try:
                process.wait(timeout=5)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
        return [(status, results(out), read(err)) for status, out, err in zip(statuses, outs, errs)]
    finally:
        for process in processes:
            if process.poll() is None:
                process.kill()
                process.wait()
        shutil.rmtree(scratch, ignore_errors=True)


def read(path):
    with open(path, errors="replace") as file:
        return file.read()


def results(out):
    lines = [line for line in read(out).splitlines(True) if line.startswith("{") and line.endswith("\n")]
    return {entry["case"]: entry["tables"] for entry in map(json.loads, lines)}


# --- cells -------------------------------------------------------------------------------------------------------


def symptom(outcomes):
    """Returns the output of a failed pair and how its processes ended."""
    texts = []
    for _, _, text in outcomes:
        for pattern in SYMPTOMS:
            found = re.search(pattern, text)
            if found and not any(re.match(pattern, t) for t in texts):
                texts.append(found.group(0))
    endings = []
    for status, _, text in outcomes:
        if status is None:
            endings.append("hangs")
        elif status < 0:
            endings.append({-6: "abort", -11: "crash"}.get(status, "signal %d" % -status))
        elif status and not texts:
            said = re.findall(r"^tensorflow\S*\.\w+Error: (?:From /job\S+\n)?(.+)$", text, re.MULTILINE)
            endings.append(said[-1][:160].replace("|", "/") if said else "status %d" % status)
    if "abort" in endings or "crash" in endings or not texts:
        ends = sorted(set(endings) - ({"hangs"} if texts or len(set(endings)) > 1 else set()))
        texts += ends
    return "; ".join(texts)


def compare(tables, reference, initial):
    """For each optimizer the largest difference in any row, and whether row 0 is as it was."""
    compared = {}
    for name, table in tables.items():
        error = max(abs(a - b) for row, other in zip(table, reference[name]) for a, b in zip(row, other))
        compared[name] = {"error": error, "row_0_untouched": table[0] == initial[0]}
    return compared


class Cells(object):
    """Runs cells and keeps what they gave, one JSON file each, under ``kept``; environments are in ``cache``."""

    def __init__(self, cache, python37, again=False, kept=None):
        self.cache, self.python37, self.again, self.kept = cache, python37, again, kept or cache

    def path(self, version, mode, case, fix):
        return os.path.join(self.kept, "results", version, mode, case, fix + ".json")

    def load(self, *key):
        try:
            with open(self.path(*key)) as file:
                return json.load(file)
        except FileNotFoundError:
            return None

    def save(self, key, result):
        path = self.path(*key)
        os.makedirs(os.path.dirname(path), exist_ok=True)
        with open(path + ".part", "w") as file:
            json.dump(result, file, indent=1, sort_keys=True)
        os.replace(path + ".part", path)

    def reference(self, version, mode):
        """{case: {optimizer: table}} of one process without a strategy; kept too."""
        path = os.path.join(self.kept, "results", version, mode, "reference.json")
        if not os.path.exists(path):
            python = environment(version, self.python37, self.cache)
            config = {"fix": "none", "mode": mode, "cases": CASES, "optimizers": OPTIMIZERS}
            log = os.path.join(self.kept, "logs", version, mode, "reference")
            ((_, tables, text),) = run(version, python, config, [None], log, TRAINING_SECONDS)
            if len(tables) != len(CASES):
                raise RuntimeError("The reference %s/%s failed:\n%s" % (version, mode, text[-3000:]))
            os.makedirs(os.path.dirname(path), exist_ok=True)
            with open(path, "w") as file:
                json.dump(tables, file)
        with open(path) as file:
            return json.load(file)

    def show(self, version, mode, fix, cases):
        """Runs the cells of one version, mode and fix that are not there yet."""
        cases = [case for case in cases if self.again or not self.load(version, mode, case, fix)]
        if not cases:
            return
        python = environment(version, self.python37, self.cache)
        trains = fix in ("runtime", "kernel") or numbers_of(version) >= FIRST_THAT_TRAINS
        # What is expected to train does it with every optimizer, in one pair of processes for all cases; what is
        # expected to fail takes a pair a case, and which optimizer does not matter.
        for together in [cases] if trains else [[case] for case in cases]:
            config = {"fix": fix, "mode": mode, "cases": together, "optimizers": OPTIMIZERS if trains else ["SGD"]}
            if fix.startswith("kernel"):
                config["kernel"] = library(version, python, self.cache)
            log = os.path.join(self.kept, "logs", version, mode, fix + "-" + "-".join(together))
            started = time.time()
            outcomes = run(version, python, config, [0, 1], log, TRAINING_SECONDS if trains else PAIR_SECONDS)
            seconds = round(time.time() - started, 1)
            for case in together:
                self.save((version, mode, case, fix), self.judge(version, mode, case, outcomes, seconds, len(together)))
                say("  %s/%s/%s/%s: %s" % (version, mode, case, fix, cell(self.load(version, mode, case, fix))))

    def judge(self, version, mode, case, outcomes, seconds, num_cases):
        tables = [tables.get(case) for _, tables, _ in outcomes]
        result = {"seconds": seconds, "cases_in_these_seconds": num_cases}
        if None in tables:
            return dict(result, outcome="failed", text=symptom(outcomes))
        reference = self.reference(version, mode)
        # No id is 0 in any batch, so row 0 of every reference is the initial one.
        compared = compare(tables[0], reference[case], reference[case]["SGD"])
        agree = tables[1] in ({}, tables[0])  # under Estimator only the first worker has the checkpoint to read
        return dict(result, outcome="trained", optimizers=compared, workers_agree=agree)


# --- the table ---------------------------------------------------------------------------------------------------


def cell(result):
    if result is None:
        return "not run"
    if result["outcome"] == "failed":
        return re.sub(r"\(nullptr vs\. \w+\) ?", "... ", result["text"])
    compared = result["optimizers"]
    worst = max(o["error"] for o in compared.values())
    wrong = sorted(n for n, o in compared.items() if o["error"] > ROUNDING or not o["row_0_untouched"])
    if not result["workers_agree"]:
        return "the workers differ"
    if not wrong:
        return "trains, %.1e" % worst
    return "trains; wrong: " + ", ".join(
        "%s %.1g%s" % (n, compared[n]["error"], "" if compared[n]["row_0_untouched"] else " (row 0 too)") for n in wrong
    )


def is_cell(version, mode, fix):
    """The kernel is for the versions that fail; alone it is shown in the loop only."""
    if fix.startswith("kernel") and numbers_of(version) >= FIRST_THAT_TRAINS:
        return False
    return fix != "kernel_alone" or mode == "loop"


def table(cells, versions):
    lines = ["| | `/none` | `/runtime` | `/kernel` | `/kernel_alone` |", "|---|---|---|---|---|"]
    for version in versions:
        for mode in MODES:
            for case in CASES:
                shown = [
                    cell(cells.load(version, mode, case, fix)) if is_cell(version, mode, fix) else "-" for fix in FIXES
                ]
                lines.append("| `%s/%s/%s` | %s |" % (version, mode, case, " | ".join(shown)))
    return "\n".join(lines)


def write_readme(text):
    path = os.path.join(PATCHES, "README.md")
    old = read(path)
    begin, end = "<!-- table: written by show.py --readme -->\n", "<!-- end of table -->"
    before, rest = old.split(begin)
    with open(path, "w") as file:
        file.write(before + begin + text + "\n" + end + rest.split(end)[1])


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("cells", nargs="*", default=["*"], help="patterns of VERSION/MODE/CASE/FIX")
    parser.add_argument("--versions", default=",".join(VERSIONS), help="default: %(default)s")
    parser.add_argument("--cache", default=os.path.join(os.path.dirname(PATCHES), ".cache", "patches"))
    parser.add_argument("--python", help="a Python 3.7")
    parser.add_argument("--again", action="store_true", help="run cells that already have a result")
    parser.add_argument("--readme", action="store_true", help="write the table into patches/README.md")
    options = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # by way of run(), which stops its processes
    try:
        python37 = find_python37(options.python)
    except NoPython37 as error:
        print(error)
        return 3
    cells = Cells(os.path.abspath(options.cache), python37, options.again)
    versions = options.versions.split(",")
    chosen = []
    for version in versions:
        for mode in MODES:
            for fix in FIXES:
                keys = ["%s/%s/%s/%s" % (version, mode, case, fix) for case in CASES if is_cell(version, mode, fix)]
                wanted = [key for key in keys if any(fnmatch.fnmatch(key, pattern) for pattern in options.cells)]
                if wanted:
                    chosen += wanted
                    cells.show(version, mode, fix, [key.split("/")[2] for key in wanted])
    if not chosen:
        parser.error("no cell is called %s" % " ".join(options.cells))
    if options.cells == ["*"]:
        text = table(cells, versions)
        print(text)
        if options.readme:
            write_readme(text)
    else:
        for key in chosen:
            print("%s: %s" % (key, cell(cells.load(*key.split("/")))))
    return 0


if __name__ == "__main__":
    sys.exit(main())
