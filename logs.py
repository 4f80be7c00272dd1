"""Where numbers go: lines of JSON in the run's folder, which are the truth, and wandb, which shows them.

What is written is on the disk when a function returns; a process that is killed leaves at most a torn last line.
"""
import contextlib
import functools
import hashlib
import json
import os
import secrets
import sys
import time
from pathlib import Path

import files
from options import UserError

# What makes two lines of a file the same measurement: the later one replaces the earlier when read.
IDENTITY = {
    "log.jsonl": lambda r: (r["step"], "val_loss" in r),
    "lengths.jsonl": lambda r: (*curve(r), r["context"]),
    "positions.jsonl": lambda r: (*curve(r), r["position"]),
    "accuracy.jsonl": lambda r: (*curve(r), r["length"]),
}
# What every line must have, as numbers.
NUMBERS = {
    "log.jsonl": lambda r: ("step", "val_loss", "val_stderr") if "val_loss" in r else
                           ("step", "train_loss"),
    "lengths.jsonl": lambda r: ("step", "context", "loss", "stderr"),
    "positions.jsonl": lambda r: ("step", "position", "loss", "stderr"),
    "accuracy.jsonl": lambda r: ("step", "length", "trained", "accuracy", "stderr", "chance"),
}


# What a curve is over, and its values; the first of them is drawn.
CURVES = {
    "lengths.jsonl": ("context", "loss", "stderr", "bpb"),
    "accuracy.jsonl": ("length", "accuracy", "stderr", "loss"),
    "positions.jsonl": ("position", "loss", "stderr"),
}


