"""Whatever ends a run's process, nothing is lost, and the run that goes on is the one that was stopped."""
import errno
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest
import torch

import checkpoints
import files
import lengths
import logs
import optim
import run as runs
import sample
import train
from options import NotFinite, UserError
from tests.conftest import SMALL, small
from tests.kills import config, contents

REPOSITORY = Path(__file__).resolve().parents[1]
LINUX = pytest.mark.skipif(not Path("/proc/self/fd").exists(), reason="asks Linux which file a number means")


def kill(folder, kills):
    words = [sys.executable, REPOSITORY / "tests" / "kills.py", folder, str(kills)]
    subprocess.run(words, check=True, timeout=40 * kills + 200)


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
def test_killed_at_ten_instants_a_run_ends_in_the_same_bytes(tmp_path):
    kill(tmp_path / "runs", 10)


@pytest.mark.slow
def test_killed_at_a_hundred_instants_every_run_ends_in_the_same_bytes(tmp_path):
    kill(tmp_path / "runs", 100)


@pytest.fixture(scope="module")
def whole(corpus, tmp_path_factory):
    """What a run that nothing happens to ends with."""
    folder = tmp_path_factory.mktemp("whole") / "run"
    assert train.train(config(folder, corpus, {"dropout": 0.1})) == 0
    return contents(folder)


def goes_on(folder, corpus, whole):
    assert train.train(config(folder, corpus, {"dropout": 0.1})) == 0
    assert contents(folder) == whole


class Disk:
    """A disk that forgets at a power failure what was not flushed: contents of files, and names in folders."""

    def __init__(self, folder):
        self.folder, self.files, self.names, self.states, self.real = folder, {}, {}, [], os.fsync

    def fsync(self, handle):
        """In place of os.fsync: also note what would be left if the power failed now."""
        self.real(handle)
        path = Path(os.readlink(f"/proc/self/fd/{handle}"))
        if path == self.folder:
            self.names = {entry.name: entry.stat().st_ino for entry in path.iterdir()}
        elif path.parent == self.folder:
            self.files[path.stat().st_ino] = path.read_bytes()
        self.states.append({name: self.files.get(file, b"") for name, file in self.names.items()})


@LINUX
def test_a_machine_that_lost_what_was_not_on_its_disk_goes_on(corpus, whole, tmp_path, monkeypatch):
    disk = Disk(tmp_path / "run")
    monkeypatch.setattr(os, "fsync", disk.fsync)
    assert train.train(config(disk.folder, corpus, {"dropout": 0.1})) == 0
    monkeypatch.undo()
    assert len(disk.states) > 60
    for number in random.Random(0).sample(range(len(disk.states)), 8):
        folder = tmp_path / str(number)
        folder.mkdir()
        for name, content in disk.states[number].items():
            (folder / name).write_bytes(content)
        goes_on(folder, corpus, whole)


@pytest.mark.parametrize("number", random.Random(1).sample(range(1, 58), 10))
def test_a_disk_that_is_full_while_something_is_written_loses_nothing(number, corpus, whole, tmp_path, monkeypatch):
    left, real = [number], os.fsync

    def fsync(handle):
        left[0] -= 1
        if left[0] == 0:
            if os.fstat(handle).st_size and not os.path.isdir(f"/proc/self/fd/{handle}"):
                os.truncate(handle, os.fstat(handle).st_size - 9)  # the last line, or the end of a checkpoint
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), "run")
        real(handle)

    monkeypatch.setattr(os, "fsync", fsync)
    with pytest.raises((OSError, UserError), match="No space left"):
        train.train(config(tmp_path / "run", corpus, {"dropout": 0.1}))
    monkeypatch.undo()
    for name in ("best.pt", "last.pt"):
        if (tmp_path / "run" / name).exists():
            checkpoints.load(tmp_path / "run" / name)
    goes_on(tmp_path / "run", corpus, whole)


def test_a_checkpoint_that_does_not_fit_is_not_begun(corpus, whole, tmp_path, monkeypatch):
    usage, left = shutil.disk_usage, [5]

    def shrinking(path):
        left[0] -= 1
        return usage(path) if left[0] else usage(path)._replace(free=1000)

    monkeypatch.setattr(checkpoints.shutil, "disk_usage", shrinking)
    with pytest.raises(UserError, match=r"MiB to write, and the disk has 0.0 MiB left"):
        train.train(config(tmp_path / "run", corpus, {"dropout": 0.1}))
    assert not list((tmp_path / "run").glob("*.new"))
    goes_on(tmp_path / "run", corpus, whole)


