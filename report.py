"""What a study ends with: tables, pictures, and a page to look around in. Reads run folders only, and imports no torch.

Means and standard deviations are over seeds. Two encodings are compared by the differences between runs of one seed, which
share their batches and their initial weights; a difference is called one where its interval leaves zero out.
"""
import csv
import hashlib
import io
import json
import math
import secrets
import shlex
import statistics
import sys
import time
from pathlib import Path

import compare
import files
import logs
from compare import PANELS
from options import UserError

# Quantiles 0.975 of Student's t by degrees of freedom, from 1 on; beyond them, that of the normal distribution is near.
STUDENT = (12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228, 2.201, 2.179, 2.160, 2.145, 2.131, 2.120,
           2.110, 2.101, 2.093, 2.086, 2.080, 2.074, 2.069, 2.064, 2.060, 2.056, 2.052, 2.048, 2.045, 2.042)


def interval(differences):
    """Differences between pairs of runs -> (mean, half of its 95 % confidence interval, not a number for one pair)."""
    n = len(differences)
    if n < 2:
        return differences[0], math.nan
    quantile = STUDENT[n - 2] if n - 2 < len(STUDENT) else 1.96
    return statistics.fmean(differences), quantile * compare.deviation(differences) / math.sqrt(n)


def verdict(differences):
    """Differences between pairs of runs -> them in words; nothing is called higher or lower within the noise."""
    mean, half = interval(differences)
    if math.isnan(half):
        return f"{mean:+.3f}, one pair"
    if abs(mean) <= half:
        return f"{mean:+.3f} ± {half:.3f}, within the noise"
    return f"{mean:+.3f} ± {half:.3f}, {'higher' if mean > 0 else 'lower'}"


class Column:
    """A number of each run and curve: its heading, and how it is read from a run."""

    def __init__(self, heading, read, digits=3):
        self.heading, self.read, self.digits = heading, read, digits

    def values(self, members, key):
        """-> {seed: number} of the runs that have one."""
        found = {run["config"].seed: self.read(run, key) for run in members}
        return {seed: value for seed, value in found.items() if isinstance(value, int | float)}


def of_summary(name):
    return lambda run, key: run["summary"].get(name) if key == compare.keys([run])[0] else None  # it is of the run as trained


def of_curve(panel, x):
    return lambda run, key: run[panel].get(key, {}).get(x, {}).get(PANELS[panel].value)


def columns(runs):
    """-> the columns that these runs have numbers for."""
    found = [Column("validation loss", of_summary("best_val_loss")), Column("bits/byte", of_summary("best_val_bpb")),
             Column("validation accuracy", of_summary("best_val_accuracy"))]
    for name, panel in PANELS.items():
        if panel.column:
            xs = sorted({x for run in runs for curve in run[name].values() for x in curve})
            found += [Column(f"{panel.column} {x}", of_curve(name, x)) for x in xs]
    return [column for column in found if any(column.values([run], key) for run in runs for key in compare.keys([run]))]


def parts(runs):
    """-> [(what is added to titles and names, runs)] for each data set: nothing is compared across them."""
    datasets = list(dict.fromkeys(run["config"].dataset for run in runs))
    return [(f", {Path(dataset).name.removeprefix('task:')}" if len(datasets) > 1 else "",
             [run for run in runs if run["config"].dataset == dataset]) for dataset in datasets]


RATES = ("learning_rate", "muon_learning_rate", "min_lr")


def at_their_best(curves):
    """-> of curves that differ only in learning rates, the one of the lowest mean validation loss; none if no two do."""
    found = {}
    for curve in curves:
        _, members, key, _ = curve
        losses = [run["summary"].get("best_val_loss", math.inf) for run in members]
        values = {k: v for k, v in members[0]["config"].essence().items() if k not in (*RATES, "seed")}
        found.setdefault(repr((key, values)), []).append((statistics.fmean(losses), curve))
    if len(found) == len(curves):
        return []
    return [min(candidates, key=lambda candidate: candidate[0])[1] for candidates in found.values()]


def tables(runs):
    """-> [{"title", "note", "columns", "rows"}]: means of each curve, and differences to the first. Cells are text."""
    found = []
    for suffix, members in parts(runs):
        curves = compare.styled(members)
        found += compared(curves, columns(members), suffix)
        if best := at_their_best(curves):
            found += compared(best, columns(members), f"{suffix}, each at its best learning rate")
    return found


