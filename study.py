"""A study: every combination of some keys is a run, read at other lengths and fine-tuned, as one file says.

    python study.py studies/positions.toml

What is missing is done, several processes at once, each with a command that a person can copy; the same command again goes on.
What was done is seen in the folders of the runs, and noted nowhere else. Imports no torch.
"""
import contextlib
import hashlib
import itertools
import json
import math
import os
import re
import shlex
import signal
import subprocess
import sys
import threading
import time
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Annotated, Any

from pydantic import Field, create_model
from tqdm import tqdm

import files
import logs
import tasks
from config import NAMES, Auto, Config, fields, inherited, load, read_config, refuse_difference, with_changes
from data.sources import located
from lengths import Lengths
from options import Options, UserError, build, command, helped, parse, read_toml
from train import Stop

HERE = Path(__file__).resolve().parent
PATIENCE = 120  # seconds until what an earlier study has left running must have left its folder
OURS = (".txt", ".md", ".csv", ".html", ".png", ".svg", ".new")  # files beside the runs' folders
FORM = SimpleNamespace(pattern=True)  # in an annotation: options.allowed says the docstring

# The study names folders; nothing is deleted unasked; and a run that stops early is never finished.
GIVEN = [key for key in NAMES if key not in ("out_dir", "overwrite", "stop_at")]
TRAINING = [key for key in GIVEN if key in NAMES[NAMES.index("init_from") + 1:]]  # what is not inherited with the weights

Given = create_model("Given", __base__=Options, **fields(GIVEN, optional=True))
Named = create_model("Named", __base__=Options, name=(str, Field(
    pattern=r"^[\w=-][\w.=-]{0,59}$", description="up to 60 letters, digits and any of . _ = -, no . as the first")))
# What begins from a run has its seed, and is compared with it.
Finetune = create_model("Finetune", __base__=Named, **fields([key for key in GIVEN if key not in ("init_from", "seed")],
                                                             optional=True))


class Flags(Options):
    """What may also be given on the command line."""

    out_dir: str | None = Field(None, min_length=1)
    """The folder of the study, in which each run has its own; out/<name of the study file> unless given."""
    processes: Auto | Annotated[int, Field(ge=1, le=1024)] = "auto"
    """Runs at once; auto = as many as have a core for each of their threads."""
    publish: bool = False
    """When all is done, save a report into wandb, where you are logged in (needs the package wandb-workspaces)."""


class Study(Flags):
    base: str | tuple[str, ...] = ()
    """Config files, the later wins."""
    set: Annotated[dict[str, Any], FORM] = {}
    """a table of keys, those of every run."""
    cross: Annotated[dict[str, list], FORM] = {}
    """a table of lists: every combination of their values is a run; a value may be a table of keys, with a name for them."""
    reading: Annotated[list[dict[str, Any]], FORM] = []
    """tables, each with what lengths.py takes: done for every run for which it is valid."""
    finetune: Annotated[list[dict[str, Any]], FORM] = []
    """tables, each with a name and keys of a further run from every run for which they are valid."""


@dataclass
class Job:
    """A process that is wanted. Its name is that of its run's folder; a reading's says what is read."""

    name: str
    folder: Path  # that it writes into
    config: Config  # of the run; of a reading, as the run is read
    command: list[str]
    kind: str  # train, reading, finetune
    origin: "Job | None" = None  # the run that it needs
    group: str = ""  # its name without seed and data set
    state: str = "unfinished"  # running, finished, "failed: why"
    options: Lengths | None = None  # of a reading

    @property
    def touched(self):
        """-> the folders that it reads or writes."""
        return {self.folder, (self.origin or self).folder}


@contextlib.contextmanager
def naming(place):
    """Say of a UserError where it is."""
    try:
        yield
    except UserError as error:
        raise UserError(f"{place}: {error.problem}", error.advice) from None


def text(value):
    """A value as the command line has it."""
    if isinstance(value, list | tuple):
        return ",".join(map(text, value))
    return str(value).lower() if isinstance(value, bool) else str(value)


def flags(values):
    """{key: value} -> the words of a command line that options.parse reads as these."""
    pairs = [(f"--{key}", text(value)) for key, value in values.items()]
    return [word for key, value in pairs for word in ([f"{key}={value}"] if value.startswith("-") else [key, value])]


