"""Runs side by side: one table and one picture. Reads run folders only, and imports no torch.

    python compare.py out/learned-1337 out/sinusoidal-1337 out/rope-1337
"""
import json
import statistics
from collections import defaultdict
from pathlib import Path

from pydantic import Field

import logs
from config import NEUTRAL, Options, UserError, build, command, parse, usage

# Colours that stay apart for colour-blind eyes (Okabe and Ito), and with dashes and markers also in grey print.
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#56B4E9", "#E69F00", "#000000", "#999999")
DASHES = ("-", "--", "-.", ":")
MARKERS = "osD^vP*X"


def read_run(folder):
    """-> {"name", "config", "summary", "log", "lengths"} of a run's folder."""
    folder = Path(folder)
    config = logs.read_config(folder)
    summary = {}
    if (folder / "summary.json").is_file():
        try:
            summary = json.loads((folder / "summary.json").read_text(encoding="utf-8"))
        except ValueError:
            summary = None
        if not isinstance(summary, dict):
            raise UserError(f"{folder / 'summary.json'}: not a summary of this program", "run train.py on it again")
    return {"name": folder.name, "config": config, "summary": summary,
            "log": logs.read(folder, "log.jsonl"), "lengths": latest(logs.read(folder, "lengths.jsonl"))}


def read_runs(folders):
    """-> the runs, each once however often its folder is named."""
    return [read_run(folder) for folder in {Path(folder).resolve(): folder for folder in folders}.values()]


def latest(records):
    """-> {name of a scaling, "" for none: {context: record}}, of each scaling the curve that was measured last."""
    curves = {}
    for record in records:
        name = "" if record["scaling"] == "none" else f"{record['scaling']}-{record['factor']}"
        if name not in curves or logs.curve(record) != logs.curve(next(iter(curves[name].values()))):
            curves[name] = {}
        curves[name][record["context"]] = record
    return curves


def groups(runs):
    """Runs that differ only in their seed, in order of appearance -> [(name, [run, ...])]."""
    found = defaultdict(list)
    for run in runs:
        found[tuple((k, v) for k, v in run["config"].model_dump().items() if k not in (*NEUTRAL, "seed"))].append(run)
    named = []
    for members in found.values():
        name, seed = members[0]["name"], members[0]["config"].seed
        named.append((name if len(members) == 1 else f"{name.removesuffix(f'-{seed}')} ({len(members)} runs)", members))
    return named


def spread(values, digits=4):
    """Mean, and where there are several values their standard deviation, as text."""
    values = [v for v in values if v is not None]
    if not values:
        return "-"
    mean = f"{statistics.fmean(values):,.{digits}f}"
    return mean if len(values) == 1 else f"{mean}±{statistics.stdev(values):.{digits}f}"


def same_windows(runs):
    """Whether the curves of all runs are over the same windows of the same text."""
    return len({(run["summary"].get("data_sha256"), run["config"].tokenizer, run["config"].vocab_size, run["config"].block_size,
                 run["config"].length_windows) for run in runs}) == 1


def paired(curves, bases, context):
    """Mean over windows of (loss - loss of the bases in the same window) and its standard error, as text."""
    ours, theirs = ([curve[context]["window_losses"] for curve in group if context in curve] for group in (curves, bases))
    if not ours or not theirs:
        return "-"
    differences = [statistics.fmean(a) - statistics.fmean(b) for a, b in zip(zip(*ours), zip(*theirs))]
    return f"{statistics.fmean(differences):+.3f}±{statistics.stdev(differences) / len(differences) ** 0.5:.3f}"


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
    bases = None
    for name, members in groups(runs):
        summaries = [run["summary"] for run in members]
        speeds = [[r["tokens_per_second"] for r in run["log"] if "tokens_per_second" in r] for run in members]
        head = [name, members[0]["config"].position, spread([summaries[0].get("parameters")], 0),
                spread([s.get("final_val_loss") for s in summaries]), spread([s.get("best_val_loss") for s in summaries]),
                spread([s.get("best_val_bpb") for s in summaries]), spread([statistics.median(s) for s in speeds if s], 0)]
        for number, key in enumerate(sorted({key for run in members for key in run["lengths"]} or {""})):
            curves = [run["lengths"].get(key, {}) for run in members]
            losses = [spread([curve[c]["loss"] for curve in curves if c in curve], 3) for c in contexts]
            rows.append((head if number == 0 else [f"  {key}", *[""] * 6]) + losses)
            if bases is None:
                bases, base = curves, f"{name} {key}".strip()
            else:
                differences.append([f"{name} {key}".strip(), f"- {base}", *(paired(curves, bases, c) for c in contexts)])
    return aligned(rows) + ("\n\n" + aligned(differences) if len(differences) > 1 and same_windows(runs) else "")


