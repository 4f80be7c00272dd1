"""Sampling: a cache changes nothing, choices follow their rules, text appears as it is generated."""
import itertools
import shutil
import sys

import pytest
import torch

import run
import sample
import tokenizer
import train
from model import GPT
from options import UserError
from position import POSITIONS
from sample import choose, encode_start, stream
from tests.conftest import small

V = 40


def model(**changes):
    """A model with weights large enough that its choices depend on everything it sees."""
    return GPT(small(embedding_std=0.5, **changes), V).eval()


def random_ids(samples, length, seed=0):
    return torch.randint(V, (samples, length), generator=torch.Generator().manual_seed(seed))


def recomputed(model, ids, tokens, temperature, top_k=None, top_p=None):
    """What `stream` must give: every token from one plain pass over the whole window so far. -> ids (B, T + tokens)"""
    generator, reach, start = torch.Generator().manual_seed(5), model.position.reach, 0
    for _ in range(tokens):
        if ids.size(1) - start > reach:
            start = ids.size(1) - reach // 2
        with torch.no_grad():
            logits = model(ids[:, start:])[:, -1]
        ids = torch.cat((ids, choose(logits, temperature, top_k, top_p, generator)), 1)
    return ids


CASES = [{"position": "rope"}, {"position": "rope", "rope_scaling": "yarn"}, {"position": "rope", "rope_scaling": "ntk"},
         {"rope_scaling": "dynamic", "rope_factor": 2.0}, {"rope_fraction": 0.5}, {"window": 7}, {"attention": "linear"},
         {"n_kv_head": 1}, {"position": "learned", "learned_extension": "interpolate"},
         *({"position": name} for name in POSITIONS)]


@pytest.mark.parametrize("choice", [{"temperature": 0}, {"temperature": 0.7, "top_k": 9, "top_p": 0.9}])
@pytest.mark.parametrize("length", [1, 32, 50])
@pytest.mark.parametrize("changes", CASES, ids=lambda c: "-".join(map(str, c.values())))
def test_streaming_with_a_cache_equals_recomputing_every_window(changes, length, choice):
    m, ids, generator = model(**changes), random_ids(3, length), torch.Generator().manual_seed(5)
    new = torch.cat(list(stream(m, ids, 40, generator=generator, **choice)), 1)
    # What a factor depends on, the length of prompt and tokens together, is settled once.
    whole, settled = length + 40, model(**changes)
    forward = settled.position.forward
    settled.position.forward = lambda pos, T, size: forward(pos, T, whole if settled.position.reach > 32 else size)
    assert new.tolist() == recomputed(settled, ids, 40, **choice)[:, length:].tolist()


@pytest.mark.parametrize("position", POSITIONS)
def test_random_positions_are_drawn_once_for_prompt_and_text(position, monkeypatch):
    m, seen, forward = model(position=position, random_positions=60), [], None
    forward = m.position.forward
    m.position.forward = lambda pos, T, size: (seen.append(pos.tolist()), forward(pos, T, size))[1]
    assert len(list(stream(m, random_ids(1, 10), 40, temperature=0))) == 40
    drawn = m.position.random_subset(50, 0).tolist()
    assert seen == [drawn[:n] for n in range(10, 50)]
    assert len(list(stream(m, random_ids(1, 50), 40, temperature=0))) == 40  # beyond them, on the last half


def test_samples_of_one_batch_are_those_of_each_alone():
    m, ids = model(), random_ids(4, 10)
    together = torch.cat(list(stream(m, ids, 30, temperature=0)), 1)
    alone = [torch.cat(list(stream(m, row[None], 30, temperature=0)), 1)[0] for row in ids]
    assert torch.equal(together, torch.stack(alone))


def test_learned_positions_restart_on_the_last_half_window(monkeypatch):
    m, seen, hidden = model(position="learned"), [], GPT.hidden
    monkeypatch.setattr(GPT, "hidden", lambda self, ids, pos=None, past=None: (
        seen.append((past[0].seen, ids.size(1))), hidden(self, ids, pos, past))[1])
    list(stream(m, random_ids(1, 30), 25, temperature=0))
    assert seen[:4] == [(0, 30), (30, 1), (31, 1), (0, 16)] and seen[4] == (16, 1) and (0, 16) in seen[5:]


def test_cached_pass_reads_every_token_once(monkeypatch):
    m, sizes, hidden = model(), [], GPT.hidden
    monkeypatch.setattr(GPT, "hidden", lambda self, ids, pos=None, past=None: (
        sizes.append(ids.size(1)), hidden(self, ids, pos, past))[1])
    list(stream(m, random_ids(1, 50), 20, temperature=0))
    assert sizes == [50] + [1] * 19