def compared(curves, chosen, suffix):
    """-> the tables of some curves."""
    rows = []
    for label, members, key, _ in curves:
        values = [column.values(members, key) for column in chosen]
        rows.append([label, str(len(members)), str(members[0]["summary"].get("parameters", "-")),
                     *(compare.spread(list(each.values()), column.digits) for each, column in zip(values, chosen))])
    found = [{"title": f"Results{suffix}", "note": "Mean ± standard deviation over seeds.",
              "columns": ["curve", "runs", "parameters", *(column.heading for column in chosen)], "rows": rows}]
    base, base_members, base_key, _ = curves[0]
    rows = []
    for label, members, key, _ in curves[1:]:
        cells = []
        for column in chosen:
            ours, theirs = column.values(members, key), column.values(base_members, base_key)
            pairs = [ours[seed] - theirs[seed] for seed in ours if seed in theirs]
            cells.append(verdict(pairs) if pairs else "-")
        rows.append([label, *cells])
    if rows:
        count = sum("±" in cell for row in rows for cell in row)
        note = "Paired by seed, with the 95 % confidence interval (Student's t) of the mean."
        if count:
            note += f" Of {count} intervals, about {count / 20:.1f} would leave zero out by chance alone."
        found.append({"title": f"Difference to {base}{suffix}", "note": note,
                      "columns": ["curve", *(column.heading for column in chosen)], "rows": rows})
    return found


def markdown(tables):
    """Tables as text that Markdown shows as tables."""
    def line(cells):
        return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |\n"

    return "\n".join(f"**{t['title']}.** {t['note']}\n\n" + line(t["columns"]) + line(["---"] * len(t["columns"]))
                     + "".join(map(line, t["rows"])) for t in tables)


def table_csv(runs):
    """A line for every number of every run, as programs read it."""
    out = io.StringIO()
    writer = csv.writer(out, lineterminator="\n")
    writer.writerow(["run", "dataset", "position", "seed", "curve", "what", "value"])
    for label, members, key, _ in compare.styled(runs):
        for run in members:
            config = run["config"]
            for column in columns([run]):
                for value in column.values([run], key).values():
                    writer.writerow([run["name"], config.dataset, config.position, config.seed, label, column.heading, value])
    return out.getvalue()


def plain(curves):
    """The curves of trained models as they were trained, unless they were fine-tuned from others of them."""
    return [curve for curve in curves if not curve[2] and not curve[1][0]["config"].init_from]


def stretched(curves):
    """The curves of models that were read at other lengths or fine-tuned, zero-shot and after it, beside what they were."""
    others = [curve for curve in curves if curve[2] or curve[1][0]["config"].init_from]
    origins = {folder.resolve() for _, members, _, _ in others for run in members
               for folder in (run["folder"], Path(run["config"].init_from or run["folder"]))}
    return [curve for curve in curves if any(run["folder"].resolve() in origins for run in curve[1])] if others else []


def pictures(runs):
    """-> {name: (kind of panel or "steps", curves)} of the pictures that there is something for."""
    found = {}
    for suffix, members in parts(runs):
        curves, end = compare.styled(members), suffix.replace(", ", "-")
        found[f"steps{end}"] = ("steps", plain(curves))
        for name in compare.shown(members):
            found[f"{name}{end}"] = (name, plain(curves))
            if name != "positions":
                found[f"{name}-scalings{end}"] = (name, stretched(curves))
    return {name: (kind, chosen) for name, (kind, chosen) in found.items() if chosen}


def draw(kind, curves, path):
    """One picture as PNG and as SVG; path without an ending."""
    import matplotlib
    from matplotlib.figure import Figure
    from matplotlib.lines import Line2D

    made = Figure(figsize=(9, 4.6))
    axes = made.subplots()
    made.subplots_adjust(left=0.08, bottom=0.11, right=0.73, top=0.92)
    if kind == "steps":
        compare.draw_steps(axes, curves)
    else:
        compare.draw_panel(axes, kind, curves)
    handles = [Line2D([], [], **style, label=label) for label, _, _, style in curves]
    made.legend(handles=handles, loc="upper left", bbox_to_anchor=(0.735, 0.93), frameon=False, fontsize=9)
    made.savefig(f"{path}.png", dpi=120)
    with matplotlib.rc_context({"svg.hashsalt": "positions"}):  # the same picture is the same file
        made.savefig(f"{path}.svg", metadata={"Date": None})


def steps_of(members):
    """-> the validation loss over steps of some runs as a curve of the page."""
    losses = [{r["step"]: {"loss": r["val_loss"], "stderr": r["val_stderr"]} for r in run["log"] if "val_loss" in r}
              for run in members]
    return compare.points(losses)


def number(value):
    """A number as JSON knows it: what is not finite is null."""
    return round(value, 6) if math.isfinite(value) else None


def page_curves(curves, suffix, points):
    """points(members, name of a curve) -> xs, means, spreads; -> the curves of a panel of the page that have any."""
    found = []
    for label, members, key, _ in curves:
        xs, means, spreads = points(members, key)
        if xs:
            found.append({"group": group(label, suffix), "label": label, "xs": xs, "mean": list(map(number, means)),
                          "spread": list(map(number, spreads)), "runs": len(members)})
    return found


def group(label, suffix):
    """The button of the page that a curve goes with: where there are several data sets, one for all of them."""
    return label.replace(f"{suffix[2:]}-", "", 1) if suffix else label


