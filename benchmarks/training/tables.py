"""From results.json to the summary in README.md, and to all figures in figures.md."""

from __future__ import annotations

import pathlib
import re
import statistics

import models
import picture

README = pathlib.Path(__file__).parent / "README.md"
MARKS = re.compile(r"(<!-- run.py -->\n).*?(<!-- end of run.py -->)", re.S)
HEAD = (
    "# Training: all figures\n\n"
    "Written by `run.py`; [the summary](README.md) says how it is measured. \"Nothing exchanged\" "
    "are workers that train Keras alone at the same time, each on its share of the rows: the most that more workers "
    "can bring on this machine."
)
HEADINGS = {
    "plain": "Keras alone",
    "apart": "Keras alone, nothing exchanged",
    "tfring": "tfring",
    "sharded": "tfring, shard_optimizer",
    "tensorflow": "TensorFlow's collectives",
    "horovod": "Horovod",
    "old": "tf.keras of Horovod's TensorFlow, nothing exchanged",
    "torch": "torch DDP on gloo",
}

# Those of whom there is not one alone, and whose one worker is theirs.
OF_ONE = {"apart": "plain", "tensorflow": "tfring", "sharded": "tfring", "old": "horovod"}
SPEED_UPS = {"convolutions": 1.9, "dense": 1.5, "embeddings": 1.5, "jpeg": 1.9}  # of two workers over one
OVER_HOROVOD = {2: 1.15, 4: 1.3}
SMALL_BEYOND = {"tensorflow": 10, "horovod": 2}
ONE_WORKER = 1.03
PEERS = ("tensorflow", "horovod", "torch")
BEYOND = {"tfring": "apart", "sharded": "apart", "tensorflow": "apart", "horovod": "old"}


class Part:
    """The times of one number of workers beside one."""

    def __init__(self, result: dict) -> None:
        self.conditions, self.versions, self.missing = (result[key] for key in ("conditions", "versions", "missing"))
        self.times = {tuple(cell): values for *cell, values in result["times"]}

    def seconds(self, *cell) -> float | None:
        values = self.times.get(cell)
        return statistics.median(value["seconds"] for value in values) if values else None

    def most(self, workers: int, name: str, figure: str) -> float | None:
        """The speed-up of workers that exchange nothing, by a figure of their steps."""
        one, several = ("plain", 1, name), ("apart", workers, name)
        if one not in self.times or several not in self.times:
            return None
        pairs = zip(self.times[one], self.times[several], strict=True)
        return statistics.median(s["seconds"] / f[figure] for s, f in pairs)

    def last(self, figure: str, *cell) -> float | None:
        values = self.times.get(cell)
        return values[-1][figure] if values else None

    def ratio(self, slow: tuple, fast: tuple) -> float | None:
        """Returns the speedup: the median of the ratios within a round."""
        if slow not in self.times or fast not in self.times:
            return None
        pairs = zip(self.times[slow], self.times[fast], strict=True)
        return statistics.median(s["seconds"] / f["seconds"] for s, f in pairs)

    def beyond(self, cell: tuple, apart: tuple) -> float | None:
        """Seconds more: the median of the differences within a round."""
        if cell not in self.times or apart not in self.times:
            return None
        pairs = zip(self.times[cell], self.times[apart], strict=True)
        return statistics.median(each["seconds"] - alone["seconds"] for each, alone in pairs)


def write(results: dict, folder: pathlib.Path) -> None:
    """Writes README.md with its picture, and figures.md, into a folder."""
    parts = {int(workers): Part(result) for workers, result in results.items() if workers.isdecimal()}
    sections = [
        targets(parts, results.get("network"), results.get("pipeline")),
        *(section(workers, part) for workers, part in parts.items()),
    ]
    summaries = [summary(workers, part) for workers, part in parts.items()]
    if parts and picture.draw(parts, HEADINGS, OF_ONE, folder):
        summaries.insert(0, "![speed-ups of all models](training.png)")
    if results.get("network"):
        sections.append(network_section(results["network"]))
    if results.get("threads"):
        sections.append(threads_section(results["threads"]))
    if results.get("embeddings"):
        sections.append(embeddings_section(results["embeddings"]))
    if results.get("pipeline"):
        sections.append(pipeline_section(results["pipeline"]))
    (folder / "figures.md").write_text("\n\n".join([HEAD, *sections]) + "\n")
    text = "\n\n".join(summaries)
    page = MARKS.sub(lambda marks: f"{marks[1]}\n{text}\n\n{marks[2]}", README.read_text())
    (folder / README.name).write_text(page)


