"""Studies: what a file comes to, what is done and what is not done again, and what happens when something goes wrong."""
import contextlib
import io
import itertools
import json
import os
import shlex
import shutil
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from types import SimpleNamespace

import pytest

import config
import files
import lengths
import logs
import study
import train
from options import UserError, build, read_toml
from tests.conftest import SMALL, small

ROOT = Path(__file__).resolve().parents[1]
TINY = SMALL | {"max_iters": 10, "warmup_iters": 2, "eval_windows": 2, "length_windows": 4}
CROSS = '[cross]\nposition = ["rope", "alibi"]\nseed = [1, 2]\n'
MORE = """
[[reading]]
rope_scaling = "yarn"

[[finetune]]
name = "yarn-64"
block_size = 64
rope_scaling = "yarn"
max_iters = 6
"""


class InProcess:
    """What study.py takes for subprocess.Popen: the program is run here, at once."""

    started = []

    def __init__(self, words, **how):
        self.started.append(words)
        assert how["start_new_session"]  # a Ctrl-C of the terminal must not reach it
        said, program = io.StringIO(), {"train": train.main, "lengths": lengths.main}[Path(words[1]).stem]
        with contextlib.redirect_stdout(said), contextlib.redirect_stderr(said):
            try:
                self.returncode = program(words[2:])
            except UserError as error:
                print(error)
                self.returncode = 2
        self.stdout = io.BytesIO(said.getvalue().encode())

    def poll(self):
        return self.returncode


class Started:
    """What study.py takes for subprocess.Popen: a process that runs until it is looked at a third time."""

    living = []

    def __init__(self, words, **how):
        self.words, self.looks, self.stdout, self.returncode = words, 0, io.BytesIO(), 0
        self.living.append(self)

    def poll(self):
        self.looks += 1
        if self.looks < 3:
            return None
        if self in self.living:
            self.living.remove(self)
        return 0


@pytest.fixture
def here(tmp_path, monkeypatch):
    """An empty current directory, with programs run in this process and the reports noted. -> the study's arguments of each
    report, and the words of each process."""
    noted = SimpleNamespace(reports=[], started=[])
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(InProcess, "started", noted.started)
    monkeypatch.setattr(lengths.compare, "draw", lambda *given: None)  # pictures take most of the time of a tiny run
    monkeypatch.setattr(study, "subprocess", SimpleNamespace(Popen=InProcess, PIPE=-1, STDOUT=-2, DEVNULL=-3))
    monkeypatch.setitem(sys.modules, "report", SimpleNamespace(write=lambda *given: noted.reports.append(given)))
    return noted


def keys(corpus, **changes):
    """-> [set] of a study of tiny models."""
    values = TINY | {"dataset": str(corpus)} | changes
    return "[set]\n" + "".join(f"{key} = {json.dumps(value)}\n" for key, value in values.items())


def write(*parts, path="small.toml"):
    Path(path).write_text("\n".join(parts), encoding="utf-8")
    return path


def planned(body):
    """-> the jobs of a study file's text."""
    return study.plan(build(study.Study, read_toml(write(body))), Path("out/small"), "small")


def contents(folder):
    """-> what must be the same however often a run was stopped."""
    log = [{k: v for k, v in record.items() if k not in ("seconds", "tokens_per_second")}
           for record in logs.read(folder, "log.jsonl")]
    return log, (folder / "last.pt").read_bytes(), (folder / "best.pt").read_bytes()


