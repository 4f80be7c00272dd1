"""Runs side by side, and the lines of JSON that everything is read from."""
import json
import math
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import compare
import config
import files
import logs
from options import UserError

REPOSITORY = Path(__file__).resolve().parents[1]


@pytest.fixture
def make(tmp_path):
    """-> a function that writes the folder of a run, finished unless told otherwise."""
    def write(name, loss=2.0, finished=True, log=True, contexts=(16, 32), scaling="none", **changes):
        folder = tmp_path / name
        folder.mkdir()
        (folder / "config.toml").write_text(config.build(config.Config, {"block_size": 32, **changes}).toml(), encoding="utf-8")
        if log:
            logs.append(folder, "log.jsonl", [
                {"step": 10, "train_loss": 3.0, "tokens_per_second": 1000}, {"step": 10, "val_loss": 3.1, "val_stderr": 0.1},
                {"step": 20, "train_loss": loss, "tokens_per_second": 3000}, {"step": 20, "val_loss": loss, "val_stderr": 0.1}])
        if finished:
            logs.append(folder, "lengths.jsonl", [curve(c, loss + c / 100, scaling) for c in contexts])
            summary = {"parameters": 12345, "final_val_loss": loss, "best_val_loss": loss - 0.1, "best_val_bpb": loss / 2}
            (folder / "summary.json").write_text(json.dumps(summary), encoding="utf-8")
        return folder
    return write


def curve(context, loss, scaling="none", factor=1.0, step=20, checkpoint="best"):
    return {"step": step, "checkpoint": checkpoint, "scaling": scaling, "factor": factor, "finetuned": False, "settings": {},
            "data": "same", "context": context, "loss": loss, "stderr": 0.01, "window_losses": [loss - 0.1, loss, loss + 0.1]}


def rows(folders):
    """-> {first cell of a row: the others} of the table above the paired differences."""
    lines = compare.table(folders).partition("\n\n")[0].splitlines()
    return {line.split("  ")[0] or line.split()[0]: line[len(line.split("  ")[0]):].split() for line in lines}


def test_comparing_imports_no_torch(make, tmp_path):
    code = (f"import sys; sys.path.insert(0, {str(REPOSITORY)!r}); import compare; "
            f"compare.main([{str(make('rope-1'))!r}, '--picture', 'x.png']); assert 'matplotlib' in sys.modules; "
            "assert not {'torch', 'wandb'} & set(sys.modules)")
    done = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "rope-1" in done.stdout and (tmp_path / "x.png").read_bytes()[:4] == b"\x89PNG"


def test_table_has_a_row_for_each_run(make):
    table = rows([make("rope-1", 2.0), make("learned-1", 2.5, position="learned", contexts=(16,))])
    assert table["run"] == ["encoding", "parameters", "final", "best", "bits/byte", "tokens/s", "at", "16", "at", "32"]
    assert table["rope-1"] == ["rope", "12,345", "2.0000", "1.9000", "1.0000", "2,000", "2.160", "2.320"]
    assert table["learned-1"] == ["learned", "12,345", "2.5000", "2.4000", "1.2500", "2,000", "2.660", "-"]


def test_runs_that_differ_only_in_the_seed_are_one_row(make):
    losses = {1: 2.0, 2: 2.1, 3: 2.5}
    folders = [make(f"rope-{seed}", loss, seed=seed, out_dir=f"out/rope-{seed}") for seed, loss in losses.items()]
    table = rows([*folders, make("deep-1", seed=1, n_layer=8)])
    assert list(table) == ["run", "rope (3 runs)", "deep-1"]
    mean, sd = 2.2, math.sqrt((0.04 + 0.01 + 0.09) / 2)
    assert table["rope (3 runs)"][2] == f"{mean:.4f}±{sd:.4f}" and table["rope (3 runs)"][6] == f"{mean + 0.16:.3f}±{sd:.3f}"
    assert "±" not in "".join(table["deep-1"])


@pytest.mark.parametrize("key, value", [("learning_rate", 0.1), ("rope_fraction", 0.5), ("dataset", "other.txt"),
                                        ("max_iters", 900)])
def test_runs_that_differ_in_anything_else_are_apart(key, value, make):
    assert len(rows([make("a-1", seed=1), make("a-2", seed=2, **{key: value})])) == 3