def summary(workers: int, part: Part) -> str:
    """Returns one row a model: rows a second, and how many times those of others they are."""
    lines = [
        f"**{workers} workers.** {part.conditions}",
        "",
        f"| model | rows a second | over Keras alone, one process | over Horovod, {workers} workers "
        f"| {workers} workers that exchange nothing, over Keras alone |",
        "|---|---:|---:|---:|---:|",
    ]
    for name, task in models.TASKS.items():
        ours = ("tfring", workers, name)
        seconds = part.seconds(*ours)
        if seconds is not None:
            cells = [
                part.ratio(("plain", 1, name), ours),
                part.ratio(("horovod", workers, name), ours),
                part.most(workers, name, "seconds"),
            ]
            lines.append(f"| {task.title} | {task.batch / seconds:,.0f} | {' | '.join(map(number, cells))} |")
    return "\n".join(lines)


def targets(parts: dict[int, Part], over_network: dict | None, of_pipelines: dict | None) -> str:
    """Returns the goals beside the results; nothing for what was not measured."""
    lines = [
        "## Targets", "",
        "At most is what workers reach that train Keras alone and exchange nothing; in step, such workers if each of "
        "their steps took as long as the slowest worker's.", "",
        "| | at least | measured | with shard_optimizer | at most | in step |", "|---|---:|---:|---:|---:|---:|",
    ]  # fmt: skip
    two = parts.get(2)
    for name, least in SPEED_UPS.items() if two else ():
        one = ("tfring", 1, name)
        cells = [two.ratio(one, (contestant, 2, name)) for contestant in ("tfring", "sharded")]
        cells += [two.most(2, name, figure) for figure in ("seconds", "in_step")]
        lines.append(f"| {name}, 2 workers over 1 | {least} | {' | '.join(map(number, cells))} |")
    for workers, least in OVER_HOROVOD.items():
        for name in models.TASKS if workers in parts else ():
            ours = [(each, workers, name) for each in ("tfring", "sharded", "apart")]
            ratios = [parts[workers].ratio(("horovod", workers, name), each) for each in ours]
            if ratios[0] is not None:
                title = f"{name}, {workers} workers, rows a second over Horovod's"
                lines.append(f"| {title} | {least} | {' | '.join(map(number, ratios))} | |")
    rest: list[tuple[str, str, str]] = []
    for peer, least in SMALL_BEYOND.items() if two else ():
        beyond = [two.beyond((each, 2, "small"), (BEYOND[each], 2, "small")) for each in (peer, "tfring")]
        if None not in beyond:
            title = f"small, 2 workers, time beyond the same work with nothing exchanged, {HEADINGS[peer]} over tfring"
            rest.append((title, f"{least}", number(beyond[0] / beyond[1])))
    for name in models.TASKS if two else ():
        ratio = two.ratio(("tfring", 1, name), ("plain", 1, name))
        rest.append((f"{name}, one worker, time over that of Keras alone, at most", f"{ONE_WORKER}", number(ratio)))
    if over_network:
        rest.append(("4 hosts, 1 Gbit/s, gradients' collectives hidden, by the clock", "80 %", hidden(over_network)))
    rest += pipeline_targets(of_pipelines) if of_pipelines else []
    lines += [f"| {' | '.join(row)} | | | |" for row in rest]
    return "\n".join(lines)


def hidden(over_network: dict, kind: int | None = None) -> str:
    """Returns the part of the links' cost, with one bucket for all, that buckets of a `kind` save."""
    of = medians(over_network)
    alone, together = of["unshaped"]["milliseconds"], list(of.values())[-1]["milliseconds"]
    return percent((together - of[kind]["milliseconds"]) / (together - alone))


def medians(over_network: dict) -> dict:
    """Returns each figure of each kind of buckets."""
    return {
        kind: {name: statistics.median(each[name] for each in found) for name in found[0]}
        for kind, found in over_network["runs"]
    }


