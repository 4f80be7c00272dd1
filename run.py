"""The run's folder: what is in it, how it is written so that nothing is lost, and how a model comes back from it."""
import io
import json
import os
import shlex
import shutil
import sys
import time
import zipfile
from dataclasses import dataclass
from pathlib import Path

import torch

import logs
import tokenizer
from config import MODEL, NEUTRAL, Config, read_config, with_changes
from machine import available, resolve, room_for, set_up, versions
from model import GPT
from options import NotFinite, UserError, build
from parallel import ALONE

FORMAT = 2  # of checkpoints; a larger number means that older programs must not read them


def fresh(value):
    """Copy nested containers so that no object but a string occurs twice: a file tells a shared object from an equal copy,
    and a resumed run must write the same bytes as one that never stopped."""
    if isinstance(value, dict):
        return {fresh(k): fresh(v) for k, v in value.items()}
    if isinstance(value, list | tuple):
        return type(value)([fresh(v) for v in value])
    return sys.intern(value) if isinstance(value, str) else value


def save(path, content):
    """Write tensors and plain values as a checkpoint: beside the old one, flushed, then moved over it. UserError if the disk
    has no room."""
    path, buffer = Path(path), io.BytesIO()
    torch.save(fresh({"format": FORMAT, **content}), buffer)
    size, free = buffer.getbuffer().nbytes, shutil.disk_usage(path.parent).free
    if size > free:
        raise UserError(f"{path}: {size / 2**20:.1f} MiB to write, and the disk has {free / 2**20:.1f} MiB left",
                        "what was saved before is whole: make room, and the same command goes on from there")
    logs.replace(path, buffer.getbuffer())


CONTENT = {"format": int, "step": int, "model": dict, "data_sha256": str, "config": dict}
RESUMABLE = {"optimizers": list, "resolved": dict, "best": dict, "reached": bool, "logged": int}


def load_kinds(path, content, wanted):
    """Refuse a checkpoint that lacks one of the entries {name: type}."""
    if not isinstance(content, dict) or not all(isinstance(content.get(key), kind) for key, kind in wanted.items()):
        raise UserError(f"{path}: not a checkpoint of this program, or not of this kind", "give a folder that train.py wrote")


def load(path):
    """-> what `save` wrote, on the CPU. Nothing in the file is executed. UserError if it is missing, foreign or damaged."""
    path = Path(path)
    if not path.is_file():
        raise UserError(f"{path}: no checkpoint", "train the run first: python train.py CONFIG.toml")
    try:
        with zipfile.ZipFile(path) as archive:
            if any(part.compress_type != zipfile.ZIP_STORED for part in archive.infolist()):
                raise ValueError("compressed")  # torch never does, and a small file could fill the memory
            if part := archive.testzip():  # torch does not look at the checksums
                raise ValueError(f"checksum of {part}")
        content = torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:  # torch raises a dozen kinds for damaged files, pickle's among them
        reason = (str(error) or type(error).__name__).splitlines()[0][:100]
        raise UserError(f"{path}: damaged, or no checkpoint ({reason})",
                        "delete it: train.py goes on from the other of last.pt and best.pt; --checkpoint reads it") from None
    if isinstance(content, dict) and isinstance(content.get("format"), int) and content["format"] != FORMAT:
        raise UserError(f"{path}: checkpoint format {content['format']}, and this program reads {FORMAT}",
                        "use the version that wrote it")
    load_kinds(path, content, CONTENT)
    return content


def fill(model, weights, path, processes=ALONE):
    """Load weights into the model, all or none; wrappers' prefixes are taken off."""
    weights = {str(key).removeprefix("module.").replace("_orig_mod.", ""): value for key, value in weights.items()}
    own = model.state_dict()
    for key in sorted(own.keys() | weights.keys()):
        here, there = (tuple(getattr(d[key], "shape", ())) if key in d else "nothing" for d in (own, weights))
        if here != there:
            raise UserError(f"{path}: weights of another configuration: {key} is {there} there and {here} here",
                            "the checkpoint belongs to a model of another shape")
    processes.fill(model, weights)


