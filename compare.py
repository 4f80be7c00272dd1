"""Runs side by side: one table and one picture. Reads run folders only, and imports no torch.

    python compare.py out/learned-1337 out/sinusoidal-1337 out/rope-1337
"""
import math
import statistics
from collections import defaultdict
from pathlib import Path

from pydantic import Field

import logs
from config import NEUTRAL, read_config
from options import Options, UserError, build, command, helped, parse

# Colours that stay apart for colour-blind eyes (Okabe and Ito), and with dashes and markers also in grey print.
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#56B4E9", "#E69F00", "#000000", "#999999")
DASHES = ("-", "--", "-.", ":")
MARKERS = "osD^vP*X"


def read_run(folder):
    """-> {"name", "config", "summary", "log", "lengths"} of a run's folder."""
    folder = Path(folder)
    return {"name": shortened(folder.resolve().name), "config": read_config(folder), "summary": logs.read_summary(folder),
            "log": logs.read(folder, "log.jsonl"), "lengths": latest(logs.read(folder, "lengths.jsonl"), "context"),
            "positions": latest(logs.read(folder, "positions.jsonl"), "position")}


def shortened(name, limit=48):
    """A run's name as tables and legends have room for it."""
    return name if len(name) <= limit else f"{name[:limit // 2]}...{name[3 - limit // 2:]}"


def read_runs(folders):
    """-> the runs, each once however often its folder is named."""
    return [read_run(folder) for folder in {Path(folder).resolve(): folder for folder in folders}.values()]


def latest(records, axis):
    """-> {name of a scaling, "" for none: {record[axis]: record}}, of each scaling the curve that was measured last."""
    curves = {}
    for record in records:
        points = curves.pop(logs.curve(record), {})
        curves[logs.curve(record)] = points | {record[axis]: record}  # the last measured comes last
    named = {}
    for points in curves.values():
        record = next(iter(points.values()))  # all of a curve have one name
        named["" if record["scaling"] == "none" else logs.curve_name(record)] = points
    return named


def groups(runs):
    """Runs that differ only in their seed, in order of appearance -> [(name, [run, ...])]."""
    def identity(config):
        values = {k: v for k, v in config.model_dump().items() if k not in (*NEUTRAL, "seed")}
        if config.init_from:  # each seed from its own origin
            values |= {"init_from": Path(config.init_from).name.removesuffix(f"-{config.seed}"), "tokenizer": None}
        return tuple(values.items())

    found = defaultdict(list)
    for run in runs:
        found[identity(run["config"])].append(run)
    named = []
    for members in found.values():
        name, seed = members[0]["name"], members[0]["config"].seed
        named.append((name if len(members) == 1 else f"{name.removesuffix(f'-{seed}')} ({len(members)} runs)", members))
    return named


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


def same_windows(runs):
    """Whether the curves of all runs are over the same windows of the same ids."""
    return len({(record.get("data"), run["config"].unit, len(record.get("window_losses", ())))
                for run in runs for curve in run["lengths"].values() for record in curve.values()}) == 1


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
    contexts = sorted({c for run in runs for curve in run["lengths"].values() for c in curve})
    rows = [["run", "encoding", "parameters", "final", "best", "bits/byte", "tokens/s", *(f"at {c}" for c in contexts)]]
    differences = [["difference, paired by window", "", *(f"at {c}" for c in contexts)]]
    bases, comparable = None, same_windows(runs)
    for name, members in groups(runs):
        summaries = [run["summary"] for run in members]
        speeds = [[r["tokens_per_second"] for r in run["log"] if "tokens_per_second" in r] for run in members]
        head = [members[0]["config"].position, spread([summaries[0].get("parameters")], 0),
                spread([s.get("final_val_loss") for s in summaries]), spread([s.get("best_val_loss") for s in summaries]),
                spread([s.get("best_val_bpb") for s in summaries]), spread([statistics.median(s) for s in speeds if s], 0)]
        for number, key in enumerate(sorted({key for run in members for key in run["lengths"]} or {""})):
            curves = [run["lengths"].get(key, {}) for run in members]
            losses = [spread([curve[c]["loss"] for curve in curves if c in curve], 3) for c in contexts]
            label = f"{name} {key}".strip()
            rows.append(([label, *head] if number == 0 else [f"  {key}", *[""] * 6]) + losses)
            if bases is None:
                bases, base = curves, label
            elif comparable:
                differences.append([label, f"- {base}", *(paired(curves, bases, c) for c in contexts)])
    return aligned(rows) + ("\n\n" + aligned(differences) if len(differences) > 1 else "")


