"""The loop: it learns, it is fair, and nothing is lost."""
import json
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
import torch

import compare
import config
import lengths
import logs
import machine
import optim
import run as runs
import train
from batches import batches, load_data, windows
from model import GPT
from position import POSITIONS
from tests.conftest import SMALL, small

ROOT = Path(__file__).resolve().parents[1]


def run(corpus, folder, **changes):
    return train.train(small(dataset=str(corpus), out_dir=str(folder), **changes))


def contents(folder):
    """The run's files without what may differ: times, and the folder's own name."""
    found = {name: (folder / name).read_bytes() for name in ("best.pt", "last.pt")}
    for name in logs.IDENTITY:
        found[name] = [{k: v for k, v in record.items() if k not in ("seconds", "tokens_per_second")}
                       for record in logs.read(folder, name)]
    summary = json.loads((folder / "summary.json").read_text())
    return found | {"summary": {k: v for k, v in summary.items() if k != "seconds"}}


def test_every_point_of_the_loss_curve_is_over_the_same_windows(run_folder):
    assert {r["windows"] for r in logs.read(run_folder, "log.jsonl") if "val_loss" in r} == {8}


@pytest.mark.parametrize("position", POSITIONS)
def test_overfits_one_batch(position):
    made = small(position=position, learning_rate=1e-2, warmup_iters=0, max_iters=150)
    model, generator = GPT(made, 23), torch.Generator().manual_seed(0)
    x, y = torch.randint(23, (2, 4, 16), generator=generator)
    optimizers = optim.build(model, made)
    for step in range(150):
        optim.set_learning_rate(optimizers, step, made)
        loss, norm = train.update(model, optimizers, x, y, step, made, torch.autocast("cpu", enabled=False))
    assert loss < 0.1 and norm > 0


def test_an_update_brings_parameters_back_into_their_range():
    made = small(position="kerple")
    model = GPT(made, 23)
    model.position.r2.data.fill_(0.005)
    optimizers = optim.build(model, made)
    optim.set_learning_rate(optimizers, 0, made)
    x, y = torch.randint(23, (2, 4, 16), generator=torch.Generator().manual_seed(0))
    train.update(model, optimizers, x, y, 0, made, torch.autocast("cpu", enabled=False))
    assert (model.position.r2 == 0.01).all()


