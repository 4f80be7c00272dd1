"""Tokens to batches. Which tokens a batch holds depends on the data, its size and (seed, n), and on nothing else."""
import hashlib
import itertools
from dataclasses import dataclass
from functools import cached_property

import numpy as np

import tasks
import tokenizer
from data.prepare import prepare, read
from options import UserError


@dataclass
class Data:
    """A prepared text: its two splits as ids (n,), the index in val at which each document starts, how to read them."""

    train: np.ndarray
    val: np.ndarray
    documents: list
    tokenizer: tokenizer.Tokenizer
    sha256: str

    @cached_property
    def byte_lengths(self):
        """UTF-8 bytes that each id stands for: (V,)."""
        return self.tokenizer.byte_lengths()

    def bytes(self, indices):
        """UTF-8 bytes that the validation tokens at `indices` stand for."""
        return int(self.byte_lengths[self.val[indices]].sum())

    def batches(self, batch_size, block_size, seed, start=0):
        """`batches` of the training split."""
        return batches(self.train, batch_size, block_size, seed, start)

    def validation(self, size, count=None):
        """`windows` of the validation split."""
        return windows(self.val, size, count)


def load_data(config):
    """-> the Data that config names, prepared first where that has not been done, or the Problems of a task."""
    if config.has_answers:
        return tasks.load(config.dataset, config.block_size)
    folder = prepare(config.dataset, config.tokenizer, config.vocab_size)
    train, val, manifest = read(folder)
    for name, tokens in (("training", train), ("validation", val)):
        if len(tokens) <= 2 * config.block_size:
            raise UserError(f"dataset = {config.dataset}: {len(tokens)} {name} tokens, and block_size = {config.block_size}",
                            "two windows must fit: give a longer text or a smaller block_size")
    # What a run was trained on is ids: the same text prepared otherwise is other data.
    identity = manifest["train"]["sha256"] + manifest["val"]["sha256"] + (folder / "tokenizer.json").read_text(encoding="utf-8")
    sha256 = hashlib.sha256(identity.encode()).hexdigest()
    return Data(train, val, manifest["val"]["starts"], tokenizer.load(folder / "tokenizer.json"), sha256)


def gather(tokens, starts, size):
    """tokens (n,), starts (B,) -> inputs and targets, each (B, size) int64: the targets are one token later."""
    window = tokens[np.asarray(starts)[:, None] + np.arange(size + 1)].astype(np.int64)
    return window[:, :-1], window[:, 1:]


def batches(tokens, batch_size, block_size, seed, start=0):
    """Endless training batches (inputs, targets), each (batch_size, block_size), from batch number `start` on.

    Batch n is drawn by a generator seeded with (seed, n): every encoding sees the same batches, and a resumed run needs
    no saved state.
    """
    for n in itertools.count(start):
        starts = np.random.default_rng((seed, n)).integers(len(tokens) - block_size, size=batch_size)
        yield gather(tokens, starts, block_size)


def windows(tokens, size, count=None):
    """-> (W,) starts of fixed windows: `count` evenly spaced ones, or all that follow one another without overlap."""
    fit = (len(tokens) - 1) // size
    if count is None or count >= fit:
        return np.arange(fit) * size
    return np.linspace(0, len(tokens) - 1 - size, count).astype(np.int64)


def window_ends(length, documents, longest, count, spacing):
    """-> (W,) indices e, evenly spaced, such that the `longest` tokens before e and e itself lie inside one document.

    length: tokens in all; documents: where each starts; spacing: tokens that two ends are apart at least, so that no
    target is scored twice. Fewer than count, or none, where the documents hold no more.
    """
    starts = np.asarray(documents)
    stops = np.append(starts[1:], length)
    room = np.maximum(stops - starts - longest, 0)  # ends that each document offers
    total = int(room.sum())
    count = min(count, total // spacing)
    picks = ((np.arange(count) + 0.5) * total / max(count, 1)).astype(np.int64)
    document = np.searchsorted(np.cumsum(room), picks, side="right")
    return starts[document] + longest + picks - (np.cumsum(room) - room)[document]