def section(workers: int, part: Part) -> str:
    lines = [f"## {workers} workers beside one", "", f"{part.conditions} Versions: {'; '.join(part.versions)}."]
    if part.missing:
        lines.append(f"Left out: {'; '.join(part.missing)}.")
    lines += [
        "",
        f"Milliseconds of the median step (median of rounds) of one worker and of {workers}; the speed-up is the "
        f"median of the ratios within a round. Rows a second, kB that a worker sends a step and MB that a worker takes "
        f"for a step beside the model's and its slots' are those of {workers} workers.",
    ]
    names = [name for name in models.TASKS if any(cell[2] == name for cell in part.times)]
    for name in names:
        lines += ["", f"**{models.TASKS[name].title}**", ""]
        lines += [
            f"| | 1 worker | {workers} workers | speed-up | rows a second | kB sent | MB in a step |",
            "|---|---:|---:|---:|---:|---:|---:|",
        ]
        for contestant, heading in HEADINGS.items():
            one, several = (contestant, 1, name), (contestant, workers, name)
            if part.seconds(*one) is None and part.seconds(*several) is None:
                continue
            if contestant in OF_ONE:
                one = (OF_ONE[contestant], 1, name)
            sent, taken = part.last("bytes", *several), part.last("memory", *several)
            seconds = part.seconds(*several)
            cells = [
                milliseconds(None if contestant in OF_ONE else part.seconds(*one)),
                milliseconds(seconds),
                number(part.ratio(one, several)),
                "" if seconds is None else f"{models.TASKS[name].batch / seconds:,.0f}",
                "" if sent is None else f"{sent / 1e3:,.0f}",
                "" if taken is None else f"{taken / 1e6:,.0f}",
            ]
            lines.append(f"| {heading} | " + " | ".join(cells) + " |")
    lines += [
        "",
        f"At most is the speed-up of {workers} workers that exchange nothing, over Keras alone; in step, the same if "
        "each of their steps took as long as the slowest worker's, as it does for workers that wait for each other. "
        "Then tfring's rows a second over its peers', and its time with one worker over that of Keras alone.",
        "",
        f"| | speed-up | sharded | at most | in step | {' | '.join(HEADINGS[peer] for peer in PEERS)} | one worker |",
        "|---|" + "---:|" * 8,
    ]
    for name in names:
        cells = [
            part.ratio(("tfring", 1, name), ("tfring", workers, name)),
            part.ratio(("tfring", 1, name), ("sharded", workers, name)),
            part.most(workers, name, "seconds"),
            part.most(workers, name, "in_step"),
            *(part.ratio((peer, workers, name), ("tfring", workers, name)) for peer in PEERS),
            part.ratio(("tfring", 1, name), ("plain", 1, name)),
        ]
        lines.append(f"| {name} | " + " | ".join(map(number, cells)) + " |")
    lines += ["", "Milliseconds a step beyond the same work with nothing exchanged:", ""]
    lines += [f"| | {' | '.join(HEADINGS[name] for name in BEYOND)} |", "|---|" + "---:|" * len(BEYOND)]
    for name in names:
        cells = [part.beyond((each, workers, name), (apart, workers, name)) for each, apart in BEYOND.items()]
        lines.append(f"| {name} | " + " | ".join(map(milliseconds, cells)) + " |")
    return "\n".join(lines)


def network_section(result: dict) -> str:
    lines = [
        f"## {result['hosts']} hosts, links of {result['rate'] / 1e9:.0f} Gbit/s", "",
        f"{result['conditions']} Versions: {'; '.join(result['versions'])}.", "",
        f"Hosts are network namespaces with a worker each, which share the cores. {models.LARGE.title[0].upper()}"
        f"{models.LARGE.title[1:]}. Milliseconds a step by `tfring report`, means over steps and ranks, medians of "
        f"{len(result['runs'][0][1])} rounds. Hidden by the clock is which part of what the links cost where one "
        "bucket holds all the buckets save; by the trace, at most the processor time that a worker had beside "
        "its collectives.",
        "",
        "| bytes that close a bucket | step | gradients' collectives | hidden, by the clock | by the trace |",
        "|---|---:|---:|---:|---:|",
    ]  # fmt: skip
    for kind, of in medians(result).items():
        if kind == "unshaped":
            heading = "all in one, links not shaped"
        else:
            heading = "as tfring chooses" if kind is None else f"{kind >> 20} MiB"
        by_clock = "" if kind == "unshaped" else hidden(result, kind)
        cells = [f"{of['milliseconds']:,.0f}", f"{of['gradients']:,.0f}", by_clock]
        lines.append(f"| {heading} | " + " | ".join(cells) + f" | {percent(of['gradients_hidden_share'])} |")
    return "\n".join(lines)


