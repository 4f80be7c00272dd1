"""Several processes compute what one does, and lose no more than one does."""
import json
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

import logs
import parallel
import train
from options import UserError
from tests.conftest import SMALL, small
from tests.kills import contents

SLOW = pytest.mark.slow
REPOSITORY = Path(__file__).resolve().parents[1]
# One import of torch for several runs: seconds in every process.
PROGRAM = f"""
import json, sys
sys.path.insert(0, {str(REPOSITORY)!r})
import config, options, parallel, train

def main(argv):
    for made in (config.build(config.Config, values) for values in json.loads(argv[0])):
        with parallel.started(made.parallel) as processes:
            train.train(made, processes)

options.command(main)
"""
EXACT = {"log_interval": 1, "optimizer": "adamw", "learning_rate": 0.003}
CASES = {  # what differs from SMALL; three processes cannot share eight windows evenly, nor four the one of the last
    "ddp": EXACT | {"batch_size": 8, "parallel": "ddp"},
    "fsdp": EXACT | {"batch_size": 8, "parallel": "fsdp", "position": "learned", "tied": False},
    "accumulation": EXACT | {"batch_size": 2, "gradient_accumulation_steps": 3, "position": "kerple", "length_interval": 20},
    "random": EXACT | {"batch_size": 1, "gradient_accumulation_steps": 2, "position": "fire", "random_positions": 64,
                       "parallel": "fsdp", "canon": 4},
    "task": EXACT | {"dataset": "task:sort", "batch_size": 4, "parallel": "ddp"},  # of each row, another share is scored
    "muon": {"log_interval": 1, "parallel": "ddp"},
    "muon fsdp": {"log_interval": 1, "parallel": "fsdp", "muon_heads": True},
}
SOME = ("accumulation", "random", "task", "muon fsdp")  # each engine, optimizer and share once


def torchrun(*words, processes=2, **how):
    """Start processes; torch.distributed.run is what torchrun calls."""
    return subprocess.Popen([sys.executable, "-m", "torch.distributed.run", *(how.pop("agent", ["--standalone"])),
                             f"--nproc_per_node={processes}", *words], cwd=REPOSITORY, text=True, stdout=subprocess.PIPE,
                            stderr=subprocess.STDOUT, env={**os.environ, "OMP_NUM_THREADS": "1"}, **how)


def finished(process, seconds=120):
    """-> what a job has printed when it ends. If it does not, torchrun is told to end its processes."""
    try:
        return process.communicate(timeout=seconds)[0]
    finally:
        if process.returncode is None:
            process.terminate()
            process.wait(40)


def together(runs, tmp_path, **how):
    """Train each of some configs {key: value} with several processes, one config after the other."""
    program = tmp_path / "program.py"
    program.write_text(PROGRAM)
    process = torchrun(program, json.dumps(runs), **how)
    out = finished(process)
    assert process.returncode == 0, out
    return out


def values(name, corpus, folder, **changes):
    return SMALL | {"dataset": str(corpus)} | CASES[name] | {"out_dir": str(folder), **changes}


@pytest.fixture(scope="module")
def alone(corpus, tmp_path_factory):
    """-> a function that gives the folder in which a case was trained by one process."""
    folder = tmp_path_factory.mktemp("alone")

    def trained(name):
        if not (folder / name).exists():
            assert train.train(small(**values(name, corpus, folder / name))) == 0
        return folder / name
    return trained


def losses(folder, key):
    return [record[key] for record in logs.read(folder, "log.jsonl") if key in record]


@pytest.mark.parametrize("processes, cases", [(3, SOME), *(pytest.param(n, tuple(CASES), marks=SLOW) for n in (2, 3, 4))])
def test_losses_do_not_depend_on_the_number_of_processes(processes, cases, alone, corpus, tmp_path):
    for name in cases:
        alone(name)
    out = together([values(name, corpus, tmp_path / name) for name in cases], tmp_path, processes=processes)
    for name in cases:
        assert f"{tmp_path / name}: " in out and out.count(f"{processes} processes") == len(cases)  # said once, not by each
        for key in ("train_loss", "val_loss", "grad_norm"):
            one, many = losses(alone(name), key), losses(tmp_path / name, key)
            exact = len(one) if "muon" not in name else 5  # its iteration makes rounding large; docs/trust.md has numbers
            assert len(one) == len(many) and len(one) >= 3
            assert many[:exact] == pytest.approx(one[:exact], rel=1e-5 if key != "grad_norm" else 1e-4)
        curves = [[r["loss"] for file in ("lengths.jsonl", "accuracy.jsonl") for r in logs.read(folder, file)]
                  for folder in (alone(name), tmp_path / name)]
        assert curves[1] == pytest.approx(curves[0], rel=1e-5 if "muon" not in name else 0.05)