@pytest.mark.parametrize("key, value", [("wandb", "disabled"), ("log_interval", 5), ("checkpoint_interval", 7)])
def test_keys_that_compute_nothing_do_not_keep_runs_apart(key, value, make):
    assert len(rows([make("a-1", seed=1), make("a-2", seed=2, **{key: value})])) == 2


def curves_over(losses, folder, digest="same"):
    """Give a run a curve whose windows have these losses."""
    record = curve(16, sum(losses) / len(losses)) | {"window_losses": losses, "windows": len(losses), "data": digest}
    logs.append(folder, "lengths.jsonl", [record])
    return folder


def test_curves_are_compared_window_by_window(make):
    first = curves_over([1.0, 5.0, 9.0], make("rope-1", contexts=()))
    second = curves_over([1.3, 5.1, 9.2], make("none-1", contexts=(), position="none"))
    block = compare.table([first, second]).partition("\n\n")[2].splitlines()
    assert "difference" in block[0] and block[1].split() == ["none-1", "-", "rope-1", "+0.200±0.058"]


@pytest.mark.parametrize("losses, changes, digest", [
    ([1.0, 5.0], {}, "other"), ([1.0, 5.0], {"block_size": 64}, "same"), ([1.0, 5.0, 3.0], {}, "same")])
@pytest.mark.parametrize("finished", [True, False])
def test_curves_over_other_windows_are_not_subtracted(losses, changes, digest, finished, make):
    first = curves_over([1.0, 5.0], make("rope-1", contexts=(), finished=finished))
    second = curves_over(losses, make("none-1", contexts=(), finished=finished, position="none", **changes), digest)
    said = compare.table([first, second])
    assert "difference" not in said and said.endswith("not subtracted: these curves are not all over the same text and windows")


def test_records_without_the_losses_of_their_windows_have_no_differences(make):
    folders = [make("rope-1", contexts=()), make("none-1", contexts=(), position="none")]
    for folder in folders:
        record = {k: v for k, v in curve(16, 2.0).items() if k not in ("window_losses", "settings", "data")}
        logs.append(folder, "lengths.jsonl", [record])
    assert rows(folders)["rope-1"][-1] == "2.000" and "±" not in compare.table(folders)


def test_the_same_folder_twice_is_one_run(make):
    folder = make("rope-1")
    table = compare.table([folder, folder])
    assert "(2 " not in table and "±" not in table


def test_further_scalings_have_rows_of_their_own(make):
    folder = make("rope-1")
    logs.append(folder, "lengths.jsonl", [curve(64, 2.9, "yarn", "auto"), curve(64, 2.8, "linear", 4.0)])
    lines = compare.table([folder]).partition("\n\n")[0].splitlines()
    assert [line.split()[0] for line in lines] == ["run", "rope-1", "yarn-auto", "linear-4.0"] or \
           [line.split()[0] for line in lines] == ["run", "rope-1", "linear-4.0", "yarn-auto"]
    assert {line.split()[0]: line.split()[1:] for line in lines[2:]} == {"yarn-auto": ["-", "-", "2.900"],
                                                                         "linear-4.0": ["-", "-", "2.800"]}


def test_of_each_scaling_the_curve_measured_last_is_shown():
    early = [curve(16, 1.0, step=10), curve(32, 1.1, step=10), curve(64, 1.2, step=10), curve(16, 7.0, "yarn", "auto", step=10)]
    shown = compare.latest([*early, curve(16, 2.0), curve(32, 2.1)], "context")
    assert {name: {c: r["loss"] for c, r in curves.items()} for name, curves in shown.items()} == {
        "": {16: 2.0, 32: 2.1}, "yarn-auto": {16: 7.0}}


def test_the_best_weights_are_shown_whatever_was_measured_after_them():
    shown = compare.latest([curve(16, 1.0), curve(16, 2.0, checkpoint="last")], "context")
    assert shown[""][16]["loss"] == 1.0
    assert compare.latest([curve(16, 2.0, checkpoint="last")], "context")[""][16]["loss"] == 2.0


