"""Tasks: problems, what of them is scored, and accuracy by length."""
import itertools
import json
import math

import numpy as np
import pytest
import torch

import compare
import lengths
import logs
import sample
import tasks
import train
from batches import load_data
from model import GPT
from options import UserError
from run import restore
from tasks import NAMES, TASKS, VALIDATION, load
from tests.conftest import small

SOLVED = {  # a slow reference: the answer of a question
    "copy": lambda question: question,
    "reverse": lambda question: "".join(reversed(question)),
    "addition": lambda question: str(sum(int(n[::-1]) for n in question.split("+"))).zfill(len(question) // 2 + 1)[::-1],
    "parity": lambda question: str(sum(map(int, question)) % 2),
    "sort": lambda question: "".join(sorted(question)),
    "passkey": lambda question: question.partition("#")[2][:4],
}


def made(name, **changes):
    return small(dataset=f"task:{name}", **changes)


@pytest.mark.parametrize("name", TASKS)
@pytest.mark.parametrize("length", [5, 6, 17, 90])
def test_answers_are_right_and_problems_of_one_length_have_one_size(name, length):
    task, generator = TASKS[name](), np.random.default_rng(length)
    for _ in range(20):
        question, answer = task.problem(generator, length)
        assert answer == SOLVED[name](question)
        assert len(question) + len(answer) + 2 == task.inputs(length)
        assert set(question + answer) <= set(task.symbols)


def test_sums_of_any_length_are_right():
    question, answer = TASKS["addition"]().problem(np.random.default_rng(0), 10_000)
    a, b = (sum(10**i * int(d) for i, d in enumerate(part)) for part in question.split("+"))
    assert sum(10**i * int(d) for i, d in enumerate(answer)) == a + b


@pytest.mark.parametrize("name", TASKS)
def test_the_longest_problem_fits_and_the_next_does_not(name):
    task = TASKS[name]()
    for size in range(task.inputs(task.shortest), 200):
        assert task.inputs(task.longest(size)) <= size < task.inputs(task.longest(size) + 1)


@pytest.mark.parametrize("name", TASKS)
def test_the_answer_and_its_end_are_scored_and_nothing_else(name):
    problems = load(f"task:{name}", 64)
    x, y = problems.mixed(50, 64, np.random.default_rng(1))
    assert x.shape == y.shape == (50, 64) and x.dtype == y.dtype == np.int64
    for inputs, targets in zip(x, y):
        text = problems.tokenizer.decode(inputs)
        question, answer = text[1:].split("=")[0], SOLVED[name](text[1:].split("=")[0])
        assert text[0] == ">" and text.rstrip(";") == f">{question}={answer}"
        scored = targets >= 0
        assert problems.tokenizer.decode(targets[scored]) == answer + ";"
        assert np.flatnonzero(scored).tolist() == list(range(len(question) + 1, len(question) + len(answer) + 2))


@pytest.mark.parametrize("name", TASKS)
def test_lengths_are_drawn_evenly_up_to_the_longest_that_fits(name):
    problems = load(f"task:{name}", 34)
    _, y = problems.mixed(3000, 34, np.random.default_rng(1))
    ends = np.bincount(34 - np.argmax(y[:, ::-1] >= 0, 1))
    assert len(ends[ends > 0]) == problems.task.longest(34) - problems.task.shortest + 1
    assert np.allclose(ends[ends > 0] / 3000, 1 / len(ends[ends > 0]), atol=0.03)


def test_batches_depend_on_seed_and_number_alone_and_validation_on_neither():
    problems = load("task:copy", 34)
    first = [x for x, _ in itertools.islice(problems.batches(4, 34, 1), 5)]
    later = [x for x, _ in itertools.islice(problems.batches(4, 34, 1, start=3), 2)]
    assert all((a == b).all() for a, b in zip(first[3:], later, strict=True))
    assert (first[0] != next(problems.batches(4, 34, 2))[0]).any() and (first[0] != first[1]).any()
    assert (problems.validation(34, 8)[0] == load("task:copy", 99).validation(34, 8)[0]).all()
    assert len(problems.validation(34)[0]) == VALIDATION
    assert (problems.tested(20, 4)[0] == load("task:copy", 99).tested(20, 4)[0]).all()


@pytest.mark.parametrize(("name", "length"), [("copy", 2), ("reverse", 2), ("addition", 2), ("parity", 3), ("sort", 2)])
def test_chance_is_that_of_the_likeliest_answer(name, length):
    task = TASKS[name]()
    answers = {}
    for questions in itertools.product(*[sorted(set(task.symbols) - {"+"})] * (2 * length if name == "addition" else length)):
        text = "".join(questions)
        answer = SOLVED[name](f"{text[:length]}+{text[length:]}" if name == "addition" else text)
        answers[answer] = answers.get(answer, 0) + 1
    assert task.chance(length) == pytest.approx(max(answers.values()) / sum(answers.values()))


def test_chance_of_sorting_counts_letters_that_come_twice():
    # 27 letters: one of 26 twice, so 27!/2! orders of the likeliest answer.
    assert TASKS["sort"]().chance(27) == pytest.approx(math.factorial(27) / 2 / 26**27)


def test_what_counts_not_adds_nothing_to_the_loss_or_to_a_gradient():
    config = made("copy")
    model = GPT(config, 30)
    x, y = map(torch.from_numpy, load("task:copy", 32).mixed(4, 32, np.random.default_rng(0)))
    loss = model.loss(x, y)
    expected = torch.nn.functional.cross_entropy(model(x)[y >= 0], y[y >= 0])
    assert loss.item() == pytest.approx(expected.item(), abs=1e-5)
    loss.backward()
    first = model.embed.weight.grad.clone()
    model.zero_grad()
    other = x.clone()
    other[y[:, :1].expand_as(y) >= 0] = 0
    for row, targets in zip(other, y):  # whatever stands behind the end
        row[torch.nonzero(targets >= 0).max() + 1:] = 3
    model.loss(other, y).backward()
    assert torch.allclose(first, model.embed.weight.grad, atol=1e-6)


def test_micro_batches_count_by_the_tokens_that_are_scored(tmp_path):
    one = made("copy", max_iters=3, warmup_iters=1, batch_size=6, out_dir=str(tmp_path / "one"), muon_learning_rate=0.01)
    many = one.model_copy(update={"batch_size": 2, "gradient_accumulation_steps": 3, "out_dir": str(tmp_path / "many")})
    assert train.train(one) == train.train(many) == 0
    found = [[r["train_loss"] for r in logs.read(c.out_dir, "log.jsonl") if "train_loss" in r] for c in (one, many)]
    assert found[0] == pytest.approx(found[1], abs=1e-5)


@pytest.fixture(scope="module")
def solver(tmp_path_factory):
    """The folder of a run that has learned a task in part: some answers are right, and some are not."""
    folder = tmp_path_factory.mktemp("tasks") / "passkey-1"
    config = made("passkey", out_dir=str(folder), block_size=16, max_iters=300, batch_size=16)
    assert train.train(config) == 0
    return folder


def test_exact_match_is_what_greedy_decoding_gives(solver):
    restored = restore(solver)
    problems, found = load("task:passkey", 16), []
    x, y = problems.tested(8, 64)
    for row, targets in zip(x, y):
        begin = int(np.argmax(targets >= 0))
        prompt, answer = torch.from_numpy(row[None, :begin + 1].copy()), targets[targets >= 0].tolist()
        found.append([int(t) for t in sample.stream(restored.model, prompt, len(answer), temperature=0)] == answer)
    scored = lengths.answered(restored.model, x, y)
    assert scored[:, 1].tolist() == found and 0 < sum(found) < 64


def test_losses_are_means_over_the_answer(solver):
    model = restore(solver).model
    x, y = load("task:passkey", 16).tested(8, 20)
    logits = torch.log_softmax(model(torch.from_numpy(x.copy())).double(), -1).detach().numpy()
    expected = [-np.mean([logits[i, t, y[i, t]] for t in np.flatnonzero(y[i] >= 0)]) for i in range(len(x))]
    assert lengths.answered(model, x, y)[:, 0] == pytest.approx(expected, abs=1e-5)


def test_windows_longer_than_a_chunk_are_scored_alike(solver, monkeypatch):
    model = restore(solver).model
    x, y = load("task:passkey", 16).tested(60, 8)
    whole = lengths.answered(model, x, y)
    monkeypatch.setattr(GPT, "CHUNK", 7)
    assert lengths.answered(model, x, y) == pytest.approx(whole, abs=1e-5)


def test_accuracy_is_measured_written_and_shown(solver, capsys):
    records, task = logs.read(solver, "accuracy.jsonl"), TASKS["passkey"]()
    N = task.longest(16)
    assert [r["length"] for r in records] == sorted({int(m * N) for m in lengths.PROBLEMS if int(m * N) >= task.shortest})
    assert records[-1]["length"] == 8 * N
    for r in records:
        assert r["trained"] == N and r["context"] == task.inputs(r["length"]) and r["chance"] == 1e-4
        assert r["problems"] == 16 and 0 <= r["accuracy"] <= 1 and r["checkpoint"] == "best"
    assert not (solver / "lengths.jsonl").exists() and not (solver / "positions.jsonl").exists()
    evaluations = [r for r in logs.read(solver, "log.jsonl") if "val_loss" in r]
    assert all(0 <= r["val_accuracy"] <= 1 and "val_bpb" not in r for r in evaluations)
    summary = json.loads((solver / "summary.json").read_text(encoding="utf-8"))
    assert summary["best_val_accuracy"] >= 0 and "final_val_bpb" not in summary
    assert lengths.main([str(solver), "--contexts", "4,6,400"]) == 0
    out = capsys.readouterr().out
    assert "length 4: the shortest problem of task:passkey has 5" in out and "length 400: above 8 times" in out
    assert "right at 6" in compare.table([solver])
    steps, accuracy, _ = compare.figure([solver]).axes
    assert [t.get_text() for t in accuracy.texts] == ["chance", f"trained at {N}"]
    assert accuracy.get_title() == "accuracy by length" and steps.get_xlabel() == "step"


def test_learned_positions_end_where_they_end(tmp_path, capsys):
    config = made("copy", position="learned", max_iters=6, out_dir=str(tmp_path / "run"))
    assert train.train(config) == 0
    assert max(r["context"] for r in logs.read(config.out_dir, "accuracy.jsonl")) <= 32
    assert "learned positions end at 32" in capsys.readouterr().out


def test_a_task_is_learned_and_resumed_bit_for_bit(tmp_path):
    whole = made("parity", block_size=8, max_iters=20, out_dir=str(tmp_path / "whole"))
    parts = whole.model_copy(update={"out_dir": str(tmp_path / "parts")})
    assert train.train(whole) == 0
    assert train.train(parts.model_copy(update={"stop_at": 7})) == train.train(parts) == 0
    for name in ("last.pt", "accuracy.jsonl"):
        assert (tmp_path / "whole" / name).read_bytes() == (tmp_path / "parts" / name).read_bytes()


@pytest.mark.parametrize(("dataset", "block_size", "problem", "advice"), [
    ("task:copi", 32, "no such task", "did you mean copy?"),
    ("task:", 32, "no such task", "known: copy, reverse"),
    ("task:passkey", 8, "too short for task:passkey", "11 inputs or more")])
def test_wrong_tasks_are_named(dataset, block_size, problem, advice):
    with pytest.raises(UserError) as error:
        load_data(small(dataset=dataset, block_size=block_size))
    assert problem in error.value.problem and advice in error.value.advice


def test_a_task_needs_no_preparation(tmp_path):
    from data.prepare import prepare

    with pytest.raises(UserError, match="made while it is trained on"):
        prepare("task:copy", "char", 300, tmp_path)
    assert set(NAMES) == {f"task:{name}" for name in tasks.TASKS}
