"""What a study ends with: tables, pictures, and a page to look around in. Reads run folders only, and imports no torch.

Means and standard deviations are over seeds. Two encodings are compared by the differences between runs of one seed, which
share their batches and their initial weights; a difference is called one where its interval leaves zero out.
"""
import csv
import hashlib
import io
import json
import math
import re
import secrets
import shlex
import statistics
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import NamedTuple

import compare
import files
import logs
from compare import PANELS
from options import UserError

# Quantiles 0.975 of Student's t by degrees of freedom, from 1 on; beyond them, the last is hardly too wide.
STUDENT = (12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228, 2.201, 2.179, 2.160, 2.145, 2.131, 2.120,
           2.110, 2.101, 2.093, 2.086, 2.080, 2.074, 2.069, 2.064, 2.060, 2.056, 2.052, 2.048, 2.045, 2.042)


def interval(differences):
    """Differences between pairs of runs -> (mean, half of its 95 % confidence interval, not a number for one pair)."""
    n = len(differences)
    if n < 2:
        return differences[0], math.nan
    quantile = STUDENT[min(n, len(STUDENT) + 1) - 2]
    return statistics.fmean(differences), quantile * compare.deviation(differences) / math.sqrt(n)


def verdict(differences):
    """Differences between pairs of runs -> them in words; nothing is called higher or lower within the noise."""
    n, (mean, half) = len(differences), interval(differences)
    if n < 2:
        return f"{mean:+.3f}, one pair"
    if half < 1e-9:  # of counts, often; a standard deviation of nothing says nothing
        return f"{mean:+.3f}, the same in {n} pairs"
    if not abs(mean) > half:
        return f"{mean:+.3f} ± {half:.3f}, within the noise"
    return f"{mean:+.3f} ± {half:.3f}, {'higher' if mean > 0 else 'lower'}"


class Column(NamedTuple):
    """A number of each run."""

    heading: str
    read: Callable  # (run, name of a curve) -> (number, what it is over) or None: numbers over other things are not compared

    def values(self, curve):
        """-> {seed: (number, what it is over)} of the runs that have one."""
        found = {run["config"].seed: self.read(run, curve.key) for run in curve.runs}
        return {seed: value for seed, value in found.items() if value}


def of_summary(name):
    """A number of a whole run, which has one as it was trained."""
    def read(run, key):
        value, config = run["summary"].get(name), run["config"]
        if isinstance(value, int | float) and key == compare.keys([run])[0]:
            return value, str((config.block_size, run["summary"].get("data_sha256")))
    return read


def of_curve(panel, x):
    """The value of a curve at x."""
    def read(run, key):
        if record := run[panel].get(key, {}).get(x):
            return record[PANELS[panel].value], compare.measured_over(run, record)
    return read


LOSS = Column("validation loss", of_summary("best_val_loss"))


def columns(curves):
    """-> the columns that these curves have numbers for."""
    found = [LOSS, Column("bits/byte", of_summary("best_val_bpb")),
             Column("validation accuracy", of_summary("best_val_accuracy"))]
    for name, panel in PANELS.items():
        if panel.column:
            xs = sorted({x for curve in curves for _, records in curve.measured(name) for x in records})
            found += [Column(f"{panel.column} {x}", of_curve(name, x)) for x in xs]
    return [column for column in found if any(map(column.values, curves))]


def parts(runs):
    """-> [(what is added to titles and names, runs, their curves)] for each data set: nothing is compared across them."""
    datasets = list(dict.fromkeys(run["config"].dataset for run in runs))
    names = [re.sub(r"[^\w.]", "_", Path(dataset).name.removeprefix("task:"))[:60] for dataset in datasets]
    if len(set(names)) < len(names):
        names = [f"{name}_{number}" for number, name in enumerate(names, 1)]
    members = [[run for run in runs if run["config"].dataset == dataset] for dataset in datasets]
    return [(f", {name}" if len(datasets) > 1 else "", each, compare.styled(each)) for name, each in zip(names, members)]


def ended(runs):
    """-> `parts` of the runs that are finished: others do not count in tables."""
    return parts([run for run in runs if run["summary"]])


RATES = ("learning_rate", "muon_learning_rate", "min_lr")


