"""Runs side by side: one table and one picture. Reads run folders only, and imports no torch.

    python compare.py out/learned-1337 out/sinusoidal-1337 out/rope-1337
"""
import io
import math
import re
import statistics
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from pydantic import Field

import files
import logs
from config import NEUTRAL, read_config
from options import Options, UserError, build, command, helped, parse

# Colours that stay apart for colour-blind eyes (Okabe and Ito), and with dashes and markers also in grey print.
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#56B4E9", "#E69F00", "#000000", "#999999")
DASHES = ("-", "--", "-.", ":")
MARKERS = "osD^vP*X"


def read_run(folder):
    """-> {"folder", "name", "config", "summary", "log"} of a run's folder, and its curves by the names of PANELS."""
    folder = Path(folder)
    return {"folder": folder, "name": folder.resolve().name, "config": read_config(folder),
            "summary": logs.read_summary(folder), "log": logs.read(folder, "log.jsonl"),
            **{name: latest(logs.read(folder, f"{name}.jsonl"), panel.axis) for name, panel in PANELS.items()}}


def shortened(name, limit=48):
    """A run's name as tables and legends have room for it."""
    return name if len(name) <= limit else f"{name[:limit // 2]}...{name[3 - limit // 2:]}"


def read_runs(folders):
    """-> the runs, each once however often its folder is named."""
    return [read_run(folder) for folder in {Path(folder).resolve(): folder for folder in folders}.values()]


def latest(records, axis):
    """-> {name of a scaling, "" for none: {record[axis]: record}}, of each scaling the curve of the best weights that was
    measured last; of a run that has not ended, that of the last."""
    curves = {}
    for record in records:
        points = curves.pop(logs.curve(record), {})
        curves[logs.curve(record)] = points | {record[axis]: record}  # the last measured comes last
    named = {}
    for points in sorted(curves.values(), key=lambda points: next(iter(points.values()))["checkpoint"] == "best"):
        record = next(iter(points.values()))  # all of a curve have one name
        named["" if record["scaling"] == "none" else logs.curve_name(record)] = points
    return named


def seedless(name, seed):
    """The name of a run without its seed, which ends it, or the part of it that says where a fine-tuned run began."""
    return re.sub(rf"(^|-){seed}(?=\+|$)", "", name)


def identity(config, free=("seed",)):
    """What two runs of one group have in common: all but the keys that may differ, and where and how they were run."""
    values = {k: v for k, v in config.model_dump().items() if k not in (*NEUTRAL, *free)}
    if config.init_from:  # each seed from its own origin, beside the run or elsewhere
        origin = Path(config.init_from)
        elsewhere = None if origin.parent == Path(config.out_dir or ".").parent else str(origin.parent)
        values |= {"init_from": (elsewhere, seedless(origin.name, config.seed)), "tokenizer": None}
    return tuple(values.items())


def groups(runs):
    """Runs that differ only in their seed, in order of appearance -> [(name, [run, ...])]; of several, without the seed."""
    found = defaultdict(list)
    for run in runs:
        found[identity(run["config"])].append(run)
    named = []
    for members in found.values():
        name = members[0]["name"]
        label = name if len(members) == 1 else seedless(name, members[0]["config"].seed)
        named.append((label or members[0]["config"].position, members))
    return named


def counted(name, members):
    """A group's name as tables and legends have room for it, and of how many runs it is."""
    return shortened(name) if len(members) == 1 else f"{shortened(name)} ({len(members)} runs)"


def deviation(values):
    """Standard deviation; no number where a value is not finite."""
    return statistics.stdev(values) if all(map(math.isfinite, values)) else math.nan


def spread(values, digits=4):
    """Mean, and where there are several values their standard deviation, as text; what is no number does not count."""
    values = [v for v in values if isinstance(v, float) or (isinstance(v, int) and abs(v) < 2**63)]
    if not values:
        return "-"
    mean = f"{statistics.fmean(values):,.{digits}f}"
    return mean if len(values) == 1 else f"{mean}±{deviation(values):.{digits}f}"


def measured_over(run, record):
    """What a point of a curve is a mean over, as text: data, windows or problems. Points are comparable if it is the same."""
    unit = None if run["config"].has_answers else run["config"].unit
    return str((record.get("data"), unit, *(record.get(key) for key in ("windows", "problems", "count"))))