def read_summary(folder):
    """-> what summary.json of a run's folder holds, {} while the run is not finished or where the file is damaged."""
    try:
        summary = json.loads(Path(folder, "summary.json").read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        return {}
    return summary if isinstance(summary, dict) else {}


def curve(record):
    """What tells one length curve from another."""
    return (*(record[key] for key in ("step", "checkpoint", "scaling", "factor", "finetuned")),
            json.dumps(record.get("settings", {})))


def curve_name(record):
    """How a curve is called where others of the same run stand beside it: none-1.0, yarn-auto, yarn-4.0-beta_fast-16.0."""
    name = f"{record['scaling']}-{record['factor']}"
    for key, value in record.get("settings", {}).items():
        if isinstance(value, list | tuple):  # too long for a name
            value = hashlib.sha256(json.dumps(value).encode()).hexdigest()[:6]
        name += f"-{key}-{value}"
    return name + "-finetuned" * record["finetuned"]


def read(folder, name):
    """-> the records of folder/name in order, of each identity the last. A last line cut off by a crash does not count."""
    path, records = Path(folder, name), {}
    whole, _, _ = path.read_bytes().rpartition(b"\n") if path.exists() else (b"", b"", b"")
    for number, line in enumerate(whole.split(b"\n"), 1):
        try:
            if line:
                record = json.loads(line)
                if not all(isinstance(record[key], int | float) for key in NUMBERS[name](record)):
                    raise ValueError("a number is missing")
                records.pop(IDENTITY[name](record), None)
                records[IDENTITY[name](record)] = record
        except (ValueError, KeyError, TypeError, RecursionError):
            raise UserError(f"{path}, line {number}: not a record of this program", "remove that line") from None
    return list(records.values())


def read_sessions(folder):
    """-> what programs have noted in sessions.jsonl of a run's folder; a line that is damaged does not count."""
    path, found = Path(folder, "sessions.jsonl"), []
    for line in path.read_bytes().split(b"\n") if path.exists() else ():
        with contextlib.suppress(ValueError, RecursionError):
            record = json.loads(line)
            found += [record] if isinstance(record, dict) else []
    return found


def lines(records):
    return "".join(json.dumps(record) + "\n" for record in records).encode()


def append(folder, name, records):
    """Add records as lines. A last line cut off by a crash goes first."""
    with open(Path(folder, name), "ab+") as file:
        size = file.seek(0, os.SEEK_END)
        if size:
            file.seek(size - 1)
            if file.read(1) != b"\n":
                file.seek(0)
                file.truncate(file.read().rfind(b"\n") + 1)
        file.write(lines(records))
        file.flush()
        os.fsync(file.fileno())
    if not size:
        files.flush(folder)


def keep(folder, name, wanted):
    """Leave the records for which wanted(record), each once, and no torn line. -> whether that was a change."""
    path = Path(folder, name)
    text = lines(filter(wanted, read(folder, name)))
    if changed := path.exists() and text != path.read_bytes():
        files.replace(path, text)
    return changed


def put(folder, name, records, old):
    """Add records, and in the same moment take away those for which old(record)."""
    before = read(folder, name)
    kept = [record for record in before if not old(record)]
    if len(kept) == len(before):
        append(folder, name, records)
    else:
        files.replace(Path(folder, name), lines(kept + records))


class Silent:
    """A tracker that tracks nothing: wandb = "disabled"."""

    def __init__(self, folder=None, config=None):
        self.kept = folder and Path(folder, "wandb_id.txt")

    def open(self):
        """Let a history that is there know that it will lack rows."""
        if self.kept and self.kept.exists():
            files.replace(self.kept, f"{identity(self.kept)} open\n".encode())

    def begin(self, cut=False):
        pass

    def log(self, record):
        pass

    def curves(self, found):
        pass

    def finish(self, summary):
        pass

    def fail(self):
        pass


def interrupted(folder):
    """Whether the run's history in wandb was not ended by the process that wrote it."""
    kept = Path(folder, "wandb_id.txt")
    return kept.exists() and "open" in kept.read_text(encoding="utf-8", errors="replace")


def identity(kept):
    """-> the run's id in wandb that a file holds, or None."""
    words = kept.read_text(encoding="utf-8", errors="replace").split() if kept.exists() else []
    return words[0] if words and words[0].isalnum() else None


QUIET = {"silent": True, "console": "off", "x_disable_stats": True, "init_timeout": 20}  # settings of every run in wandb


def set_aside(run):
    """Move earlier offline folders of a run of wandb out of the way of `wandb sync`."""
    current = Path(run.dir).parent
    for older in current.parent.glob(f"offline-run-*-{run.id}"):
        if older.name != current.name:
            (current.parent / "aside").mkdir(exist_ok=True)
            os.replace(older, current.parent / "aside" / older.name)


def surviving(method):
    """A method of a tracker that does not end a run when wandb fails: its process may have died, or the disk be full."""
    @functools.wraps(method)
    def attempt(self, *arguments):
        if self.run is None:
            return
        try:
            method(self, *arguments)
        except Exception as error:
            self.run = None
            print(f"wandb: {error or type(error).__name__}; this run goes on without it. Its rows are in {self.folder}, "
                  "and the same command, given again, writes them to wandb", file=sys.stderr)
            with contextlib.suppress(Exception):
                self.wandb.teardown(1)
    return attempt


class Wandb:
    """Sends the records of one run to wandb, offline unless asked otherwise.

    wandb drops a row whose step is not above the last one's, so rows are numbered by where they belong, ROOM numbers for
    each iteration: what a resumed run sends a second time is the same row again. Curves are shown over axes of their own.
    wandb_id.txt holds the run's id, and the word "open" while a process writes to it.
    """

    ROOM = 10**6

    def __init__(self, folder, config):
        """Start wandb, which may refuse. Nothing is written into the run's folder yet."""
        import wandb

        self.wandb, self.folder, self.kept = wandb, Path(folder), Path(folder, "wandb_id.txt")
        known = None if config.overwrite else identity(self.kept)
        self.identity = known or secrets.token_hex(4)
        self.interrupted = known is None or interrupted(folder)  # without an id, nothing was sent so far
        self.folder.parent.mkdir(parents=True, exist_ok=True)
        # wandb names its folder by the second; two in one second would be one, and the first one's rows lost.
        while any(self.folder.parent.glob(f"wandb/*run-{time.strftime('%Y%m%d_%H%M%S')}-{self.identity}")):
            time.sleep(0.05)
        try:
            self.run = wandb.init(
                project=config.wandb_project, group=config.wandb_group or config.position, job_type=config.position,
                tags=[config.position], name=self.folder.name, id=self.identity, resume="allow", dir=self.folder.parent,
                config=config.model_dump(exclude_none=True), mode=config.wandb,
                settings=wandb.Settings(**QUIET))
            self.identity = self.run.id  # a sweep gives its own
        except (wandb.errors.Error, OSError) as error:
            raise UserError(f"wandb = {config.wandb}: {str(error).splitlines()[0]}",
                            "use --wandb offline, or log in with `wandb login`") from None

    def open(self):
        """Note that what is sent from now on is not whole before `finish`."""
        files.replace(self.kept, f"{self.identity} open\n".encode())

    def begin(self, cut=False):
        """Take the history up where the run's files have it. cut: whether they have lost what was sent before.

        What a process that was killed left of it offline lacks rows that were in memory. It is set aside, and the files,
        which lack none, are sent from the first row: offline folders together hold each row once.
        """
        self.define_axes()
        if self.interrupted or cut:
            set_aside(self.run)
            self.send_again()

    @surviving
    def define_axes(self):
        axes = ((Path(name).stem, f"{Path(name).stem}/{axis}") for name, (axis, *_) in CURVES.items())
        for prefix, axis in (("train", "step"), ("val", "step"), *axes):
            self.run.define_metric(axis, hidden=True)
            self.run.define_metric(f"{prefix}/*", step_metric=axis)

    def send_again(self):
        """Send all that the run's files hold."""
        for record in sorted(read(self.folder, "log.jsonl"), key=lambda r: (r["step"], "val_loss" in r)):
            self.log(record)
        curves, earlier = {}, 0
        for name in CURVES:
            for record in read(self.folder, name):
                curves.setdefault(curve(record), {}).setdefault(name, []).append(record)
        for found in curves.values():
            self.curves(found, earlier)
            earlier += len(next(iter(found.values())))
        if self.run is not None:
            self.run.summary.update(read_summary(self.folder))

    @surviving
    def log(self, record):
        """One line of log.jsonl."""
        prefix, number = ("val", 1) if "val_loss" in record else ("train", 0)
        row = {f"{prefix}/{key.removeprefix('val_').removeprefix('train_')}": value for key, value in record.items()
               if key not in ("step", "tokens", "seconds")}
        self.run.log({**row, "step": record["step"]}, step=record["step"] * self.ROOM + number)

    @surviving
    def curves(self, found, earlier=None):
        """A length curve {file: records}, already in the run's files: rows over their own axes, and a chart in which runs
        overlay.

        earlier: lines of the first of the files before it; it is the last one unless given.
        """
        (file, first), rows = next(iter(found.items())), []
        if not first:
            return
        name = curve_name(first[0])
        for place, records in found.items():
            prefix, (axis, *values) = Path(place).stem, CURVES[place]
            rows += [{f"{prefix}/{axis}": r[axis], **{f"{prefix}/{name}/{k}": r[k] for k in values}} for r in records]
        axis, value, *_ = CURVES[file]
        data = self.wandb.Table(columns=[axis, value], data=[[r[axis], r[value]] for r in first])
        rows.append({f"charts/{name}": self.wandb.plot.line(data, axis, value, title=f"{value} by {axis}, {name}")})
        # Above all rows so far: the log's, and less than a hundred for each line of a curve.
        step = max([first[0]["step"], *(r["step"] for r in read(self.folder, "log.jsonl"))])
        if earlier is None:
            earlier = (self.folder / file).read_bytes().count(b"\n") - len(first)
        for i, row in enumerate(rows):
            self.run.log(row, step=step * self.ROOM + 2 + 100 * earlier + i)

    @surviving
    def finish(self, summary):
        """The run, or this part of it, has ended well."""
        self.run.summary.update(summary)
        self.run.finish()
        files.replace(self.kept, f"{self.identity}\n".encode())

    @surviving
    def fail(self):
        """The run has ended otherwise; the next start sends its history again."""
        self.run.finish(exit_code=1)


TRACKERS = {"disabled": Silent, "offline": Wandb, "online": Wandb}