def label(table):
    """What a choice of keys is called in the names of runs: by its own name, or by all of them."""
    if "name" in table:
        return text(table["name"])
    shown = {k: Path(v).name if k in ("dataset", "init_from") else text(v) for k, v in table.items()}
    return "-".join(v if k in ("position", "seed") else f"{k}={v}" for k, v in shown.items())


def run_name(choice, study_name):
    """-> what the run of a choice, [{key: value}] of each axis, is called; without any, as the study is."""
    seed_last = sorted(choice, key=lambda table: list(table) == ["seed"])
    name = "-".join(filter(None, map(label, seed_last))) or study_name
    if len(name.encode("utf-8", "replace")) > 160:  # file systems end names at 255 bytes
        name = f"{name[:35]}-{hashlib.sha256(name.encode('utf-8', 'replace')).hexdigest()[:12]}"
        name += "".join(f"-{label(table)}" for table in choice if list(table) == ["seed"])
    return re.sub(r"[^\w.=+-]", "_", name)


def checked(table):
    """A choice of keys as the config has them: a seed of 1.0 is 1."""
    build(Named, {"name": table.get("name", "-")})
    keys = {key: value for key, value in table.items() if key != "name"}
    return table | build(Given, keys).model_dump(include=set(keys))


def available(config):
    """UserError where the data set of a run is not there, or a task that does not fit."""
    if config.has_answers:
        tasks.load(config.dataset, config.block_size)
    else:
        located(config.dataset)


def combinations(cross):
    """{axis: values} -> ([{key: value} of each axis], {key: value} of all) of every combination, the last axis first."""
    if empty := [axis for axis, values in cross.items() if not values]:
        raise UserError(f"{empty[0]} = []", "give one value or more")
    axes = [[checked(value if isinstance(value, dict) else {axis: value}) for value in values]
            for axis, values in cross.items()]
    for choice in itertools.product(*axes):
        given = [(key, value) for table in choice for key, value in table.items() if key != "name"]
        if len(dict(given)) < len(given):
            raise UserError(" and ".join(map(str, choice)), "a key is in two axes; leave it in one")
        yield choice, dict(given)


def train_job(study, out, study_name, choice, keys):
    """-> the job that trains the run of one combination."""
    base = (study.base,) if isinstance(study.base, str) else study.base
    if wrong := [file for file in base if file.startswith("-")]:
        raise UserError(f"base = {wrong[0]}", "allowed: paths of config files; keys belong into [set]")
    group = {"wandb_group": study.set.get("wandb_group", study_name)}
    name = run_name(choice, study_name)
    words = [*base, *flags({**keys, **{k: v for k, v in (study.set | group).items() if k not in keys}, "out_dir": out / name})]
    with naming(f"run {name}"):
        config = load(words)
        if config.overwrite or config.stop_at:
            raise UserError("overwrite or stop_at in a config file", "leave them out: such runs would never be finished")
        available(config)
        kept = [{k: v for k, v in table.items() if k not in ("seed", "dataset")} for table in choice]
        return Job(name, out / name, config, ["python", "train.py", *words], "train",
                   group=run_name([table for table in kept if table.keys() - {"name"}], study_name))


def finetune_job(run, table):
    """-> the job that begins from a run. UserError if it is not valid for that run.

    Text, model and positions come with the weights; the rest, seed included, is as it was given to the run or as table has it.
    """
    base, given = parse(run.command[2:], Config)
    given = {k: v for file in base for k, v in read_toml(file).items()} | given
    name = f"{run.name}+{table['name']}"
    values = {"init_from": run.folder, **{k: v for k, v in table.items() if k != "name"}}
    values |= {k: v for k, v in given.items() if k in TRAINING and k not in values} | {"out_dir": run.folder.with_name(name)}
    words = flags(values)
    config = build(Config, inherited(run.folder, parse(words, Config)[1], run.config))
    available(config)
    return Job(name, run.folder.with_name(name), config, ["python", "train.py", *words], "finetune", run,
               group=f"{run.group}+{table['name']}")