@pytest.mark.parametrize("key, value", [("data", "other"), ("windows", 7), ("block_size", 64)])
def test_what_is_over_other_data_has_no_mean_and_says_so_in_the_picture(make, key, value):
    more = {key: value} if key == "block_size" else {}
    folders = [make("rope-1", seed=1, contexts=()), make("rope-2", seed=2, contexts=(), **more)]
    logs.append(folders[0], "lengths.jsonl", [curve(16, 2.0) | {"windows": 3}])
    logs.append(folders[1], "lengths.jsonl", [curve(16, 4.0) | {"windows": 3} | ({} if more else {key: value})])
    curves = compare.styled(compare.read_runs(folders))
    assert compare.title(curves, "lengths").endswith("by context, over different data: not comparable")
    if more:
        return  # runs of other lengths are no group
    assert compare.points(curves[0], "lengths") == ([], [], []) and "3.000" not in compare.table(folders)
    logs.put(folders[1], "lengths.jsonl", [curve(16, 4.0) | {"windows": 3}], lambda record: True)
    curves = compare.styled(compare.read_runs(folders))
    assert compare.title(curves, "lengths") == compare.PANELS["lengths"].title
    assert compare.points(curves[0], "lengths")[:2] == ([16], [3.0]) and "3.000" in compare.table(folders)


def test_losses_on_texts_that_differ_have_no_mean(make):
    folders = [make(f"rope-{seed}", seed=seed) for seed in (1, 2)]
    for folder, digest in zip(folders, "ab"):
        summary = json.loads((folder / "summary.json").read_text(encoding="utf-8"))
        (folder / "summary.json").write_text(json.dumps(summary | {"data_sha256": digest}), encoding="utf-8")
    line = compare.table(folders).splitlines()[1]
    assert line.startswith("rope (2 runs)") and line.split()[4:8] == ["-", "-", "-", "-"] and "2.160" in line


def test_fine_tuned_runs_are_one_group_if_their_origins_are(make, tmp_path):
    def tuned(name, origin, seed):
        return make(name, seed=seed, init_from=str(origin), tokenizer=f"{origin}/tokenizer.json", out_dir=str(tmp_path / name))

    folders = [tuned(f"{seed}+x", tmp_path / str(seed), seed) for seed in (1, 2)]
    folders += [tuned(f"{place}-rope-1+x", tmp_path / place / "rope-1", 1) for place in "AB"]
    assert [(name, len(members)) for name, members in compare.groups(compare.read_runs(folders))] == [
        ("+x", 2), ("A-rope-1+x", 1), ("B-rope-1+x", 1)]


def test_odd_marks_of_the_data_are_only_compared(make):
    folder = make("rope-1", contexts=())
    logs.append(folder, "lengths.jsonl", [curve(16, 2.0) | {"data": [], "windows": {}}])
    assert "2.000" in compare.table([folder])


def test_two_chances_at_one_length_are_no_line(make):
    folders = [make(f"{task}-1", contexts=(), dataset=f"task:{task}") for task in ("copy", "sort")]
    for folder, chance in zip(folders, (0.1, 0.2)):
        (folder / "lengths.jsonl").unlink(missing_ok=True)
        record = curve(16, 2.0) | {"trained": 8, "accuracy": 0.5}
        logs.append(folder, "accuracy.jsonl", [record | {"length": n, "chance": chance / n} for n in (4, 8)])
    curves = compare.styled(compare.read_runs(folders))
    assert compare.marks(curves, "accuracy") == ([8], []) and len(compare.marks(curves[:1], "accuracy")[1]) == 2


def test_one_context_measured_again_keeps_the_others(tmp_path):
    logs.append(tmp_path, "lengths.jsonl", [curve(16, 1.0), curve(32, 1.1), curve(16, 1.5)])
    shown = compare.latest(logs.read(tmp_path, "lengths.jsonl"), "context")
    assert {c: r["loss"] for c, r in shown[""].items()} == {16: 1.5, 32: 1.1}


def test_checkpoints_measured_in_turn_lose_no_points(tmp_path):
    logs.append(tmp_path, "lengths.jsonl", [curve(16, 1.0), curve(32, 1.1), curve(16, 2.0, checkpoint="last"), curve(64, 1.2)])
    shown = compare.latest(logs.read(tmp_path, "lengths.jsonl"), "context")
    assert {c: r["loss"] for c, r in shown[""].items()} == {16: 1.0, 32: 1.1, 64: 1.2}


def test_settings_of_a_scaling_have_rows_of_their_own(make):
    folder = make("rope-1")
    logs.append(folder, "lengths.jsonl", [curve(64, 2.9, "yarn", 4.0) | changes for changes in (
        {}, {"settings": {"beta_fast": 8.0}}, {"finetuned": True})])
    table = rows([folder])
    assert [k for k in table if "yarn" in k] == ["yarn-4.0", "yarn-4.0-beta_fast-8.0", "yarn-4.0-finetuned"]


