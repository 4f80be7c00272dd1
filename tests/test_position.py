"""Invariants of every encoding in POSITIONS; a new one is tested without a new line here."""
import math

import pytest
import torch

from config import UserError
from model import GPT
from position import POSITIONS
from tests.conftest import small

VOCABULARY = 23
every = pytest.mark.parametrize("name", POSITIONS)


def model(name, dtype=torch.float64, **changes):
    """A model with weights large enough for attention to matter, in evaluation mode."""
    made = GPT(small(position=name, embedding_std=0.5, **changes), VOCABULARY).to(dtype).eval()
    generator = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for p in made.parameters():
            p.add_(torch.randn(p.shape, generator=generator, dtype=torch.float64).to(dtype) * 0.1)
    return made.requires_grad_(False)


def tokens(*shape, seed=0):
    return torch.randint(VOCABULARY, shape, generator=torch.Generator().manual_seed(seed))


@every
def test_no_token_sees_the_future(name):
    made, ids = model(name), tokens(2, 24)
    changed = ids.clone()
    changed[:, 12:] = (changed[:, 12:] + 1) % VOCABULARY
    before, after = made(ids), made(changed)
    assert torch.equal(before[:, :12], after[:, :12])
    assert not torch.allclose(before[:, 12:], after[:, 12:])


@every
@pytest.mark.parametrize("cuts", [range(25), (0, 10, 17, 24), (0, 1, 24), (0, 24)])
def test_cached_equals_parallel(name, cuts):
    made, ids = model(name), tokens(2, 24)
    past = made.past(24)
    parts = [made(ids[:, a:b], past=past) for a, b in zip(cuts, cuts[1:])]
    torch.testing.assert_close(torch.cat(parts, 1), made(ids), atol=1e-10, rtol=0)


@every
def test_shifting_all_positions(name):
    """Relative encodings do not notice; absolute ones do."""
    made, ids = model(name), tokens(2, 16)
    shift = (torch.arange(16) + 9) if not POSITIONS[name].relative else (torch.arange(16) + 9).double()
    difference = (made(ids, pos=shift) - made(ids, pos=shift - 9)).abs().max().item()
    assert difference < 1e-10 if POSITIONS[name].relative else difference > 1e-3


@every
def test_one_layer_sees_order_only_through_the_encoding(name):
    made, ids = model(name, n_layer=1), tokens(1, 16)
    swapped = ids.clone()
    swapped[:, [3, 9]] = swapped[:, [9, 3]]
    assert ids[0, 3] != ids[0, 9]
    difference = (made(ids)[:, -1] - made(swapped)[:, -1]).abs().max().item()
    assert difference < 1e-12 if name == "none" else difference > 1e-4


@every
def test_far_beyond_the_training_length_is_finite_or_refused_in_a_sentence(name):
    made, ids = model(name, torch.float32), tokens(1, 8 * 32)
    if made.position.reach < 8 * 32:
        with pytest.raises(UserError, match="position 255 asked of learned positions"):
            made(ids)
    else:
        assert made(ids).isfinite().all()


def test_a_table_ends_by_positions_and_not_by_their_number():
    made = model("learned")
    made(tokens(1, 4), pos=torch.tensor([5, 9, 30, 31]))
    with pytest.raises(UserError, match="position 32 asked"):
        made(tokens(1, 4), pos=torch.tensor([5, 9, 30, 32]))


@every
def test_state_holds_nothing_but_what_is_learned(name):
    made = model(name)
    assert set(made.state_dict()) - {"head.weight"} == {key for key, _ in made.named_parameters()}
    expected = {"learned": ["position.table.weight"]}.get(name, [])
    assert [key for key in made.state_dict() if key.startswith("position")] == expected


@every
def test_same_seed_same_shared_weights(name):
    shared = {k: v for k, v in GPT(small(position=name), VOCABULARY).state_dict().items() if not k.startswith("position")}
    reference = GPT(small(position="none"), VOCABULARY).state_dict()
    assert shared.keys() == reference.keys()
    assert all(torch.equal(shared[k], reference[k]) for k in shared)
    other = GPT(small(position=name, seed=2), VOCABULARY).state_dict()
    assert not torch.equal(other["embed.weight"], reference["embed.weight"])


@every
def test_bfloat16_autocast_stays_near_float32(name):
    made, ids = model(name, torch.float32), tokens(2, 32)
    with torch.autocast("cpu", torch.bfloat16):
        half = made(ids)
    full = made(ids)
    assert half.dtype == torch.float32
    assert (half - full).abs().max() < 0.05 * full.abs().max()


@every
def test_initial_weights_do_not_depend_on_the_global_generator(name):
    torch.manual_seed(3)
    first = GPT(small(position=name), VOCABULARY).state_dict()
    torch.manual_seed(4)
    second = GPT(small(position=name), VOCABULARY).state_dict()
    assert all(torch.equal(first[k], second[k]) for k in first)


def test_sinusoid_is_the_papers_at_the_scale_of_the_embeddings():
    """Vaswani et al., section 3.5: PE(pos, 2i) = sin(pos / 10000^(2i/d)), PE(pos, 2i+1) = cos of the same."""
    position = POSITIONS["sinusoidal"](small(embedding_std=0.02))
    vector = position.embedding(torch.tensor([0, 1, 77]))
    for row, pos in enumerate((0, 1, 77)):
        for i in range(16):
            angle = pos / 10000 ** (2 * i / 32)
            scale = 0.02 * math.sqrt(2)
            assert vector[row, 2 * i].item() == pytest.approx(scale * math.sin(angle), abs=1e-6)
            assert vector[row, 2 * i + 1].item() == pytest.approx(scale * math.cos(angle), abs=1e-6)
    assert position.embedding(torch.arange(32)).square().mean().sqrt().item() == pytest.approx(0.02, rel=1e-5)


def test_learned_table_starts_at_the_scale_of_the_embeddings():
    made = GPT(small(position="learned", n_embd=64), 500)
    assert made.position.table.weight.std().item() == pytest.approx(made.embed.weight.std().item(), rel=0.1)
    assert made.position.table.weight.shape == (32, 64)


def test_mask_is_none_for_plain_causal_and_for_one_token():
    position = POSITIONS["rope"](small())
    assert position(torch.arange(8), 8)[2] is None
    assert position(torch.arange(8), 1)[2] is None
    assert position(torch.arange(5), 2)[2].tolist() == [[True] * 4 + [False], [True] * 5]