def at_their_best(curves):
    """-> of curves that differ only in learning rates, the one of the lowest mean validation loss; none if no two do."""
    def loss(curve):
        return statistics.fmean(value for value, _ in LOSS.values(curve).values())

    found = {}
    for curve in (curve for curve in plain(curves) if len(LOSS.values(curve)) == len(curve.runs)):
        found.setdefault(compare.identity(curve.runs[0]["config"], ("seed", *RATES)), []).append(curve)
    # Where seeds are missing, a rate would be chosen by those that were kinder to it.
    comparable = [candidates for candidates in found.values()
                  if len({frozenset(run["config"].seed for run in curve.runs) for curve in candidates}) == 1]
    if not any(len(candidates) > 1 for candidates in comparable):
        return []
    return [min(candidates, key=loss) for candidates in comparable]


def tables(runs):
    """-> [{"title", "note", "columns", "rows"}]: means of each curve, and differences to the first. Cells are text."""
    found = []
    for suffix, _, curves in ended(runs):
        found += compared(curves, suffix)
        if best := at_their_best(curves):
            found += compared(best, f"{suffix}, each at its best learning rate", " Rates are chosen by this validation loss.")
    return found


def cell(values, runs):
    """What Column.values gives -> mean and standard deviation as text, and of how many runs, if not of all; none of numbers
    that are over different things, as where the text has changed between two runs."""
    if len({over for _, over in values.values()}) > 1:
        return "-"
    text = compare.spread([value for value, _ in values.values()], 3)
    return text if len(values) in (0, runs) else f"{text} ({len(values)})"


def compared(curves, suffix, remark=""):
    """-> the tables of some curves."""
    chosen, (base, *others) = columns(curves), curves
    rows = []
    for curve in curves:
        cells = [cell(column.values(curve), len(curve.runs)) for column in chosen]
        rows.append([curve.label, str(len(curve.runs)), str(curve.runs[0]["summary"].get("parameters", "-")), *cells])
    found = [{"title": f"Results{suffix}", "note": f"Mean ± standard deviation over seeds.{remark}",
              "columns": ["curve", "runs", "parameters", *(column.heading for column in chosen)], "rows": rows}]
    rows = []
    for curve in others:
        cells = []
        for column in chosen:
            ours, theirs = column.values(curve), column.values(base)
            pairs = [ours[seed][0] - theirs[seed][0] for seed in ours if seed in theirs and ours[seed][1] == theirs[seed][1]]
            cells.append(verdict(pairs) if pairs else "-")
        rows.append([curve.label, *cells])
    if rows:
        count = sum("±" in cell for row in rows for cell in row)
        note = f"Paired by seed, with the 95 % confidence interval (Student's t) of the mean.{remark}"
        if count:
            note += f" Of {count} intervals, about {count / 20:.1f} would leave zero out by chance alone."
        found.append({"title": f"Difference to {base.label}{suffix}", "note": note,
                      "columns": ["curve", *(column.heading for column in chosen)], "rows": rows})
    return found


def markdown(tables):
    """Tables as text that Markdown shows as tables."""
    def line(cells):
        return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |\n"

    return "\n".join(f"**{t['title']}.** {t['note']}\n\n" + line(t["columns"]) + line(["---"] * len(t["columns"]))
                     + "".join(map(line, t["rows"])) for t in tables)


def table_csv(runs):
    """A line for every number of every finished run, as programs read it."""
    out = io.StringIO()
    writer = csv.writer(out, lineterminator="\n")
    writer.writerow(["run", "dataset", "position", "seed", "curve", "what", "value"])
    for _, _, curves in ended(runs):
        for column in columns(curves):
            for curve in curves:
                for run in curve.runs:
                    if value := column.read(run, curve.key):
                        config = run["config"]
                        writer.writerow([run["name"], config.dataset, config.position, config.seed, curve.label,
                                         column.heading, value[0]])
    return out.getvalue()


def plain(curves):
    """The curves of trained models as they were trained, unless they were fine-tuned from others of them."""
    names = {run["name"] for curve in curves for run in curve.runs}
    return [curve for curve in curves if curve.trained and origin(curve.runs[0]) not in names]


def origin(run):
    """-> the name of the run that a run began from, wherever their folders lie now; "" if there is none."""
    return Path(run["config"].init_from or "").name


def stretched(curves):
    """The curves of models that were read at other lengths or fine-tuned, zero-shot and after it, beside what they were."""
    ordinary = plain(curves)
    wanted = {name for curve in curves if curve not in ordinary for run in curve.runs for name in (run["name"], origin(run))}
    return [curve for curve in curves if any(run["name"] in wanted for run in curve.runs)]


