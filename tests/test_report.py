"""What a study ends with: its statistics against slow references, and its files."""
import csv
import json
import math
import statistics
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

import compare
import config
import logs
import report
from options import UserError
from tests.test_wandb import inspect, rows


def record(axis, x, value, **more):
    name = "accuracy" if axis == "length" else "loss"
    return {"step": 20, "checkpoint": "best", "scaling": "none", "factor": 1.0, "finetuned": False, "settings": {}, axis: x,
            name: value, "stderr": 0.01, **more}


@pytest.fixture
def make(tmp_path):
    """-> a function that writes the folder of a run and gives its job."""
    def write(name, seed, loss, **changes):
        folder, yarn = tmp_path / f"{name}-{seed}", changes.pop("yarn", None)
        folder.mkdir()
        made = config.build(config.Config, {"block_size": 32, "seed": seed, "wandb": "disabled", **changes})
        (folder / "config.toml").write_text(made.toml(), encoding="utf-8")
        logs.append(folder, "log.jsonl", [{"step": 10, "train_loss": 3.0, "lr": 0.1},
                                          {"step": 10, "val_loss": loss, "val_stderr": 0.1}])
        if made.dataset.startswith("task:"):
            logs.append(folder, "accuracy.jsonl", [record("length", n, loss / n, chance=1 / n, trained=8) for n in (4, 8, 16)])
        else:
            curve = [record("context", c, loss + c / 100) for c in (16, 32, 64)]
            if yarn is not None:
                curve += [r | {"scaling": "yarn", "factor": "auto", "loss": yarn} for r in curve]
            logs.append(folder, "lengths.jsonl", curve)
            logs.append(folder, "positions.jsonl", [record("position", p, loss) for p in (0, 1, 2)])
        (folder / "summary.json").write_text(json.dumps({"parameters": 123, "best_val_loss": loss, "max_iters": 10}),
                                             encoding="utf-8")
        return SimpleNamespace(name=folder.name, folder=folder, config=made, state="finished", group=name.split("-")[-1],
                               command=["python", "train.py", "--prompt", "a b"])
    return write


def quantile(freedom):
    """Student's t by Simpson's rule and bisection, slowly: the x up to which lies 97.5 % of the distribution."""
    scale = math.exp(math.lgamma((freedom + 1) / 2) - math.lgamma(freedom / 2)) / math.sqrt(freedom * math.pi)

    def below(x, steps=4000):
        density = [scale * (1 + (x * i / steps) ** 2 / freedom) ** (-(freedom + 1) / 2) for i in range(steps + 1)]
        return 0.5 + x / steps / 3 * (density[0] + density[-1] + 4 * sum(density[1::2]) + 2 * sum(density[2:-1:2]))

    low, high = 0.0, 20.0
    for _ in range(40):
        middle = (low + high) / 2
        low, high = (middle, high) if below(middle) < 0.975 else (low, middle)
    return low


def test_quantiles_are_students():
    for freedom in (1, 2, 3, 7, 18, 30):
        assert report.STUDENT[freedom - 1] == pytest.approx(quantile(freedom), abs=6e-4)
    assert len(report.STUDENT) == 30 and sorted(report.STUDENT, reverse=True) == list(report.STUDENT)


@pytest.mark.parametrize(("differences", "words"), [
    ([0.10, 0.12, 0.11], "+0.110 ± 0.025, higher"), ([-0.10, -0.12, -0.11], "-0.110 ± 0.025, lower"),
    ([0.1, -0.1, 0.3], "+0.100 ± 0.497, within the noise"), ([0.5], "+0.500, one pair"),
    ([0.0, 0.0, 0.0], "+0.000, the same in 3 pairs"), ([0.005, 0.005], "+0.005, the same in 2 pairs"),
    ([math.inf, 1.0], "+inf ± nan, within the noise")])
def test_nothing_is_called_better_within_the_noise(differences, words):
    assert report.verdict(differences) == words


def test_interval_is_the_quantile_times_the_standard_error():
    values = [0.3, 0.1, 0.4, 0.15]
    mean, half = report.interval(values)
    assert mean == pytest.approx(sum(values) / 4) and half == pytest.approx(3.182 * statistics.stdev(values) / 2)


def table(made, title):
    """-> {first cell: {heading: cell}} of the table with that title."""
    found = next(t for t in made if t["title"] == title)
    return {row[0]: dict(zip(found["columns"], row, strict=True)) for row in found["rows"]}


def read(jobs):
    return compare.read_runs([job.folder for job in jobs])


