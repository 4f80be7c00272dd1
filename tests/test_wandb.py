"""A real offline run, read back with wandb's own reader."""
import json
import os
import subprocess
import sys
import time
import tomllib
from pathlib import Path
from types import SimpleNamespace

import pytest

import lengths
import logs
import train
from tests.conftest import SMALL, small

ROOT = Path(__file__).resolve().parents[1]
ENVIRONMENT = {key: value for key, value in os.environ.items() if not key.startswith("WANDB_")}


def start(corpus, folder, **changes):
    assert train.train(small(dataset=str(corpus), out_dir=str(folder), wandb="offline", **changes)) == 0


def inspect(folder):
    """-> for each offline run beside the folder, in order, {type of record: [record, ...]}."""
    files = []
    for path in sorted((folder.parent / "wandb").glob("offline-run-*/*.wandb")):
        done = subprocess.run([sys.executable, "-m", "wandb", "leet", "inspect", "--json", path], capture_output=True,
                              text=True, check=True, env=ENVIRONMENT)
        records = {}
        for line in done.stdout.splitlines():
            record = json.loads(line)
            records.setdefault(record["type"], []).append(record[record["type"]])
        files.append(records)
    return files


def rows(file):
    """-> [(step, {key: value})] of what was logged."""
    return [(r["step"]["num"], r["item"]) for r in file["history"]]


def column(files, *keys):
    """-> the rows that have all the keys, as tuples."""
    return [tuple(item[key] for key in keys) for file in files for _, item in rows(file) if all(key in item for key in keys)]


@pytest.fixture(scope="module")
def interrupted(corpus, tmp_path_factory):
    """A run stopped at 15 of 30, continued, and measured with another scaling. -> (folder, what wandb has of it)."""
    folder = tmp_path_factory.mktemp("out") / "rope-1"
    patch = pytest.MonkeyPatch()
    for key in [key for key in os.environ if key.startswith("WANDB_")]:
        patch.delenv(key)
    start(corpus, folder, stop_at=15)
    first = (folder / "wandb_id.txt").read_text(encoding="utf-8")
    start(corpus, folder)
    assert (folder / "wandb_id.txt").read_text(encoding="utf-8") == first
    assert lengths.main([str(folder), "--rope_scaling", "yarn", "--contexts", "32", "64"]) == 0
    patch.undo()
    return folder, inspect(folder)


def test_id_is_kept_in_the_folder_and_taken_up_again(interrupted):
    folder, files = interrupted
    identity = (folder / "wandb_id.txt").read_text(encoding="utf-8").strip()
    assert len(files) == 3 and {file["run"][0]["run_id"] for file in files} == {identity}


def test_another_folder_is_another_run(interrupted, tmp_path, monkeypatch):
    import wandb

    ids = []
    monkeypatch.setattr(wandb, "init", lambda id, **_: ids.append(id) or SimpleNamespace(
        id=id, define_metric=lambda *_, **__: None))
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
        logs.Wandb(tmp_path / name, small(wandb="offline"))
    assert len({*ids, (interrupted[0] / "wandb_id.txt").read_text(encoding="utf-8")}) == 3


def test_run_has_its_name_group_tags_and_config(interrupted):
    folder, files = interrupted
    written = tomllib.loads((folder / "config.toml").read_text(encoding="utf-8"))
    for file in files:
        run = file["run"][0]
        assert run["display_name"] == folder.name == "rope-1"
        assert (run["run_group"], run["job_type"], run["tags"], run["project"]) == ("rope", "rope", ["rope"], "positions")
        config = {key: value for key, value in run["config"]["update"].items() if not key.startswith("_")}
        assert {k: v for k, v in config.items() if k != "stop_at"} == written


def test_a_study_gives_the_group_and_a_sweep_the_id(corpus, tmp_path):
    """In a process of its own, as wandb's agent starts it: what wandb has read from the environment once, it keeps."""
    words = [f"--{key}={value}" for key, value in (SMALL | {"dataset": corpus, "max_iters": 6, "wandb": "offline"}).items()]
    sweep = {"WANDB_SWEEP_ID": "abc", "WANDB_RUN_ID": "given123", "WANDB_PROJECT": "theirs"}
    subprocess.run([sys.executable, ROOT / "train.py", *words, "--wandb_group=study", "--out_dir=run"], cwd=tmp_path,
                   env=ENVIRONMENT | sweep, check=True, capture_output=True)
    file, = inspect(tmp_path / "run")
    run = file["run"][0]
    assert (run["run_id"], run["run_group"], run["job_type"], run["project"]) == ("given123", "study", "rope", "theirs")
    assert (tmp_path / "run/wandb_id.txt").read_text(encoding="utf-8").split() == ["given123"]