def pictures(runs):
    """-> {name: (kind of panel or "steps", curves)} of the pictures that there is something for."""
    found = {}
    for suffix, members, curves in parts(runs):
        end = suffix.replace(", ", "-")
        found[f"steps{end}"] = ("steps", plain(curves))
        for name in compare.shown(members):
            found[f"{name}{end}"] = (name, plain(curves))
            if name != "positions":
                found[f"{name}-scalings{end}"] = (name, stretched(curves))
    return {name: (kind, chosen) for name, (kind, chosen) in found.items() if chosen}


def draw(kind, curves, path):
    """One picture as PNG and as SVG; path without an ending."""
    from matplotlib.figure import Figure
    from matplotlib.lines import Line2D

    made = Figure(figsize=(9, 4.6))
    axes = made.subplots()
    made.subplots_adjust(left=0.08, bottom=0.11, right=0.73, top=0.92)
    if kind == "steps":
        compare.draw_steps(axes, curves)
    else:
        compare.draw_panel(axes, kind, curves)
    handles = [Line2D([], [], **curve.style, label=compare.shortened(curve.label)) for curve in curves]
    made.legend(handles=handles, loc="upper left", bbox_to_anchor=(0.735, 0.93), frameon=False, fontsize=9)
    for ending, options in (("png", {"dpi": 120}), ("svg", {"metadata": {"Date": None}})):
        compare.save(made, f"{path}.{ending}", bbox_inches="tight", **options)  # as wide as the longest label needs


def number(value):
    """A number as JSON knows it: what is not finite is null."""
    return round(value, 6) if math.isfinite(value) else None


def steps_of(curve):
    """-> what compare.points gives, of the validation loss over steps."""
    if not curve.trained:
        return [], [], []
    logged = [{r["step"]: {"loss": r["val_loss"], "stderr": r["val_stderr"], "windows": r.get("windows")}
               for r in run["log"] if "val_loss" in r} for run in curve.runs]
    runs = [{"config": run["config"], "lengths": {curve.key: each}} for run, each in zip(curve.runs, logged)]
    return compare.points(curve._replace(runs=runs), "lengths")


def panel_of(name, curves, suffix, x, y, title, points):
    """-> a panel of the page, as report.html reads it. points(curve) -> xs, means, spreads."""
    trained, chance = compare.marks(curves, name) if name in PANELS else ([], [])
    drawn = []
    for curve in curves:
        xs, means, spreads = points(curve)
        if xs:
            drawn.append({"group": group(curve), "label": curve.label, "xs": xs, "mean": list(map(number, means)),
                          "spread": list(map(number, spreads))})
    return {"id": f"{name}{suffix}", "title": title + suffix, "x": x, "y": y, "log": name in PANELS,
            "trained": trained, "chance": chance or None, "curves": drawn}


def group(curve):
    """The button of the page that a curve goes with: one for all data sets."""
    return f"{curve.runs[0]['group']} {curve.key}".strip()


def page_panels(split):
    """What `parts` gives -> the panels of the page."""
    found = []
    for suffix, members, curves in split:
        found.append(panel_of("steps", plain(curves), suffix, "step", compare.LOSS, "validation loss over steps", steps_of))
        for name in compare.shown(members):
            kind, points = PANELS[name], partial(compare.points, name=name)
            found.append(panel_of(name, curves, suffix, kind.x, kind.y, compare.title(curves, name), points))
    return found


def page(name, command, jobs, runs, tables):
    """-> the page as text: the template with all that it shows inside."""
    split = parts(runs)
    curves = [curve for _, _, members in split for curve in members]
    summaries = {str(run["folder"]): run["summary"] for run in runs}

    def said(key):
        return ", ".join(sorted({str(summary[key]) for summary in summaries.values() if summary.get(key)}))

    trained = {run["config"].block_size for run in runs if not run["config"].init_from}
    groups = {run["folder"]: group(curve) for curve in curves if curve.trained for run in curve.runs}
    data = {
        "name": name, "command": command, "created": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        "commit": said("git_commit"), "versions": ", ".join(f"{key} {said(key)}" for key in ("python", "torch", "numpy")),
        "trained": trained.pop() if len(trained) == 1 else None, "panels": page_panels(split), "tables": tables,
        "groups": [{"id": id, "colour": colour}
                   for id, colour in {group(curve): curve.style["color"] for curve in reversed(curves)}.items()][::-1],
        "runs": [{"name": job.name, "group": groups.get(job.folder, job.group), "state": job.state,
                  "command": shlex.join(job.command),
                  "config": job.config.toml(),
                  "summary": [[key, str(value)] for key, value in summaries.get(str(job.folder), {}).items()]} for job in jobs]}
    template = Path(__file__).with_name("report.html").read_text(encoding="utf-8")
    return template.replace("/*DATA*/null", json.dumps(data, allow_nan=False).replace("<", "\\u003c"))


