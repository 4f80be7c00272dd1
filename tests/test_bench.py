"""The measurements: that the references compute the same, and that rows come out."""
import json
import time
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import pytest
import torch

import bench
from model import GPT
from tests.conftest import small
from tests.test_bad_input import refused


def test_plain_model_is_ours_with_learned_positions():
    model = GPT(small(position="learned"), 23)
    plain = bench.plain_model(23, 2, 2, 32, 32)
    plain.load_state_dict({
        "tokens.weight": model.embed.weight, "positions.weight": model.position.table.weight, "norm.weight": model.norm.weight,
        "head.weight": model.embed.weight,
        **{f"blocks.{i}.{theirs}.weight": block.get_submodule(ours).weight for i, block in enumerate(model.blocks)
           for theirs, ours in (("norm1", "norm1"), ("norm2", "norm2"), ("attention.qkv", "attention.qkv"),
                                ("attention.out", "attention.out"), ("mlp.0", "mlp.up"), ("mlp.2", "mlp.out"))}})
    x, y = torch.randint(23, (2, 3, 32), generator=torch.Generator().manual_seed(0))
    assert plain(x, y).item() == pytest.approx(model.loss(x, y).item(), abs=1e-5)


def slow():
    return lambda: time.sleep(0.05)


def fast():
    return lambda: time.sleep(0.005)


def test_rows_say_how_many_times_faster_or_longer(monkeypatch):
    monkeypatch.setattr(bench, "ProcessPoolExecutor", lambda count, context: ThreadPoolExecutor(count))  # no imports
    row = bench.faster("what", "against", 3, fast, slow, pairs=3)
    assert 3 < row.value < 20 and row.met and row.ours < row.theirs
    row = bench.costs("what", "against", 3, fast, slow, pairs=3, times=2)
    assert row.value < 0.2 and row.met
    row = bench.costs("what", "against", 3, slow, fast, pairs=3)
    assert row.value > 3 and not row.met


def test_rows_are_printed_and_written(tmp_path, capsys, monkeypatch):
    monkeypatch.setitem(bench.ROWS, "linear", lambda options: [bench.costs("what", "other", 2, fast, slow, options.pairs)])
    assert bench.main(["linear", "--pairs", "1", "--json_file", str(tmp_path / "rows.json")]) == 0
    written, = json.loads((tmp_path / "rows.json").read_text())
    assert written["row"] == "linear" and written["met"] and f"{written['value']:.2f} x" in capsys.readouterr().out


@pytest.mark.parametrize("argv, words", [
    (["speedrnu"], "did you mean speedrun?"), (["step", "--pairs", "0"], "pairs = 0"),
    (["step", "--device", "cuda:9"], "not on this machine"), (["step", "--json_file", "no/such/x.json"], "no such folder")])
def test_bad_rows_are_named(argv, words):
    refused(lambda: bench.main(argv), words)


@pytest.mark.parametrize("position", bench.POSITIONS)
def test_both_sides_of_a_length_curve_run(position, corpus, monkeypatch):
    monkeypatch.setattr(bench, "LONG", {"length_windows": 2, "n_layer": 1, "n_embd": 8, "n_head": 2, "block_size": 8,
                                        "dataset": str(corpus), "tokenizer": "char"})
    bench.curve(position)()
    bench.forward(position)()


@pytest.mark.parametrize("work", [
    partial(bench.our_step, "cpu", False, 1, **bench.SMALL | {"block_size": 8}), partial(bench.linear_attention, 130, 1),
    partial(bench.plain_step, "cpu", 1, 1, 2, 16, 8, 2), partial(bench.sampling, "cpu", 16, 2, 3),
    partial(bench.recomputing, "cpu", 16, 5, 2)])
def test_work_that_is_timed_runs(work):
    work()()
