"""Invariants of every encoding in POSITIONS; a new one is tested without a new line here."""
import math

import pytest
import torch

from model import GPT
from options import UserError
from position import POSITIONS
from tests.conftest import small

VOCABULARY = 23
every = pytest.mark.parametrize("name", POSITIONS)

# What must change none of the invariants; linear attention has no scores for a bias to act on.
VARIANTS = [{}, {"n_kv_head": 1, "canon": 4}, {"window": 5}, {"attention": "linear", "canon": 2},
            {"qk_norm": "weighted", "parallel_block": True}, {"window": 5, "parallel_block": True, "canon": 3},
            {"head_dim": 12, "bias": True, "head_bias": True, "qkv_bias": False, "mlp_hidden": 40}]
combined = pytest.mark.parametrize("name, changes", [
    (name, changes) for name in POSITIONS for changes in VARIANTS
    if changes.get("attention") != "linear" or POSITIONS[name].bias is POSITIONS["none"].bias], ids=str)


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


@combined
@pytest.mark.parametrize("cut", [12, 70])
def test_no_token_sees_the_future(name, changes, cut):
    made, ids = model(name, block_size=140, **changes), tokens(2, 2 * cut)
    changed = ids.clone()
    changed[:, cut:] = (changed[:, cut:] + 1) % VOCABULARY
    before, after = made(ids), made(changed)
    assert torch.equal(before[:, :cut], after[:, :cut])
    assert not torch.allclose(before[:, cut:], after[:, cut:])


@combined
@pytest.mark.parametrize("cuts", [range(25), (0, 10, 17, 24), (0, 1, 24), (0, 24)])
def test_cached_equals_parallel(name, changes, cuts):
    made, ids = model(name, **changes), tokens(2, 24)
    past = made.past(24)
    parts = [made(ids[:, a:b], past=past) for a, b in zip(cuts, cuts[1:])]
    torch.testing.assert_close(torch.cat(parts, 1), made(ids), atol=1e-10, rtol=0)


@combined
def test_shifting_all_positions(name, changes):
    """Relative encodings do not notice; absolute ones do; None is neither."""
    made, ids, relative = model(name, **changes), tokens(2, 16), POSITIONS[name].relative
    shift = (torch.arange(16) + 9).double() if relative else torch.arange(16) + 9
    difference = (made(ids, pos=shift) - made(ids, pos=shift - 9)).abs().max().item()
    assert relative is None or (difference < 1e-10 if relative else difference > 1e-3)


def test_fire_is_relative_up_to_its_threshold():
    for threshold, alike in ((100.0, True), (4.0, False)):
        made, ids = model("fire", fire_threshold=threshold), tokens(2, 16)
        made.position.threshold.fill_(1.0)
        difference = (made(ids, pos=torch.arange(16) + 9) - made(ids)).abs().max().item()
        assert (difference < 1e-5) == alike


@every
def test_one_layer_sees_order_only_through_the_encoding(name):
    made, ids = model(name, n_layer=1), tokens(1, 16)
    swapped = ids.clone()
    swapped[:, [3, 9]] = swapped[:, [9, 3]]
    assert ids[0, 3] != ids[0, 9]
    difference = (made(ids)[:, -1] - made(swapped)[:, -1]).abs().max().item()
    assert difference < 1e-12 if name == "none" else difference > 1e-4


@combined
def test_a_sum_over_tokens_that_are_seen_is_all_that_matters(name, changes):
    """With a window of w, a token w places later in one layer does not know what came before; beside Canon layers of n tokens,
    a token n - 1 places further."""
    if changes.get("window"):
        made, ids = model(name, n_layer=1, **changes), tokens(1, 24)
        other = ids.clone()
        other[:, 3] = (other[:, 3] + 1) % VOCABULARY
        differs = (made(ids) - made(other)).abs().amax(-1)[0] > 1e-12
        assert differs.nonzero().flatten().tolist() == list(range(3, 3 + changes["window"] + changes.get("canon", 1) - 1))


@every
def test_far_beyond_the_training_length_is_finite_or_refused_in_a_sentence(name):
    made, ids = model(name, torch.float32), tokens(1, 8 * 32)
    if made.position.reach < 8 * 32:
        with pytest.raises(UserError, match=f"position 255 asked of {name} positions"):
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
    vector = position.embedding(torch.tensor([0, 1, 77]), 78)
    for row, pos in enumerate((0, 1, 77)):
        for i in range(16):
            angle = pos / 10000 ** (2 * i / 32)
            scale = 0.02 * math.sqrt(2)
            assert vector[row, 2 * i].item() == pytest.approx(scale * math.sin(angle), abs=1e-6)
            assert vector[row, 2 * i + 1].item() == pytest.approx(scale * math.cos(angle), abs=1e-6)
    assert position.embedding(torch.arange(32), 32).square().mean().sqrt().item() == pytest.approx(0.02, rel=1e-5)