def threads_section(result: dict) -> str:
    cells = {tuple(cell): statistics.median(values) for *cell, values in result["times"]}
    names = list(dict.fromkeys(name for _, _, name in cells))
    titles = list(dict.fromkeys(title for _, title, _ in cells))
    lines = [
        "## Threads of workers that share a host's cores", "",
        f"{result['conditions']} Versions: {'; '.join(result['versions'])}.", "",
        "tfring, workers that are not bound to cores. Milliseconds of the slowest worker's median step, medians of "
        f"{len(result['times'][0][-1])} rounds.", "",
        f"| workers | threads | {' | '.join(names)} |", "|---|---|" + "---:|" * len(names),
    ]  # fmt: skip
    for workers in dict.fromkeys(workers for workers, _, _ in cells):
        for title in titles:
            found = [milliseconds(cells[workers, title, name]) for name in names]
            lines.append(f"| {workers} | {title} | {' | '.join(found)} |")
    return "\n".join(lines)


def embeddings_section(result: dict) -> str:
    headings = {
        **HEADINGS,
        "tfring": "tfring, every worker has all tables",
        "divided": "tfring, tables divided",
        "divided_apart": "tfring, tables divided, nothing exchanged",
    }
    lines = [
        "## Tables divided over the workers", "",
        f"{result['conditions']} Versions: {'; '.join(result['versions'])}.", "",
        f"{models.TABLES_TASK.title}. Milliseconds of the slowest worker's median step, medians of "
        f"{len(result['times'][0][-1])} rounds; how many times as fast the divided form is, medians of the ratios "
        "within a round; kB that a worker sends a step, and would if it sent the gradients of all looked-up rows to "
        "each other.", "",
        "| workers | | ms | divided is faster by | kB sent | every row |", "|---|---|---:|---:|---:|---:|",
    ]  # fmt: skip
    of = {tuple(cell): values for *cell, values in result["times"]}
    for (workers, name), values in of.items():
        seconds = [value["seconds"] for value in values]
        ratio = statistics.median(
            one / other["seconds"] for one, other in zip(seconds, of[workers, "divided"], strict=True)
        )
        sent = values[-1]["bytes"]
        rows = len(models.LARGE_TABLES) * models.TABLES_TASK.batch / workers
        every = rows * (4 * models.LARGE_WIDTH + 4) * (workers - 1)
        cells = [
            milliseconds(statistics.median(seconds)), "" if name == "divided" else number(ratio),
            "" if not sent else f"{sent / 1e3:,.0f}", f"{every / 1e3:,.0f}" if name == "divided" else "",
        ]  # fmt: skip
        lines.append(f"| {workers} | {headings[name]} | {' | '.join(cells)} |")
    lines += [
        "",
        f"One table of so many rows of {models.LARGE_WIDTH} floats with Adagrad, {len(result['memory'][0][1])} "
        "workers: MB of a worker's share of rows and slots, the most that it took beyond a model with 1,000 rows while "
        "it made the table, compiled and trained, and its step (batch 1,024, 8 ids an example).",
        "",
        "| rows | share, MB | taken, MB | taken over share | ms a step |",
        "|---:|---:|---:|---:|---:|",
    ]
    for rows, answers in result["memory"]:
        worst = max(answers, key=lambda answer: answer["taken"])
        cells = [f"{worst[name] / 1e6:,.0f}" for name in ("share", "taken")]
        cells += [number(worst["taken"] / worst["share"]), milliseconds(worst["seconds"])]
        lines.append(f"| {rows:,} | {' | '.join(cells)} |")
    return "\n".join(lines)


def idle_of_stages(result: dict) -> list[float | None]:
    """Returns, for each variant that computes forward passes once, the share of a step in which stages are idle."""
    whole = dict(result["microbatched"])
    found: list[float | None] = []
    for _, microbatches, recompute, rounds in result["times"]:
        pairs = zip(whole[microbatches], rounds, strict=True)
        shares = [1 - statistics.mean(busy) / (len(step) * max(step)) for busy, step in pairs]
        found.append(None if recompute else statistics.median(shares))
    return found