def test_runs_are_paired_by_seed_not_by_order(make):
    jobs = [make("rope", seed, 1.0 + seed) for seed in (1, 2, 3)]
    jobs += [make("alibi", seed, loss, position="alibi") for seed, loss in ((3, 4.1), (1, 2.1), (2, 3.1), (4, 9.0))]
    made = report.tables(read(jobs))
    assert table(made, "Results")["rope"]["validation loss"] == "3.000±1.000" and table(made, "Results")["alibi"]["runs"] == "4"
    cell = table(made, "Difference to rope")["alibi"]["at 32"]
    assert cell.startswith("+0.100")


def test_the_curve_as_trained_is_that_one_in_whatever_order_they_were_measured(make):
    jobs = [make("rope", 1, 2.0, yarn=1.5), make("rope", 2, 2.2, yarn=1.6)]
    for folder in (jobs[0].folder,):  # the plain curve once more, after the other
        again = [r for r in logs.read(folder, "lengths.jsonl") if r["scaling"] == "none"]
        logs.put(folder, "lengths.jsonl", again, lambda record: record["scaling"] == "none")
    scaled = make("scaled", 1, 3.0, rope_scaling="linear", rope_factor=2.0)
    found = table(report.tables(read([*jobs, scaled])), "Results")
    assert found["rope"]["validation loss"] == "2.100±0.141" and found["rope yarn-auto"]["validation loss"] == "-"
    assert found["rope yarn-auto"]["at 32"] == "1.550±0.071"
    curves = compare.styled(read([*jobs, scaled]))
    assert [(c.label, c.trained) for c in curves] == [("rope", True), ("rope yarn-auto", False), ("scaled-1", False)]


def test_runs_that_are_not_finished_do_not_count(make):
    jobs = [make("rope", 1, 2.0), make("rope", 2, 2.1), make("rope", 3, 9.0)]
    (jobs[2].folder / "summary.json").unlink()
    assert table(report.tables(read(jobs)), "Results")["rope"] | {"at 16": "2.210±0.071", "runs": "2"} == \
        table(report.tables(read(jobs)), "Results")["rope"]


def test_a_number_of_some_runs_says_of_how_many(make):
    jobs = [make("rope", 1, 2.0, yarn=1.5), make("rope", 2, 2.2)]
    assert table(report.tables(read(jobs)), "Results")["rope yarn-auto"]["at 64"] == "1.500 (1)"


@pytest.mark.parametrize("key, value", [("block_size", 64), ("tokenizer", "char")])
def test_numbers_over_other_things_are_not_subtracted(make, key, value):
    jobs = [make("rope", 1, 2.0), make("other", 1, 2.5, **{key: value})]
    summary = json.loads((jobs[1].folder / "summary.json").read_text(encoding="utf-8"))
    if key == "tokenizer":  # other tokens are other data
        (jobs[1].folder / "summary.json").write_text(json.dumps(summary | {"data_sha256": "x"}), encoding="utf-8")
        logs.put(jobs[1].folder, "lengths.jsonl", [r | {"data": "x"} for r in logs.read(jobs[1].folder, "lengths.jsonl")],
                 lambda record: True)
    row = table(report.tables(read(jobs)), "Difference to rope-1")["other-1"]
    assert row["validation loss"] == row["at 32"] == "-"


def test_data_sets_of_one_name_are_apart(make, tmp_path):
    jobs = [make("A", 1, 2.0, dataset="a/text.txt"), make("B", 1, 3.0, dataset="b/text.txt")]
    assert [t["title"] for t in report.tables(read(jobs))] == ["Results, text.txt_1", "Results, text.txt_2"]


def test_curves_that_end_have_no_number_and_no_difference(make):
    jobs = [make("rope", 1, 2.0), make("learned", 1, 2.1, position="learned")]
    kept = [r for r in logs.read(jobs[1].folder, "lengths.jsonl") if r["context"] <= 32]
    (jobs[1].folder / "lengths.jsonl").write_bytes(logs.lines(kept))
    made = report.tables(read(jobs))
    assert table(made, "Results")["learned-1"]["at 64"] == "-" == table(made, "Difference to rope-1")["learned-1"]["at 64"]
    assert table(made, "Difference to rope-1")["learned-1"]["at 32"] == "+0.100, one pair"