def page_panels(runs):
    """-> the panels of the page, as report.html reads them."""
    found = []
    for suffix, members in parts(runs):
        curves = compare.styled(members)

        def panel(name, x, y, title, points, curves=curves, suffix=suffix, **more):
            found.append({"id": f"{name}{suffix}", "title": title + suffix, "x": x, "y": y, "log": name != "steps",
                          "trained": None, "chance": None, **more, "curves": page_curves(curves, suffix, points)})

        panel("steps", "step", compare.LOSS, "validation loss over steps",
              lambda some, key: steps_of(some) if key == compare.keys(some)[0] else ([], [], []))
        for name in compare.shown(members):
            kind = PANELS[name]
            records = [(run, record) for run in members for curve in run[name].values() for record in curve.values()]
            chance = sorted({(record[kind.axis], record["chance"]) for _, record in records if "chance" in record})

            def points(some, key, name=name, kind=kind):
                measured = [run[name][key] for run in some if run[name].get(key)]
                xs, means, spreads = compare.points(measured, kind.value) if measured else ([], [], [])
                return [x + kind.shift for x in xs], means, spreads

            panel(name, kind.x, kind.y, kind.title, points, chance=chance or None,
                  trained=min((kind.trained(run, record) for run, record in records), default=None))
    return found


def page(name, command, jobs, runs):
    """-> the page as text: the template with all that it shows inside."""
    groups, label_of = {}, {}
    for suffix, members in parts(runs):
        for label, some, _, style in compare.styled(members):
            groups.setdefault(group(label, suffix), style["color"])
            label_of |= {str(run["folder"]): group(label, suffix) for run in some if str(run["folder"]) not in label_of}
    summaries = {str(run["folder"]): run["summary"] for run in runs}
    any_summary = next((s for s in summaries.values() if s), {})
    data = {
        "name": name, "command": command, "created": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        "commit": str(any_summary.get("git_commit") or ""), "trained": runs[0]["config"].block_size,
        "versions": ", ".join(f"{key} {any_summary[key]}" for key in ("python", "torch", "numpy") if key in any_summary),
        "panels": page_panels(runs), "tables": tables(runs),
        "groups": [{"id": name, "label": name, "colour": colour} for name, colour in groups.items()],
        "runs": [{"name": job.name, "group": label_of.get(str(job.folder), ""), "state": job.state,
                  "command": shlex.join(job.command), "config": job.config.toml(),
                  "summary": [[key, str(value)] for key, value in summaries.get(str(job.folder), {}).items()]} for job in jobs]}
    template = Path(__file__).with_name("report.html").read_text(encoding="utf-8")
    return template.replace("/*DATA*/null", json.dumps(data, allow_nan=False).replace("<", "\\u003c"))


def track(folder, name, config, tables, pictures):
    """Send the tables and pictures to wandb, where the study's runs are, as a run of their own; what was sent before is not
    sent again. A study does not end because wandb fails."""
    kept = folder / "wandb_id.txt"
    identity, *sent = kept.read_text(encoding="utf-8").split() if kept.exists() else [secrets.token_hex(4)]
    digest = hashlib.sha256(json.dumps(tables).encode()).hexdigest()
    if sent == [digest]:
        return
    try:
        import wandb

        run = wandb.init(project=config.wandb_project, group=name, job_type="study", name=f"{name}-results", id=identity,
                         resume="allow", dir=folder, mode=config.wandb,
                         settings=wandb.Settings(silent=True, console="off", x_disable_stats=True, init_timeout=20))
        logs.set_aside(run)
        run.log({**{table["title"]: wandb.Table(columns=table["columns"], data=table["rows"]) for table in tables},
                 **{picture: wandb.Image(str(folder / f"{picture}.png")) for picture in pictures}}, step=0)
        run.finish()
    except Exception as error:
        print(f"wandb: {error or type(error).__name__}; the results are in {folder}", file=sys.stderr)
        return
    files.replace(kept, f"{identity} {digest}\n".encode())


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
    runset = wr.Runset(project=config.wandb_project, name=name, filters=f"Group = '{name}'", groupby=["config.position"])
    try:
        made = wr.Report(project=config.wandb_project, title=name, blocks=[
            wr.H1(name), wr.MarkdownBlock(markdown(tables(runs))), wr.PanelGrid(runsets=[runset], panels=panels)])
        made.save()
    except Exception as error:  # of a library that raises plain Exception, and of the network
        raise UserError(f"publish: {error}", "log in with `wandb login`, and send the runs first, by `wandb sync`") from None
    return made.url


def write(folder, name, jobs, command):
    """Write all of it into the study's folder. jobs: study.Job of each run; those without a log are only listed."""
    folder = Path(folder)
    runs = [run for run in compare.read_runs([job.folder for job in jobs if (job.folder / "config.toml").exists()])
            if run["log"]]
    if not runs:
        return
    made, drawn = tables(runs), pictures(runs)
    files.replace(folder / "table.md", markdown(made).encode())
    files.replace(folder / "table.csv", table_csv(runs).encode())
    for picture, (kind, curves) in drawn.items():
        draw(kind, curves, folder / picture)
    files.replace(folder / "report.html", page(name, command, jobs, runs).encode())
    config = runs[0]["config"]
    if all(job.state == "finished" for job in jobs) and config.wandb != "disabled":
        track(folder, name, config, made, drawn)
