"""The run's folder: what is in it, how training goes on from it, and how a model comes back from it."""
import json
import math
import os
import shlex
import sys
import time
from dataclasses import dataclass
from pathlib import Path

import torch

import files
import logs
import tokenizer
from checkpoints import fill, load, load_resumable, save
from config import MODEL, NEUTRAL, Config, read_config, refuse_difference, with_changes
from machine import available, resolve, room_for, set_up, versions
from model import GPT
from options import NotFinite, UserError, build
from parallel import ALONE


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
    resolved = resolve(config.model_copy(update={"compile": False, "dtype": "float32"}))  # those are for training
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


def session(folder, **what):
    """Note in sessions.jsonl what a program has begun or done in a run's folder, by which command and which versions."""
    logs.append(folder, "sessions.jsonl", [{"time": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
                                            "command": shlex.join(sys.argv), **what, **versions()}])


TEXT = ("dataset", "tokenizer", "vocab_size", "init_from")  # what they come to is known by its hash, wherever it lies now


class Run:
    """A folder that a run is written to, new or continued, and held until it is left. Everything is checked before anything is
    written. Of several processes only the main one writes.

    In this order: Run(config), settle, load_weights, load_optimizers, begin; then log and save; at the end load_best, finish.
    """

    # Weights first: if --overwrite is killed meanwhile, what is left is never taken for a run that can go on.
    FILES = ("last.pt", "best.pt", "summary.json", "curves.png", "tokenizer.json", "sessions.jsonl", "wandb_id.txt",
             *logs.IDENTITY)

    def __init__(self, config, processes=ALONE):
        """Look at config.out_dir, and refuse what is not this run."""
        self.config, self.folder, self.processes = config, Path(config.out_dir), processes
        self.state = self.origin = self.lock = None  # of the checkpoint that training goes on from; the checkpoint; see hold
        self.finished, self.tracker = False, logs.Silent()
        # What torchrun starts again goes on, although the command that it repeats says otherwise.
        self.overwrite = config.overwrite and os.environ.get("TORCHELASTIC_RESTART_COUNT", "0") == "0"
        try:
            if any(part.is_file() for part in (self.folder, *self.folder.parents)):
                raise UserError(f"{self.folder}: a file is in the way", "give another --out_dir")
            # A process that was killed at the very beginning leaves the lock, and half a config.
            if not self.folder.exists() or all(p.name == ".lock" or p.suffix == ".new" for p in self.folder.iterdir()):
                return
            if not (self.folder / "config.toml").is_file():
                raise UserError(f"{self.folder}: not empty, and not a run's folder", "give another --out_dir")
            weights = any((self.folder / name).exists() for name in ("last.pt", "best.pt"))
            if not (self.overwrite and weights):  # with its weights, it is a run whatever else is in there
                read_config(self.folder)
            if processes.main:
                self.lock = files.hold(self.folder)
            if not self.overwrite:
                self.look()
        except BaseException as error:
            self.release()
            if isinstance(error, OSError):
                raise UserError(f"{config.out_dir}: {error.strerror}", "give another --out_dir") from None
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
        self.finished = logs.read_summary(self.folder).get("max_iters") == self.config.max_iters
        if self.config.max_iters > before.max_iters:
            print(f"{self.folder}: max_iters grows from {before.max_iters} to {self.config.max_iters}, "
                  f"and the learning rate follows the longer schedule from step {self.state['step']} on")
        if self.origin.name == "best.pt" and not self.finished:
            print(f"{self.folder}: training goes on from best.pt, step {self.state['step']}")

    def choose_checkpoint(self):
        """Take the newer of last.pt and best.pt, or the one before which no line of the log is lost."""
        steps = [record["step"] for record in logs.read(self.folder, "log.jsonl")]

        def lost(state):
            return max(0, state["logged"] - sum(step <= state["step"] for step in steps))

        paths = [self.folder / name for name in ("last.pt", "best.pt") if (self.folder / name).exists()]
        found = [(load_resumable(path), path) for path in paths]
        if not found:
            return
        self.state, self.origin = min(found, key=lambda each: (lost(each[0]) > 0, -each[0]["step"]))
        if lines := lost(self.state):
            print(f"{self.folder}: log.jsonl has lost {lines} lines before step {self.state['step']}", file=sys.stderr)
        best = next((state["step"] for state, path in found if path.name == "best.pt"), None)
        if best != self.state["best"]["step"]:  # it is lost, or of a step that is now done again
            self.state["best"] = {"step": None, "val_loss": math.inf}

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
                raise UserError(f"dataset = {self.config.dataset}, tokenizer = {self.config.tokenizer}: not the tokens of "
                                f"{self.config.init_from}",
                                "the weights know their own ids: leave tokenizer out, and of tasks take the same")
        self.data_sha256 = data.sha256
        self.resolved = self.state["resolved"] if self.state else resolve(self.config)
        if self.resolved.setdefault("processes", self.processes.size) != self.processes.size:
            threads = self.config.threads or torch.get_num_threads()  # as many processes may have a core less each
            self.resolved = {**self.resolved, "processes": self.processes.size, "threads": threads}
        available(self.resolved["device"])
        self.best = self.state["best"] if self.state else {"step": None, "val_loss": math.inf}
        self.step = self.state["step"] if self.state else 0
        self.reached = self.state["reached"] if self.state else False  # target_val_loss
        return self.resolved

    def load_weights(self, model):
        """Give a continued run its weights back, a new one the weights it begins from."""
        self.begins_from = {}
        if self.state:
            fill(model, self.state["model"], self.origin)
        elif self.config.init_from:
            origin = Path(self.config.init_from) / "best.pt"
            fill(model, load(origin)["model"], origin)
            self.begins_from = {"init_from_sha256": files.file_digest(origin)}

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
        if self.processes.total(self.step) != self.step * self.processes.size:  # waits until all have read what changes now
            raise UserError(f"{self.folder}: processes see different checkpoints", "all must see one file system")
        self.state = None  # its memory is needed
        self.seconds, self.logged = 0.0, 0  # of the main process alone
        if self.processes.main:
            try:
                self.write_beginning(text)
            except OSError as error:
                raise UserError(f"{self.folder}: {error.strerror}", "give another --out_dir") from None
            records = logs.read(self.folder, "log.jsonl")
            self.logged, self.seconds = len(records), max((r.get("seconds", 0.0) for r in records), default=0.0)
        self.processes.wait()

    def write_beginning(self, text):
        """Killed after any line, it is done again by the next start."""
        config = self.config.model_copy(update={"overwrite": self.overwrite})
        self.tracker = logs.TRACKERS[config.wandb](self.folder, config)  # first: it may be refused
        self.folder.mkdir(parents=True, exist_ok=True)
        if self.lock is None:
            self.lock = files.hold(self.folder)
            if (self.folder / "config.toml").exists():
                raise UserError(f"{self.folder}: another process began a run here meanwhile", "give another --out_dir")
        for name in self.FILES if self.overwrite else ():
            (self.folder / name).unlink(missing_ok=True)
        for name in (*self.FILES, "config.toml"):
            (self.folder / f"{name}.new").unlink(missing_ok=True)
        files.replace(self.folder / "config.toml", config.toml().encode())
        files.flush(self.folder.parent)
        tokenizer.save(text, self.folder / "tokenizer.json")
        self.tracker.open()
        cut = [logs.keep(self.folder, name, lambda record: record["step"] <= self.step) for name in logs.IDENTITY]
        (self.folder / "summary.json").unlink(missing_ok=True)
        session(self.folder, step=self.step, **self.begins_from, **self.resolved, data_sha256=self.data_sha256)
        self.tracker.begin(any(cut))

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
        path = self.folder / "best.pt"
        content = load(path)
        if content["step"] != self.best["step"]:
            raise UserError(f"{path}: of step {content['step']}, and the best of this run is of step {self.best['step']}",
                            "delete it: the same command goes on without it")
        fill(model, content["model"], path, self.processes)

    def save(self, name, model, optimizers, step, reached):
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
            summary = {**summary, "max_iters": self.config.max_iters, **self.resolved, **versions(),
                       "data_sha256": self.data_sha256}
            files.replace(self.folder / "summary.json", (json.dumps(summary, indent=1) + "\n").encode())
            self.tracker.finish(summary)

    def mend(self):
        """Send the history of a finished run to wandb again if the process that finished it was killed before it had."""
        if self.processes.main and self.config.wandb != "disabled" and logs.interrupted(self.folder):
            self.tracker = logs.TRACKERS[self.config.wandb](self.folder, self.config)
            self.tracker.begin()
            self.tracker.finish({})