@SLOW
@pytest.mark.parametrize("name", ["ddp", "muon fsdp"])
def test_a_run_goes_on_with_another_number_of_processes(name, alone, corpus, tmp_path):
    config = values(name, corpus, tmp_path / "run")
    assert train.train(small(**config, stop_at=8)) == 0
    together([config | {"stop_at": 16}], tmp_path, processes=3)
    assert torch.load(tmp_path / "run" / "last.pt", weights_only=True)["step"] == 16
    together([config | {"stop_at": 23}], tmp_path, processes=2)
    assert train.train(small(**config)) == 0
    tolerance = 1e-5 if "muon" not in name else 0.02
    assert losses(tmp_path / "run", "train_loss") == pytest.approx(losses(alone(name), "train_loss"), rel=tolerance)
    sessions = [json.loads(line) for line in (tmp_path / "run" / "sessions.jsonl").read_text().splitlines()]
    assert [(s["step"], s["processes"]) for s in sessions] == [(0, 1), (8, 3), (16, 2), (23, 1)]


def wait_for(path, process):
    while not path.exists():
        assert process.poll() is None, process.communicate()[0]
        time.sleep(0.02)


def arguments(config):
    return [f"--{key}={str(value).lower() if isinstance(value, bool) else value}" for key, value in config.items()]


def ranks(process):
    """-> {rank: number} of the processes that torchrun has started."""
    found = {}
    for number in Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split():
        environment = dict(line.partition("=")[::2] for line in Path(f"/proc/{number}/environ").read_text().split("\0"))
        found[int(environment["RANK"])] = int(number)
    return found


@pytest.mark.skipif(not Path("/proc/self/task").exists(), reason="asks Linux for the processes that another has started")
@pytest.mark.parametrize("parallel, victim", [("ddp", 1), pytest.param("fsdp", 0, marks=SLOW)])
def test_a_killed_process_ends_the_job_which_restarts_from_the_last_checkpoint(parallel, victim, corpus, tmp_path):
    config = values(parallel, corpus, tmp_path / "run", max_iters=50, checkpoint_interval=5, dropout=0.1, eval_interval=25)
    together([config | {"out_dir": str(tmp_path / "whole")}], tmp_path)
    process = torchrun("train.py", *arguments(config), agent=["--standalone", "--max-restarts=1"])
    wait_for(tmp_path / "run" / "last.pt", process)
    os.kill(ranks(process)[victim], signal.SIGKILL)
    out = finished(process)
    assert process.returncode == 0, out
    assert "Traceback" not in out and "going on at step" in out
    assert contents(tmp_path / "run") == contents(tmp_path / "whole")


def test_a_signal_stops_all_processes_at_one_step(corpus, tmp_path):
    config = values("ddp", corpus, tmp_path / "run", max_iters=3000)
    process = torchrun("train.py", *arguments(config))
    wait_for(tmp_path / "run" / "log.jsonl", process)
    process.send_signal(signal.SIGTERM)
    out = finished(process)
    step = torch.load(tmp_path / "run" / "last.pt", weights_only=True)["step"]
    assert 0 < step < 3000 and out.count(f"stopped at step {step} of 3000 and saved") == 1


@SLOW
def test_two_machines_meet(alone, corpus, tmp_path):
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        place = f"127.0.0.1:{free.getsockname()[1]}"
    agent = ["--nnodes=2", "--rdzv_backend=c10d", f"--rdzv_endpoint={place}", "--rdzv_id=1", "--local_addr=127.0.0.1"]
    processes = [torchrun("train.py", *arguments(values("ddp", corpus, tmp_path / "run")), processes=1, agent=agent)
                 for _ in range(2)]
    for process in processes:
        out = finished(process)
        assert process.returncode == 0, out
    assert losses(tmp_path / "run", "train_loss") == pytest.approx(losses(alone("ddp"), "train_loss"), rel=1e-5)


def test_a_refusal_is_said_once_and_ends_the_job(corpus, tmp_path):
    config = values("ddp", tmp_path / "nowhere.txt", tmp_path / "run")
    process = torchrun("train.py", *arguments(config))
    out = finished(process)
    assert process.returncode and out.count("no such name, file or folder") == 1 and not (tmp_path / "run").exists()


def test_processes_that_would_each_train_the_same_are_refused(monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(UserError, match="parallel = none, and torchrun started 2 processes"):
        parallel.started("none")


@pytest.mark.parametrize("rows, most", [(8, 8), (8, 3), (7, 2), (1, 4), (2, 1), (30, 4)])
@pytest.mark.parametrize("size", [1, 2, 3, 4, 9])
def test_shares_are_all_windows_once_in_equally_many_passes(rows, most, size):
    one, shares = parallel.Alone(), []
    for one.rank in range(size):
        one.size = size
        shares.append(one.passes(rows, most))
    windows = list(range(rows))
    assert [w for share in shares for part in share for w in windows[part]] == windows
    assert len({len(share) for share in shares}) == 1
    assert all(len(windows[part]) <= most for share in shares for part in share)
    sizes = [sum(len(windows[part]) for part in share) for share in shares]
    assert max(sizes) - min(sizes) <= 1