def test_every_combination_is_trained_read_and_fine_tuned_once(corpus, here, capsys):
    given = [write(keys(corpus), CROSS, MORE), "--out_dir", "all"]
    assert study.main(given) == 0
    assert len(here.started) == 4 + 2 + 2  # yarn needs rope
    for position, seed in itertools.product(("rope", "alibi"), (1, 2)):
        trained = config.read_config(f"all/{position}-{seed}")
        assert trained.essence() == small(**TINY, dataset=str(corpus), position=position, seed=seed).essence()
        assert trained.wandb_group == "small"
        scalings = {record["scaling"] for record in logs.read(f"all/{position}-{seed}", "lengths.jsonl")}
        assert scalings == ({"none", "yarn"} if position == "rope" else {"none"})
    for seed in (1, 2):
        tuned = config.read_config(f"all/rope-{seed}+yarn-64")
        assert tuned.init_from == f"all/rope-{seed}" and tuned.seed == seed and tuned.eval_windows == 2
        assert (tuned.n_embd, tuned.block_size, tuned.rope_original_context, tuned.max_iters) == (32, 64, 32, 6)
    assert "step 10/10" in Path("all/alibi-1.txt").read_text() and "yarn" in Path("all/rope-2.txt").read_text()
    loss = logs.read_summary("all/rope-1")["best_val_loss"]
    assert f"rope-1: {loss:.4f} validation loss, " in capsys.readouterr().out
    (folder, name, members, line), = here.reports
    assert (folder, name, line) == (Path("all"), "small", "python study.py small.toml --out_dir all")
    assert [(m.name, m.kind, m.origin and m.origin.name, m.state) for m in members] == [
        *((f"{position}-{seed}", "train", None, "finished") for position in ("rope", "alibi") for seed in (1, 2)),
        *((f"rope-{seed}+yarn-64", "finetune", f"rope-{seed}", "finished") for seed in (1, 2))]

    assert study.main(given) == 0
    assert len(here.started) == 8 and len(here.reports) == 2  # nothing is done again, but for the report

    Path("all/rope-2/summary.json").unlink()  # as if it had been stopped
    before = contents(Path("all/rope-2"))
    assert study.main(given) == 0
    assert [Path(words[1]).stem for words in here.started[8:]] == ["train"] and contents(Path("all/rope-2")) == before

    with pytest.raises(UserError) as refused:
        study.main([write(keys(corpus, batch_size=2), CROSS), "--out_dir", "all"])
    assert "holds a run with batch_size = 4, not 2" in str(refused.value) and len(here.started) == 9


def test_the_command_of_each_run_is_one_that_a_person_can_copy(corpus, here):
    jobs = planned(f"{keys(corpus, bias=True, wandb_project='--odd')}{CROSS}{MORE}[[reading]]\ncontexts = [16, 32]\n")
    assert jobs[0].command[:6] == ["python", "train.py", "--position", "rope", "--seed", "1"]
    for job in jobs:
        program, *words = shlex.split(shlex.join(job.command))[1:]
        assert program == ("lengths.py" if job.kind == "reading" else "train.py")
        if job.kind == "train":
            assert config.load(words) == job.config and job.config.bias and job.config.out_dir == f"out/small/{job.name}"
        if job.kind == "finetune":
            assert words[:2] == ["--init_from", f"out/small/{job.origin.name}"]
    assert next(job for job in jobs if job.options and job.options.contexts).command[-2:] == ["--contexts", "16,32"]


@pytest.mark.parametrize("cross, names", [
    ('position = ["rope", "none"]\nseed = [1, 2]', ["rope-1", "rope-2", "none-1", "none-2"]),
    ('seed = [1, 2]\nposition = ["rope", "none"]', ["rope-1", "none-1", "rope-2", "none-2"]),
    ('position = ["rope", {position = "rope", random_positions = 2048}]', ["rope", "rope-random_positions=2048"]),
    ('position = ["rope"]\nrate = [{learning_rate = 0.003, muon_learning_rate = 0.024}]\nseed = [2]',
     ["rope-learning_rate=0.003-muon_learning_rate=0.024-2"]),
    ('seed = [2]\nposition = ["rope"]\nrate = [{name = "low", learning_rate = 0.003}, {name = "as-is"}]\n',
     ["rope-low-2", "rope-as-is-2"]),
    ('bias = [true, false]', ["bias=true", "bias=false"]),
    ('seed = [5]', ["5"]), ('seed = [1.0, 2.0]', ["1", "2"]),
    ('dataset = ["some/where/a text.txt"]\nseed = [1]', ["dataset=a_text.txt-1"]),
    ('', ["small"]),
])
def test_runs_are_named_after_what_is_crossed(here, cross, names):
    Path("some/where").mkdir(parents=True)
    Path("some/where/a text.txt").touch()
    assert [job.name for job in planned(f"[cross]\n{cross}\n")] == names