def test_each_is_also_compared_at_its_best_learning_rate(make):
    jobs = [make(f"{p}-{rate}", seed, loss + seed / 100, position=p, learning_rate=rate)
            for p, rate, loss in (("rope", 0.01, 2.0), ("rope", 0.02, 1.8), ("alibi", 0.01, 1.9), ("alibi", 0.02, 2.2))
            for seed in (1, 2)]
    made = report.tables(read(jobs))
    assert list(table(made, "Results, each at its best learning rate")) == ["rope-0.02", "alibi-0.01"]
    difference = table(made, "Difference to rope-0.02, each at its best learning rate")
    assert difference["alibi-0.01"]["validation loss"].startswith("+0.100")
    assert not any("best" in t["title"] for t in report.tables(read(jobs[:2])))


def test_a_rate_is_not_best_because_seeds_are_missing_or_numbers_wrong(make):
    jobs = [make(f"rope-{rate}", seed, loss + seed / 10, learning_rate=rate)
            for rate, loss, seeds in ((0.01, 2.0, (1, 2, 3)), (0.02, 2.05, (1, 2))) for seed in seeds]
    assert not any("best" in t["title"] for t in report.tables(read(jobs)))
    jobs.append(make("rope-0.02", 3, 2.35, learning_rate=0.02))
    assert list(table(report.tables(read(jobs)), "Results, each at its best learning rate")) == ["rope-0.01"]
    summary = json.loads((jobs[0].folder / "summary.json").read_text(encoding="utf-8"))
    (jobs[0].folder / "summary.json").write_text(json.dumps(summary | {"best_val_loss": "x"}), encoding="utf-8")
    assert not any("best" in t["title"] for t in report.tables(read(jobs)))


@pytest.mark.parametrize("key", ["windows", "problems"])
def test_numbers_over_more_or_fewer_are_not_subtracted(make, key):
    task = key == "problems"
    jobs = [make(f"{p}-x", 1, 2.0, position=p, **({"dataset": "task:copy"} if task else {})) for p in ("rope", "alibi")]
    name, column = ("accuracy.jsonl", "right at 8") if task else ("lengths.jsonl", "at 32")
    for numbers, cell in (((16, 16), "+0.000, one pair"), ((16, 64), "-")):
        for job, n in zip(jobs, numbers):
            logs.put(job.folder, name, [r | {key: n} for r in logs.read(job.folder, name)], lambda record: True)
        assert table(report.tables(read(jobs)), "Difference to rope-x-1")["alibi-x-1"][column] == cell


def test_what_unfinished_runs_have_measured_on_the_way_is_in_no_picture(make, tmp_path):
    jobs = [make("rope", seed, 2.0) for seed in (1, 2)]
    (jobs[1].folder / "summary.json").unlink()
    report.write(tmp_path, "positions", jobs, "x")
    panels = {panel["id"]: panel for panel in shown(tmp_path)["panels"]}
    assert panels["lengths"]["curves"][0]["mean"] == pytest.approx([2.16, 2.32, 2.64])
    assert panels["lengths"]["curves"][0]["spread"] == pytest.approx([0.01] * 3)  # of one run: over windows


def test_data_sets_are_not_compared_with_each_other(make, tmp_path):
    jobs = [make("copy-rope", 1, 2.0, dataset="task:copy"), make("sort-rope", 1, 3.0, dataset="task:sort")]
    made = report.tables(read(jobs))
    assert [t["title"] for t in made] == ["Results, copy", "Results, sort"]
    assert table(made, "Results, copy")["copy-rope-1"]["right at 8"] == "0.250"
    report.write(tmp_path, "tasks", jobs, "python study.py x.toml")
    assert {p.stem for p in tmp_path.glob("*.svg")} == {"accuracy-copy", "accuracy-sort", "steps-copy", "steps-sort"}
    page = shown(tmp_path)
    assert [g["id"] for g in page["groups"]] == ["rope"]
    accuracy = [p for p in page["panels"] if p["id"].startswith("accuracy")]
    assert [p["chance"] for p in accuracy] == [[[4, 0.25], [8, 0.125], [16, 0.0625]]] * 2
    assert [p["trained"] for p in accuracy] == [[8], [8]] and [p["curves"][0]["mean"][1] for p in accuracy] == [0.25, 0.375]


def shown(folder):
    """-> what the page in a study's folder holds as data."""
    text = (folder / "report.html").read_text(encoding="utf-8")
    return json.JSONDecoder().raw_decode(text, text.index("const data = ") + len("const data = "))[0]