def idle_by_plan(stages: int, microbatches: int) -> float:
    return (stages - 1) / (microbatches + stages - 1)


def pipeline_targets(result: dict) -> list[tuple[str, str, str]]:
    """Returns the goals of pipelines beside the results."""
    times = {(schedule, m): rounds for schedule, m, recompute, rounds in result["times"] if not recompute}
    memory = {(s, schedule): max(taken) for s, schedule, _, recompute, taken in result["memory"] if not recompute}
    stages = len(times["1f1b", 8][0])
    pairs = zip(times["1f1b", 8], times["gpipe", 8], strict=True)
    ratio = statistics.median(max(ours) / max(theirs) for ours, theirs in pairs)
    rows = [("2 stages, 8 microbatches, time of 1F1B over GPipe's, at most", "1", number(ratio))]
    for count in (2, 4):
        title = f"{count} stages, 8 microbatches, memory of the fullest stage, GPipe's over 1F1B's"
        rows.append((title, "1.5", number(memory[count, "gpipe"] / memory[count, "1f1b"])))
    for (schedule, m, *_), idle in zip(result["times"], idle_of_stages(result), strict=True):
        if idle is not None and schedule == "1f1b":
            title = f"{stages} stages, {m} microbatches, 1F1B, idle beyond the plan's, points, at most"
            rows.append((title, "10", f"{100 * (idle - idle_by_plan(stages, m)):.0f}"))
    return rows


def pipeline_section(result: dict) -> str:
    whole, stages = dict(result["microbatched"]), len(result["times"][0][-1][0])
    one = statistics.median(statistics.mean(seconds) for seconds in whole[1])
    lines = [
        "## Layers divided over the workers", "",
        f"{result['conditions']} Versions: {'; '.join(result['versions'])}.", "",
        f"{models.DEEP_TASK.title}, in {stages} stages of {models.DEPTH // stages} layers, medians of {len(whole[1])} "
        f"rounds, in which each schedule has its turn. Computing is what a worker of Keras alone takes to train on the "
        f"same microbatches, a step each, {stages} such workers at once and nothing exchanged; on the whole batch it "
        f"takes {milliseconds(one)} ms. Idle is which part of a step the stages do not compute: by the plan "
        "(S - 1) / (M + S - 1); measured 1 - C / (S T), with the time T of a step and that of computing, C, so that "
        "what travels is in it.", "",
        "| schedule | microbatches | forward pass | ms a step | ms of computing | idle, by the plan | idle, measured |",
        "|---|---:|---|---:|---:|---:|---:|",
    ]  # fmt: skip
    for (schedule, m, recompute, rounds), idle in zip(result["times"], idle_of_stages(result), strict=True):
        cells = [
            schedule, str(m), "twice" if recompute else "once",
            milliseconds(statistics.median(map(max, rounds))),
            milliseconds(statistics.median(map(statistics.mean, whole[m]))),
            percent(idle_by_plan(stages, m)), "" if idle is None else percent(idle),
        ]  # fmt: skip
        lines.append(f"| {' | '.join(cells)} |")
    lines += [
        "",
        f"MB that steps of {models.MANY_ROWS:,} rows take at most on each stage, beyond what its process has once it "
        f"has trained the same model on {models.FEW_ROWS} rows: the batch, activations, gradients. One stage is the "
        "model itself, without microbatches. Each has processes of its own, whose malloc gives large blocks back at "
        "once, so that the most there is at a time is seen.", "",
        "| stages | schedule | microbatches | forward pass | MB, by stage | the fullest, of one stage's |",
        "|---:|---|---:|---|---:|---:|",
    ]  # fmt: skip
    [undivided] = [max(taken) for count, *_, taken in result["memory"] if count == 1]
    for count, schedule, m, recompute, taken in result["memory"]:
        kind = ("", "", "once") if count == 1 else (schedule, str(m), "twice" if recompute else "once")
        cells = [str(count), *kind, ", ".join(f"{each / 1e6:,.0f}" for each in taken), percent(max(taken) / undivided)]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def percent(share: float) -> str:
    return f"{100 * share:.0f} %"


def milliseconds(seconds: float | None) -> str:
    return "" if seconds is None else f"{seconds * 1e3:,.1f}"


def number(value: float | None) -> str:
    return "" if value is None else f"{value:.2f}"