def test_a_name_is_never_too_long_for_a_file_system(here):
    job, = planned(f'[cross]\nwandb_project = ["{"x" * 300}"]\nseed = [1]\n')
    assert len(job.name) < 100 and job.name.endswith("-1")


@pytest.mark.parametrize("body, said", [
    ('bse = "a.toml"', ("bse = a.toml: no such key", "did you mean base?")),
    ('base = "nowhere.toml"', ("nowhere.toml: no such config file", "")),
    ('processes = 0', ("processes = 0", "allowed: auto or an integer >= 1")),
    ('set = 3', ("set = 3", "a table of keys")),
    ('[set]\nlerning_rate = 0.1', ("small.toml: [set]: lerning_rate", "did you mean learning_rate?")),
    ('[set]\nlearning_rate = "fast"', ("[set]: learning_rate = fast", "a number > 0")),
    ('[set]\nout_dir = "elsewhere"', ("[set]: out_dir = elsewhere: no such key", "")),
    ('[cross]\npositon = ["rope"]', ("[cross]: positon = rope: no such key", "did you mean position?")),
    ('[cross]\nseed = 3', ("cross = {'seed': 3}", "a table of lists")),
    ('[cross]\nposition = ["rpoe"]', ("[cross]: position = rpoe", "did you mean rope?")),
    ('[cross]\nrate = [{lerning_rate = 0.1}]', ("[cross]: lerning_rate = 0.1: no such key", "did you mean learning_rate?")),
    ('[cross]\nrate = [{seed = 1}, 3]', ("[cross]: rate = 3: no such key", "")),
    ('[cross]\nrate = [{seed = 1}]\nseed = [2]', ("{'seed': 1} and {'seed': 2}", "a key is in two axes")),
    ('[cross]\nseed = [1, 1]', ("1 and 1: the same twice", "")),
    ('[cross]\nposition = ["rope", {position = "rope", rope_fraction = 1.0}]',
     ("rope and rope-rope_fraction=1.0: the same twice", "")),
    ('[cross]\nn_head = [1, 2, 3]', ("run n_head=3: n_embd = 128", "must be divisible by n_head = 3")),
    ('[[reading]]\nrope_scalin = "yarn"', ("[[reading]] 1: rope_scalin = yarn: no such key", "did you mean rope_scaling?")),
    ('[[reading]]\nrope_scaling = "yran"', ("[[reading]] 1: rope_scaling = yran", "did you mean yarn?")),
    ('[[reading]]\nrope_scaling = "linear"\n[[reading]]\nlearned_extension = "interpolate"\n[cross]\nseed = [4]',
     ("[[reading]] 2: not valid for any run; 4: learned_extension = interpolate", 'needs position = "learned"')),
    ('[[finetune]]\nblock_size = 8', ("[[finetune]] 1: name: missing", "up to 60 letters")),
    ('[[finetune]]\nname = "a/b"', ("[[finetune]] 1: name = a/b", "up to 60 letters")),
    ('[[finetune]]\nname = "a"\nblok_size = 8', ("[[finetune]] 1: blok_size = 8: no such key", "did you mean block_size?")),
    ('[[finetune]]\nname = "a"\nrope_factor = 8', ("[[finetune]] 1: not valid for any run; small: rope_factor = 8.0", "")),
    ('[[finetune]]\nname = "a"\n[[finetune]]\nname = "a"', ("small+a and small+a: the same twice", "")),
])
def test_what_is_wrong_is_said_before_anything_starts(here, monkeypatch, body, said):
    monkeypatch.setattr(study, "Child", None)
    with pytest.raises(UserError) as refused:
        study.main([write(body)])
    assert said[0] in refused.value.problem and said[1] in refused.value.advice
    assert not here.started and not here.reports and not Path("out").exists()