@pytest.mark.parametrize("lost", ["missing", "damaged"])
def test_without_last_pt_a_run_goes_on_from_best_pt(lost, corpus, whole, tmp_path, capsys):
    assert train.train(config(tmp_path / "run", corpus, {"dropout": 0.1, "stop_at": 12})) == 0
    last = tmp_path / "run" / "last.pt"
    if lost == "damaged":
        last.write_bytes(last.read_bytes()[:-100])
        with pytest.raises(UserError, match="delete it: train.py goes on from the other"):
            train.train(config(tmp_path / "run", corpus, {"dropout": 0.1}))
    last.unlink()
    goes_on(tmp_path / "run", corpus, whole)
    assert "training goes on from best.pt, step 10" in capsys.readouterr().out


def test_where_a_machine_has_lost_lines_of_the_log_a_run_goes_on_from_before(corpus, whole, tmp_path, capsys):
    assert train.train(config(tmp_path / "run", corpus, {"dropout": 0.1, "stop_at": 18})) == 0
    log = (tmp_path / "run" / "log.jsonl").read_bytes().splitlines(keepends=True)
    (tmp_path / "run" / "log.jsonl").write_bytes(b"".join(log[:-2]))
    goes_on(tmp_path / "run", corpus, whole)
    assert "training goes on from best.pt, step 15" in capsys.readouterr().out


def test_lines_of_the_log_that_are_lost_for_good_are_said(corpus, tmp_path, capsys):
    assert train.train(config(tmp_path / "run", corpus, {"stop_at": 18})) == 0
    (tmp_path / "run" / "log.jsonl").write_bytes(b"")
    assert train.train(config(tmp_path / "run", corpus, {})) == 0
    assert "log.jsonl has lost 21 lines before step 18" in capsys.readouterr().err


@pytest.mark.parametrize("stop_at", [12, 20])
def test_without_best_pt_a_run_finds_a_new_best(stop_at, corpus, tmp_path):
    assert train.train(config(tmp_path / "run", corpus, {"stop_at": stop_at})) == 0
    for name in ("best.pt", "summary.json"):
        (tmp_path / "run" / name).unlink(missing_ok=True)
    assert train.train(config(tmp_path / "run", corpus, {})) == 0
    best = checkpoints.load(tmp_path / "run" / "best.pt")["step"]
    assert best == logs.read_summary(tmp_path / "run")["best_step"] > stop_at - 1


def test_a_best_pt_of_a_step_that_is_done_again_is_no_longer_the_best(corpus, whole, tmp_path):
    older = tmp_path / "older"
    assert train.train(config(tmp_path / "run", corpus, {"dropout": 0.1, "stop_at": 8})) == 0
    shutil.copytree(tmp_path / "run", older)
    assert train.train(config(tmp_path / "run", corpus, {"dropout": 0.1, "stop_at": 12})) == 0
    shutil.copy(older / "last.pt", tmp_path / "run")
    shutil.copy(older / "log.jsonl", tmp_path / "run")  # which best.pt, of step 10, lacks lines of
    goes_on(tmp_path / "run", corpus, whole)


def dies(made, module, name, when):
    """Train until module.name is called with arguments for which when(*arguments)."""
    original = getattr(module, name)

    def call(*arguments, **settings):
        if when(*arguments):
            raise KeyboardInterrupt  # at this point, as good as a kill: nothing is written after it
        return original(*arguments, **settings)

    with pytest.MonkeyPatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(module, name, call)
        train.train(made)


def test_a_run_killed_when_it_began_to_grow_is_not_finished(corpus, tmp_path):
    folder = tmp_path / "run"
    assert train.train(config(folder, corpus, {})) == 0
    dies(config(folder, corpus, {"max_iters": 24}), logs, "keep", lambda *_: True)
    assert train.train(config(folder, corpus, {"max_iters": 24})) == 0
    assert logs.read_summary(folder)["step"] == 24


def test_last_pt_is_there_in_the_end_wherever_a_run_was_killed(corpus, whole, tmp_path):
    rarely = {"dropout": 0.1, "checkpoint_interval": 1000}
    dies(config(tmp_path / "run", corpus, rarely), runs.Run, "save", lambda run, name, *_: name == "last.pt")
    assert train.train(config(tmp_path / "run", corpus, rarely)) == 0
    assert contents(tmp_path / "run") == whole


def test_what_torchrun_starts_again_goes_on_although_it_was_told_to_overwrite(corpus, tmp_path, monkeypatch, capsys):
    made = {"overwrite": True, "stop_at": 8}
    for count, words in (("0", "stopped at step 8"), ("1", "going on at step 8"), ("0", "stopped at step 8")):
        monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", count)
        assert train.train(config(tmp_path / "run", corpus, made)) == 0
        assert words in capsys.readouterr().out
    assert len((tmp_path / "run" / "sessions.jsonl").read_text().splitlines()) == 1


