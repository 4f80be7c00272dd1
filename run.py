"""The run's folder: what is in it, how it is written so that nothing is lost, and how a model comes back from it."""
import contextlib
import ctypes
import importlib.util
import io
import json
import os
import platform
import shutil
import subprocess
import sys
import sysconfig
import zipfile
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

import logs
import tokenizer
from config import NEUTRAL, Config, read_config, with_changes
from model import GPT
from options import UserError, build

FORMAT = 1  # of checkpoints; a larger number means that older programs must not read them


def resolve(config):
    """Settle what is automatic -> {"device", "dtype", "compile", "threads"}; a resumed run keeps what was settled."""
    device = config.device
    if device == "auto":
        device = "cuda" if torch.cuda.is_available() else "mps" if torch.backends.mps.is_available() else "cpu"
    available(device)
    dtype = config.dtype
    if dtype == "auto":
        dtype = "bfloat16" if device.startswith("cuda") and torch.cuda.is_bf16_supported() else "float32"
    compiled = config.compile if config.compile != "auto" else worth_compiling(config, device)
    if compiled and (lacking := missing_for_compiling(device)):
        print(f"not compiled: there is no {lacking}")
        compiled = False
    return {"device": device, "dtype": dtype, "compile": compiled, "threads": config.threads or torch.get_num_threads()}


def available(device):
    """Refuse a device that this machine does not have."""
    kind, _, index = device.partition(":")
    here = {"cpu": True, "cuda": torch.cuda.is_available(), "mps": torch.backends.mps.is_available()}[kind]
    if not here or (index and int(index) >= torch.cuda.device_count()):
        raise UserError(f"device = {device}: not on this machine", "use --device auto, or --device cpu")


def worth_compiling(config, device):
    """On a GPU, or on a CPU where training is long enough to win back the compiler's time."""
    if device != "cpu":
        return device.startswith("cuda")
    tokens = config.max_iters * config.batch_size * config.gradient_accumulation_steps * config.block_size
    return 6 * 12 * config.n_layer * config.n_embd**2 * tokens > 5e13


def missing_for_compiling(device):
    """-> what torch.compile needs and this machine does not have, or None."""
    if device.startswith("cuda") and importlib.util.find_spec("triton") is None:
        return "triton"
    if device == "cpu" and not any(shutil.which(name) for name in (os.environ.get("CXX", "g++"), "g++", "clang++", "cl")):
        return "C++ compiler"
    if device == "cpu" and not Path(sysconfig.get_path("include"), "Python.h").exists():
        return "Python.h (the package python3-dev)"
    return None


def set_up(threads):
    """Set the threads, and let the C library keep freed memory: a tenth to a third of a step on CPUs is page faults."""
    torch.set_num_threads(threads)
    with contextlib.suppress(OSError, AttributeError, TypeError):
        mallopt = ctypes.CDLL(None).mallopt  # glibc; elsewhere there is none, and nothing happens
        for option, value in ((-3, 2**30), (-1, 2**31 - 1), (-2, 2**27)):  # mmap threshold, trim threshold, top padding
            mallopt(option, value)


def fresh(value):
    """Copy nested containers so that no object but a string occurs twice: a file tells a shared object from an equal copy,
    and a resumed run must write the same bytes as one that never stopped."""
    if isinstance(value, dict):
        return {fresh(k): fresh(v) for k, v in value.items()}
    if isinstance(value, list | tuple):
        return type(value)([fresh(v) for v in value])
    return sys.intern(value) if isinstance(value, str) else value


def save(path, content):
    """Write tensors and plain values as a checkpoint: beside the old one, flushed, then moved over it."""
    buffer = io.BytesIO()
    torch.save(fresh({"format": FORMAT, **content}), buffer)
    logs.replace(Path(path), buffer.getbuffer())


CONTENT = {"format": int, "step": int, "model": dict, "data_sha256": str}
RESUMABLE = {"optimizers": list, "resolved": dict, "best": dict, "reached": bool}


