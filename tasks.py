"""Tasks with an answer: generated problems, on which length generalization is a yes or a no.

    python train.py configs/rope.toml --dataset task:copy

A row is one problem from position 0 on, `>` question `=` answer `;`, and only the answer and its end are scored. Training
draws lengths evenly up to N, the longest problem that fits into block_size; curves go to 8 N (lengths.py). A new task is
one class and one entry in TASKS.
"""
import hashlib
import itertools
import math
import string
from dataclasses import dataclass

import numpy as np

import tokenizer
from options import UserError, nearest

START, ASK, END = ">=;"
VALIDATION = 1024  # problems that stand for the whole validation split,
TOKENS = 2**22  # but not more tokens than these


class Task:
    """What the tasks share. A problem of one length has one number of tokens."""

    symbols = ""  # that questions and answers are made of
    shortest = 1

    def problem(self, generator, length):
        """A numpy generator, symbols in the question -> (question, answer), texts."""
        question = self.draw(generator, self.symbols, length)
        return question, self.answer(question)

    def answer(self, question):
        """-> the answer, where it is one of a question drawn from all symbols."""
        raise NotImplementedError

    def chance(self, length):
        """-> the probability that the best answer given without reading the question is right."""
        raise NotImplementedError

    def inputs(self, length):
        """-> tokens that a model reads of a problem of this length: all but the last."""
        return 2 + sum(map(len, self.problem(np.random.default_rng(0), length)))

    def longest(self, size):
        """-> the length of the longest problem of at most `size` inputs, below `shortest` if none fits."""
        least = self.inputs(self.shortest)
        return self.shortest + (size - least) // (self.inputs(self.shortest + 1) - least)  # problems grow evenly

    def draw(self, generator, symbols, count):
        return "".join(symbols[i] for i in generator.integers(len(symbols), size=count))


class Copy(Task):
    """>dog=dog;"""

    symbols = string.ascii_lowercase

    def answer(self, question):
        return question

    def chance(self, length):
        return len(self.symbols) ** -float(length)


class Reverse(Copy):
    """>dog=god;"""

    def answer(self, question):
        return question[::-1]


class Sort(Task):
    """>hello=ehllo;"""

    symbols = string.ascii_lowercase

    def answer(self, question):
        return "".join(sorted(question))

    def chance(self, length):
        # The likeliest answer has each letter as often as any other, or once more.
        often, more = divmod(length, len(self.symbols))
        ways = math.lgamma(length + 1) - len(self.symbols) * math.lgamma(often + 1) - more * math.log(often + 1)
        return math.exp(ways - length * math.log(len(self.symbols)))


class Parity(Task):
    """>0111=1; whether the number of ones is odd."""

    symbols = "01"

    def answer(self, question):
        return str(question.count("1") % 2)

    def chance(self, length):
        return 0.5


class Addition(Task):
    """>75+86=521; two numbers of `length` digits each and their sum, all from the last digit to the first, the order in which
    sums are computed (Zhou et al. 2024, arXiv:2402.09371)."""

    symbols = string.digits + "+"

    def problem(self, generator, length):
        a, b = (self.draw(generator, string.digits, length) for _ in range(2))
        # By digits: Python refuses to read numbers of thousands.
        answer, carry = [], 0
        for x, y in zip(a, b):
            carry, digit = divmod(int(x) + int(y) + carry, 10)
            answer.append(str(digit))
        return f"{a}+{b}", "".join(answer) + str(carry)

    def chance(self, length):
        return 10.0 ** -length  # 99...9 is the likeliest sum


class Passkey(Task):
    """A key hidden in filler, asked for at the end (Mohtashami and Jaggi 2023, arXiv:2305.16300); length: that of both."""

    symbols = string.ascii_lowercase + " #" + string.digits
    filler = "the grass is green the sky is blue the sun is yellow here we go there and back again "
    digits = 4
    shortest = digits + 1

    def problem(self, generator, length):
        key, rest = self.draw(generator, string.digits, self.digits), length - self.digits - 1
        start, place = generator.integers(len(self.filler)), generator.integers(rest + 1)
        text = (self.filler * (rest // len(self.filler) + 2))[start:start + rest]
        return f"{text[:place]}#{key}{text[place:]}", key

    def chance(self, length):
        return 10.0 ** -self.digits


TASKS = {"copy": Copy, "reverse": Reverse, "addition": Addition, "parity": Parity, "sort": Sort, "passkey": Passkey}
NAMES = tuple(f"task:{name}" for name in TASKS)


@dataclass
class Problems:
    """A task as training and evaluation take it; what batches.Data is for a text."""

    name: str
    task: Task
    tokenizer: tokenizer.Tokenizer
    sha256: str

    def rows(self, lengths, generator, size=None):
        """One problem of each length -> inputs and targets (B, size) int64; size: that of the longest unless given.

        A target is -1 where nothing is scored: in the question, and behind the end.
        """
        problems = [self.task.problem(generator, int(length)) for length in lengths]
        size = size or max(2 + len(question) + len(answer) for question, answer in problems)
        text = "".join(f"{START}{question}{ASK}{answer}{END}".ljust(size + 1, END) for question, answer in problems)
        ids = self.tokenizer.encode(text).astype(np.int64).reshape(-1, size + 1)
        begin, end = np.array([(1 + len(question), 2 + len(question) + len(answer)) for question, answer in problems]).T
        place = np.arange(size)
        scored = (place >= begin[:, None]) & (place < end[:, None])
        return ids[:, :-1], np.where(scored, ids[:, 1:], -1)

    def mixed(self, count, size, generator):
        """`count` problems as training has them -> rows of `size` inputs, of lengths drawn evenly from all that fit."""
        return self.rows(generator.integers(self.task.shortest, self.task.longest(size), count, endpoint=True), generator, size)

    def batches(self, batch_size, block_size, seed, start=0):
        """Endless training batches (inputs, targets), from number `start` on; number n depends on (seed, n) alone."""
        for n in itertools.count(start):
            yield self.mixed(batch_size, block_size, np.random.default_rng((seed, n)))

    def validation(self, size, count=None):
        """-> rows of `count` problems, or of VALIDATION, the same for every seed."""
        return self.mixed(count or max(16, min(VALIDATION, TOKENS // size)), size, np.random.default_rng((2**32, size)))

    def tested(self, length, count):
        """-> rows of the problems behind a point of the accuracy curve, the same for every seed and block_size."""
        return self.rows([length] * count, np.random.default_rng((2**33, length)))


def load(name, block_size):
    """The name of a data set, task:copy or another -> its Problems. UserError if there are none, or none fits."""
    if name not in NAMES:
        raise UserError(f"dataset = {name}: no such task", nearest(name.removeprefix("task:"), list(TASKS)))
    task = TASKS[name.removeprefix("task:")]()
    if task.longest(block_size) < task.shortest:
        raise UserError(f"block_size = {block_size}: too short for {name}",
                        f"its problems have {task.inputs(task.shortest)} inputs or more")
    text = tokenizer.Char("".join(sorted({START, ASK, END, *task.symbols})))
    # What a run was trained on is what its task makes; were it changed, this would be.
    shown = [task.problem(np.random.default_rng(length), length) for length in range(task.shortest, task.shortest + 32)]
    return Problems(name, task, text, hashlib.sha256(repr((name, text.characters, shown)).encode()).hexdigest())