@pytest.mark.parametrize("what, code", [("SIGTERM twice", 143), ("a closed pipe", 143), ("a closed terminal", 129)])
def test_what_else_ends_a_process_is_a_stop_as_well(what, code, corpus, whole, tmp_path, monkeypatch):
    update, say = train.update, train.tqdm.write

    def ending(*arguments):
        if arguments[4] == 6 and what != "a closed pipe":
            for _ in range(2):
                signal.raise_signal(signal.SIGTERM if "SIGTERM" in what else signal.SIGHUP)
        return update(*arguments)

    def closed(bar, text, **settings):
        if "step 7" in text:
            raise BrokenPipeError
        say(text, **settings)

    monkeypatch.setattr(train, "update", ending)
    if what == "a closed pipe":
        monkeypatch.setattr(train.tqdm, "write", closed)
    monkeypatch.setattr(sys, "stdout", sys.stdout)  # given back afterwards
    assert train.train(config(tmp_path / "run", corpus, {"dropout": 0.1})) == code
    assert checkpoints.load(tmp_path / "run" / "last.pt")["step"] == 7
    monkeypatch.undo()
    goes_on(tmp_path / "run", corpus, whole)


def test_weights_that_are_not_finite_are_not_saved(corpus, tmp_path, monkeypatch):
    assert train.train(config(tmp_path / "run", corpus, {"stop_at": 8})) == 0
    before = {name: (tmp_path / "run" / name).read_bytes() for name in ("best.pt", "last.pt")}
    step = optim.AdamW.step

    def overflowing(self):
        step(self)
        self.param_groups[0]["params"][0].data[0, 0] = torch.inf

    monkeypatch.setattr(optim.AdamW, "step", overflowing)
    with pytest.raises(NotFinite, match="step 9: embed.weight has weights that are not finite"):
        train.train(config(tmp_path / "run", corpus, {"dropout": 0.0}))
    assert {name: (tmp_path / "run" / name).read_bytes() for name in before} == before


def test_a_validation_loss_that_is_no_number_ends_the_run_and_is_not_logged(corpus, tmp_path, monkeypatch):
    monkeypatch.setattr(lengths, "evaluate", lambda *_: {"val_loss": float("inf")})
    with pytest.raises(NotFinite, match="step 5: validation loss inf, learning rate .*, gradient norm"):
        train.train(config(tmp_path / "run", corpus, {}))
    assert not [r for r in logs.read(tmp_path / "run", "log.jsonl") if "val_loss" in r]


# One process at a time


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
def test_a_folder_is_held_by_one_process_and_free_when_it_is_killed(corpus, run_folder, tmp_path):
    folder = tmp_path / run_folder.name
    shutil.copytree(run_folder, folder)
    made = small(dataset=str(corpus), out_dir=str(folder), seed=1, max_iters=31)
    reading, writing = os.pipe()
    process = os.fork()
    if not process:
        held = files.hold(folder)
        os.write(writing, b"held")
        os.read(os.pipe()[0], 1)  # until it is killed
        os._exit(held.fileno())
    os.read(reading, 4)
    try:
        before = {p.name: p.read_bytes() for p in folder.iterdir()}
        for refused in (lambda: train.train(made), lambda: lengths.main([str(folder)])):
            with pytest.raises(UserError, match="another process is writing into this folder"):
                refused()
        assert sample.main([str(folder), "--tokens", "3"]) == 0  # which only reads
        assert {p.name: p.read_bytes() for p in folder.iterdir()} == before
    finally:
        os.kill(process, signal.SIGKILL)
        os.waitpid(process, 0)
    assert train.train(made) == 0


def test_of_two_that_begin_at_once_one_is_refused(corpus, tmp_path, monkeypatch):
    made, load_data = small(dataset=str(corpus), out_dir=str(tmp_path / "run"), stop_at=1), train.load_data

    def meanwhile(config):
        monkeypatch.setattr(train, "load_data", load_data)
        assert train.train(made) == 0
        return load_data(config)

    monkeypatch.setattr(train, "load_data", meanwhile)
    with pytest.raises(UserError, match="another process began a run here meanwhile"):
        train.train(made)
    assert len((tmp_path / "run" / "sessions.jsonl").read_text().splitlines()) == 1


# What a run was made with


def test_every_start_is_recorded(corpus, tmp_path, monkeypatch):
    for argv in (["train.py", "--stop_at", "2"], ["train.py", "a b"]):
        monkeypatch.setattr(sys, "argv", argv)
        assert train.train(small(dataset=str(corpus), out_dir=str(tmp_path / "run"), stop_at=2 * len(argv))) == 0
    sessions = [json.loads(line) for line in (tmp_path / "run" / "sessions.jsonl").read_text().splitlines()]
    assert [(s["step"], s["command"]) for s in sessions] == [(0, "train.py --stop_at 2"), (6, "train.py 'a b'")]
    for key in ("time", "python", "torch", "numpy", "git_commit", "data_sha256", "device", "dtype", "threads", "processes"):
        assert key in sessions[0]