def publish(name, jobs):
    """Save a report into wandb, where the study's runs are, and -> its address. UserError if that cannot be done."""
    try:
        import wandb_workspaces.reports.v2 as wr
    except ImportError:
        raise UserError("publish: the package wandb-workspaces is not installed", "pip install wandb-workspaces") from None
    runs = compare.read_runs([job.folder for job in jobs if job.state == "finished"])
    if not runs:
        raise UserError("publish: no run of this study is finished", "run the study first")
    config = runs[0]["config"]
    panels = [wr.LinePlot(title="validation loss", x="step", y=["val/loss"])]
    for panel in compare.shown(runs):
        kind, names = PANELS[panel], sorted({logs.curve_name(next(iter(curve.values())))
                                             for run in runs for curve in run[panel].values()})
        panels.append(wr.LinePlot(title=kind.title, x=f"{panel}/{kind.axis}", y=[f"{panel}/{n}/{kind.value}" for n in names],
                                  log_x=True))
    group = config.wandb_group or name
    runset = wr.Runset(project=config.wandb_project, name=name, filters=f"Group = '{group}'", groupby=["config.position"])
    try:
        made = wr.Report(project=config.wandb_project, title=name, blocks=[
            wr.H1(name), wr.MarkdownBlock(markdown(tables(runs))), wr.PanelGrid(runsets=[runset], panels=panels)])
        made.save()
    except Exception as error:  # of a library that raises plain Exception, and of the network
        raise UserError(f"publish: {error}", "log in with `wandb login`, and send the runs first, by `wandb sync`") from None
    return made.url


def track(folder, name, config, tables, pictures):
    """Send the tables and pictures to wandb, where the study's runs are, as a run of their own; what was sent before is not
    sent again. A study does not end because wandb fails."""
    kept = folder / "wandb_id.txt"
    identity, digest = logs.identity(kept) or secrets.token_hex(4), hashlib.sha256(json.dumps(tables).encode()).hexdigest()
    if kept.exists() and digest in kept.read_text(encoding="utf-8", errors="replace"):
        return
    files.replace(kept, f"{identity}\n".encode())  # first: what fails is sent again under the same id
    try:
        import wandb

        run = wandb.init(project=config.wandb_project, group=config.wandb_group or name, job_type="study", id=identity,
                         name=f"{name}-results", resume="allow", dir=folder, mode=config.wandb,
                         settings=wandb.Settings(**logs.QUIET))
        logs.set_aside(run)
        run.log({**{table["title"]: wandb.Table(columns=table["columns"], data=table["rows"]) for table in tables},
                 **{picture: wandb.Image(str(folder / f"{picture}.png")) for picture in pictures}}, step=0)
        run.finish()
    except Exception as error:
        print(f"wandb: {error or type(error).__name__}; the results are in {folder}", file=sys.stderr)
        return
    files.replace(kept, f"{identity} {digest}\n".encode())


def write(folder, name, jobs, command):
    """Write all of it into the study's folder, if there is anything yet. -> whether there was. jobs: study.Job of each run;
    those without a log are only listed."""
    folder, runs = Path(folder), []
    for job in (job for job in jobs if (job.folder / "config.toml").exists()):
        try:
            run = compare.read_run(job.folder) | {"group": job.group}
            if not run["summary"]:  # what was measured on the way is of other weights than those of the finished ones
                run |= {name: {} for name in PANELS}
            runs += [run] if run["log"] else []
        except UserError as error:
            print(f"not in the report: {error.problem}")
    if not runs:
        return False
    made, drawn = tables(runs), pictures(runs)
    files.replace(folder / "table.md", markdown(made).encode())
    files.replace(folder / "table.csv", table_csv(runs).encode())
    for picture, (kind, curves) in drawn.items():
        draw(kind, curves, folder / picture)
    files.replace(folder / "report.html", page(name, command, jobs, runs, made).encode())
    config = runs[0]["config"]
    if all(job.state == "finished" for job in jobs) and config.wandb != "disabled":
        track(folder, name, config, made, drawn)
    return True
