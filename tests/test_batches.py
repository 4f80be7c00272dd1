"""Which tokens a batch or a window holds."""
import itertools

import numpy as np
import pytest

from batches import batches, gather, window_ends, windows

TOKENS = np.arange(1000, dtype=np.uint16)


def take(count, **changes):
    settings = {"tokens": TOKENS, "batch_size": 4, "block_size": 16, "seed": 7} | changes
    return list(itertools.islice(batches(**settings), count))


def test_targets_are_the_next_tokens():
    x, y = take(1)[0]
    assert x.shape == y.shape == (4, 16) and x.dtype == np.int64
    assert (y == x + 1).all()


def test_batch_n_depends_on_seed_and_n_only():
    first = take(5)
    later = take(2, start=3)
    assert all((a[0] == b[0]).all() for a, b in zip(first[3:], later))
    assert not (first[0][0] == first[1][0]).all()
    assert not (first[0][0] == take(1, seed=8)[0][0]).all()
    np.random.seed(0)
    assert (take(1)[0][0] == first[0][0]).all()


def test_every_window_of_the_text_can_be_drawn():
    starts = {int(x[0]) for batch in take(400, tokens=TOKENS[:40], block_size=16) for x in batch[0]}
    assert starts == set(range(24))
    assert max(int(y[-1]) for batch in take(400, tokens=TOKENS[:40]) for y in batch[1]) == 39


def test_accumulated_batch_holds_the_same_windows_as_the_larger_one():
    assert (take(1, batch_size=8)[0][0][:4] == take(1, batch_size=4)[0][0]).all()


@pytest.mark.parametrize("count", [None, 10, 1000])
def test_windows_are_fixed_and_fit(count):
    starts = windows(TOKENS, 16, count)
    assert (starts == windows(TOKENS, 16, count)).all()
    assert starts[0] == 0 and starts[-1] + 16 <= 999
    assert len(starts) == (10 if count == 10 else 62)
    if count != 10:
        assert (np.diff(starts) == 16).all()


def test_ids_above_65535_survive():
    tokens = np.array([70_000, 3, 70_001], dtype=np.uint32)
    x, y = gather(tokens, [0], 2)
    assert x.tolist() == [[70_000, 3]] and y.tolist() == [[3, 70_001]]


def test_window_ends_lie_inside_one_document_and_score_no_target_twice():
    documents = [0, 50, 400, 420, 900]
    ends = window_ends(1000, documents, longest=60, count=20, spacing=4)
    assert len(ends) == 20
    stops = documents[1:] + [1000]
    for end in ends:
        start, stop = next((a, b) for a, b in zip(documents, stops) if a <= end < b)
        assert start <= end - 60 and end < stop
    assert (np.diff(np.sort(ends)) >= 4).all()
    assert {int(np.searchsorted(documents, e, side="right")) for e in ends} == {2, 4, 5}  # all that are long enough


def test_fewer_window_ends_where_the_text_has_no_more():
    assert len(window_ends(100, [0], longest=90, count=20, spacing=4)) == 2
    assert len(window_ends(100, [0, 50], longest=60, count=20, spacing=4)) == 0