@dataclass
class Restored:
    """A trained model and what belongs to it."""

    folder: Path
    checkpoint: str
    step: int
    trained: Config  # as it was trained
    config: Config  # as it is evaluated
    model: GPT
    tokenizer: tokenizer.Tokenizer
    data_sha256: str


def restore(folder, checkpoint="best", **changes):
    """-> the model of a run's folder, on its device and ready for evaluation.

    changes: config keys of Evaluation.changes, of the type the config wants or as text.
    """
    folder = Path(folder)
    trained = read_config(folder)
    if Path(trained.tokenizer).name == "tokenizer.json":  # that of the folder, wherever it is now
        changes = {"tokenizer": str(folder / "tokenizer.json"), **changes}
    config = build(Config, with_changes(trained, changes))
    resolved = resolve(config.model_copy(update={"compile": False}))  # that is for training
    set_up(resolved["threads"])
    path = folder / f"{checkpoint}.pt"
    content = load(path)
    for key in MODEL:
        if (there := content["config"].get(key)) != (here := getattr(trained, key)):
            raise UserError(f"{path}: weights of another configuration: {key} is {there} there and {here} in config.toml",
                            "give the folder that the checkpoint was written to")
    text = tokenizer.load(folder / "tokenizer.json")
    room_for(config, text.vocab_size, resolved["device"])
    model = GPT(config, text.vocab_size)
    fill(model, content["model"], path)
    model = model.to(resolved["device"]).eval()
    return Restored(folder, checkpoint, content["step"], trained, config, model, text, content["data_sha256"])


TEXT = ("dataset", "tokenizer", "vocab_size", "init_from")  # what they come to is known by its hash, wherever it lies now


def refuse_difference(path, before, now, free=NEUTRAL):
    """A run is continued only under its own config {key: value}; `free` keys may differ, and max_iters may grow."""
    for key in Config.model_fields:
        old, new = before.get(key), getattr(now, key)
        if key not in free and old != new and not (key == "max_iters" and isinstance(old, int) and new > old):
            raise UserError(f"{path}: holds a run with {key} = {old}, not {new}",
                            "give another --out_dir, or --overwrite to delete that run")


def hold(folder):
    """-> an open file; until it is closed, or this process ends in whatever way, no other can hold the folder.

    UserError if another does.
    """
    try:
        file = open(Path(folder, ".lock"), "ab")  # noqa: SIM115
    except OSError as error:
        raise UserError(f"{folder}: {error.strerror}", "give a folder that can be written") from None
    try:
        if os.name == "nt":
            import msvcrt

            msvcrt.locking(file.fileno(), msvcrt.LK_NBLCK, 1)
        else:
            import fcntl

            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except (BlockingIOError, PermissionError):
        file.close()
        raise UserError(f"{folder}: another process is writing into this folder",
                        "wait until it has ended, or give another folder") from None
    except OSError as error:  # of file systems without locks
        print(f"{folder}: cannot be locked ({error.strerror}); see to it that no other process writes into it", file=sys.stderr)
    return file