def test_files_hold_the_numbers_of_the_run_folders(make, tmp_path):
    jobs = [make("rope", seed, 2.0 + seed / 10, yarn=1.5 + seed / 10) for seed in (1, 2, 3)]
    jobs += [make("alibi", seed, 3.0 + seed / 9, position="alibi") for seed in (1, 2, 3)]
    jobs.append(SimpleNamespace(name="t5-1", folder=tmp_path / "t5-1", config=jobs[0].config, state="failed: <script>",
                                command=["x"], group="t5"))
    report.write(tmp_path, "positions", jobs, "python study.py x.toml")
    with open(tmp_path / "table.csv", encoding="utf-8") as file:
        lines = list(csv.DictReader(file))
    losses = {r["seed"]: float(r["value"]) for r in lines if r["curve"] == "rope yarn-auto" and r["what"] == "at 64"}
    assert losses == {"1": 1.6, "2": 1.7, "3": 1.8}
    text = (tmp_path / "table.md").read_text(encoding="utf-8")
    assert "| rope | 3 | 123 | 2.200±0.100 | 2.360±0.100 |" in text, text
    assert "Of 4 intervals, about 0.2 would" in text
    assert {p.stem for p in tmp_path.glob("*.png")} == {"steps", "lengths", "positions", "lengths-scalings"}
    page = shown(tmp_path)
    panel = next(p for p in page["panels"] if p["id"] == "lengths")
    curve = next(c for c in panel["curves"] if c["label"] == "rope")
    assert curve["xs"] == [16, 32, 64] and curve["mean"] == pytest.approx([2.36, 2.52, 2.84])
    assert curve["spread"] == pytest.approx([0.1] * 3) and panel["trained"] == [32]
    assert [c["label"] for c in page["panels"][0]["curves"]] == ["rope", "alibi"]
    assert page["runs"][0]["command"] == "python train.py --prompt 'a b'" and page["runs"][-1]["state"] == "failed: <script>"
    assert "failed: <script>" not in (tmp_path / "report.html").read_text(encoding="utf-8")
    by_position = next(p for p in page["panels"] if p["id"] == "positions")
    assert by_position["curves"][0]["xs"] == [1, 2, 3]  # tokens seen: a logarithm has no place for 0
    before = (tmp_path / "lengths.svg").read_bytes()
    report.write(tmp_path, "positions", jobs, "python study.py x.toml")
    assert (tmp_path / "lengths.svg").read_bytes() == before


def test_fine_tuned_runs_stand_beside_what_they_began_from(make):
    jobs = [make("rope", 1, 2.0), make("rope", 2, 2.1), make("none", 1, 3.0, position="none")]
    jobs += [make(f"rope-{seed}+longer", seed, 1.9, init_from=str(jobs[seed - 1].folder), block_size=64) for seed in (1, 2)]
    for job, seed in zip(jobs[-2:], (1, 2)):
        job.folder.rename(job.folder.with_name(f"rope-{seed}+longer"))
        job.folder = job.folder.with_name(f"rope-{seed}+longer")
    drawn = report.pictures(read(jobs))
    assert [label for label, *_ in drawn["lengths-scalings"][1]] == ["rope", "rope+longer"]
    assert [label for label, *_ in drawn["lengths"][1]] == ["rope", "none-1"]
    drawn = report.pictures(read(jobs[-2:]))  # from what is not in the study
    assert [label for label, *_ in drawn["lengths"][1]] == ["rope+longer"] and "lengths-scalings" not in drawn


def test_every_run_of_the_page_has_the_colour_of_its_curve(make, tmp_path):
    jobs = [make("rope", 1, 2.0), make("scaled", 1, 2.1, rope_scaling="linear", rope_factor=2.0)]
    for r in (r | {"scaling": "linear", "factor": 2.0} for r in logs.read(jobs[1].folder, "lengths.jsonl")):
        logs.put(jobs[1].folder, "lengths.jsonl", [r], lambda record: record["scaling"] == "none")
    report.write(tmp_path, "positions", jobs, "x")
    page = shown(tmp_path)
    assert {run["group"] for run in page["runs"]} <= {group["id"] for group in page["groups"]}


def test_numbers_over_different_data_have_no_mean(make):
    jobs = [make("rope", 1, 2.0), make("rope", 2, 2.2)]
    summary = json.loads((jobs[1].folder / "summary.json").read_text(encoding="utf-8"))
    (jobs[1].folder / "summary.json").write_text(json.dumps(summary | {"data_sha256": "other"}), encoding="utf-8")
    row = table(report.tables(read(jobs)), "Results")["rope"]
    assert row["validation loss"] == "-" and row["at 32"] == "2.420±0.141"


def test_a_damaged_run_is_left_out_and_said(make, tmp_path, capsys):
    jobs = [make("rope", 1, 2.0), make("alibi", 1, 2.1, position="alibi")]
    (jobs[1].folder / "log.jsonl").write_bytes(b'{"step": 1}\n{"step"\n{}\n')
    assert report.write(tmp_path, "positions", jobs, "x")
    assert "not in the report: " in capsys.readouterr().out
    assert [c["label"] for c in shown(tmp_path)["panels"][0]["curves"]] == ["rope-1"]