def points(curves):
    """Curves {x: record} of several seeds -> the x that all have, mean losses, and their spread.

    Over several seeds the spread is their standard deviation, for one run the standard error over windows.
    """
    xs = sorted(set.intersection(*(set(curve) for curve in curves)))
    losses = [[curve[x]["loss"] for curve in curves] for x in xs]
    spreads = [deviation(values) if len(values) > 1 else curves[0][x]["stderr"] for values, x in zip(losses, xs)]
    return xs, [statistics.fmean(values) for values in losses], spreads


def draw_steps(axes, members, style):
    """Training and validation loss over steps."""
    for run in members:
        train, val = ([r for r in run["log"] if key in r] for key in ("train_loss", "val_loss"))
        axes.plot([r["step"] for r in train], [r["train_loss"] for r in train], color=style["color"], alpha=0.25, linewidth=0.8)
        axes.plot([r["step"] for r in val], [r["val_loss"] for r in val], **style, markersize=4)


def figure(folders):
    """-> a matplotlib Figure: loss over steps, over context and over position for all runs, the training length marked."""
    from matplotlib.figure import Figure
    from matplotlib.lines import Line2D

    runs = read_runs(folders)
    made = Figure(figsize=(12, 8.4))
    (steps, by_context), (by_position, legend) = made.subplots(2, 2)
    # A layout that is computed takes as long as the drawing.
    made.subplots_adjust(left=0.06, bottom=0.06, right=0.99, top=0.96, wspace=0.15, hspace=0.22)
    handles, number = {}, 0
    for i, (name, members) in enumerate(groups(runs)):
        for j, key in enumerate(dict.fromkeys(key for run in members for key in run["lengths"]) or [""]):
            style = {"color": COLOURS[(i if len(runs) > 1 else number) % len(COLOURS)],
                     "marker": MARKERS[number % len(MARKERS)], "linestyle": DASHES[(j + i // len(COLOURS)) % len(DASHES)]}
            number += 1
            label = f"{name} {key}".strip()
            handles[label] = Line2D([], [], **style, label=label)
            if j == 0:
                draw_steps(steps, members, style)
            if curves := [run["lengths"][key] for run in members if key in run["lengths"]]:
                by_context.errorbar(*points(curves), **style, markersize=5, capsize=2)
            if curves := [run["positions"][key] for run in members if key in run["positions"]]:
                xs, means, spreads = points(curves)
                xs = [x + 1 for x in xs]
                by_position.plot(xs, means, **style, markersize=3, linewidth=1)
                by_position.fill_between(xs, *([m + sign * s for m, s in zip(means, spreads)] for sign in (-1, 1)),
                                         color=style["color"], alpha=0.12, linewidth=0)
    steps.set(xlabel="step", title="training (faint) and validation loss")
    by_context.set(xlabel="context (tokens)", title="loss on the same targets by context")
    by_position.set(xlabel="tokens seen", title="loss by position in the longest windows")
    for axes in (by_context, by_position):
        axes.set_xscale("log", base=2)
        axes.xaxis.set_major_formatter(lambda x, _: f"{x:g}")
        for length in sorted({run["config"].block_size for run in runs}):
            axes.axvline(length, color="grey", linestyle=":", linewidth=1)
            axes.annotate(f"trained at {length}", (length, 1), xycoords=("data", "axes fraction"), xytext=(3, -3),
                          textcoords="offset points", rotation=90, va="top", fontsize=8, color="grey")
    for axes in (steps, by_context, by_position):
        axes.set_ylabel("loss (nats per token)")
        axes.grid(alpha=0.25)
    legend.axis("off")
    legend.legend(handles=list(handles.values()), loc="upper left", frameon=False)
    return made


def draw(folders, path):
    """Write the picture of these runs; the ending of the path says in which format."""
    try:
        figure(folders).savefig(path, dpi=100)
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