def test_learned_table_starts_at_the_scale_of_the_embeddings():
    made = GPT(small(position="learned", n_embd=64), 500)
    assert made.position.table.weight.std().item() == pytest.approx(made.embed.weight.std().item(), rel=0.1)
    assert made.position.table.weight.shape == (32, 64)


def test_mask_is_none_for_plain_causal_and_for_one_token():
    position = POSITIONS["rope"](small())
    assert position(torch.arange(8), 8)[2] is None
    assert position(torch.arange(8), 1)[2] is None
    assert position(torch.arange(5), 2)[2].tolist() == [[True] * 4 + [False], [True] * 5]


# Each encoding against its paper


def published_slopes(n):
    """The recursion of the ALiBi paper's code, restated."""
    def power(n):
        return [2 ** (-8 * (i + 1) / n) for i in range(n)]

    if math.log2(n).is_integer():
        return power(n)
    closest = 2 ** math.floor(math.log2(n))
    return power(closest) + published_slopes(2 * closest)[0::2][:n - closest]


@pytest.mark.parametrize("n_head", range(1, 33))
def test_alibi_slopes_are_the_published_ones(n_head):
    position = POSITIONS["alibi"](small(n_head=n_head, n_embd=2 * n_head))
    bias = position.bias(torch.arange(n_head)[:, None, None], torch.tensor([[7]]), torch.arange(8))
    assert bias.dtype == torch.float32 and bias.shape == (n_head, 1, 8)
    expected = torch.tensor(published_slopes(n_head))[:, None] * -torch.arange(7, -1, -1)
    torch.testing.assert_close(bias[:, 0], expected, rtol=1e-6, atol=0)


def t5(**changes):
    """-> the encoding with a table that holds 100 head + bucket, and its bias by distance: (H, D)."""
    position = POSITIONS["t5"](small(n_head=2, **changes))
    position.table.weight.data = torch.arange(position.table.num_embeddings)[:, None] + torch.tensor([0.0, 100.0])
    return lambda distances: position.bias(torch.arange(2)[:, None, None], torch.tensor([[max(distances)]]),
                                           max(distances) - torch.tensor(distances))[:, 0].detach()


def test_t5_buckets_are_the_published_ones():
    """One distance each up to 15, then logarithmically more, all from 128 on alike: table of the T5 code."""
    bias = t5()([0, 1, 15, 16, 17, 31, 64, 127, 128, 10_000])
    assert bias[0].tolist() == [0, 1, 15, 16, 16, 21, 26, 31, 31, 31] and bias[1].tolist() == (bias[0] + 100).tolist()


@pytest.mark.parametrize("buckets, furthest", [(32, 128), (16, 64), (8, 1000), (64, 40)])
def test_t5_buckets_equal_those_of_transformers(buckets, furthest):
    modeling = pytest.importorskip("transformers.models.t5.modeling_t5")
    distances = list(range(1500))
    expected = modeling.T5Attention._relative_position_bucket(
        -torch.tensor(distances), bidirectional=False, num_buckets=buckets, max_distance=furthest)
    assert t5(t5_buckets=buckets, t5_max_distance=furthest)(distances)[0].long().tolist() == expected.tolist()


@pytest.mark.parametrize("kernel", ["log", "power"])
def test_kerple_is_the_papers_kernel(kernel):
    position = POSITIONS["kerple"](small(n_head=2, kerple_kernel=kernel))
    position.r1.data, position.r2.data = torch.tensor([0.5, 2.0]), torch.tensor([0.25, -3.0])
    position.constrain()
    bias = position.bias(torch.arange(2)[:, None, None], torch.tensor([[6], [9]]), torch.arange(7))
    for h, (r1, r2) in enumerate(((0.5, 0.25), (2.0, 0.01))):  # what is not positive is held at 0.01, as the authors do
        for i, m in enumerate((6, 9)):
            for n in range(7):
                expected = -r1 * (math.log(1 + r2 * (m - n)) if kernel == "log" else (m - n) ** r2 if m > n else 0)
                assert bias[h, i, n].item() == pytest.approx(expected, abs=1e-5)
    bias.sum().backward()
    assert position.r2.grad[1] != 0  # which the bound does not end
    assert position.r1.grad.isfinite().all() and position.r2.grad.isfinite().all()