def test_the_command_line_names_one_study(here):
    for words, said in (([], "0 study files"), (["a.toml", "b.toml"], "2 study files"), (["no.toml"], "no such config file"),
                        ([write(CROSS), "--seed", "1"], "--seed: no such key")):
        with pytest.raises(UserError, match=said):
            study.main(words)


def test_a_failed_run_is_reported_and_the_others_go_on(corpus, here, capsys):
    rates = '[cross]\nrate = [{learning_rate = 1e6, muon_learning_rate = 1e6}, {}]\nseed = [1]\n'
    assert study.main([write(keys(corpus, grad_clip=0), rates, MORE)]) == 1
    assert [Path(words[1]).stem for words in here.started] == ["train", "train", "lengths", "train"]  # nothing from what failed
    name = "learning_rate=1000000.0-muon_learning_rate=1000000.0-1"
    line = capsys.readouterr().out.splitlines()[-1]
    assert line.startswith(f"{name}: failed: exit code 3: error: step ") and line.endswith("Try a lower learning_rate")
    assert {member.name: member.state.split(":")[0] for member in here.reports[0][2]} == {
        name: "failed", f"{name}+yarn-64": "unfinished", "1": "finished", "1+yarn-64": "finished"}
    assert study.main(["small.toml"]) == 1 and len(here.started) == 5  # only that is tried again


def test_a_run_that_had_ended_when_it_was_told_to_stop_is_finished(corpus, here):
    assert study.main([write(keys(corpus), "[cross]\nseed = [1]\n")]) == 0
    child = study.Child.__new__(study.Child)
    child.job, child.process, child.lines = here.reports[0][2][0], SimpleNamespace(returncode=-signal.SIGTERM), []
    assert child.outcome(stopping=143) == "finished"
    Path("out/small/1/summary.json").unlink()
    assert child.outcome(stopping=143) == "unfinished"


def test_a_second_study_in_a_folder_is_refused(here, monkeypatch):
    monkeypatch.setattr(study, "Child", None)
    Path("shared").mkdir()
    with files.hold("shared"), pytest.raises(UserError, match="shared: another process is writing"):
        study.main([write(CROSS), "--out_dir", "shared"])
    assert not here.started


def test_a_run_waits_for_a_process_that_still_holds_its_folder(corpus, here, monkeypatch, capsys):
    Path("out/small/1").mkdir(parents=True)
    given = [write(keys(corpus), "[cross]\nseed = [1, 2]\n"), "--processes", "1"]
    held = files.hold("out/small/1")
    leaving = threading.Timer(3, held.close)
    leaving.start()
    assert study.main(given) == 0
    assert capsys.readouterr().out.count("1: waits, another process is writing into out/small/1") == 1
    assert [words[words.index("--seed") + 1] for words in here.started] == ["2", "1"]

    Path("out/small/1/summary.json").unlink()
    monkeypatch.setattr(study, "PATIENCE", 0.3)
    with files.hold("out/small/1"):
        assert study.main(given) == 1
    assert "1: failed: out/small/1: another process is writing into this folder" in capsys.readouterr().out


def test_no_two_processes_meet_in_a_folder(here, monkeypatch):
    """Many at once, but of one origin a reading is alone."""
    monkeypatch.setattr(study, "finished", lambda job: job.name in done if job.kind == "reading" else
                        Path(job.folder, "done").exists())
    monkeypatch.setattr(study, "time", SimpleNamespace(sleep=lambda seconds: None, monotonic=time.monotonic))
    most, living, done = [], [], set()

    class Watched(Started):
        def __init__(self, words, **how):
            folder = words[words.index("--out_dir") + 1] if "--out_dir" in words else words[2]
            Path(folder).mkdir(parents=True, exist_ok=True)
            Path(folder, "done").touch()
            if "--rope_scaling" in words and "--out_dir" not in words:
                done.add(f"{Path(folder).name} (rope_scaling = {words[words.index('--rope_scaling') + 1]})")
            self.writes, self.reads = folder, folder.split("+")[0]
            assert not any(self.writes in (other.writes, other.reads) or other.writes == self.reads for other in living)
            super().__init__(words)
            most.append(len(living))

    monkeypatch.setattr(Watched, "living", living)
    monkeypatch.setattr(study, "subprocess", SimpleNamespace(Popen=Watched, PIPE=-1, STDOUT=-2, DEVNULL=-3))
    further = "".join(f'[[reading]]\nrope_scaling = "{s}"\n[[finetune]]\nname = "{s}"\nrope_scaling = "{s}"\n'
                      for s in ("linear", "ntk", "yarn"))
    assert study.main([write("processes = 3", CROSS, further)]) == 0
    assert len(most) == 4 + 2 * 3 + 2 * 3 and max(most) == 3