def test_a_checkpoint_of_another_configuration_is_refused_with_the_first_difference(corpus, run_folder, tmp_path):
    folder = tmp_path / "run"
    assert train.train(small(dataset=str(corpus), out_dir=str(folder), rope_base=500.0, stop_at=10)) == 0
    for name in ("best.pt", "last.pt"):
        shutil.copy(run_folder / name, folder)
    with pytest.raises(UserError, match="best.pt: weights of another configuration: rope_base is 10000.0 there and 500.0 in"):
        sample.main([str(folder)])
    with pytest.raises(UserError, match="last.pt: holds a run with rope_base = 10000.0, not 500.0"):
        train.train(small(dataset=str(corpus), out_dir=str(folder), rope_base=500.0))


def test_weights_from_elsewhere_are_not_trained_over(corpus, run_folder, tmp_path):
    folder = tmp_path / "imported"
    folder.mkdir()
    content = torch.load(run_folder / "best.pt", weights_only=True)
    torch.save({k: v for k, v in content.items() if k not in checkpoints.RESUMABLE}, folder / "best.pt")
    made = small(dataset=str(corpus), out_dir=str(folder), seed=1)
    (folder / "config.toml").write_text(made.toml(), encoding="utf-8")
    with pytest.raises(UserError, match="weights that were not trained here\n.*--init_from"):
        train.train(made)


def test_compressed_checkpoints_are_refused(run_folder, tmp_path):
    """A few kilobytes could fill the memory."""
    path = tmp_path / "best.pt"
    with zipfile.ZipFile(run_folder / "best.pt") as there, zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as here:
        for name in there.namelist():
            here.writestr(name, there.read(name))
    with pytest.raises(UserError, match="damaged, or no checkpoint .compressed"):
        checkpoints.load(path)


# What a machine has


@pytest.mark.parametrize("changes", [{"n_embd": 65536, "n_layer": 100}, {"batch_size": 2**20}])
def test_what_cannot_fit_into_memory_is_said_before_it_is_tried(changes, corpus, tmp_path):
    with pytest.raises(UserError, match=r"parameters and their training need about [\d.]+ GiB of memory, and this machine has"):
        train.train(small(dataset=str(corpus), out_dir=str(tmp_path / "run"), **changes))
    assert not (tmp_path / "run").exists()


@LINUX
def test_files_and_processes_are_closed(corpus, tmp_path):
    def held():
        mine = f"/proc/{os.getpid()}"
        children = Path(f"{mine}/task/{os.getpid()}/children").read_text().split()
        return len(os.listdir(f"{mine}/fd")), len(children)

    counts = []
    for number in range(4):
        assert train.train(small(dataset=str(corpus), out_dir=str(tmp_path / str(number)), max_iters=3, warmup_iters=0)) == 0
        counts.append(held())
    assert counts[1] == counts[3]


@LINUX
@pytest.mark.slow
def test_memory_does_not_grow_over_ten_thousand_iterations(corpus, tmp_path, monkeypatch):
    found, update = [], train.update

    def watched(*arguments):
        if arguments[4] % 1000 == 0:
            found.append(int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE"))
        return update(*arguments)

    monkeypatch.setattr(train, "update", watched)
    assert train.train(small(dataset=str(corpus), out_dir=str(tmp_path / "run"), max_iters=10_000, dropout=0.1,
                             eval_interval=100, checkpoint_interval=100, n_embd=16)) == 0
    assert found[-1] - found[2] < 2**22, found


# Text and keys


def test_texts_are_utf8_whatever_the_locale_and_the_console(tmp_path):
    """Where Python would take ASCII: files, prompts and what is printed."""
    (tmp_path / "text.txt").write_text("Ünïcödé – 文字 \U0001f600\n" * 400, encoding="utf-8")
    (tmp_path / "prompt.txt").write_text("文字", encoding="utf-8")
    (tmp_path / "mine.toml").write_text("# Ü\n" + "".join(
        f"{key} = {json.dumps(value)}\n" for key, value in SMALL.items()), encoding="utf-8")
    environment = {**os.environ, "LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0", "PYTHONIOENCODING": "ascii",
                   "OMP_NUM_THREADS": "1"}
    for words in (["train.py", "mine.toml", "--dataset=text.txt", "--max_iters=2", "--warmup_iters=0", "--out_dir=run"],
                  ["sample.py", "run", "--prompt_file=prompt.txt", "--tokens=20"]):
        done = subprocess.run([sys.executable, REPOSITORY / words[0], *words[1:]], cwd=tmp_path, capture_output=True, text=True,
                              check=False, env=environment)
        assert done.returncode == 0 and not done.stderr, done.stderr
    assert set("文字") <= set(json.loads((tmp_path / "run" / "tokenizer.json").read_text(encoding="utf-8"))["characters"])