def test_fire_is_the_papers_network():
    """Appendix of the paper, in loops: relu network of log(c (m - n) + 1) / log(c max(m, L) + 1)."""
    position = POSITIONS["fire"](small(n_head=2, fire_hidden=5, fire_threshold=6.0))
    generator = torch.Generator().manual_seed(0)
    for p in position.parameters():
        p.data = torch.rand(p.shape, generator=generator) + 0.1
    up, out, c, limit = position.up, position.out, position.c.item(), 6 * position.threshold.item()
    bias = position.bias(torch.arange(2)[:, None, None], torch.arange(3, 12)[:, None], torch.arange(12))
    for m in range(3, 12):
        for n in range(m + 1):
            x = math.log(c * (m - n) + 1) / (math.log(c * max(m, limit) + 1) + 1e-6)
            hidden = [max(0, w * x + b) for w, b in zip(up.weight[:, 0].tolist(), up.bias.tolist())]
            for h in range(2):
                expected = sum(w * v for w, v in zip(out.weight[h].tolist(), hidden)) + out.bias[h].item()
                assert bias[h, m - 3, n].item() == pytest.approx(expected, abs=1e-4)


@every
def test_biases_are_exact_under_autocast(name):
    """In 16 bits, distances above 256 would round to each other."""
    position = POSITIONS[name](small(block_size=1000))
    with torch.autocast("cpu", torch.bfloat16):
        _, _, mask = position(torch.arange(1000), 1)
        _, _, masks = position(torch.arange(1000), 2)
    for found in (mask, masks):
        assert found is None or found.dtype in (torch.bool, torch.float32)
    if name == "alibi":
        assert (mask[0, :, 0].diff() > 0).all()


def test_a_bias_reaches_the_scores_in_float32(monkeypatch):
    from torch.nn import functional as F

    seen, attention = [], F.scaled_dot_product_attention
    monkeypatch.setattr(F, "scaled_dot_product_attention", lambda q, k, v, mask, *rest, **kw: (
        seen.append((q.dtype, mask.dtype)), attention(q, k, v, mask, *rest, **kw))[1])
    with torch.autocast("cpu", torch.bfloat16):
        model("alibi", torch.float32)(tokens(1, 8))
    assert set(seen) == {(torch.float32, torch.float32)}


# A learned table in longer windows


@pytest.mark.parametrize("length", [33, 64, 100, 500])
def test_interpolated_table_is_the_resampled_one(length):
    position = POSITIONS["learned"](small(position="learned", learned_extension="interpolate"))
    table = position.table.weight
    expected = torch.nn.functional.interpolate(table.T[None], size=length, mode="linear", align_corners=True)[0].T
    torch.testing.assert_close(position.embedding(torch.arange(length), length), expected, atol=1e-5, rtol=1e-5)


def test_interpolation_changes_nothing_up_to_the_training_length():
    plain, longer = model("learned"), model("learned", learned_extension="interpolate")
    assert torch.equal(plain(tokens(1, 32)), longer(tokens(1, 32))) and longer(tokens(1, 33)).isfinite().all()


# Randomized positions


@every
def test_random_positions_are_a_sorted_choice_that_seed_and_number_settle(name):
    position = POSITIONS[name](small(random_positions=100))
    first, again, other = position.random_subset(32, 7), position.random_subset(32, 7), position.random_subset(32, 8)
    assert torch.equal(first, again) and not torch.equal(first, other)
    assert len(set(first.tolist())) == 32 and first.tolist() == sorted(first.tolist()) and first.max() < 100
    assert position.random_subset(100, 3).tolist() == list(range(100))
    assert not torch.equal(POSITIONS[name](small(random_positions=100, seed=2)).random_subset(32, 7), first)
    assert POSITIONS[name](small()).random_subset(32, 7) is None


@every
def test_random_positions_end_where_they_were_drawn_from(name):
    made = model(name, random_positions=64)
    assert made(tokens(1, 64), pos=torch.arange(64)).isfinite().all()
    with pytest.raises(UserError, match="position 64 asked"):
        made(tokens(1, 65))


def test_random_positions_give_learned_tables_as_many_rows():
    assert POSITIONS["learned"](small(random_positions=64)).table.weight.shape == (64, 32)


@combined
def test_causality_and_windows_count_tokens_and_not_positions(name, changes):
    made, ids, pos = model(name, random_positions=99, **changes), tokens(2, 24), torch.arange(24) ** 2 // 6
    assert len(set(pos.tolist())) < 24  # even equal positions are in order
    changed = ids.clone()
    changed[:, 12:] = (changed[:, 12:] + 1) % VOCABULARY
    assert torch.equal(made(ids, pos)[:, :12], made(changed, pos)[:, :12])
    past = made.past(24)
    parts = [made(part, pos, past) for part in ids.split(5, 1)]
    torch.testing.assert_close(torch.cat(parts, 1), made(ids, pos), atol=1e-10, rtol=0)