def load(path, wanted=CONTENT):
    """-> what `save` wrote, on the CPU. Nothing in the file is executed. UserError if it is missing, foreign or damaged."""
    path = Path(path)
    if not path.is_file():
        raise UserError(f"{path}: no checkpoint", "train the run first: python train.py CONFIG.toml")
    try:
        content = torch.load(path, map_location="cpu", weights_only=True)
        with zipfile.ZipFile(path) as archive:
            if part := archive.testzip():  # torch does not look at the checksums
                raise ValueError(f"checksum of {part}")
    except Exception as error:  # torch raises a dozen kinds for damaged files, pickle's among them
        reason = (str(error) or type(error).__name__).splitlines()[0][:100]
        raise UserError(f"{path}: damaged, or no checkpoint ({reason})",
                        "use the other of best.pt and last.pt, or train again with --overwrite") from None
    if isinstance(content, dict) and isinstance(content.get("format"), int) and content["format"] != FORMAT:
        raise UserError(f"{path}: checkpoint format {content['format']}, and this program reads {FORMAT}",
                        "use the version that wrote it")
    if not isinstance(content, dict) or not all(isinstance(content.get(key), kind) for key, kind in wanted.items()):
        raise UserError(f"{path}: not a checkpoint of this program, or not of this kind", "give a folder that train.py wrote")
    return content


def fill(model, weights, path):
    """Load weights into the model, all or none; wrappers' prefixes are taken off."""
    weights = {key.removeprefix("module.").replace("_orig_mod.", ""): value for key, value in weights.items()}
    own = model.state_dict()
    for key in sorted(own.keys() | weights.keys()):
        here, there = (tuple(d[key].shape) if key in d else "nothing" for d in (own, weights))
        if here != there:
            raise UserError(f"{path}: weights of another configuration: {key} is {there} there and {here} here",
                            "the checkpoint belongs to a model of another shape")
    model.load_state_dict(weights)


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
    content = load(folder / f"{checkpoint}.pt")
    text = tokenizer.load(folder / "tokenizer.json")
    model = GPT(config, text.vocab_size)
    fill(model, content["model"], folder / f"{checkpoint}.pt")
    model = model.to(resolved["device"]).eval()
    return Restored(folder, checkpoint, content["step"], trained, config, model, text, content["data_sha256"])


def refuse_difference(before, now):
    """A folder is continued only under its own config; NEUTRAL keys may differ, and max_iters may grow."""
    for key in Config.model_fields:
        old, new = getattr(before, key), getattr(now, key)
        if key not in NEUTRAL and old != new and not (key == "max_iters" and new > old):
            raise UserError(f"{now.out_dir}: holds a run with {key} = {old}, not {new}",
                            "give another --out_dir, or --overwrite to delete that run")