def test_curves_of_tasks_have_an_axis_of_their_own(tmp_path):
    folder = tmp_path / "run"
    start("task:copy", folder, max_iters=6)
    start("task:copy", folder, max_iters=6)  # again: nothing is sent twice
    file, = inspect(folder)
    found = column([file], "accuracy/length", "accuracy/none-1.0/accuracy", "accuracy/none-1.0/loss")
    records = logs.read(folder, "accuracy.jsonl")
    assert found == [(r["length"], r["accuracy"], r["loss"]) for r in records] and len(found) > 5
    assert [item["val/accuracy"] for _, item in rows(file) if "val/accuracy" in item]
    assert any("charts/none-1.0" in key for _, item in rows(file) for key in item)


def test_axes_are_defined(interrupted):
    for file in interrupted[1]:
        axes = {m["glob_name"]: m["step_metric"] for m in file["metric"] if "glob_name" in m}
        assert axes == {"train/*": "step", "val/*": "step", "lengths/*": "lengths/context", "positions/*": "positions/position",
                        "accuracy/*": "accuracy/length"}


def test_steps_always_grow_and_nothing_is_dropped(interrupted):
    folder, files = interrupted
    for file in files:
        steps = [step for step, _ in rows(file)]
        assert steps == sorted(set(steps))
    for log in (folder.parent / "wandb").glob("offline-run-*/logs/*.log"):
        assert "step must be" not in log.read_text(encoding="utf-8").lower()


def test_a_continued_run_never_writes_below_what_was_written_before(interrupted):
    highest = -1
    for file in interrupted[1]:
        steps = [step for step, _ in rows(file)]
        assert steps[0] > highest
        highest = max(steps)


def test_rows_of_the_log_are_those_of_the_file(interrupted):
    folder, files = interrupted
    log = logs.read(folder, "log.jsonl")
    assert column(files, "step", "train/loss") == [(r["step"], r["train_loss"]) for r in log if "train_loss" in r]
    final = dict(column(files, "step", "val/loss"))
    assert final == {r["step"]: r["val_loss"] for r in log if "val_loss" in r} and set(final) == {10, 20, 30}
    keys = {key for file in files for _, item in rows(file) for key in item if key.startswith(("train/", "val/"))}
    assert keys >= {"train/lr", "train/grad_norm", "train/tokens_per_second", "val/stderr", "val/bpb"}


@pytest.mark.parametrize("scaling, factor", [("none", 1.0), ("yarn", "auto")])
def test_rows_of_the_curves_are_those_of_the_files(scaling, factor, interrupted):
    folder, files = interrupted
    for name, key, values in (("lengths", "context", ("loss", "stderr", "bpb")), ("positions", "position", ("loss",))):
        written = [(r[key], *(r[v] for v in values)) for r in logs.read(folder, f"{name}.jsonl") if r["scaling"] == scaling]
        assert column(files, f"{name}/{key}", *(f"{name}/{scaling}-{factor}/{v}" for v in values)) == written and written


@pytest.mark.parametrize("scaling", ["none-1.0", "yarn-auto"])
def test_curve_is_a_chart_as_well(scaling, interrupted):
    tables = (interrupted[0].parent / "wandb").rglob(f"{scaling}*.table.json")
    data = [json.loads(path.read_text(encoding="utf-8")) for path in tables]
    assert len(data) == 1 and data[0]["columns"] == ["context", "loss"]
    losses = {r["context"]: r["loss"] for r in logs.read(interrupted[0], "lengths.jsonl") if scaling.startswith(r["scaling"])}
    assert dict(data[0]["data"]) == losses


def test_summary_has_the_end_of_the_run(interrupted):
    folder, files = interrupted
    summary = {}
    for record in files[1]["summary"]:
        summary |= record["update"]
    written = json.loads((folder / "summary.json").read_text(encoding="utf-8"))
    assert {key: summary[key] for key in ("best_val_loss", "final_val_loss", "parameters", "step")} == {
        key: written[key] for key in ("best_val_loss", "final_val_loss", "parameters", "step")}


def test_curve_of_an_earlier_checkpoint_is_not_dropped(corpus, tmp_path, monkeypatch):
    folder, evaluate, calls = tmp_path / "rope-1", lengths.evaluate, []

    def worse_each_time(*arguments):
        calls.append(arguments)
        return evaluate(*arguments) | {"val_loss": 3.0 + len(calls)}

    monkeypatch.setattr(lengths, "evaluate", worse_each_time)
    start(corpus, folder, length_interval=20)
    records = logs.read(folder, "lengths.jsonl")
    assert {(r["checkpoint"], r["step"]) for r in records} == {("last", 20), ("best", 10)}
    seen = column(inspect(folder), "lengths/context", "lengths/none-1.0/loss")
    assert sorted(seen) == sorted((r["context"], r["loss"]) for r in records)


# After an unclean stop


def offline(folder):
    """-> what `wandb sync` would send of the run: {row's number: row}, each once."""
    sent = [(step, item) for file in inspect(folder) for step, item in rows(file)]
    assert len(sent) == len(dict(sent)), "a row is sent twice"
    return dict(sent)