def test_accumulated_gradients_equal_the_larger_batch():
    losses = []
    for micro in (1, 2, 4):
        made = small(batch_size=8 // micro, gradient_accumulation_steps=micro)
        model = GPT(made, 23)
        x, y = torch.randint(23, (2, 8, 16), generator=torch.Generator().manual_seed(0))
        optimizers = optim.build(model, made)
        losses.append([train.update(model, optimizers, x, y, step, made, torch.autocast("cpu", enabled=False))
                       for step in range(3)])
    np.testing.assert_allclose(losses[1], losses[0], rtol=1e-4)
    np.testing.assert_allclose(losses[2], losses[0], rtol=1e-4)


@pytest.mark.parametrize("changes", [
    {},
    {"optimizer": "adamw", "position": "learned"},
    {"dropout": 0.2, "gradient_accumulation_steps": 2, "position": "sinusoidal"},
    {"length_interval": 10, "position": "none", "max_iters": 31},
    {"position": "t5", "random_positions": 300}, {"position": "kerple", "window": 9}, {"position": "fire", "n_kv_head": 1},
    {"position": "alibi", "parallel_block": True, "canon": 4}, {"attention": "linear", "qk_norm": "weighted"},
    {"dtype": "bfloat16", "dropout": 0.2, "window": 9, "n_kv_head": 1}])
def test_stopped_and_resumed_equals_never_stopped(corpus, tmp_path, changes, monkeypatch):
    monkeypatch.setattr(machine, "computes_bfloat16", lambda: True)
    assert run(corpus, tmp_path / "whole", **changes) == 0
    for stop_at in (7, 20):  # between checkpoints, and at one
        assert run(corpus, tmp_path / "parts", stop_at=stop_at, **changes) == 0
        assert not (tmp_path / "parts" / "summary.json").exists()
    assert run(corpus, tmp_path / "parts", **changes) == 0
    assert contents(tmp_path / "whole") == contents(tmp_path / "parts")


def test_resumed_from_an_older_checkpoint_repeats_what_came_after(corpus, tmp_path):
    """As after kill -9: the log is ahead of last.pt, and its last line is torn."""
    assert run(corpus, tmp_path / "whole") == 0
    assert run(corpus, tmp_path / "parts", stop_at=10) == 0
    older = (tmp_path / "parts" / "last.pt").read_bytes()
    assert run(corpus, tmp_path / "parts", stop_at=25) == 0
    (tmp_path / "parts" / "last.pt").write_bytes(older)
    with open(tmp_path / "parts" / "log.jsonl", "a") as file:
        file.write('{"step": 26, "train_lo')
    assert run(corpus, tmp_path / "parts") == 0
    assert contents(tmp_path / "whole") == contents(tmp_path / "parts")


@pytest.mark.parametrize("number, code", [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_signal_saves_and_exits(corpus, tmp_path, number, code):
    made = SMALL | {"dataset": str(corpus), "max_iters": 3000, "log_interval": 1}
    (tmp_path / "config.toml").write_text(config.build(config.Config, made).toml())
    command = [sys.executable, str(ROOT / "train.py"), str(tmp_path / "config.toml"), "--out_dir", str(tmp_path / "run")]
    process = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    deadline = time.time() + 60
    while time.time() < deadline and not (tmp_path / "run" / "log.jsonl").exists():
        time.sleep(0.05)
    process.send_signal(number)
    out, err = process.communicate(timeout=60)
    assert process.returncode == code and "Traceback" not in err
    step = torch.load(tmp_path / "run" / "last.pt", weights_only=True)["step"]
    assert 0 < step < 3000 and f"stopped at step {step} of 3000 and saved" in out


def test_a_finished_run_says_so_and_keeps_its_bytes(corpus, run_folder, capsys):
    before = {p.name: p.read_bytes() for p in run_folder.iterdir()}
    assert run(corpus, run_folder, seed=1) == 0
    assert "finished at step 30" in capsys.readouterr().out
    assert {p.name: p.read_bytes() for p in run_folder.iterdir()} == before


def test_a_larger_max_iters_goes_on_and_says_so(corpus, tmp_path, capsys):
    assert run(corpus, tmp_path / "run") == 0
    assert run(corpus, tmp_path / "run", max_iters=40) == 0
    assert "max_iters grows from 30 to 40" in capsys.readouterr().out
    assert [r["step"] for r in logs.read(tmp_path / "run", "log.jsonl") if "train_loss" in r] == [10, 20, 30, 40]
    with pytest.raises(config.UserError, match="max_iters = 40, not 30"):
        run(corpus, tmp_path / "run")


def test_overwrite_begins_anew(corpus, tmp_path):
    assert run(corpus, tmp_path / "run", seed=1) == 0
    assert run(corpus, tmp_path / "run", seed=2, overwrite=True, stop_at=1) == 0
    assert logs.read(tmp_path / "run", "lengths.jsonl") == []


def test_encodings_see_identical_batches_and_start_alike(corpus, tmp_path, monkeypatch):
    seen = {}
    original = train.update

    def recording(model, optimizers, x, y, step, made, *rest):
        if step == 0:
            shared = {k: v.clone() for k, v in model.state_dict().items() if not k.startswith("position")}
            seen[made.position] = (shared, [])
        seen[made.position][1].append(x.clone())
        return original(model, optimizers, x, y, step, made, *rest)

    monkeypatch.setattr(train, "update", recording)
    for position in POSITIONS:
        # Another evaluation interval must not change training either.
        assert run(corpus, tmp_path / position, position=position, eval_interval=7 if position == "none" else 10) == 0
    weights, inputs = seen["none"]
    for position in POSITIONS:
        assert all(torch.equal(seen[position][0][k], weights[k]) for k in weights)
        assert all(torch.equal(a, b) for a, b in zip(seen[position][1], inputs))


def test_random_positions_depend_on_seed_and_iteration_alone(corpus, tmp_path, monkeypatch):
    seen, loss = [], GPT.loss
    monkeypatch.setattr(GPT, "loss", lambda self, *batch, pos: (seen.append(pos.tolist()), loss(self, *batch, pos=pos))[1])
    for position, changes in (("none", {"stop_at": 4}), ("alibi", {"gradient_accumulation_steps": 2, "stop_at": 4})):
        assert run(corpus, tmp_path / position, position=position, random_positions=500, **changes) == 0
    alone, accumulated = seen[:4], seen[4:]
    assert accumulated == [pos for pos in alone for _ in range(2)]  # the micro-batches of an iteration share them
    assert len({tuple(pos) for pos in alone}) == 4


def test_evaluation_settings_do_not_change_training(corpus, tmp_path):
    assert run(corpus, tmp_path / "a", dropout=0.1) == 0
    assert run(corpus, tmp_path / "b", dropout=0.1, eval_interval=3, eval_windows=4, length_interval=9, log_interval=1) == 0
    last = [torch.load(tmp_path / name / "last.pt", weights_only=True)["model"] for name in "ab"]
    assert all(torch.equal(last[0][k], last[1][k]) for k in last[0])


def test_loss_that_is_no_number_stops_the_run_and_keeps_the_checkpoint(corpus, tmp_path, monkeypatch, capsys):
    assert run(corpus, tmp_path / "run", stop_at=20) == 0
    before = (tmp_path / "run" / "last.pt").read_bytes()
    original = GPT.loss
    calls = []

    def poisoned(self, ids, targets, **kw):
        calls.append(1)
        return original(self, ids, targets, **kw) * (float("nan") if len(calls) == 5 else 1)

    monkeypatch.setattr(GPT, "loss", poisoned)
    argv = [f"--{k}={str(v).lower() if isinstance(v, bool) else v}" for k, v in SMALL.items()]
    assert train.main([*argv, "--dataset", str(corpus), "--out_dir", str(tmp_path / "run")]) == 3
    error = capsys.readouterr().err
    assert "step 25: loss nan, learning rate" in error and "gradient norm nan" in error
    assert (tmp_path / "run" / "last.pt").read_bytes() == before


def test_stops_at_the_target_loss_over_the_whole_validation_split(corpus, tmp_path):
    assert run(corpus, tmp_path / "run", max_iters=300, target_val_loss=2.2) == 0
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert summary["final_val_loss"] <= 2.2 and summary["step"] < 300
    whole = windows(load_data(small(dataset=str(corpus))).val, 32)
    restored = runs.restore(tmp_path / "run", "last")
    found = lengths.evaluate(restored.model, load_data(restored.config), whole)
    assert len(whole) == (1200 - 1) // 32 and found["val_loss"] == pytest.approx(summary["final_val_loss"], abs=1e-6)


def test_a_target_that_was_not_reached_is_said(corpus, tmp_path, capsys):
    assert run(corpus, tmp_path / "run", target_val_loss=0.1) == 0
    assert "target_val_loss = 0.1 was not reached" in capsys.readouterr().out


def test_killed_after_the_target_was_reached_ends_as_if_it_had_not_been(corpus, tmp_path):
    for name in ("whole", "parts"):
        assert run(corpus, tmp_path / name, max_iters=300, target_val_loss=2.2) == 0
    (tmp_path / "parts" / "summary.json").unlink()
    assert run(corpus, tmp_path / "parts", max_iters=300, target_val_loss=2.2) == 0
    assert contents(tmp_path / "whole") == contents(tmp_path / "parts")


def test_a_signal_during_a_length_curve_saves_what_was_trained(corpus, tmp_path, monkeypatch):
    monkeypatch.setattr(lengths, "measure", lambda *_, **__: signal.raise_signal(signal.SIGTERM))
    assert run(corpus, tmp_path / "run", length_interval=7) == 143
    assert torch.load(tmp_path / "run" / "last.pt", weights_only=True)["step"] == 7


def test_summary_and_log_hold_what_the_design_promises(run_folder):
    summary = json.loads((run_folder / "summary.json").read_text())
    model = GPT(small(seed=1), 10)
    assert summary["tokens"] == 30 * 4 * 32 and summary["step"] == 30
    assert summary["parameters"] > sum(p.numel() for p in model.blocks.parameters())
    for key in ("final_val_loss", "best_val_loss", "best_step", "seconds", "python", "torch", "numpy", "git_commit",
                "data_sha256", "device", "dtype", "compile", "threads"):
        assert key in summary
    first = logs.read(run_folder, "log.jsonl")[0]
    assert {"step", "tokens", "seconds", "train_loss", "lr", "tokens_per_second"} <= first.keys()
    assert config.build(config.Config, config.read_toml(run_folder / "config.toml")) == small(
        dataset=config.read_toml(run_folder / "config.toml")["dataset"], out_dir=str(run_folder), seed=1)


def test_logged_loss_is_the_mean_over_the_batch(corpus, tmp_path):
    assert run(corpus, tmp_path / "run", gradient_accumulation_steps=2, log_interval=1, max_iters=6, warmup_iters=2) == 0
    made = small(dataset=str(corpus), gradient_accumulation_steps=2)
    data = load_data(made)
    x, y = next(batches(data.train, 8, 32, made.seed))
    expected = GPT(made, data.tokenizer.vocab_size).losses(torch.from_numpy(x), torch.from_numpy(y)).mean().item()
    assert logs.read(tmp_path / "run", "log.jsonl")[0]["train_loss"] == pytest.approx(expected, rel=1e-5)


def test_data_prepared_otherwise_is_other_data(corpus):
    shas = {load_data(small(dataset=str(corpus), tokenizer=name)).sha256 for name in ("char", "byte", "char")}
    assert len(shas) == 2


def test_changed_text_is_refused_on_resume(tmp_path):
    from tests.conftest import text

    (tmp_path / "text.txt").write_text(text(12_000))
    assert run(tmp_path / "text.txt", tmp_path / "run", stop_at=10) == 0
    (tmp_path / "text.txt").write_text(text(12_000, seed=1))
    with pytest.raises(config.UserError, match="has changed since this run began"):
        run(tmp_path / "text.txt", tmp_path / "run")


# Beginning from another run


def extend(run_folder, folder, *argv):
    """Fine-tune a run to four times its training length with yarn."""
    values = {"init_from": run_folder, "block_size": 128, "rope_scaling": "yarn", "rope_factor": 4, "max_iters": 12,
              "warmup_iters": 2, "batch_size": 2, "threads": 1, "wandb": "disabled", "eval_interval": 6, "eval_windows": 4,
              "length_windows": 16, "out_dir": folder}
    return train.main([*(f"--{key}={value}" for key, value in values.items()), *argv])


def test_an_extended_context_inherits_the_original_one_and_is_called_fine_tuned(run_folder, tmp_path, monkeypatch):
    began, update = [], train.update
    monkeypatch.setattr(train, "update", lambda model, *rest: (
        began.append({k: v.clone() for k, v in model.state_dict().items()}), update(model, *rest))[1])
    assert extend(run_folder, tmp_path / "run") == 0
    weights = torch.load(run_folder / "best.pt", weights_only=True)["model"]
    assert all(torch.equal(began[0][k], weights[k]) for k in weights)
    made, trained = config.read_config(tmp_path / "run"), config.read_config(run_folder)
    assert (made.block_size, made.rope_original_context, made.rope_scaling, made.rope_factor) == (128, 32, "yarn", 4.0)
    assert made.length_unit == 32
    assert (made.n_layer, made.n_embd, made.dataset) == (trained.n_layer, trained.n_embd, trained.dataset)
    assert made.learning_rate == config.Config().learning_rate  # how to train is not inherited
    records = logs.read(tmp_path / "run", "lengths.jsonl")
    assert {(r["scaling"], r["factor"], r["applied"], r["finetuned"]) for r in records} == {("yarn", 4.0, 4.0, True)}
    # The same windows as those of the run it began from, so that the two can be subtracted.
    before = logs.read(run_folder, "lengths.jsonl")
    assert [r["context"] for r in records] == [r["context"] for r in before]
    assert {r["data"] for r in records} == {r["data"] for r in before}
    table = compare.table([run_folder, tmp_path / "run"])
    assert "difference" in table and "run yarn-4.0-finetuned  rope" in table


def test_an_extended_run_resumes_like_any_other(run_folder, tmp_path):
    assert extend(run_folder, tmp_path / "whole") == 0
    assert extend(run_folder, tmp_path / "parts", "--stop_at", "5") == 0
    assert extend(run_folder, tmp_path / "parts") == 0
    assert contents(tmp_path / "whole") == contents(tmp_path / "parts")


def test_an_extended_run_can_be_extended_again_from_its_original_context(run_folder, tmp_path):
    assert extend(run_folder, tmp_path / "one", "--stop_at", "12") == 0
    assert extend(tmp_path / "one", tmp_path / "two", "--block_size", "256", "--rope_factor", "8", "--stop_at", "1") == 0
    assert config.read_config(tmp_path / "two").rope_original_context == 32


def test_a_context_extended_without_a_scaling_is_the_original_one_of_later_scalings(run_folder, tmp_path):
    assert extend(run_folder, tmp_path / "run", "--rope_scaling", "none", "--rope_factor", "auto", "--stop_at", "1") == 0
    made = config.read_config(tmp_path / "run")
    assert (made.rope_original_context, made.original_context, made.unit) == (None, 128, 32)


def test_the_threshold_of_fire_goes_with_its_weights(corpus, tmp_path):
    assert run(corpus, tmp_path / "fire", position="fire", max_iters=6) == 0
    assert extend(tmp_path / "fire", tmp_path / "run", "--rope_scaling", "none", "--rope_factor", "auto", "--stop_at", "1") == 0
    assert config.read_config(tmp_path / "run").fire_threshold == 8


def test_extended_seeds_are_one_row(corpus, tmp_path):
    for seed in (1, 2):
        assert run(corpus, tmp_path / f"rope-{seed}", seed=seed, max_iters=6) == 0
        assert extend(tmp_path / f"rope-{seed}", tmp_path / f"long-{seed}", "--seed", str(seed), "--max_iters", "6") == 0
    assert "long (2 runs)" in compare.table([tmp_path / "long-1", tmp_path / "long-2"])


def test_naming_the_trained_scaling_again_keeps_its_settings(run_folder, tmp_path):
    assert extend(run_folder, tmp_path / "run", "--beta_fast", "16", "--stop_at", "12") == 0
    kept = runs.restore(tmp_path / "run", rope_scaling="yarn").config
    assert (kept.rope_factor, kept.beta_fast) == (4.0, 16.0)
    assert runs.restore(tmp_path / "run", rope_scaling="linear").config.rope_factor == "auto"


def test_another_text_is_read_with_the_tokenizer_of_the_origin(run_folder, corpus, tmp_path):
    other = tmp_path / "other.txt"
    other.write_text(corpus.read_text()[::-1], encoding="utf-8")
    assert extend(run_folder, tmp_path / "run", "--dataset", str(other), "--stop_at", "1") == 0
    assert (tmp_path / "run" / "tokenizer.json").read_bytes() == (run_folder / "tokenizer.json").read_bytes()


@pytest.mark.parametrize("argv, words", [
    (["--tokenizer", "byte"], "not the tokens of"), (["--n_layer", "3"], "weights of another configuration: blocks.2"),
    (["--init_from", "nowhere"], "nowhere: no run in this folder"),
    (["--rope_scaling", "linear", "--beta_fast", "3"], "beta_fast"),
])
def test_an_origin_that_does_not_fit_is_refused_before_anything_is_written(argv, words, run_folder, tmp_path):
    with pytest.raises(config.UserError, match=words):
        extend(run_folder, tmp_path / "run", *argv)
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("lacking", ["C++ compiler", "Python.h"])
def test_training_that_cannot_be_compiled_is_eager_and_says_so(lacking, corpus, tmp_path, monkeypatch, capsys):
    if lacking == "Python.h":
        monkeypatch.setattr(machine.shutil, "which", lambda name: "/usr/bin/" + name)
        monkeypatch.setattr(machine.sysconfig, "get_path", lambda name: str(tmp_path))
    else:
        monkeypatch.setattr(machine.shutil, "which", lambda name: None)
    assert run(corpus, tmp_path / "run", compile=True, stop_at=2) == 0
    output = capsys.readouterr().out
    assert f"not compiled: there is no {lacking}" in output and ", not compiled," in output


@pytest.mark.parametrize("capable, resolved", [({"avx512_bf16": True}, "bfloat16"), ({"avx2": True}, "float32")])
def test_bfloat16_on_a_cpu_that_lacks_it_is_float32_and_says_so(capable, resolved, corpus, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(machine.torch.cpu, "get_capabilities", lambda: capable)
    assert run(corpus, tmp_path / "run", dtype="bfloat16", stop_at=2) == 0
    output = capsys.readouterr().out
    assert f" cpu, {resolved}, " in output and ("float32: this processor" in output) == (resolved == "float32")
    other = {"avx512_bf16": resolved == "float32"}  # what was resolved is kept, wherever the run goes on
    monkeypatch.setattr(machine.torch.cpu, "get_capabilities", lambda: other)
    assert run(corpus, tmp_path / "run", dtype="bfloat16", stop_at=4) == 0
    assert f" cpu, {resolved}, " in capsys.readouterr().out
    runs.restore(tmp_path / "run", "last")  # evaluates in float32 in any case, and says nothing
    assert not capsys.readouterr().out


@pytest.mark.slow
@pytest.mark.parametrize("changes", [
    *({"position": name} for name in POSITIONS), {"attention": "linear"}, {"window": 9, "n_kv_head": 1, "canon": 3},
    {"rope_values": True, "qk_norm": "weighted", "parallel_block": True}, {"dtype": "bfloat16"}], ids=str)
def test_compiled_training_equals_eager(corpus, tmp_path, changes, monkeypatch):
    monkeypatch.setattr(machine, "computes_bfloat16", lambda: True)
    for compiled in (False, True):
        assert run(corpus, tmp_path / str(compiled), **changes, compile=compiled, log_interval=1, max_iters=10) == 0
    eager, fast = ([r["train_loss"] for r in logs.read(tmp_path / name, "log.jsonl") if "train_loss" in r]
                   for name in ("False", "True"))
    np.testing.assert_allclose(eager, fast, rtol=1e-2 if "dtype" in changes else 1e-4)
