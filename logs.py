"""Where numbers go: lines of JSON in the run's folder, which are the truth, and wandb, which shows them."""
import json
import os
import secrets
from pathlib import Path

from config import UserError

# What makes two lines of a file the same measurement: the later one replaces the earlier when read.
IDENTITY = {
    "log.jsonl": lambda r: (r["step"], "val_loss" in r),
    "lengths.jsonl": lambda r: (*curve(r), r["context"]),
    "positions.jsonl": lambda r: (*curve(r), r["position"]),
}


def curve(record):
    """What tells one length curve from another."""
    return tuple(record[key] for key in ("step", "checkpoint", "scaling", "factor", "finetuned"))


def read(folder, name):
    """-> the records of folder/name in order, of each identity the last. A last line cut off by a crash does not count."""
    path, records = Path(folder, name), {}
    lines = path.read_bytes().split(b"\n") if path.exists() else []
    for number, line in enumerate(lines, 1):
        try:
            if line:
                record = json.loads(line)
                records.pop(IDENTITY[name](record), None)
                records[IDENTITY[name](record)] = record
        except (ValueError, KeyError, TypeError):
            if number < len(lines):
                raise UserError(f"{path}, line {number}: not a record of this program", "remove that line") from None
    return list(records.values())


def append(folder, name, records):
    """Add records as lines, on the disk when this returns."""
    with open(Path(folder, name), "a", encoding="utf-8") as file:
        file.writelines(json.dumps(record) + "\n" for record in records)
        file.flush()
        os.fsync(file.fileno())


def keep(folder, name, wanted):
    """Rewrite folder/name with the records for which wanted(record): what came after the checkpoint is done again."""
    if Path(folder, name).exists():
        text = "".join(json.dumps(record) + "\n" for record in read(folder, name) if wanted(record))
        replace(Path(folder, name), text.encode())


def replace(path, content):
    """Write bytes beside path, flush them to the disk, and move them there: the old or the new file, never a part."""
    beside = path.with_name(path.name + ".new")
    with open(beside, "wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())
    os.replace(beside, path)


class Silent:
    """A tracker that tracks nothing: wandb = "disabled"."""

    def log(self, record):
        pass

    def curves(self, by_context, by_position):
        pass

    def finish(self, summary):
        pass


class Wandb:
    """Sends the records of one run to wandb, offline unless asked otherwise.

    wandb drops a row whose step is not above the last one's, so rows are numbered by where they belong, ROOM numbers for
    each iteration: what a resumed run sends a second time is the same row again. Curves shown are over own axes.
    """

    ROOM = 1000

    def __init__(self, folder, config):
        import wandb

        self.wandb, self.folder = wandb, Path(folder)
        identity = self.folder / "wandb_id.txt"
        if not identity.exists():
            identity.write_text(secrets.token_hex(4), encoding="utf-8")
        try:
            self.run = wandb.init(
                project=config.wandb_project, id=identity.read_text(encoding="utf-8").strip(), resume="allow",
                name=self.folder.name, group=config.position, job_type="train", tags=[config.position],
                config=config.model_dump(exclude_none=True), dir=self.folder.parent, mode=config.wandb,
                settings=wandb.Settings(silent=True, console="off", x_disable_stats=True))
        except (wandb.errors.Error, OSError) as error:
            raise UserError(f"wandb = {config.wandb}: {str(error).splitlines()[0]}",
                            "use --wandb offline, or log in with `wandb login`") from None
        for prefix, axis in (("train", "step"), ("val", "step"), ("lengths", "lengths/context"),
                             ("positions", "positions/position")):
            self.run.define_metric(axis, hidden=True)
            self.run.define_metric(f"{prefix}/*", step_metric=axis)

    def log(self, record):
        """One line of log.jsonl."""
        prefix, number = ("val", 1) if "val_loss" in record else ("train", 0)
        row = {f"{prefix}/{key.removeprefix('val_').removeprefix('train_')}": value for key, value in record.items()
               if key not in ("step", "tokens", "seconds")}
        self.run.log({**row, "step": record["step"]}, step=record["step"] * self.ROOM + number)

    def curves(self, by_context, by_position):
        """A length curve, already in the run's files: rows over their own axes, and a chart in which runs overlay."""
        if not by_context:
            return
        first = by_context[0]
        name = f"{first['scaling']}-{first['factor']}"
        written = read(self.folder, "lengths.jsonl") + read(self.folder, "positions.jsonl")
        earlier = sum(r["step"] == first["step"] for r in written) - len(by_context) - len(by_position)
        number = first["step"] * self.ROOM + 2 + earlier
        rows = [{"lengths/context": r["context"], **{f"lengths/{name}/{k}": r[k] for k in ("loss", "stderr", "bpb")}}
                for r in by_context]
        rows += [{"positions/position": r["position"], f"positions/{name}/loss": r["loss"]} for r in by_position]
        for i, row in enumerate(rows):
            self.run.log(row, step=number + i)
        data = self.wandb.Table(columns=["context", "loss"], data=[[r["context"], r["loss"]] for r in by_context])
        chart = self.wandb.plot.line(data, "context", "loss", title=f"loss by context, {name}")
        self.run.log({f"charts/{name}": chart}, step=number + len(rows))

    def finish(self, summary):
        self.run.summary.update(summary)
        self.run.finish()


TRACKERS = {"disabled": lambda folder, config: Silent(), "offline": Wandb, "online": Wandb}