def whole_history(folder):
    """All that the run's files hold is sent, each row once."""
    sent = [{k: v for k, v in item.items() if not k.startswith("_")} for item in offline(folder).values()]
    log = logs.read(folder, "log.jsonl")
    for key in ("train_loss", "val_loss"):
        found = [(item["step"], item[key.replace("_", "/")]) for item in sent if key.replace("_", "/") in item]
        assert sorted(found) == [(r["step"], r[key]) for r in log if key in r]
    for name, axis in (("lengths", "context"), ("positions", "position")):
        records = logs.read(folder, f"{name}.jsonl")
        found = [item[f"{name}/{axis}"] for item in sent if f"{name}/{axis}" in item]
        assert sorted(found) == sorted(r[axis] for r in records)


def test_killed_run_is_sent_once_and_whole(corpus, tmp_path):
    folder = tmp_path / "out" / "rope-1"
    made = small(dataset=str(corpus), out_dir=str(folder), wandb="offline", log_interval=1, length_interval=15, max_iters=40)
    code = f"import sys; sys.path.insert(0, {str(ROOT)!r}); import config, train; train.train(config.read_config(sys.argv[1]))"
    (tmp_path / "config.toml").write_text(made.toml(), encoding="utf-8")
    process = subprocess.Popen([sys.executable, "-c", code, tmp_path], stdout=subprocess.DEVNULL, env=ENVIRONMENT)
    while len(logs.read(folder, "log.jsonl")) < 25:
        time.sleep(0.01)
    process.kill()
    process.wait()
    assert logs.interrupted(folder)
    assert train.train(made) == 0
    whole_history(folder)
    assert not logs.interrupted(folder)
    identity = (folder / "wandb_id.txt").read_text(encoding="utf-8").strip()
    aside, = (folder.parent / "wandb" / "aside").iterdir()
    assert aside.name.endswith(identity) and len({file["run"][0]["run_id"] for file in inspect(folder)}) == 1


def test_killed_between_its_summary_and_the_end_of_its_history_the_next_start_sends_it(corpus, tmp_path, monkeypatch, capsys):
    folder = tmp_path / "out" / "rope-1"
    made = {"dataset": str(corpus), "out_dir": str(folder), "wandb": "offline"}
    monkeypatch.setattr(logs.Wandb, "finish", lambda self, summary: sys.exit(9))
    with pytest.raises(SystemExit):
        train.train(small(**made))
    monkeypatch.undo()
    assert logs.interrupted(folder)
    assert train.train(small(**made)) == 0
    assert "finished at step 30" in capsys.readouterr().out
    whole_history(folder)
    summary = {}
    for record in inspect(folder)[-1]["summary"]:
        summary |= record.get("update", {})
    assert summary["best_val_loss"] == logs.read_summary(folder)["best_val_loss"] and not logs.interrupted(folder)


def test_what_is_done_again_is_not_sent_twice(corpus, tmp_path):
    """A length curve between the kill and the resumption has already sent the log, which is then cut back to the checkpoint."""
    folder = tmp_path / "out" / "rope-1"
    start(corpus, folder, stop_at=25)
    (folder / "last.pt").unlink()
    assert lengths.main([str(folder), "--contexts", "32"]) == 0
    start(corpus, folder)
    whole_history(folder)


def test_what_was_trained_without_wandb_is_sent_later(corpus, tmp_path):
    folder = tmp_path / "out" / "rope-1"
    start(corpus, folder, stop_at=10)
    assert train.train(small(dataset=str(corpus), out_dir=str(folder), stop_at=20)) == 0  # disabled
    start(corpus, folder)
    whole_history(folder)


def test_a_run_survives_the_death_of_wandb_and_is_sent_later(corpus, tmp_path, monkeypatch, capsys):
    import wandb

    folder = tmp_path / "out" / "rope-1"
    made, log, calls = {"dataset": str(corpus), "out_dir": str(folder), "wandb": "offline"}, wandb.Run.log, []

    def dying(self, *arguments, **settings):
        calls.append(arguments)
        if len(calls) > 3:
            raise ConnectionResetError("Connection lost")
        log(self, *arguments, **settings)

    monkeypatch.setattr(wandb.Run, "log", dying)
    assert train.train(small(**made)) == 0
    assert capsys.readouterr().err.count("wandb: Connection lost; this run goes on without it") == 1
    monkeypatch.undo()
    assert train.train(small(**made)) == 0
    whole_history(folder)


def test_keys_of_wandb_reach_no_file(corpus, tmp_path, monkeypatch):
    key = "0123456789abcdef" * 2 + "deadbeef"
    monkeypatch.setenv("WANDB_API_KEY", key)
    start(corpus, tmp_path / "out" / "rope-1", max_iters=6)
    files = [path for path in (tmp_path / "out").rglob("*") if path.is_file()]
    assert len(files) > 10 and not [path for path in files if key.encode() in path.read_bytes()]


def test_disabled_writes_nothing_and_imports_nothing(corpus, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "wandb", None)  # importing it would fail
    assert train.train(small(dataset=str(corpus), out_dir=str(tmp_path / "out" / "a"), max_iters=6)) == 0
    assert not [path for path in tmp_path.rglob("*") if "wandb" in path.name]