def draw(folders, path):
    """Loss over steps, and loss over context with the training length marked, for all runs in one picture."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    runs = read_runs(folders)
    figure, (left, right) = plt.subplots(1, 2, figsize=(12, 4.6), layout="constrained")
    number = 0
    for i, (name, members) in enumerate(groups(runs)):
        colour, dash = COLOURS[i % len(COLOURS)], DASHES[i // len(COLOURS) % len(DASHES)]
        for j, run in enumerate(members):
            train = [r for r in run["log"] if "train_loss" in r]
            left.plot([r["step"] for r in train], [r["train_loss"] for r in train], color=colour, alpha=0.25, linewidth=0.8)
            points = [r for r in run["log"] if "val_loss" in r]
            left.plot([r["step"] for r in points], [r["val_loss"] for r in points], color=colour, linestyle=dash,
                      marker=MARKERS[i % 8], markersize=4, label=None if j else name)
        for key in dict.fromkeys(key for run in members for key in run["lengths"]):
            curves = [run["lengths"][key] for run in members if key in run["lengths"]]
            contexts = sorted(set.intersection(*(set(curve) for curve in curves)))
            losses = [[curve[c]["loss"] for curve in curves] for c in contexts]
            means = [statistics.fmean(values) for values in losses]
            # Over several seeds the bar is their standard deviation, for one run the standard error over windows.
            bars = [statistics.stdev(v) if len(v) > 1 else curves[0][c]["stderr"] for v, c in zip(losses, contexts)]
            style = DASHES[number % len(DASHES)] if key else dash
            right.errorbar(contexts, means, bars, color=colour if not key or len(runs) > 1 else COLOURS[number % len(COLOURS)],
                           linestyle=style, marker=MARKERS[number % 8], markersize=5, capsize=2, label=f"{name} {key}".strip())
            number += 1
    for length in sorted({run["config"].block_size for run in runs}):
        right.axvline(length, color="grey", linestyle=":", linewidth=1)
        right.annotate(f"trained at {length}", (length, 1), xycoords=("data", "axes fraction"), xytext=(3, -3),
                       textcoords="offset points", rotation=90, va="top", fontsize=8, color="grey")
    left.set(xlabel="step", ylabel="loss (nats per token)", title="training (faint) and validation loss")
    right.set(xlabel="context (tokens)", ylabel="loss (nats per token)", title="loss on the same targets by context")
    ticks = sorted({c for run in runs for curve in run["lengths"].values() for c in curve})
    if ticks:
        right.set_xscale("log", base=2)
        right.set_xticks(ticks, [str(c) for c in ticks])
        right.minorticks_off()
    for axes in (left, right):
        axes.grid(alpha=0.25)
        if axes.get_legend_handles_labels()[0]:
            axes.legend(frameon=False, fontsize=8)
    try:
        figure.savefig(path, dpi=120)
    except (OSError, ValueError) as error:
        raise UserError(f"{path}: cannot be written", str(error)) from None
    finally:
        plt.close(figure)


class Compare(Options):
    picture: str = Field("compare.png", min_length=1)
    """Where the picture goes; .png, .svg and .pdf are known by their endings."""


def main(argv):
    if "--help" in argv or "-h" in argv:
        print(usage(Compare, "python compare.py RUN RUN ... [--picture PATH]"))
        return 0
    folders, values = parse(argv, Compare)
    options = build(Compare, values)
    if not folders:
        raise UserError("no run folders given", "usage: python compare.py RUN RUN ... [--picture PATH]")
    picture = options.picture if Path(options.picture).suffix else f"{options.picture}.png"
    print(table(folders))
    draw(folders, picture)
    print(f"picture: {picture}")
    return 0


if __name__ == "__main__":
    command(main)