def alike(pairs):
    """Whether the records of all (run, record) are over the same."""
    return len({measured_over(run, record) for run, record in pairs}) < 2


def paired(curves, bases, context):
    """Mean over windows of (loss - loss of the bases in the same window) and its standard error, as text."""
    ours, theirs = ([curve[context].get("window_losses", ()) for curve in group if context in curve]
                    for group in (curves, bases))
    if not any(ours) or not any(theirs):
        return "-"
    differences = [statistics.fmean(a) - statistics.fmean(b)
                   for a, b in zip(zip(*ours, strict=True), zip(*theirs, strict=True), strict=True)]
    return f"{statistics.fmean(differences):+.3f}±{deviation(differences) / len(differences) ** 0.5:.3f}"


def aligned(rows):
    """Rows of cells as text: the first two columns to the left, numbers to the right."""
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    lines = [[cell.ljust(w) if i < 2 else cell.rjust(w) for i, (cell, w) in enumerate(zip(row, widths))] for row in rows]
    return "\n".join("  ".join(line).rstrip() for line in lines)


def table(folders):
    """One row a run, or a group of runs that differ only in the seed, and one for each further scaling that was measured.

    Below, where they were measured on the same windows, each curve's difference to the first: the standard error of a curve
    is mostly that some windows are harder than others, for every encoding, and in a paired difference that cancels.
    """
    runs = read_runs(folders)
    columns = [(name, x) for name, panel in PANELS.items() if panel.column
               for x in sorted({x for run in runs for curve in run[name].values() for x in curve})]
    contexts = [x for name, x in columns if name == "lengths"]
    rows = [["run", "encoding", "parameters", "final", "best", "bits/byte", "tokens/s",
             *(f"{PANELS[name].column} {x}" for name, x in columns)]]
    differences = [["difference, paired by window", "", *(f"at {c}" for c in contexts)]]
    bases, comparable = None, alike([(run, r) for run in runs for curve in run["lengths"].values() for r in curve.values()])
    for name, members in groups(runs):
        name = counted(name, members)
        summaries = [run["summary"] for run in members]
        if len({str(s["data_sha256"]) for s in summaries if "data_sha256" in s}) > 1:  # a mean over texts says nothing
            summaries = [{}]
        speeds = [[r["tokens_per_second"] for r in run["log"] if "tokens_per_second" in r] for run in members]
        head = [members[0]["config"].position, spread([summaries[0].get("parameters")], 0),
                spread([s.get("final_val_loss") for s in summaries]), spread([s.get("best_val_loss") for s in summaries]),
                spread([s.get("best_val_bpb") for s in summaries]), spread([statistics.median(s) for s in speeds if s], 0)]
        for number, key in enumerate(keys(members)):
            curves = [run["lengths"].get(key, {}) for run in members]
            found = [[(run, run[panel][key][x]) for run in members if x in run[panel].get(key, ())] for panel, x in columns]
            cells = [spread([record[PANELS[panel].value] for _, record in pairs], 3) if alike(pairs) else "-"
                     for (panel, _), pairs in zip(columns, found)]
            label = f"{name} {key}".strip()
            rows.append(([label, *head] if number == 0 else [f"  {key}", *[""] * 6]) + cells)
            if bases is None:
                bases, base = curves, label
            elif comparable:
                differences.append([label, f"- {base}", *(paired(curves, bases, c) for c in contexts)])
    if not comparable:
        return f"{aligned(rows)}\n\nnot subtracted: these curves are not all over the same text and windows"
    return aligned(rows) + ("\n\n" + aligned(differences) if len(differences) > 1 else "")


@dataclass(frozen=True)
class Panel:
    """How one kind of curve is drawn and tabulated."""

    axis: str  # the key of a record that the curve is over
    value: str  # the key that is shown
    x: str
    y: str
    title: str
    trained: Callable  # (run, record) -> where on the x-axis training ended
    column: str = ""  # before the columns of the table, if it has any
    shift: int = 0  # between the key and the x-axis


LOSS = "loss (nats per token)"
PANELS = {
    "lengths": Panel(*logs.CURVES["lengths.jsonl"][:2], "context (tokens)", LOSS, "loss on the same targets by context",
                     lambda run, record: run["config"].block_size, "at"),
    "positions": Panel(*logs.CURVES["positions.jsonl"][:2], "tokens seen", LOSS, "loss by position in the longest windows",
                       lambda run, record: run["config"].block_size, shift=1),
    "accuracy": Panel(*logs.CURVES["accuracy.jsonl"][:2], "length of the problem", "answers that are right",
                      "accuracy by length", lambda run, record: record["trained"], "right at"),
}