def test_tokens_come_one_by_one_however_many_are_asked_for():
    new = list(itertools.islice(stream(model(), random_ids(1, 5), 10**12, temperature=0), 3))
    assert len(new) == 3


def test_sampling_leaves_the_global_generator_alone():
    m, before = model(), torch.get_rng_state()
    list(stream(m, random_ids(2, 5), 5, generator=torch.Generator().manual_seed(0)))
    assert torch.equal(before, torch.get_rng_state())


# Choices


def drawn(probabilities, **limits):
    """-> the set of ids that 3,000 draws give."""
    logits = torch.tensor(probabilities).log().expand(3000, -1)
    generator = torch.Generator().manual_seed(0)
    return set(choose(logits, limits.pop("temperature", 1.0), limits.get("top_k"), limits.get("top_p"), generator)
               .flatten().tolist())


@pytest.mark.parametrize("limits, kept", [
    ({}, {0, 1, 2, 3}), ({"temperature": 0}, {2}), ({"top_k": 1}, {2}), ({"top_k": 2}, {2, 0}), ({"top_k": 4}, {0, 1, 2, 3}),
    ({"top_k": 1000}, {0, 1, 2, 3}), ({"top_p": 1.0}, {0, 1, 2, 3}), ({"top_p": 0.01}, {2}), ({"top_p": 0.45}, {2}),
    ({"top_p": 0.55}, {2, 0}), ({"top_p": 0.85}, {2, 0, 1}), ({"top_k": 3, "top_p": 0.99}, {2, 0, 1}),
    ({"temperature": 0.02}, {2}),
])
def test_choices_keep_to_the_right_tokens(limits, kept):
    assert drawn([0.3, 0.15, 0.5, 0.05], **limits) == kept


def test_choices_follow_the_probabilities_at_a_temperature():
    logits = torch.tensor([0.3, 0.15, 0.5, 0.05]).log()
    ids = choose(logits.expand(20_000, -1), 0.5, None, None, torch.Generator().manual_seed(0))
    expected = (logits / 0.5).softmax(-1)
    assert torch.allclose(ids.flatten().bincount(minlength=4) / 20_000, expected, atol=0.015)


def test_rows_of_a_batch_are_limited_each_by_its_own_probabilities():
    logits = torch.tensor([[0.9, 0.05, 0.05], [0.05, 0.05, 0.9]]).log().repeat(500, 1)
    ids = choose(logits, 1.0, None, 0.5, torch.Generator().manual_seed(0)).view(500, 2)
    assert ids.unique(dim=0).tolist() == [[0, 2]]


# The program


def text_of(capsys, folder, *argv):
    capsys.readouterr()
    assert sample.main([str(folder), *argv]) == 0
    return capsys.readouterr().out


def test_same_seed_gives_the_same_text(run_folder, capsys):
    first, again, other = (text_of(capsys, run_folder, "--temperature", "1", "--seed", seed) for seed in "112")
    assert first == again != other


def test_several_samples_are_printed_one_after_another(run_folder, capsys):
    out = text_of(capsys, run_folder, "--samples", "3", "--prompt", "ab\ncd", "--tokens", "30", "--temperature", "1")
    texts = out.removesuffix("\n").split("\n---------------\n")
    assert len(texts) == 3 == len(set(texts))
    assert all(text.startswith("ab\ncd") and len(text) == 5 + 30 for text in texts)


def test_greedy_samples_are_all_alike(run_folder, capsys):
    out = text_of(capsys, run_folder, "--samples", "2", "--prompt", "ab", "--tokens", "20", "--temperature", "0")
    first, second = out.removesuffix("\n").split("\n---------------\n")
    assert first == second


@pytest.mark.parametrize("argv", [[], ["--prompt", ""]])
def test_without_a_prompt_there_is_text_all_the_same(argv, run_folder, capsys):
    assert len(text_of(capsys, run_folder, "--tokens", "40", *argv)) == 41


def test_prompt_of_a_file_is_that_of_the_command_line(run_folder, capsys, tmp_path):
    (tmp_path / "prompt.txt").write_bytes("\ufeffabc def".encode())
    by_file = text_of(capsys, run_folder, "--prompt_file", str(tmp_path / "prompt.txt"), "--tokens", "20")
    assert by_file == text_of(capsys, run_folder, "--prompt", "abc def", "--tokens", "20")