def test_long_names_are_shortened_in_tables_and_legends(make):
    folder = make("rope-" + "n" * 90 + "-1337")
    first = next(line for line in compare.table([folder]).splitlines() if line.startswith("rope"))
    assert "..." in first and first.split()[0].endswith("n-1337") and len(first.split()[0]) <= 48


@pytest.mark.parametrize("log", [True, False])
def test_unfinished_run_has_dashes(log, make, tmp_path):
    folder = make("rope-1", finished=False, log=log, seed=1)
    assert rows([folder])["rope-1"] == ["rope", "-", "-", "-", "-", "2,000" if log else "-"]
    compare.draw([folder], tmp_path / "x.png")
    assert rows([folder, make("rope-2", seed=2)])["rope (2 runs)"][2] == "2.0000"


@pytest.mark.parametrize("name, start", [("x.png", b"\x89PNG"), ("x.svg", b"<?xml"), ("x.pdf", b"%PDF")])
def test_picture_is_written(name, start, make, tmp_path, capsys):
    folders = [make("rope-1"), make("rope-2", seed=2), make("none-1", position="none")]
    folders.append(make("new-1", finished=False, n_layer=1))
    assert compare.main([*map(str, folders), "--picture", str(tmp_path / name)]) == 0
    assert (tmp_path / name).read_bytes().startswith(start) and f"picture: {tmp_path / name}" in capsys.readouterr().out


def test_picture_has_the_curves_and_the_training_length(make):
    left, right, legend = compare.figure([make("rope-1"), make("learned-1", position="learned")]).axes
    assert [t.get_text() for t in legend.get_legend().get_texts()] == ["rope-1", "learned-1"]
    assert [line.get_ydata().tolist() for line in left.lines[1::2]] == [[3.1, 2.0]] * 2
    curves = [container.lines[0] for container in right.containers]
    assert [line.get_xdata().tolist() for line in curves] == [[16, 32]] * 2
    assert curves[0].get_ydata().tolist() == pytest.approx([2.16, 2.32])
    assert len({(line.get_color(), line.get_marker()) for line in curves}) == 2
    assert [a.get_text() for a in right.texts] == ["trained at 32"] and right.get_xscale() == "log"


@pytest.mark.parametrize("name", ["x.unknown", "no/such/folder/x.png", "rope-1.png"])
def test_picture_that_cannot_be_written_is_named(name, make, tmp_path):
    from matplotlib import pyplot as plt

    before = plt.get_fignums()
    (tmp_path / "rope-1.png").mkdir()
    with pytest.raises(UserError, match="cannot be written"):
        compare.main([str(make("rope-1")), "--picture", str(tmp_path / name)])
    assert plt.get_fignums() == before


def test_picture_without_an_ending_is_where_the_program_says(make, tmp_path, capsys):
    assert compare.main([str(make("rope-1")), "--picture", str(tmp_path / "picture")]) == 0
    assert Path(capsys.readouterr().out.splitlines()[-1].removeprefix("picture: ")).is_file()


def test_picture_has_the_loss_by_position(run_folder):
    axes = compare.figure([run_folder]).axes[2]
    line = axes.lines[0]
    assert [a.get_text() for a in axes.texts] == ["trained at 32"]
    records = logs.read(run_folder, "positions.jsonl")
    assert line.get_xdata().tolist() == [r["position"] + 1 for r in records]
    assert line.get_ydata().tolist() == [r["loss"] for r in records]


def test_comparing_writes_nothing_into_the_runs(run_folder, tmp_path, capsys):
    before = {p: p.read_bytes() for p in run_folder.iterdir()}
    assert compare.main([str(run_folder), "--picture", str(tmp_path / "x.png")]) == 0
    assert {p: p.read_bytes() for p in run_folder.iterdir()} == before
    assert "-" not in capsys.readouterr().out.splitlines()[1].split()


# Lines of JSON


def test_a_later_line_replaces_an_earlier_one(tmp_path):
    first = [{"step": 1, "train_loss": 3.0}, {"step": 1, "val_loss": 4.0, "val_stderr": 0.1}, {"step": 2, "train_loss": 2.0}]
    logs.append(tmp_path, "log.jsonl", first)
    logs.append(tmp_path, "log.jsonl", [{"step": 1, "train_loss": 9.0}])
    read = logs.read(tmp_path, "log.jsonl")
    assert len(read) == 3 and all(record in read for record in [{"step": 1, "train_loss": 9.0}, *first[1:]])
    assert len((tmp_path / "log.jsonl").read_text(encoding="utf-8").splitlines()) == 4