class Run:
    """A folder that a run is written to, new or continued. Everything is checked before anything is written."""

    FILES = ("config.toml", "tokenizer.json", "summary.json", "curves.png", "last.pt", "best.pt", *logs.IDENTITY)

    def __init__(self, config):
        """Look at config.out_dir, and refuse what is not this run."""
        self.config, self.folder, self.state, self.finished = config, Path(config.out_dir), None, False
        try:
            if any(part.is_file() for part in (self.folder, *self.folder.parents)):
                raise UserError(f"{self.folder}: a file is in the way", "give another --out_dir")
            if not self.folder.exists() or not any(self.folder.iterdir()):
                return
        except OSError as error:
            raise UserError(f"{config.out_dir}: {error.strerror}", "give another --out_dir") from None
        if not (self.folder / "config.toml").is_file():
            raise UserError(f"{self.folder}: not empty, and not a run's folder", "give another --out_dir")
        if config.overwrite and (self.folder / "last.pt").exists():
            return  # whatever else is in there, it is a run
        before = read_config(self.folder)
        if config.overwrite:
            return
        refuse_difference(before, config)
        for name in logs.IDENTITY:
            logs.read(self.folder, name)
        if (self.folder / "last.pt").exists():
            self.state = load(self.folder / "last.pt", CONTENT | RESUMABLE)
            self.finished = bool(logs.read_summary(self.folder)) and config.max_iters == before.max_iters
            if config.max_iters > before.max_iters:
                print(f"{self.folder}: max_iters grows from {before.max_iters} to {config.max_iters}, "
                      f"and the learning rate follows the longer schedule from step {self.state['step']} on")

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

    def load_into(self, model, optimizers):
        """Give a continued run its weights and the optimizers' state back, a new one the weights it begins from."""
        if not self.state:
            if self.config.init_from:
                origin = Path(self.config.init_from) / "best.pt"
                fill(model, load(origin)["model"], origin)
            return
        fill(model, self.state["model"], self.folder / "last.pt")
        try:
            for optimizer, state in zip(optimizers, self.state["optimizers"], strict=True):
                optimizer.load_state_dict(state)
        except (ValueError, KeyError, TypeError) as error:
            raise UserError(f"{self.folder / 'last.pt'}: optimizers of another configuration ({error})",
                            "train again with --overwrite") from None

    def begin(self, text):
        """Create the folder, or take it up again at the checkpoint."""
        try:
            self.tracker = logs.TRACKERS[self.config.wandb](self.folder, self.config)  # first: it may be refused
            for name in self.FILES if self.config.overwrite else ():
                (self.folder / name).unlink(missing_ok=True)
            self.folder.mkdir(parents=True, exist_ok=True)
            logs.replace(self.folder / "config.toml", self.config.toml().encode())
            tokenizer.save(text, self.folder / "tokenizer.json")
            for name in logs.IDENTITY:
                logs.keep(self.folder, name, lambda record: record["step"] <= self.step)
            (self.folder / "summary.json").unlink(missing_ok=True)
        except OSError as error:
            raise UserError(f"{self.folder}: {error.strerror}", "give another --out_dir") from None
        self.seconds = max((r.get("seconds", 0.0) for r in logs.read(self.folder, "log.jsonl")), default=0.0)

    def log(self, record):
        """One line of log.jsonl, and of the tracker."""
        logs.append(self.folder, "log.jsonl", [record])
        self.tracker.log(record)

    def save_best(self, model, step, val_loss):
        """Write best.pt if val_loss is the lowest so far."""
        if val_loss < self.best["val_loss"]:
            self.best = {"step": step, "val_loss": val_loss}
            save(self.folder / "best.pt", {"step": step, "model": model.state_dict(), "data_sha256": self.data_sha256})

    def load_best(self, model):
        """Give the model the weights of best.pt."""
        fill(model, load(self.folder / "best.pt")["model"], self.folder / "best.pt")

    def save_last(self, model, optimizers, step, reached):
        """Write last.pt, from which training goes on bit for bit: no clock and no random state are in it."""
        save(self.folder / "last.pt", {
            "step": step, "model": model.state_dict(), "optimizers": [o.state_dict() for o in optimizers],
            "best": self.best, "reached": reached, "resolved": self.resolved, "data_sha256": self.data_sha256})

    def finish(self, summary):
        """Write summary.json and end the tracker; from now on the run is finished."""
        summary = {**summary, **self.resolved, **versions(), "data_sha256": self.data_sha256}
        logs.replace(self.folder / "summary.json", (json.dumps(summary, indent=1) + "\n").encode())
        self.tracker.finish(summary)


def versions():
    """What the numbers were made with."""
    git = subprocess.run(["git", "rev-parse", "HEAD"], cwd=Path(__file__).parent, capture_output=True, text=True, check=False) \
        if shutil.which("git") else None
    return {"python": platform.python_version(), "torch": torch.__version__, "numpy": np.__version__,
            "git_commit": git.stdout.strip() or None if git else None}