def test_a_reading_is_done_when_it_was_made_of_the_last_weights(corpus, here):
    job = planned(f'{keys(corpus)}[[reading]]\nrope_scaling = "yarn"\ncontexts = [16, 32]\n')[1]
    job.folder.mkdir(parents=True)
    (job.folder / "summary.json").write_text('{"max_iters": 10, "best_step": 10, "step": 10}')
    session = {"step": 10, "checkpoint": "best", "scaling": "yarn", "factor": "auto", "settings": {}, "contexts": [16, 32]}
    for changes, done in (({"contexts": None}, False), ({"step": 9}, False), ({"scaling": "ntk"}, False),
                          ({"settings": {"beta_fast": 2.0}}, False), ({"checkpoint": "last"}, False), ({}, True)):
        with open(job.folder / "sessions.jsonl", "a") as file:
            file.write(f"{json.dumps(session | changes)}\n\n[1]\n{{torn")
            file.write("\n")
        assert study.finished(job) == done
    (job.folder / "summary.json").write_text('{"max_iters": 9, "best_step": 10}')  # the run is to go on
    assert not study.finished(job)


def test_what_cannot_be_measured_is_asked_for_once(corpus, here):
    """And a reading of all contexts is another one than that of a few."""
    few = '[[reading]]\nrope_scaling = "yarn"\ncontexts = [16, 1000000]\n'
    for body, started in ((few, 2), (few, 2), (few + '[[reading]]\nrope_scaling = "yarn"\n', 3)):
        assert study.main([write(keys(corpus), "[cross]\nseed = [1]\n", body)]) == 0
        assert len(here.started) == started


def test_where_a_run_stands_is_read_from_the_end_of_its_log(tmp_path):
    assert study.reached(tmp_path)[0] == 0
    logs.append(tmp_path, "log.jsonl", [{"step": step, "tokens": 1, "train_loss": 1 / step} for step in range(1, 500)])
    logs.append(tmp_path, "log.jsonl", [{"step": 500, "val_loss": 2.0, "val_stderr": 0.1}])
    with open(tmp_path / "log.jsonl", "a") as file:
        file.write('{"step": 510, "train_lo')
    assert study.reached(tmp_path) == (499, 1 / 499)


def begin(path, reports):
    """-> the process of a study, which notes the states of its runs in a file instead of writing a report."""
    code = (f"import sys, types; sys.path.insert(0, {str(ROOT)!r})\n"
            f"note = lambda out, name, jobs, line: open({str(reports)!r}, 'a').write(str([job.state for job in jobs]))\n"
            "sys.modules['report'] = types.SimpleNamespace(write=note)\n"
            "import study; study.command(study.main)")
    return subprocess.Popen([sys.executable, "-c", code, path], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)


def wait_for(true, seconds=60):
    deadline = time.monotonic() + seconds
    while not true():
        assert time.monotonic() < deadline
        time.sleep(0.02)