@pytest.mark.parametrize("key, value", [("step", 30), ("checkpoint", "last"), ("scaling", "ntk"), ("factor", 2.0),
                                        ("finetuned", True), ("context", 64)])
def test_other_measurements_stay(key, value, tmp_path):
    logs.append(tmp_path, "lengths.jsonl", [curve(16, 1.0), curve(16, 1.0) | {key: value}])
    assert len(logs.read(tmp_path, "lengths.jsonl")) == 2


@pytest.mark.parametrize("torn", ['{"step": 2, "train', '{"st', '"', "{}", '\xff'])
def test_a_last_line_cut_off_by_a_crash_does_not_count(torn, tmp_path):
    (tmp_path / "log.jsonl").write_bytes(b'{"step": 1, "train_loss": 3.0}\n' + torn.encode("latin-1"))
    assert logs.read(tmp_path, "log.jsonl") == [{"step": 1, "train_loss": 3.0}]


@pytest.mark.parametrize("damaged", ['{"step": 2, "train', "nonsense", "[]", "3", "null", '{"loss": 3}', '{"step": [1]}'])
def test_a_damaged_line_before_others_is_refused_by_number(damaged, tmp_path):
    (tmp_path / "log.jsonl").write_text(f'{{"step": 1, "train_loss": 3}}\n{damaged}\n{{"step": 3}}\n', encoding="utf-8")
    with pytest.raises(UserError, match="line 2"):
        logs.read(tmp_path, "log.jsonl")


def test_missing_log_is_an_empty_one(tmp_path):
    assert logs.read(tmp_path, "log.jsonl") == []


def test_what_is_appended_after_a_torn_line_is_read(tmp_path):
    (tmp_path / "log.jsonl").write_text('{"step": 1, "train_loss": 3}\n{"ste', encoding="utf-8")
    logs.append(tmp_path, "log.jsonl", [{"step": 2, "train_loss": 3}])
    logs.append(tmp_path, "log.jsonl", [{"step": 3, "train_loss": 3}])
    assert [r["step"] for r in logs.read(tmp_path, "log.jsonl")] == [1, 2, 3]


def test_keep_leaves_what_is_wanted_and_nothing_torn(tmp_path):
    logs.append(tmp_path, "log.jsonl", [{"step": s, "train_loss": s / 7} for s in (1, 2, 3, 2)])
    with open(tmp_path / "log.jsonl", "a", encoding="utf-8") as file:
        file.write('{"step": 4')
    logs.keep(tmp_path, "log.jsonl", lambda r: r["step"] <= 2)
    lines = (tmp_path / "log.jsonl").read_text(encoding="utf-8")
    assert [json.loads(line) for line in lines.splitlines()] == [{"step": s, "train_loss": s / 7} for s in (1, 2)]
    assert lines.endswith("\n")
    logs.keep(tmp_path, "lengths.jsonl", lambda r: True)
    assert not (tmp_path / "lengths.jsonl").exists()


def test_a_crash_while_replacing_leaves_the_old_file(tmp_path, monkeypatch):
    path = tmp_path / "last.pt"
    files.replace(path, b"old")

    def crash(*_):
        raise KeyboardInterrupt

    for step in ("fsync", "replace"):
        monkeypatch.setattr(files.os, step, crash)
        with pytest.raises(KeyboardInterrupt):
            files.replace(path, b"new and longer")
        monkeypatch.undo()
        assert path.read_bytes() == b"old"
    files.replace(path, b"new")
    assert path.read_bytes() == b"new" and [p.name for p in tmp_path.iterdir()] == ["last.pt"]


def test_an_interrupted_run_can_be_compared(run_folder, tmp_path, capsys):
    folder = shutil.copytree(run_folder, tmp_path / "rope-1")
    for name in ("summary.json", "lengths.jsonl", "positions.jsonl"):
        (folder / name).unlink()
    assert compare.main([str(folder), "--picture", str(tmp_path / "x.png")]) == 0
    assert capsys.readouterr().out.splitlines()[1].split()[:3] == ["rope-1", "rope", "-"]