def reading_job(run, table):
    """-> the job that measures a run read otherwise. UserError if that is not valid for the run."""
    options = build(Lengths, parse(flags(table), Lengths)[1])
    if "checkpoint" in table:
        raise UserError(f"checkpoint = {table['checkpoint']}", "a study reads the best weights; for others use lengths.py")
    config = build(Config, with_changes(run.config, options.changes()))
    name = f"{run.name} ({', '.join(f'{key} = {text(value)}' for key, value in table.items()) or 'as trained'})"
    return Job(name, run.folder, config, ["python", "lengths.py", str(run.folder), *flags(table)], "reading", run,
               options=options)


def where_valid(make, model, table, runs):
    """-> make(run, table) for the runs for which it raises no UserError; the first of these if there is no other."""
    build(model, table)
    made, refusals = [], []
    for run in runs:
        try:
            made.append(make(run, table))
        except UserError as error:
            refusals.append(UserError(f"not valid for any run; {run.name}: {error.problem}", error.advice))
    if not made:
        raise refusals[0]
    return made


def plan(study, out, name):
    """-> all jobs in the order in which they begin: runs, readings, fine-tunings. UserError if anything in them is wrong."""
    with naming("[set]"):
        build(Given, study.set)
    with naming("[cross]"):
        crossed = list(combinations(study.cross))
    runs = [train_job(study, out, name, *each) for each in crossed]
    further = []
    for kind, model, make in (("reading", Lengths, reading_job), ("finetune", Finetune, finetune_job)):
        for number, table in enumerate(getattr(study, kind), 1):
            with naming(f"[[{kind}]] {number}"):
                further += where_valid(make, model, table, runs)
    jobs, seen = [*runs, *further], {}
    for job in jobs:
        if job.kind != "reading" and (job.name == "wandb" or Path(job.name).suffix in OURS):
            raise UserError(f"{job.name}: a name that the study needs for itself", "give the values a name of their own")
        for mark in (job.name, *([] if job.kind == "reading" else [repr(job.config.essence())])):
            if seen.setdefault(mark, job) is not job:
                raise UserError(f"{seen[mark].name} and {job.name}: the same twice",
                                "remove one of them, or give their values a name of their own")
    return jobs


class Different(UserError):
    """A folder holds another run than the study wants there."""


def measured(job, summary):
    """Whether a reading has been made, of the weights that its run ended with."""
    wanted = {"step": summary.get("best_step"), "checkpoint": "best", "contexts": job.options.contexts, **job.config.reading()}
    wanted = json.loads(json.dumps(wanted)).items()
    return any(wanted <= session.items() for session in logs.read_sessions(job.folder))


def refuse_stale(job):
    """UserError where a fine-tuning began from other weights than its origin has now."""
    began = [session["init_from_sha256"] for session in logs.read_sessions(job.folder) if "init_from_sha256" in session]
    origin = job.origin.folder / "best.pt"
    if began and origin.exists() and began[-1] != files.file_digest(origin):
        raise UserError(f"began from other weights than {job.origin.name} has now",
                        f"delete {job.folder}, and it begins again")


def finished(job):
    """Whether a job has been done. UserError if its folder holds another run, or one that began from what is no more."""
    summary = logs.read_summary(job.folder)
    whole = summary.get("max_iters") == job.config.max_iters
    if job.kind == "reading":
        return whole and measured(job, summary)
    if not (job.folder / "config.toml").exists():
        return False
    before = read_config(job.folder).model_dump()
    try:
        refuse_difference(job.folder, before, job.config)
    except UserError as error:
        raise Different(error.problem, "give the study another out_dir, or delete that folder") from None
    if job.origin:
        refuse_stale(job)
    return whole


def state(job):
    """-> "finished", "unfinished", or "failed: why" where what is there cannot be read."""
    try:
        return "finished" if finished(job) else "unfinished"
    except Different:
        raise
    except UserError as error:
        return f"failed: {error.problem}; {error.advice}"


def reached(folder):
    """-> (step, training loss) where a run stands by the last lines of its log; (0, nan) before the first."""
    with contextlib.suppress(OSError, ValueError), open(folder / "log.jsonl", "rb") as file:
        file.seek(max(0, file.seek(0, os.SEEK_END) - 4096))  # of a log of any length
        for step, loss in re.findall(rb'"step": (\d+),.*"train_loss": ([^,}]+).*\n', file.read())[-1:]:
            return int(step), float(loss)
    return 0, math.nan