def test_lines_of_a_prompt_file_may_end_as_on_windows(run_folder, capsys, tmp_path):
    (tmp_path / "prompt.txt").write_bytes(b"abc\r\ndef")
    assert text_of(capsys, run_folder, "--prompt_file", str(tmp_path / "prompt.txt"), "--tokens", "5").startswith("abc\ndef")


def test_prompt_longer_than_the_window_is_gone_on_from(run_folder, capsys):
    prompt = "abcdefgh " * 10
    assert len(text_of(capsys, run_folder, "--prompt", prompt, "--tokens", "30")) == len(prompt) + 31


def test_scaling_is_accepted_and_changes_the_text_beyond_the_training_length(run_folder, capsys):
    argv = ["--prompt", "abcdefgh " * 10, "--tokens", "60", "--temperature", "1"]
    plain, scaled = text_of(capsys, run_folder, *argv), text_of(capsys, run_folder, *argv, "--rope_scaling", "yarn")
    assert len(plain) == len(scaled) and plain != scaled


def test_either_checkpoint_can_be_sampled_from(run_folder, tmp_path, capsys):
    folder = shutil.copytree(run_folder, tmp_path / "run")
    (folder / "last.pt").unlink()
    text_of(capsys, folder, "--tokens", "3")
    with pytest.raises(UserError, match=r"last\.pt"):
        sample.main([str(folder), "--checkpoint", "last"])


@pytest.fixture(scope="module")
def byte_run(tmp_path_factory):
    """A run that knows bytes, of which its characters need two to four."""
    folder = tmp_path_factory.mktemp("bytes")
    (folder / "text.txt").write_text("äöü €uro 你好 😀\n" * 300, encoding="utf-8")
    assert train.train(small(dataset=str(folder / "text.txt"), tokenizer="byte", out_dir=str(folder / "run"))) == 0
    return folder / "run"


@pytest.fixture
def scripted(monkeypatch):
    """-> a function that makes the model say the bytes of a text, and returns the list of what it wrote, piece by piece."""
    def say(content):
        written = []
        monkeypatch.setattr(sample, "stream", lambda *_: (torch.full((1, 1), b) for b in content))
        monkeypatch.setattr(sys.stdout, "write", lambda piece: written.append(piece))
        return written
    return say


def test_characters_of_several_bytes_appear_whole_and_at_once(byte_run, scripted):
    written = scripted("aä€😀z".encode())
    assert sample.main([str(byte_run), "--prompt", "x"]) == 0
    assert [piece for piece in written if piece] == ["x", "a", "ä", "€", "😀", "z", "\n"]


def test_bytes_that_are_no_text_become_replacement_characters(byte_run, scripted):
    written = scripted(b"a\xffb\xe4\xbd")
    assert sample.main([str(byte_run), "--prompt", "x"]) == 0
    assert "".join(written) == "xa\ufffdb\ufffd\n"


@pytest.mark.parametrize("made, start", [
    (tokenizer.Char("\nab"), [0]), (tokenizer.Char("\nab", separated=True), [3]), (tokenizer.Byte(), [256]),
    (tokenizer.Byte(separated=False), [10]),
])
def test_an_empty_prompt_starts_a_document_or_a_line(made, start):
    assert encode_start("", made) == encode_start(None, made) == start


def test_an_empty_prompt_needs_no_line_break_in_the_text():
    assert len(encode_start("", tokenizer.Char("abc"))) == 1


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
@pytest.mark.parametrize("temperature", [0, 1.0])
def test_output_that_is_not_finite_is_named(value, temperature):
    with pytest.raises(UserError, match="not finite"):
        choose(torch.tensor([[0.0, value, 1.0]]), temperature, None, None, torch.Generator())


def test_a_text_cannot_steer_the_terminal(run_folder, monkeypatch, capsys):
    monkeypatch.setattr(sample, "starting_text", lambda options: None)
    monkeypatch.setattr(sample, "stream", lambda *_: iter([torch.tensor([[0]])] * 3))
    restored = run.restore(run_folder)
    restored.tokenizer.tokens[0] = b"\x1b]0;mine\x07\n"
    monkeypatch.setattr(run, "restore", lambda *_, **__: restored)
    for terminal, expected in ((True, "\ufffd]0;mine\ufffd\n" * 3), (False, "\x1b]0;mine\x07\n" * 3)):
        monkeypatch.setattr(sys.stdout, "isatty", lambda answer=terminal: answer)
        assert sample.main([str(run_folder)]) == 0
        assert capsys.readouterr().out == expected + "\n"
    assert "\x1b" not in str(UserError("\x1b[2J", "\x9b2J"))