def as_trained(config):
    """-> the name among a run's curves of the one in which positions are read as they were in training."""
    said = config.reading()
    return "" if said["scaling"] == "none" else logs.curve_name(said | {"finetuned": False})


def reads_as_trained(key, config):
    """Whether that is the curve of this name."""
    return key.removesuffix("-finetuned") == as_trained(config)


def keys(members):
    """-> the names of all curves of some runs that differ only in their seed, that of the run as it was trained first."""
    config = members[0]["config"]
    found = {key for run in members for panel in PANELS for key in run[panel]} or {as_trained(config)}
    return sorted(found, key=lambda key: (not reads_as_trained(key, config), key))


class Curve(NamedTuple):
    """A group of runs, read in one way."""

    label: str
    runs: list
    key: str  # the name of the curve in each run
    style: dict

    @property
    def trained(self):
        """Whether positions are read as they were in training."""
        return reads_as_trained(self.key, self.runs[0]["config"])

    def measured(self, panel):
        """-> [(run, {x: record})] of the runs in which it was measured."""
        return [(run, run[panel][self.key]) for run in self.runs if run[panel].get(self.key)]


def styled(runs):
    """-> [Curve] of every group of runs and every way in which they were read."""
    found = []
    for i, (name, members) in enumerate(groups(runs)):
        for j, key in enumerate(keys(members)):
            colour = i if len(runs) > 1 else len(found)
            found.append(Curve(f"{name} {key}".strip(), members, key, {
                "color": COLOURS[colour % len(COLOURS)], "marker": MARKERS[len(found) % len(MARKERS)],
                "linestyle": DASHES[(j + i // len(COLOURS)) % len(DASHES)]}))
    return found


def points(curve, name):
    """A Curve in a panel -> the x that all its runs have, over the same, means of the value, and their spread; empty where
    there are none.

    Over several seeds the spread is their standard deviation, for one run the standard error over windows.
    """
    panel, measured = PANELS[name], curve.measured(name)
    found = [records for _, records in measured]
    xs = [x for x in sorted(set.intersection(*map(set, found))) if alike((run, records[x]) for run, records in measured)] \
        if found else []
    values = [[each[x][panel.value] for each in found] for x in xs]
    spreads = [deviation(each) if len(each) > 1 else found[0][x]["stderr"] for each, x in zip(values, xs)]
    return [x + panel.shift for x in xs], [statistics.fmean(each) for each in values], spreads


def draw_steps(axes, curves):
    """Training and validation loss over steps."""
    for curve in (curve for curve in curves if curve.trained):
        for run in curve.runs:
            train, val = ([r for r in run["log"] if key in r] for key in ("train_loss", "val_loss"))
            axes.plot([r["step"] for r in train], [r["train_loss"] for r in train], color=curve.style["color"], alpha=0.25,
                      linewidth=0.8)
            axes.plot([r["step"] for r in val], [r["val_loss"] for r in val], **curve.style, markersize=4)
    axes.set(xlabel="step", ylabel=LOSS, title="training (faint) and validation loss")
    axes.grid(alpha=0.25)


def draw_panel(axes, name, curves):
    """One kind of curve, with its spread, where training ended, and chance where there is one."""
    panel = PANELS[name]
    for curve in curves:
        xs, means, spreads = points(curve, name)
        if not xs:
            continue
        several = len(curve.measured(name)) > 1
        if name == "positions":
            axes.plot(xs, means, **curve.style, markersize=3, linewidth=1)
        else:
            axes.errorbar(xs, means, None if several else spreads, **curve.style, markersize=5, capsize=2)
        if name == "positions" or several:
            axes.fill_between(xs, *([m + sign * s for m, s in zip(means, spreads)] for sign in (-1, 1)),
                              color=curve.style["color"], alpha=0.12, linewidth=0)
    trained, chance = marks(curves, name)
    if chance:
        axes.plot(*zip(*chance), color="grey", linestyle="--", linewidth=1)
        axes.annotate("chance", chance[-1], xytext=(-3, 3), textcoords="offset points", ha="right", fontsize=8, color="grey")
    axes.set(xlabel=panel.x, ylabel=panel.y, title=title(curves, name))
    axes.set_xscale("log", base=2)
    axes.xaxis.set_major_formatter(lambda x, _: f"{x:g}")
    for length in trained:
        axes.axvline(length, color="grey", linestyle=":", linewidth=1)
        axes.annotate(f"trained at {length}", (length, 1), xycoords=("data", "axes fraction"), xytext=(3, -3),
                      textcoords="offset points", rotation=90, va="top", fontsize=8, color="grey")
    axes.grid(alpha=0.25)


def drawn(curves, name):
    """-> all (run, record) of these curves in a panel."""
    return [(run, record) for curve in curves for run, found in curve.measured(name) for record in found.values()]


def title(curves, name):
    """-> the title of a panel, which says where points at one x are not over the same."""
    panel, found = PANELS[name], defaultdict(list)
    for run, record in drawn(curves, name):
        found[record[panel.axis]].append((run, record))
    if all(map(alike, found.values())):
        return panel.title
    return f"{panel.title.replace(' on the same targets', '')}, over different data: not comparable"


def marks(curves, name):
    """-> (where training ended on the x-axis of a panel, each once; [(x, chance)], empty where there is none, or several)."""
    records, axis, trained = drawn(curves, name), PANELS[name].axis, PANELS[name].trained
    chance = sorted({(record[axis], record["chance"]) for _, record in records if "chance" in record})
    return sorted({trained(run, record) for run, record in records}), chance if len(dict(chance)) == len(chance) else []


def shown(runs):
    """-> the names of the panels that these runs have curves for, or will have."""
    found = [name for name in PANELS if any(run[name] for run in runs)]
    return found or (["accuracy"] if runs[0]["config"].has_answers else ["lengths", "positions"])


def figure(folders):
    """-> a matplotlib Figure: loss over steps, and every kind of curve that the runs have, the training length marked."""
    from matplotlib.figure import Figure
    from matplotlib.lines import Line2D

    runs = read_runs(folders)
    curves, panels = styled(runs), shown(runs)
    rows = 1 + (len(panels) + 1) // 2
    made = Figure(figsize=(12, 4.2 * rows))
    steps, *places, legend = made.subplots(rows, 2).flat[:len(panels) + 2]
    for axes in made.axes[len(panels) + 2:]:
        axes.remove()
    # A layout that is computed takes as long as the drawing.
    made.subplots_adjust(left=0.06, bottom=0.12 / rows, right=0.99, top=1 - 0.08 / rows, wspace=0.15, hspace=0.22)
    draw_steps(steps, curves)
    for axes, name in zip(places, panels):
        draw_panel(axes, name, curves)
    legend.axis("off")
    legend.legend(handles=[Line2D([], [], **curve.style, label=counted(curve.label, curve.runs)) for curve in curves],
                  loc="upper left", frameon=False)
    return made


def save(figure, path, **options):
    """Write a matplotlib Figure, whole or not at all; the ending of the path says in which format."""
    import matplotlib

    picture = io.BytesIO()
    # The same picture is the same file, and a dollar in a name is no formula.
    with matplotlib.rc_context({"svg.hashsalt": "positions", "text.parse_math": False}):
        figure.savefig(picture, format=Path(path).suffix[1:], **options)
    files.replace(path, picture.getvalue())


def draw(folders, path):
    """Write the picture of these runs; the ending of the path says in which format."""
    try:
        save(figure(folders), path, dpi=100)
    except (OSError, ValueError) as error:
        raise UserError(f"{path}: cannot be written", str(error)) from None


class Compare(Options):
    picture: str = Field("compare.png", min_length=1)
    """Where the picture goes; .png, .svg and .pdf are known by their endings."""


@helped(Compare, "python compare.py RUN RUN ... [--picture PATH]")
def main(argv):
    folders, values = parse(argv, Compare)
    options = build(Compare, values)
    if not folders:
        raise UserError("no run folders given", "name some, such as out/rope-1337 out/learned-1337; --help shows the rest")
    picture = options.picture if Path(options.picture).suffix else f"{options.picture}.png"
    print(table(folders))
    draw(folders, picture)
    print(f"picture: {picture}")
    return 0


if __name__ == "__main__":
    command(main)