def test_names_of_any_characters_are_shown_as_they_are(make, tmp_path):
    jobs = [make("a$b$c", 1, 2.0, dataset="we|rd\n <b>.txt"), make("x" * 90, 2, 2.0, dataset="y" * 200)]
    assert report.write(tmp_path, "positions", jobs, "x")
    assert {p.name for p in tmp_path.glob("steps*.png")} == {"steps-we_rd___b_.txt.png", f"steps-{'y' * 60}.png"}
    titles = [line for line in (tmp_path / "table.md").read_text(encoding="utf-8").splitlines() if line.startswith("**")]
    assert len(titles) == 2 and "a$b$c" in (tmp_path / "steps-we_rd___b_.txt.svg").read_text(encoding="utf-8")


def test_runs_that_have_only_begun_are_listed(make, tmp_path):
    job = make("rope", 1, 2.0)
    for name in ("summary.json", "lengths.jsonl", "positions.jsonl"):
        (job.folder / name).unlink()
    job.state = "unfinished"
    report.write(tmp_path, "positions", [job], "x")
    assert shown(tmp_path)["runs"][0]["state"] == "unfinished" and shown(tmp_path)["panels"][0]["curves"]
    (job.folder / "log.jsonl").unlink()
    (tmp_path / "report.html").unlink()
    report.write(tmp_path, "positions", [job], "x")
    assert not (tmp_path / "report.html").exists()


def test_results_are_sent_to_wandb_once(make, tmp_path, monkeypatch):
    jobs = [make("rope", 1, 2.0, wandb="offline")]
    monkeypatch.delenv("WANDB_MODE", raising=False)
    report.write(tmp_path, "positions", jobs, "x")
    report.write(tmp_path, "positions", jobs, "x")
    folders = list((tmp_path / "wandb").glob("offline-run-*"))
    assert len(folders) == 1
    file = inspect(tmp_path / "rope-1")[0]
    run = file["run"][0]
    assert (run["run_group"], run["job_type"], run["display_name"]) == ("positions", "study", "positions-results")
    assert {"Results", "steps", "lengths", "positions"} <= {key.split(".")[0] for _, item in rows(file) for key in item}
    logs.append(jobs[0].folder, "lengths.jsonl", [record("context", 128, 3.0)])
    report.write(tmp_path, "positions", jobs, "x")
    left = list((tmp_path / "wandb").glob("offline-run-*"))
    assert len(left) == 1 and left != folders and len(list((tmp_path / "wandb/aside").iterdir())) == 1
    assert Path(tmp_path, "wandb_id.txt").read_text(encoding="utf-8").split()[0] == left[0].name.rsplit("-", 1)[1]


def test_a_report_is_made_for_wandb_by_its_own_library(make, monkeypatch):
    interface = pytest.importorskip("wandb_workspaces.reports.v2.interface")
    jobs, saved = [make("rope", seed, 2.0, yarn=1.5) for seed in (1, 2)], []
    monkeypatch.setattr(interface, "_get_api", lambda: SimpleNamespace(default_entity="someone"))  # what needs a server
    monkeypatch.setattr(interface.Report, "save", lambda made: saved.append(made._to_model()))
    monkeypatch.setattr(interface.Report, "url", "https://here")
    assert report.publish("positions", jobs) == "https://here"
    spec = saved[0].spec.model_dump_json(by_alias=True, exclude_none=True)
    assert saved[0].project.name == "positions" and saved[0].display_name == "positions"
    for part in ("lengths/yarn-auto/loss", "lengths/none-1.0/loss", "lengths/context", "val/loss", "| rope | 2 |"):
        assert part in spec, part
    assert '"positions"' in spec and "position" in spec


def test_what_keeps_a_report_from_wandb_is_said(make, monkeypatch):
    job = make("rope", 1, 2.0)
    monkeypatch.setitem(sys.modules, "wandb_workspaces.reports.v2", None)
    with pytest.raises(UserError, match="not installed"):
        report.publish("positions", [job])
    monkeypatch.undo()
    interface = pytest.importorskip("wandb_workspaces.reports.v2.interface")

    def fail():
        raise Exception("not logged in")

    monkeypatch.setattr(interface, "_get_api", fail)
    with pytest.raises(UserError, match="not logged in"):
        report.publish("positions", [job])
    job.state = "unfinished"
    with pytest.raises(UserError, match="no run of this study is finished"):
        report.publish("positions", [job])
