"""Length curves: every context scores the same targets, in windows that data and block_size fix."""
import json
import math
import shutil

import numpy as np
import pytest
import torch

import batches
import lengths
import logs
import run as runs
import train
from batches import Data, load_data, window_ends
from lengths import MULTIPLES, bits_per_byte, by_position, choose_contexts, curves, ends, evaluate, window_losses
from model import GPT
from position import POSITIONS
from tests.conftest import small
from tokenizer import Char

V, BLOCK, K = 10, 32, 2
CONTEXTS = [8, 16, 32, 64, 128, 256, 512]


@pytest.fixture(scope="module")
def data():
    """A validation split of 9 documents, three of them too short for the longest window."""
    generator = np.random.default_rng(0)
    sizes = [1500, 30, 2000, 600, 64, 900, 500, 3000, 700]
    val = generator.integers(V, size=sum(sizes)).astype(np.uint8)
    return Data(val, val, [0, *np.cumsum(sizes)[:-1].tolist()], Char("abcdefghiä"), "0" * 64)


def model(**changes):
    """Untrained, with weights large enough that its losses depend on everything it sees."""
    return GPT(small(embedding_std=0.5, **changes), V).eval()


def plain_losses(model, tokens, start, context):
    """(context,) float64 losses of one window by one forward pass, without chunks, cache or batch."""
    window = torch.from_numpy(tokens[start:start + context + 1].astype(np.int64))[None]
    with torch.no_grad():
        logits = model(window[:, :-1])[0].double()
    return -logits.log_softmax(-1).gather(1, window[0, 1:, None])[:, 0].numpy()


# Where windows lie


@pytest.mark.parametrize("documents", [[0], [0, 400, 3000], [0, 5, 700, 720, 2500, 4000]])
def test_windows_lie_inside_one_document_and_score_no_target_twice(documents):
    length, stops = 5000, [*documents[1:], 5000]
    at, longest = ends(length, documents, BLOCK, 40)
    assert longest == 512 and 16 <= len(at) <= 40
    for end in at:  # inputs are end - longest ... end - 1, and the last target is end itself
        assert any(start <= end - longest and end < stop for start, stop in zip(documents, stops)), end
    scored = [i for end in at for i in range(end - K + 1, end + 1)]
    assert len(scored) == len(set(scored))


def test_windows_are_spread_evenly():
    at = window_ends(10_000, [0], 1000, 9, 2)
    assert np.diff(at).max() - np.diff(at).min() <= 1 and at[0] - 1000 == pytest.approx(500, abs=1)
    assert at[-1] == pytest.approx(9500, abs=1)


def test_all_the_room_is_used_where_there_is_little():
    assert window_ends(105, [0], 100, 50, 1).tolist() == [100, 101, 102, 103, 104]
    assert window_ends(100, [0], 100, 50, 1).tolist() == []
    assert len(window_ends(110, [0], 100, 50, 2)) == 5 and np.diff(window_ends(111, [0], 100, 50, 2)).min() >= 2


@pytest.mark.parametrize("length, longest", [(70, 32), (120, 64), (200, 128), (600, 512)])
def test_longest_context_shrinks_with_the_documents(length, longest):
    assert ends(length, [0], BLOCK, 16)[1] == longest


def record_gathered(monkeypatch):
    """-> list of (first input of each window, context) that will be evaluated."""
    seen, gather = [], batches.gather
    monkeypatch.setattr(lengths, "gather", lambda tokens, starts, size: (
        seen.append((np.asarray(starts).tolist(), size)), gather(tokens, starts, size))[1])
    return seen


@pytest.mark.parametrize("asked", [None, [8], [512, 32], [100]])
def test_window_ends_do_not_depend_on_the_contexts_asked_for(asked, data, monkeypatch):
    seen = record_gathered(monkeypatch)
    curves(model(), data, asked)
    ends_of = {}
    for starts, size in seen:
        ends_of.setdefault(size, []).extend(start + size for start in starts)
    assert sorted(ends_of) == sorted(asked or CONTEXTS)
    assert all(found == ends(len(data.val), data.documents, BLOCK, 16)[0].tolist() for found in ends_of.values())