class Run:
    """A folder that a run is written to, new or continued, and held until it is left. Everything is checked before anything is
    written. Of several processes only the main one writes."""

    FILES = ("last.pt", "best.pt", "summary.json", "curves.png", "tokenizer.json", "sessions.jsonl", *logs.IDENTITY)

    def __init__(self, config, processes=ALONE):
        """Look at config.out_dir, and refuse what is not this run."""
        self.config, self.folder, self.processes = config, Path(config.out_dir), processes
        self.state, self.finished, self.lock, self.tracker = None, False, None, logs.Silent()
        try:
            if any(part.is_file() for part in (self.folder, *self.folder.parents)):
                raise UserError(f"{self.folder}: a file is in the way", "give another --out_dir")
            # A process that was killed at the very beginning leaves the lock, and half a config.
            if not self.folder.exists() or all(p.name == ".lock" or p.suffix == ".new" for p in self.folder.iterdir()):
                return
            if not (self.folder / "config.toml").is_file():
                raise UserError(f"{self.folder}: not empty, and not a run's folder", "give another --out_dir")
            weights = any((self.folder / name).exists() for name in ("last.pt", "best.pt"))
            if not (config.overwrite and weights):  # with its weights, it is a run whatever else is in there
                read_config(self.folder)
            if self.processes.main:
                self.lock = hold(self.folder)
            if not config.overwrite:
                self.look()
        except OSError as error:
            raise UserError(f"{config.out_dir}: {error.strerror}", "give another --out_dir") from None
        except UserError:
            self.release()
            raise

    def look(self):
        """Take up the state of the run that is in the folder, if it is this one."""
        before = read_config(self.folder)
        refuse_difference(self.folder, before.model_dump(), self.config)
        for name in logs.IDENTITY:
            logs.read(self.folder, name)
        self.choose_checkpoint()
        if self.state is None:
            return
        refuse_difference(self.origin, self.state["config"], self.config, (*NEUTRAL, *TEXT))
        self.finished = bool(logs.read_summary(self.folder)) and self.config.max_iters == before.max_iters
        if self.config.max_iters > before.max_iters:
            print(f"{self.folder}: max_iters grows from {before.max_iters} to {self.config.max_iters}, "
                  f"and the learning rate follows the longer schedule from step {self.state['step']} on")
        if self.origin.name == "best.pt" and not self.finished:
            print(f"{self.folder}: training goes on from best.pt, step {self.state['step']}")

    def choose_checkpoint(self):
        """Take last.pt; best.pt where there is none, or where the machine has lost lines of the log that only last.pt needs."""
        records, found = logs.read(self.folder, "log.jsonl"), []
        for path in (self.folder / name for name in ("last.pt", "best.pt") if (self.folder / name).exists()):
            state = load(path)
            if RESUMABLE.keys() - state.keys():
                raise UserError(f"{path}: weights that were not trained here",
                                f"begin from them in another folder: --init_from {self.folder}")
            load_kinds(path, state, RESUMABLE)
            found.append((state["logged"] - sum(record["step"] <= state["step"] for record in records), state, path))
            if found[-1][0] <= 0:
                break
        if found:
            lacking, self.state, self.origin = next((each for each in found if each[0] <= 0), found[0])
            if lacking > 0:
                print(f"{self.folder}: log.jsonl has lost {lacking} lines before step {self.state['step']}", file=sys.stderr)

    def __enter__(self):
        return self

    def __exit__(self, kind, *raised):
        if kind is not None:
            self.tracker.fail()
        self.release()

    def release(self):
        if self.lock is not None:
            self.lock.close()

    def settle(self, data):
        """-> device, dtype, compile and threads: resolved now, or as the run began."""
        if self.state and self.state["data_sha256"] != data.sha256:
            raise UserError(f"{self.folder}: the text of dataset = {self.config.dataset} has changed since this run began",
                            "give another --out_dir, or --overwrite to delete that run")
        if self.config.init_from and not self.state:
            origin = tokenizer.load(Path(self.config.init_from) / "tokenizer.json")
            if data.tokenizer.tokens != origin.tokens:
                raise UserError(f"tokenizer = {self.config.tokenizer}: not that of {self.config.init_from}",
                                "the weights know the ids of their own tokenizer; leave the key out")
        self.data_sha256 = data.sha256
        self.resolved = self.state["resolved"] if self.state else resolve(self.config)
        available(self.resolved["device"])
        self.best = self.state["best"] if self.state else {"step": None, "val_loss": float("inf")}
        self.step = self.state["step"] if self.state else 0
        self.reached = self.state["reached"] if self.state else False  # target_val_loss
        return self.resolved

    def load_into(self, model):
        """Give a continued run its weights back, a new one the weights it begins from."""
        if self.state:
            fill(model, self.state["model"], self.origin)
        elif self.config.init_from:
            origin = Path(self.config.init_from) / "best.pt"
            fill(model, load(origin)["model"], origin)

    def load_optimizers(self, optimizers):
        """Give the optimizers of a continued run their moments back."""
        if not self.state:
            return
        try:
            for optimizer, state in zip(optimizers, self.state["optimizers"], strict=True):
                optimizer.load_state_dict(state)
        except (ValueError, KeyError, TypeError) as error:
            raise UserError(f"{self.origin}: optimizers of another configuration ({error})",
                            "train again with --overwrite") from None

    def begin(self, text):
        """Create the folder, or take it up again at the checkpoint."""
        self.processes.wait()  # until all have read what is rewritten here
        self.seconds = 0.0
        if self.processes.main:
            try:
                self.write_beginning(text)
            except OSError as error:
                raise UserError(f"{self.folder}: {error.strerror}", "give another --out_dir") from None
            records = logs.read(self.folder, "log.jsonl")
            self.logged, self.seconds = len(records), max((r.get("seconds", 0.0) for r in records), default=0.0)
        self.state = None  # its memory is needed
        self.processes.wait()

    def write_beginning(self, text):
        tracker = logs.TRACKERS[self.config.wandb](self.folder, self.config)  # first: it may be refused
        self.folder.mkdir(parents=True, exist_ok=True)
        if self.lock is None:
            self.lock = hold(self.folder)
            if (self.folder / "config.toml").exists():
                raise UserError(f"{self.folder}: another process began a run here meanwhile", "give another --out_dir")
        self.tracker = tracker
        for name in self.FILES if self.config.overwrite else ():
            (self.folder / name).unlink(missing_ok=True)
        for half in self.folder.glob("*.new"):
            half.unlink()
        logs.replace(self.folder / "config.toml", self.config.toml().encode())
        logs.flush(self.folder.parent)
        tokenizer.save(text, self.folder / "tokenizer.json")
        cut = [logs.keep(self.folder, name, lambda record: record["step"] <= self.step) for name in logs.IDENTITY]
        (self.folder / "summary.json").unlink(missing_ok=True)
        logs.append(self.folder, "sessions.jsonl", [{
            "step": self.step, "time": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()), "command": shlex.join(sys.argv),
            "processes": self.processes.size, **self.resolved, **versions(), "data_sha256": self.data_sha256}])
        tracker.begin(any(cut))

    def log(self, record):
        """One line of log.jsonl, and of the tracker."""
        if self.processes.main:
            logs.append(self.folder, "log.jsonl", [record])
            self.logged += 1
            self.tracker.log(record)

    def save_best(self, model, optimizers, step, reached, val_loss):
        """Write best.pt if val_loss is the lowest so far."""
        if val_loss < self.best["val_loss"]:
            self.best = {"step": step, "val_loss": val_loss}
            self.save("best.pt", model, optimizers, step, reached)

    def load_best(self, model):
        """Give the model the weights of best.pt."""
        self.processes.wait()  # until it is written
        fill(model, load(self.folder / "best.pt")["model"], self.folder / "best.pt", self.processes)

    def save(self, name, model, optimizers, step, reached=False):
        """Write last.pt or best.pt, from which training goes on bit for bit: no clock and no random state are in it.

        NotFinite, and the file that is there stays, if a weight is no number.
        """
        content = self.processes.gather({"model": model.state_dict(), "optimizers": [o.state_dict() for o in optimizers]})
        if not self.processes.main:
            return
        for key, weight in content["model"].items():
            if not weight.isfinite().all():
                raise NotFinite(f"step {step}: {key} has weights that are not finite")
        save(self.folder / name, {
            "step": step, **content, "best": self.best, "reached": reached, "logged": self.logged,
            "resolved": self.resolved, "data_sha256": self.data_sha256, "config": self.config.essence()})

    def finish(self, summary):
        """Write summary.json and end the tracker; from now on the run is finished."""
        if self.processes.main:
            summary = {**summary, **self.resolved, **versions(), "data_sha256": self.data_sha256}
            logs.replace(self.folder / "summary.json", (json.dumps(summary, indent=1) + "\n").encode())
            self.tracker.finish(summary)

    def mend(self):
        """Send the history of a finished run to wandb again if the process that finished it was killed before it had."""
        if self.processes.main and self.config.wandb != "disabled" and logs.interrupted(self.folder):
            self.tracker = logs.TRACKERS[self.config.wandb](self.folder, self.config)
            self.tracker.begin()
            self.tracker.finish({})