def test_a_study_that_is_stopped_and_then_killed_goes_on_to_the_same_bytes(corpus, here, monkeypatch, capsys):
    monkeypatch.undo()  # processes from here on, and elsewhere
    folder = corpus.parent / "stopped"
    folder.mkdir()
    monkeypatch.chdir(folder)
    monkeypatch.setitem(sys.modules, "report", SimpleNamespace(write=lambda *given: here.reports.append(given)))
    slow = {"max_iters": 200, "log_interval": 1, "checkpoint_interval": 100, "eval_interval": 200}
    path = write("processes = 1", keys(corpus, **slow), '[cross]\nposition = ["rope"]\nseed = [1, 2]\n')
    run, log = Path("out/small/rope-1"), Path("out/small/rope-1/log.jsonl")

    process = begin(path, folder / "reports")
    wait_for(log.exists)
    process.send_signal(signal.SIGTERM)
    out = process.communicate(timeout=60)[0]
    assert process.returncode == 143 and "the same command goes on from here" in out and "Traceback" not in out
    assert (run / "last.pt").exists() and not Path("out/small/rope-2").exists()
    assert "stopped at step" in Path("out/small/rope-1.txt").read_text()
    assert (folder / "reports").read_text() == "['unfinished', 'unfinished']"

    size = log.stat().st_size
    process = begin(path, folder / "reports")
    wait_for(lambda: log.stat().st_size > size)
    process.kill()
    process.communicate()

    write(Path(path).read_text().replace("[1, 2]", "[1]"))
    assert study.main([path]) == 0
    sessions = [json.loads(line)["step"] for line in (run / "sessions.jsonl").read_text().splitlines()]
    assert len(sessions) == 3 and sessions[0] == 0 < sessions[1] < sessions[2] < 200
    assert train.main([*shlex.split(shlex.join(here.reports[0][2][0].command))[2:], "--out_dir", "untouched"]) == 0
    assert contents(run) == contents(Path("untouched"))


def test_help_needs_no_torch():
    code = "import sys, study; study.main(['--help']); assert not {'torch', 'matplotlib'} & set(sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert "--processes" in done.stdout


@pytest.mark.parametrize("name, runs, readings, finetunes",
                         [("positions", 24, 6, 0), ("scalings", 3, 12, 15), ("tasks", 36, 0, 0), ("rates", 72, 0, 0),
                          ("random", 12, 0, 0), ("canon", 12, 0, 0), ("quick", 10, 2, 0)])
def test_the_studies_of_the_repository_are_valid(name, runs, readings, finetunes, monkeypatch):
    monkeypatch.chdir(ROOT)
    jobs = study.plan(build(study.Study, read_toml(f"studies/{name}.toml")), Path("out", name), name)
    kinds = [job.kind for job in jobs]
    assert [kinds.count(kind) for kind in ("train", "reading", "finetune")] == [runs, readings, finetunes]
    assert all(job.config.threads == 1 for job in jobs)


@pytest.mark.parametrize("content, problem", [
    ("base = '--help'\n", "base = --help"), ("[cross]\nseed = []\n", "seed = []"),
    ("[cross]\na = [{name = '..'}]\n", "name = .."), ("[cross]\na = [{name = 'report.html'}]\n", "needs for itself"),
    ("[cross]\na = [{name = 'wandb'}]\n", "needs for itself"), ("[cross]\ndataset = ['task:copi']\n", "no such task"),
    ("[cross]\ndataset = ['stdlib', 'nowhere.txt']\n", "no such name, file or folder"),
    (f"[cross]\ndataset = ['{os.devnull}']\n", "no such name, file or folder"),
    (f"[cross]\ndataset = ['{'x' * 300}']\n", "no such name, file or folder"),
    ("[cross]\nseed = [1]\n[[finetune]]\nname = 'x'\nseed = 2\n", "seed = 2: no such key"),
    ("[set]\ndataset = 'task:passkey'\nblock_size = 34\n[[finetune]]\nname = 'x'\nblock_size = 8\n", "block_size = 8"),
    ("[cross]\nseed = [1]\n[[reading]]\ncheckpoint = 'last'\n", "checkpoint = last")])
def test_what_no_study_can_do_is_refused_before_it_begins(here, content, problem):
    with pytest.raises(UserError) as error:
        study.main([write(content)])
    assert problem in error.value.problem and not here.started and not Path("out").exists()