class Progress:
    """A bar over the iterations of all runs on a terminal; lines, everywhere."""

    def __init__(self, jobs):
        self.runs, self.shown = [job for job in jobs if job.kind != "reading"], 0.0
        self.bar = tqdm(total=sum(job.config.max_iters for job in self.runs), initial=self.steps(), unit="it",
                        dynamic_ncols=True, disable=None)

    def steps(self):
        return sum(job.config.max_iters if job.state == "finished" else reached(job.folder)[0] for job in self.runs)

    def show(self):
        """Bring the bar up to date, once a second."""
        if not self.bar.disable and time.monotonic() > self.shown + 1:
            self.shown = time.monotonic()
            running = [(job.name, *reached(job.folder)) for job in self.runs if job.state == "running"]
            self.bar.set_postfix_str(", ".join(f"{name} {loss:.2f}" if step else name for name, step, loss in running),
                                     refresh=False)
            self.bar.update(self.steps() - self.bar.n)
            self.bar.refresh()

    def say(self, line):
        self.bar.write(line, file=sys.stdout)
        sys.stdout.flush()


class Child:
    """The process of a job. What it prints is added to <its run's folder>.txt.

    It comes through a pipe: when the study is killed, even by kill -9, the child notices at its next line that nobody reads
    it, saves and stops.
    """

    def __init__(self, job):
        self.job, self.lines = job, [""]
        # In a session of its own, so that Ctrl-C reaches the study alone, which passes it on.
        self.process = subprocess.Popen([sys.executable, str(HERE / job.command[1]), *job.command[2:]], start_new_session=True,
                                        stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
        self.reader = threading.Thread(target=self.read, daemon=True)
        self.reader.start()

    def read(self):
        try:
            with self.process.stdout as output, open(self.job.folder.with_name(f"{self.job.folder.name}.txt"), "ab") as file:
                file.write(f"$ {shlex.join(self.job.command)}\n".encode())
                for line in output:
                    file.write(line)
                    file.flush()
                    if line.strip():
                        self.lines = [*self.lines[-9:], line.decode("utf-8", "replace").strip()]
        except OSError as error:  # a full disk, say; the pipe is closed now, and the child stops
            self.lines = [f"its output cannot be written: {error.strerror}"]

    def ended(self):
        if self.process.poll() is None:
            return False
        self.reader.join(5)  # longer only if a process that it left behind keeps the pipe open
        return True

    def outcome(self, stopping):
        """-> the state of the job now that its process has ended."""
        code = self.process.returncode
        # A signal may have met it when all was written.
        if (code == 0 or stopping) and (found := state(self.job)) != "unfinished":
            return found
        if stopping and code in (128 + signal.SIGTERM, -signal.SIGTERM):
            return "unfinished"
        error = max((i for i, line in enumerate(self.lines) if line.startswith("error: ")), default=-1)
        return f"failed: exit code {code}: {' '.join(self.lines[error:])}"


class Runner:
    """Does jobs, `processes` at once, until none is left that can be done."""

    def __init__(self, jobs, processes):
        self.jobs, self.processes, self.progress = jobs, processes, Progress(jobs)
        self.running, self.held = [], {}  # each a Child; {name of a job that waits for its folder: until when}

    def work(self, stop):
        """stop: train.Stop. A signal is passed on to the children, which save; no further one is begun."""
        told = False
        try:
            while self.begin(stop) or self.running or (self.held and not stop.code):
                if stop.code and not told:
                    told = self.terminate()
                self.progress.show()
                time.sleep(0.2)
                self.collect(stop)
        except BaseException:
            self.terminate()
            raise
        finally:
            self.progress.bar.close()

    def terminate(self):
        for child in self.running:
            child.process.terminate()
        return True

    def begin(self, stop):
        """Begin what can be. -> whether anything was."""
        before = len(self.running)
        for job in self.jobs:
            if len(self.running) < self.processes and not stop.code and self.possible(job) and self.free(job):
                if job.origin:  # it may have been done for a run that was stopped in its last seconds, or for other weights
                    job.state = state(job)
                if job.state == "unfinished":
                    job.state = "running"
                    self.running.append(Child(job))
        return len(self.running) > before

    def possible(self, job):
        """Whether a job waits, has what it needs, and no other one writes where it reads or reads where it writes."""
        if job.state != "unfinished" or (job.origin and job.origin.state != "finished"):
            return False
        return not any(job.folder in other.job.touched or other.job.folder in job.touched for other in self.running)

    def free(self, job):
        """Whether no process holds the folder: a study that was killed leaves runs that take seconds to notice and save."""
        try:
            if job.folder.exists():
                files.hold(job.folder).close()
            self.held.pop(job.name, None)
            return True
        except files.Held as error:
            if not self.wait(job):
                job.state = f"failed: {error.problem}"
        except UserError as error:
            job.state = f"failed: {error.problem}"
        return False

    def wait(self, job):
        """Wait for a folder that another process writes into. -> whether there is patience left."""
        if job.name not in self.held:
            self.held[job.name] = time.monotonic() + PATIENCE
            self.progress.say(f"{job.name}: waits, another process is writing into {job.folder}")
        if time.monotonic() < self.held[job.name]:
            return True
        del self.held[job.name]
        return False

    def collect(self, stop):
        for child in [child for child in self.running if child.ended()]:
            self.running.remove(child)
            job = child.job
            job.state, summary = child.outcome(stop.code), logs.read_summary(job.folder)
            if job.state.startswith("failed: exit code 2") and "another process" in job.state and self.wait(job):
                job.state = "unfinished"  # an earlier study's process was faster, and had not even begun its folder before
                continue
            said = job.state
            if said == "finished" and job.kind != "reading":
                said = f"{summary.get('best_val_loss', math.nan):.4f} validation loss, {summary.get('seconds', math.nan):.0f} s"
            self.progress.say(f"{job.name}: {said}")


def conclude(out, name, jobs, command):
    """Write the report of a study into its folder."""
    import report

    if report.write(out, name, [job for job in jobs if job.kind != "reading"], command):
        print(f"{out}/report.html, table.md, table.csv and pictures")


def do(jobs, processes):
    """Do what is not done. -> the signal's exit code if one stopped it, or None."""
    for job in jobs:
        job.state = state(job)
        if job.origin and job.origin.state != "finished":
            job.state = "unfinished"  # until that is, whatever is there
    kinds = [job.kind for job in jobs]
    print(f"{kinds.count('train')} runs, {kinds.count('reading')} readings, {kinds.count('finetune')} fine-tunings, "
          f"{sum(job.state == 'finished' for job in jobs)} of these finished", flush=True)
    with Stop() as stop:
        Runner(jobs, processes).work(stop)
    return stop.code


def at_once(jobs):
    """-> how many processes the cores hold: one where runs take all threads for themselves."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    return max(1, cores // max(job.config.threads or cores for job in jobs))


def refuse_folder(out):
    """UserError where the study's files would lie among others."""
    if (out / "config.toml").exists():
        raise UserError(f"{out}: a run's folder", "give the study a folder of its own, with --out_dir")
    foreign = out.is_dir() and not (out / ".lock").exists() and any(path.is_file() for path in out.iterdir())
    if foreign or os.path.realpath(out) == str(HERE):  # that of pathlib raises for links in a circle
        raise UserError(f"{out}: holds other files", "give the study a folder of its own, with --out_dir")


@helped(Flags, "python study.py STUDY.toml [--key value ...]        (for what a study file says, see studies/)")
def main(argv):
    words, given = parse(argv, Flags)
    if len(words) != 1:
        raise UserError(f"{len(words)} study files given", "name one, such as studies/positions.toml; --help shows the rest")
    build(Flags, given)
    values, name = read_toml(words[0]) | given, Path(words[0]).stem
    with naming(words[0]):
        study = build(Study, values)
        out = Path(study.out_dir or f"out/{name}")
        jobs = plan(study, out, name)
    refuse_folder(out)
    out.mkdir(parents=True, exist_ok=True)
    with files.hold(out):
        code = do(jobs, at_once(jobs) if study.processes == "auto" else study.processes)
        if code:
            print(f"{out}: stopped; what was begun is saved, and the same command goes on from here")
        if failed := [f"{job.name}: {job.state}" for job in jobs if job.state.startswith("failed")]:
            print("\n".join([f"{len(failed)} failed; the same command tries again:", *failed]))
        conclude(out, name, jobs, shlex.join(["python", "study.py", *argv]))
    if study.publish and not code and not failed:
        import report

        print(report.publish(name, [job for job in jobs if job.kind != "reading"]))
    return code or int(bool(failed))


if __name__ == "__main__":
    command(main)