def test_window_ends_are_the_same_for_every_encoding_and_seed(data, monkeypatch):
    seen = record_gathered(monkeypatch)
    for changes in ({"position": "rope"}, {"position": "none", "seed": 8}, {"position": "sinusoidal", "eval_windows": 3}):
        curves(model(**changes), data, [64])
    assert seen[:len(seen) // 3] * 3 == seen


# The curve


@pytest.mark.parametrize("changes", [
    *({"position": p} for p in POSITIONS), *({"rope_scaling": s} for s in ("linear", "ntk", "yarn")),
    {"rope_scaling": "dynamic", "rope_factor": 2}, {"window": 9}, {"attention": "linear"}, {"n_kv_head": 1},
    {"position": "learned", "learned_extension": "interpolate"}, {"position": "alibi", "window": 9}], ids=str)
def test_curve_equals_a_plain_loop_over_windows(changes, data, monkeypatch):
    monkeypatch.setattr(GPT, "CHUNK", 20)
    m = model(**changes)
    by_c, by_p, _ = curves(m, data)
    at, _ = ends(len(data.val), data.documents, BLOCK, 16)
    assert [r["context"] for r in by_c] == [c for c in CONTEXTS if c <= m.position.reach]
    for record in by_c:
        losses = np.array([plain_losses(m, data.val, end - record["context"], record["context"])[-K:] for end in at])
        sizes = data.tokenizer.byte_lengths()
        scored = sum(sizes[data.val[end - i]] for end in at for i in range(K))
        means = losses.mean(1)
        assert record["loss"] == pytest.approx(losses.mean(), abs=2e-6)
        assert record["stderr"] == pytest.approx(means.std(ddof=1) / math.sqrt(len(at)), abs=2e-6)
        assert record["bpb"] == pytest.approx(losses.sum() / math.log(2) / scored, abs=2e-6)
        assert record["window_losses"] == pytest.approx(means.tolist(), abs=1e-4)
        assert (record["windows"], record["targets"]) == (len(at), len(at) * K)
    far = by_c[-1]["context"]
    losses = np.array([plain_losses(m, data.val, end - far, far) for end in at])
    for record, following in zip(by_p, [*[r["position"] for r in by_p[1:]], far]):
        part = losses[:, record["position"]:following]
        assert record["loss"] == pytest.approx(part.mean(), abs=2e-6)
        assert record["stderr"] == pytest.approx(part.mean(1).std(ddof=1) / math.sqrt(len(at)), abs=2e-6)


def test_every_context_scores_the_same_targets(data, monkeypatch):
    scored, losses = {}, GPT.losses

    def recorded(self, ids, targets, last, pos):
        scored.setdefault(ids.size(1), []).extend(targets[:, -K:].tolist())
        return losses(self, ids, targets, last, pos)

    monkeypatch.setattr(GPT, "losses", recorded)
    curves(model(), data)
    assert list(scored) == CONTEXTS and all(targets == scored[8] for targets in scored.values())


def test_bytes_of_the_scored_targets_are_counted(data, monkeypatch):
    counted = []
    monkeypatch.setattr(Data, "bytes", lambda self, indices: counted.append(np.asarray(indices)) or 1)
    curves(model(), data, [8])
    at, _ = ends(len(data.val), data.documents, BLOCK, 16)
    assert counted[0].tolist() == [[end - 1, end] for end in at]


@pytest.mark.parametrize("T", [2, 3, 8, 32, 100, 512, 4096])
def test_bins_cover_every_position_once_and_average_to_the_whole(T):
    losses = np.random.default_rng(T).random((5, T))
    records = by_position(losses)
    edges = [r["position"] for r in records] + [T]
    assert edges[0] == 0 and edges == sorted(set(edges))
    assert [r["count"] for r in records] == [5 * (b - a) for a, b in zip(edges, edges[1:])]
    assert sum(r["loss"] * r["count"] for r in records) / losses.size == pytest.approx(losses.mean(), abs=1e-12)
    assert len(records) <= 2 * math.log2(T) + 2


def test_standard_error_is_over_windows():
    losses = np.repeat(np.random.default_rng(0).random((9, 1)), 64, 1)  # all targets of a window alike
    record = lengths.by_context(losses, 100)
    assert record["stderr"] == pytest.approx(losses[:, 0].std(ddof=1) / 3)
    assert by_position(losses)[-1]["stderr"] == pytest.approx(losses[:, 0].std(ddof=1) / 3)


def test_bits_per_byte_of_a_uniform_guess():
    assert bits_per_byte(np.full((3, 4), math.log(256)), 12) == pytest.approx(8)


def test_contexts_are_multiples_of_block_size_unless_asked():
    assert choose_contexts(model(), None, 512) == (CONTEXTS, [])
    assert choose_contexts(model(), [100, 50, 100], 512) == ([50, 100], [])
    assert choose_contexts(model(length_unit=16), None, 512)[0] == [4, 8, 16, 32, 64, 128, 256]
    assert [int(m * 32) for m in MULTIPLES] == CONTEXTS


def test_contexts_that_the_text_cannot_hold_are_skipped_by_name(data):
    short = Data(data.val, data.val[:200], [0], data.tokenizer, data.sha256)
    by_c, by_p, skipped = curves(model(), short)
    assert [r["context"] for r in by_c] == [8, 16, 32, 64, 128] and by_p
    assert [line.partition(":")[0] for line in skipped] == ["context 256", "context 512"]
    assert all("text" in line and "128" in line for line in skipped)
    assert curves(model(), data, [4096])[2] == ["context 4096: windows end at 512 tokens, 16 times 32"]


@pytest.mark.parametrize("size", [3, 7])
def test_documents_too_short_for_any_context_leave_a_sentence_and_no_curve(size, data):
    short = Data(data.val, data.val, list(range(0, len(data.val), size)), data.tokenizer, data.sha256)
    by_c, by_p, skipped = curves(model(), short)
    assert (by_c, by_p) == ([], []) and len(skipped) == len(CONTEXTS)


def test_a_single_window_has_no_standard_error_but_is_no_crash(data):
    short = Data(data.val, data.val[:80], [0, *range(10, 80, 7)], data.tokenizer, data.sha256)
    by_c, _, skipped = curves(model(), short)
    json.loads(json.dumps([by_c, skipped], allow_nan=False))


def test_contexts_shorter_than_the_targets_are_skipped_by_name(data):
    by_c, by_p, skipped = curves(model(), data, [1])
    assert (by_c, by_p) == ([], []) and skipped == ["context 1: shorter than the 2 targets that are scored"]


def test_learned_positions_end_at_the_training_length_and_say_so(data):
    by_c, _, skipped = curves(model(position="learned"), data)
    assert [r["context"] for r in by_c] == [8, 16, 32]
    assert skipped == [f"context {c}: learned positions end at 32" for c in (64, 128, 256, 512)]


def test_interpolated_tables_go_on_and_say_so(data, tmp_path):
    changes = {"position": "learned", "learned_extension": "interpolate"}
    (tmp_path / "config.toml").write_text(small(**changes).toml(), encoding="utf-8")
    lengths.measure(tmp_path, model(**changes), 5, "best", data, logs.Silent(), [16, 32, 64], trained=small(position="learned"))
    records = logs.read(tmp_path, "lengths.jsonl")
    assert [(r["context"], r["scaling"], r["applied"], r["finetuned"]) for r in records] == [
        (16, "interpolate", 1, False), (32, "interpolate", 1, False), (64, "interpolate", 2, False)]


@pytest.mark.parametrize("position", POSITIONS)
def test_random_positions_end_the_curve_and_are_drawn_anew_for_each_batch(position, data, monkeypatch):
    made, seen = model(position=position, random_positions=100), []
    losses = GPT.losses
    monkeypatch.setattr(GPT, "losses", lambda self, ids, targets, last, pos: (
        seen.append(pos.tolist()), losses(self, ids, targets, last, pos))[1])
    monkeypatch.setattr(lengths, "TOKENS", 256)
    by_c, _, skipped = curves(made, data)
    assert [r["context"] for r in by_c] == [8, 16, 32, 64]
    assert skipped == [f"context {c}: {position} positions end at 100" for c in (128, 256, 512)]
    drawn = [pos for pos in seen if len(pos) == 64]
    assert len(drawn) == len({tuple(pos) for pos in drawn}) > 1 and all(max(pos) < 100 for pos in drawn)
    before = list(seen)
    seen.clear()
    curves(made, data)
    assert seen == before


@pytest.mark.parametrize("changes, applied", [
    ({}, [1, 1, 1, 1]), ({"rope_scaling": "yarn"}, [1, 1, 2, 16]),
    ({"rope_scaling": "dynamic", "rope_factor": 2}, [1, 1, 3, 31]),
    ({"rope_scaling": "linear", "rope_factor": 4}, [4, 4, 4, 4]),
    ({"rope_scaling": "ntk", "rope_original_context": 16}, [1, 2, 4, 32]),
])
def test_factor_that_was_applied_is_recorded(changes, applied, data):
    m, used = model(**changes), []
    frequencies = m.position.frequencies
    expected = {c: frequencies(c)[0] for c in (8, 32, 64, 512)}

    def recorded(length, device=None):
        used.append(frequencies(length, device)[0])
        return frequencies(length, device)

    m.position.frequencies = recorded
    by_c, _, _ = curves(m, data, [8, 32, 64, 512])
    assert [r["applied"] for r in by_c] == applied
    assert all(any(torch.equal(freq, e) for e in expected.values()) for freq in used)  # chunks are turned as their whole window


# Memory


@pytest.mark.parametrize("changes", [
    {}, {"rope_scaling": "yarn"}, {"position": "sinusoidal"}, {"position": "none"}, {"position": "alibi"},
    {"position": "fire", "window": 40}, {"attention": "linear"}], ids=str)
@pytest.mark.parametrize("chunk, logits", [(7, 2**25), (64, 3 * V), (200, 1), (512, 2**25)])
@pytest.mark.parametrize("last", [None, 1, 5, 150])
def test_parts_give_the_losses_of_the_whole(changes, chunk, logits, last, data, monkeypatch):
    m = model(**changes)
    at = np.array([250, 900])
    whole = np.stack([plain_losses(m, data.val, end - 200, 200) for end in at])
    monkeypatch.setattr(GPT, "CHUNK", chunk)
    monkeypatch.setattr(GPT, "LOGITS", logits)
    found = window_losses(m, data.val, at, 200, last or 200)
    assert found.dtype == np.float64 and np.allclose(found, whole[:, -(last or 200):], atol=2e-6)


def test_nothing_as_large_as_a_square_of_the_window_is_ever_built(data, monkeypatch):
    from torch.utils._python_dispatch import TorchDispatchMode

    class Largest(TorchDispatchMode):
        elements = 0

        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            result = function(*args, **(kwargs or {}))
            for part in result if isinstance(result, tuple | list) else [result]:
                if isinstance(part, torch.Tensor):
                    self.elements = max(self.elements, part.numel())
            return result

    T = 3000
    monkeypatch.setattr(GPT, "CHUNK", 32)
    with Largest() as largest:
        window_losses(model(), data.val, np.array([T + 10]), T, 2)
    assert 32 * T <= largest.elements <= 5 * 32 * T < T * T / 4


def test_a_window_longer_than_a_batch_is_a_batch_of_its_own(data, monkeypatch):
    monkeypatch.setattr(lengths, "TOKENS", 100)
    found = window_losses(model(), data.val, np.array([300, 700, 900]), 200, 2)
    assert np.allclose(found[1], plain_losses(model(), data.val, 500, 200)[-2:], atol=2e-6)


def test_batches_of_windows_stay_small(data, monkeypatch):
    seen = record_gathered(monkeypatch)
    monkeypatch.setattr(lengths, "TOKENS", 600)
    found = window_losses(model(), data.val, np.arange(300, 310), 200, 3)
    assert [len(starts) for starts, _ in seen] == [3, 3, 2, 2] and found.shape == (10, 3)


def test_long_windows_are_computed_together_as_far_as_their_chunks_fit(data, monkeypatch):
    seen = record_gathered(monkeypatch)
    monkeypatch.setattr(lengths, "TOKENS", 100)
    monkeypatch.setattr(GPT, "CHUNK", 50)
    window_losses(model(), data.val, np.arange(300, 304), 200, 3)
    assert [len(starts) for starts, _ in seen] == [2, 2]


# Validation


def test_evaluation_is_the_mean_over_its_windows(data):
    m, starts = model(dropout=0.5), batches.windows(data.val, BLOCK)
    m.train()
    result = evaluate(m, data, starts)
    m.eval()
    losses = np.array([plain_losses(m, data.val, start, BLOCK) for start in starts])
    scored = data.tokenizer.byte_lengths()[data.val[1:len(starts) * BLOCK + 1]].sum()
    assert len(starts) == (len(data.val) - 1) // BLOCK == result["windows"]
    assert result["val_loss"] == pytest.approx(losses.mean(), abs=2e-6)
    assert result["val_stderr"] == pytest.approx(losses.mean(1).std(ddof=1) / math.sqrt(len(starts)), abs=2e-6)
    assert result["val_bpb"] == pytest.approx(losses.sum() / math.log(2) / scored, abs=2e-6)


# The program


@pytest.fixture
def copy(run_folder, tmp_path):
    return shutil.copytree(run_folder, tmp_path / "rope-1")


def test_records_say_what_they_are(run_folder):
    for name, key in (("lengths.jsonl", "context"), ("positions.jsonl", "position")):
        for record in logs.read(run_folder, name):
            assert {"step", "checkpoint", "scaling", "factor", "finetuned", "loss", "stderr", key} <= record.keys()
    summary = json.loads((run_folder / "summary.json").read_text(encoding="utf-8"))
    records = logs.read(run_folder, "lengths.jsonl")
    assert [r["context"] for r in records] == CONTEXTS
    assert {(r["step"], r["checkpoint"], r["scaling"], r["finetuned"]) for r in records} == {
        (summary["best_step"], "best", "none", False)}


def test_another_scaling_is_added_under_its_label_and_a_repeated_call_replaces(copy, capsys):
    before = logs.read(copy, "lengths.jsonl")
    for _ in range(2):
        assert lengths.main([str(copy), "--rope_scaling", "yarn", "--contexts", "64", "32"]) == 0
        assert lengths.main([str(copy), "--rope_scaling", "linear", "--rope_factor", "4", "--contexts", "64"]) == 0
        records = logs.read(copy, "lengths.jsonl")
        assert [r for r in records if r["scaling"] == "none"] == before
        assert [(r["scaling"], r["factor"], r["context"], r["applied"]) for r in records if r["scaling"] != "none"] == [
            ("yarn", "auto", 32, 1.0), ("yarn", "auto", 64, 2.0), ("linear", 4.0, 64, 4.0)]
    assert len((copy / "lengths.jsonl").read_text(encoding="utf-8").splitlines()) == len(before) + 3
    assert "yarn-auto, zero-shot" in capsys.readouterr().out and (copy / "curves.png").read_bytes()[:4] == b"\x89PNG"


def test_the_same_curve_again_gives_the_same_numbers(copy):
    before = logs.read(copy, "lengths.jsonl"), logs.read(copy, "positions.jsonl")
    assert lengths.main([str(copy)]) == 0
    assert (logs.read(copy, "lengths.jsonl"), logs.read(copy, "positions.jsonl")) == before


def test_a_shorter_curve_leaves_no_positions_of_a_longer_one_behind(copy):
    assert lengths.main([str(copy), "--contexts", "100"]) == 0
    records = logs.read(copy, "positions.jsonl")
    assert sum(r["count"] for r in records) in (16 * 100, 16 * 512)


def test_a_line_that_a_crash_cut_off_does_not_spoil_the_next(copy):
    with open(copy / "lengths.jsonl", "a", encoding="utf-8") as file:
        file.write('{"step": 30, "chec')
    assert lengths.main([str(copy), "--contexts", "64", "--rope_scaling", "yarn"]) == 0
    assert ("yarn", 64) in {(r["scaling"], r["context"]) for r in logs.read(copy, "lengths.jsonl")}


def test_either_checkpoint_is_measured_under_its_name(copy):
    assert lengths.main([str(copy), "--checkpoint", "last", "--contexts", "64"]) == 0
    last = [r for r in logs.read(copy, "lengths.jsonl") if r["checkpoint"] == "last"]
    assert [(r["context"], r["step"]) for r in last] == [(64, 30)]


def test_settings_of_a_scaling_keep_curves_apart(copy):
    assert lengths.main([str(copy), "--rope_scaling", "yarn", "--contexts", "64"]) == 0
    assert lengths.main([str(copy), "--rope_scaling", "yarn", "--beta_fast", "8", "--contexts", "64"]) == 0
    assert lengths.main([str(copy), "--rope_scaling", "yarn", "--rope_original_context", "16", "--contexts", "64"]) == 0
    found = [(logs.curve_name(r), r["applied"]) for r in logs.read(copy, "lengths.jsonl") if r["scaling"] == "yarn"]
    assert found == [("yarn-auto", 2.0), ("yarn-auto-beta_fast-8.0", 2.0), ("yarn-auto-rope_original_context-16", 4.0)]


LONG = {"rope_scaling": "longrope", "rope_factor": 4, "short_factor": (1.0,) * 8, "long_factor": (4.0,) * 8}


@pytest.mark.parametrize("trained, evaluated, finetuned", [
    ({}, {}, False), ({}, {"rope_scaling": "yarn"}, False),
    ({"rope_scaling": "yarn", "rope_factor": 4}, {"rope_scaling": "yarn", "rope_factor": 4}, True),
    ({"rope_scaling": "yarn", "rope_factor": 4}, {"rope_scaling": "yarn", "rope_factor": 8}, False),
    ({"rope_scaling": "yarn", "rope_factor": 4}, {}, False),
    ({"rope_scaling": "yarn"}, {"rope_scaling": "yarn"}, False),  # auto was 1 at the training length
    # Trained at a stretch of 4, and measured at one of 8.
    ({"rope_scaling": "yarn", "rope_original_context": 8}, {"rope_scaling": "yarn", "rope_original_context": 8}, False),
    ({"rope_scaling": "dynamic", "rope_factor": 2}, {"rope_scaling": "dynamic", "rope_factor": 2}, False),
    (LONG, LONG, False), (LONG | {"rope_original_context": 16}, LONG | {"rope_original_context": 16}, True),
])
def test_a_curve_says_whether_the_model_was_trained_with_its_stretch(trained, evaluated, finetuned, data, tmp_path):
    (tmp_path / "config.toml").write_text(small(**trained).toml(), encoding="utf-8")
    lengths.measure(tmp_path, model(**evaluated), 5, "best", data, logs.Silent(), [64], trained=small(**trained))
    assert [r["finetuned"] for r in logs.read(tmp_path, "lengths.jsonl")] == [finetuned]


def test_table_has_both_curves(copy, capsys):
    assert lengths.main([str(copy), "--contexts", "8", "64"]) == 0
    said = capsys.readouterr().out
    records = [r for r in logs.read(copy, "positions.jsonl") if r["context"] == 64]
    line = next(line for line in said.splitlines() if line.startswith(" position")).split()
    assert line == ["position", "0", "1", "2", "4", "8", "16", "32"]
    losses = next(line for line in said.splitlines() if line.startswith(" loss")).split()[1:]
    assert losses == [f"{r['loss']:.3f}" for r in records if str(r["position"]) in line]
    assert all(r["applied"] == 1 and r["stderr"] > 0 for r in records)


def test_curve_of_the_program_is_that_of_the_checkpoint(run_folder):
    restored = runs.restore(run_folder)
    by_c, _, _ = curves(restored.model, load_data(restored.config), [32, 128])
    written = {r["context"]: r for r in logs.read(run_folder, "lengths.jsonl") if r["scaling"] == "none"}
    assert all(written[r["context"]]["loss"] == pytest.approx(r["loss"], abs=1e-6) for r in by_c)


def test_curves_during_training_are_kept_by_step(corpus, tmp_path):
    folder = tmp_path / "run"
    assert train.train(small(dataset=str(corpus), out_dir=str(folder), length_interval=10)) == 0
    records = logs.read(folder, "lengths.jsonl")
    assert {(r["step"], r["checkpoint"]) for r in records} >= {(10, "last"), (20, "last")}
