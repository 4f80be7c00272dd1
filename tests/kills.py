"""Kill a training run at random instants until it ends, many times over, and look whether anything was lost.

    python tests/kills.py FOLDER [KILLS] [SEED]

Every attempt is a process of its own, forked from one that has imported torch, which saves its seconds. What each run ends with
is compared, byte by byte, with the same run that was never killed.
"""
import contextlib
import json
import os
import random
import signal
import sys
import time
import traceback
from pathlib import Path

if not __package__:  # run as a script: sys.path begins with this folder instead of the repository
    sys.path[0] = str(Path(__file__).resolve().parents[1])
import matplotlib.backends.backend_agg  # noqa: F401  imported here once, instead of in every attempt

import checkpoints
import logs
import train
from config import Config
from options import build
from position import POSITIONS
from tests.conftest import SMALL, text

VARIANTS = [{"position": name} for name in POSITIONS] + [
    {"optimizer": "adamw", "dropout": 0.1}, {"gradient_accumulation_steps": 2, "dropout": 0.1}, {"random_positions": 100},
    {"attention": "linear"}, {"target_val_loss": 2.3}, {"dataset": "task:copy"}]


def config(folder, corpus, variant):
    """A run that writes nearly all the time."""
    return build(Config, SMALL | {
        "dataset": str(corpus), "out_dir": str(folder), "log_interval": 1, "eval_interval": 5, "checkpoint_interval": 3,
        "length_interval": 10, "eval_windows": 4, "length_windows": 4, "max_iters": 20, **variant})


def contents(folder):
    """-> what must be the same however often a run was stopped: all its files, without times and what was on the machine."""
    found = {name: (folder / name).read_bytes() for name in ("best.pt", "last.pt", "tokenizer.json")}
    for name in (name for name in logs.IDENTITY if (folder / name).exists()):
        records = map(json.loads, (folder / name).read_text().splitlines())  # all of them, torn and doubled ones too
        found[name] = [{k: v for k, v in record.items() if k not in ("seconds", "tokens_per_second")} for record in records]
    found["summary"] = json.loads((folder / "summary.json").read_text()) | {"seconds": 0, "git_commit": None}
    found["files"] = sorted(path.name for path in folder.iterdir())
    return found


def attempt(made):
    """Train in a process of its own. -> its number."""
    process = os.fork()
    if process:
        return process
    with open(os.devnull, "w") as nowhere, contextlib.redirect_stdout(nowhere), contextlib.redirect_stderr(nowhere):
        code = 1
        try:
            code = train.train(made)
        except BaseException:
            traceback.print_exc(file=sys.__stderr__)
        finally:
            os._exit(code)


def ended(process, deadline):
    """Wait for a process until the deadline. -> whether it ended by itself, and well."""
    while time.monotonic() < deadline:
        number, status = os.waitpid(process, os.WNOHANG)
        if number:
            if status:
                raise AssertionError(f"a resumed run failed with status {status}")
            return True
        time.sleep(0.001)
    os.kill(process, signal.SIGKILL)
    os.waitpid(process, 0)
    return False


def whole_checkpoints(folder):
    """A checkpoint that is there can be loaded, at any instant."""
    for name in ("best.pt", "last.pt"):
        if (folder / name).exists():
            checkpoints.load(folder / name)


def kill(folder, kills, seed):
    """-> how many runs it took to be killed so often. AssertionError at the first difference."""
    generator, runs, usual = random.Random(seed), 0, {}
    corpus = folder / "corpus.txt"
    corpus.write_text(text(12_000), encoding="utf-8")
    while kills > 0:
        number = (seed + runs) % len(VARIANTS)
        variant, whole, parts = VARIANTS[number], folder / f"whole-{number}", folder / f"parts-{runs}"
        if number not in usual:
            before = time.monotonic()
            assert ended(attempt(config(whole, corpus, variant)), before + 300)
            usual[number] = time.monotonic() - before
        runs, attempts = runs + 1, 0
        # At first a run hardly gets beyond its beginning; the time that it is given grows until it ends.
        while not ended(attempt(config(parts, corpus, variant)),
                        time.monotonic() + generator.random() * usual[number] * (0.3 + 0.1 * attempts)):
            kills, attempts = kills - 1, attempts + 1
            whole_checkpoints(parts)
        expected, found = contents(whole), contents(parts)
        for name, content in expected.items():
            assert found[name] == content, f"{parts}: {name} differs from that of the run that was not killed ({variant})"
        print(f"run {runs}: killed {attempts} times, {variant}: the same bytes", flush=True)
    return runs


if __name__ == "__main__":
    words = sys.argv[1:]
    where, kills, seed = Path(words[0]), int((words[1:] or [100])[0]), int((words[2:] or [0])[0])
    where.mkdir(parents=True)
    print(f"{kill(where, kills, seed)} runs, each ended in the same bytes as when it was not killed")