def test_a_folder_of_other_files_is_no_study(here, corpus):
    path, there = write(keys(corpus), CROSS), Path("there")
    there.mkdir()
    (there / "mine.txt").write_text("mine")
    for folder, problem in ((there, "holds other files"), (study.HERE, "holds other files")):
        with pytest.raises(UserError, match=problem):
            study.main([path, "--out_dir", str(folder)])
    (there / "config.toml").write_text("")
    with pytest.raises(UserError, match="a run's folder"):
        study.main([path, "--out_dir", str(there)])
    assert not here.started and {p.name for p in there.iterdir()} == {"mine.txt", "config.toml"}


def test_overwrite_and_stop_at_cannot_hide_in_a_base(here, corpus):
    for key in ("overwrite = true", "stop_at = 3"):
        Path("base.toml").write_text(key)
        with pytest.raises(UserError, match="overwrite or stop_at"):
            study.main([write('base = "base.toml"\n', keys(corpus), CROSS)])
    assert not here.started


def test_a_file_in_the_place_of_a_run_fails_at_once_and_the_others_go_on(here, corpus, capsys):
    path = write(keys(corpus), CROSS)
    Path("out/small").mkdir(parents=True)
    Path("out/small/.lock").touch()
    Path("out/small/rope-1").touch()
    began = time.monotonic()
    assert study.main([path]) == 1 and time.monotonic() - began < 60
    assert "rope-1: failed: " in capsys.readouterr().out and len(here.started) == 3


def test_a_process_that_another_was_faster_than_is_tried_again(here, corpus, monkeypatch, capsys):
    """An orphan of a killed study that had not begun its folder when the study looked."""
    program, calls = InProcess, []

    def begin(words, **how):
        calls.append(words)
        made = program(words if len(calls) > 1 else [*words[:2], "--dataset", "nowhere"], **how)
        if len(calls) == 1:
            made.stdout = io.BytesIO(b"error: out/small/rope-1: another process began a run here meanwhile\n")
        return made

    monkeypatch.setattr(study.subprocess, "Popen", begin)
    assert study.main([write(keys(corpus), '[cross]\nposition = ["rope"]\nseed = [1]\n')]) == 0
    assert len(calls) == 2 and "waits, another process" in capsys.readouterr().out


def test_a_fine_tuning_goes_on_wherever_the_study_lies_now(here, corpus):
    path = write(keys(corpus), '[cross]\nseed = [1]\n', MORE)
    assert study.main([path, "--out_dir", "there"]) == 0
    Path("there/1+yarn-64/summary.json").unlink()  # as if it had been stopped
    Path("there").rename("elsewhere")
    assert study.main([path, "--out_dir", str(Path("elsewhere").absolute())]) == 0 and len(here.started) == 4


def test_what_was_fine_tuned_from_earlier_weights_is_not_taken_for_finished(here, corpus, capsys):
    assert study.main([write(keys(corpus), '[cross]\nseed = [1]\n', MORE)]) == 0
    assert len(here.started) == 3
    assert study.main([write(keys(corpus, max_iters=12), '[cross]\nseed = [1]\n', MORE)]) == 1  # the run grows
    assert [Path(words[1]).stem for words in here.started[3:]] == ["train", "lengths"]
    assert "1+yarn-64: failed: began from other weights than 1 has now; delete " in capsys.readouterr().out
    shutil.rmtree("out/small/1+yarn-64")
    assert study.main(["small.toml"]) == 0 and len(here.started) == 6

    shutil.rmtree("out/small/1")  # to be trained again; with other rates, it comes to other weights
    rates = "learning_rate = 0.002\nmuon_learning_rate = 0.01\n"
    again = MORE + "".join(f"{key} = {config.Config.model_fields[key].default}\n"
                           for key in ("learning_rate", "muon_learning_rate"))
    assert study.main([write(keys(corpus, max_iters=12) + rates, '[cross]\nseed = [1]\n', again)]) == 1
    assert "began from other weights" in capsys.readouterr().out
