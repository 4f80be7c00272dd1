"""The transformer against a slow one written out in float64, and its chunked and compiled forms against the plain one."""
import math
from functools import partial

import pytest
import torch
from torch.nn import functional as F

from model import GPT, UNFUSED, Canon, Linear, attend
from tests.conftest import small
from tests.test_position import VOCABULARY, model, tokens


def slow(made, ids):
    """The forward pass in loops, for layernorm without bias, no qk_norm, gelu: (T,) -> (T, V)."""
    state, config = made.state_dict(), made.config
    H, D = config.n_head, config.head_size
    x = [state["embed.weight"][i] for i in ids]
    for layer in range(config.n_layer):
        part = {k.removeprefix(f"blocks.{layer}."): v for k, v in state.items() if k.startswith(f"blocks.{layer}.")}

        def norm(v, weight):
            return (v - v.mean()) / torch.sqrt(v.var(unbiased=False) + 1e-5) * weight

        qkv = [(part["attention.qkv.weight"] @ norm(v, part["norm1.weight"])).view(3, H, D) for v in x]
        out = []
        for t in range(len(ids)):
            heads = []
            for h in range(H):
                def turn(vector, m):
                    turned = vector.clone()
                    for i in range(D // 2):
                        angle = m * float(torch.tensor(config.rope_base) ** (-torch.tensor(2.0 * i) / D))
                        a, b = vector[2 * i], vector[2 * i + 1]
                        turned[2 * i] = a * math.cos(angle) - b * math.sin(angle)
                        turned[2 * i + 1] = a * math.sin(angle) + b * math.cos(angle)
                    return turned

                query = turn(qkv[t][0, h], t)
                scores = torch.stack([query @ turn(qkv[s][1, h], s) / math.sqrt(D) for s in range(t + 1)])
                weights = scores.softmax(0)
                heads.append(sum(w * qkv[s][2, h] for s, w in enumerate(weights)))  # values are not turned
            out.append(part["attention.out.weight"] @ torch.cat(heads))
        x = [a + b for a, b in zip(x, out)]
        x = [v + part["mlp.out.weight"] @ F.gelu(part["mlp.up.weight"] @ norm(v, part["norm2.weight"])) for v in x]
    return torch.stack([state["embed.weight"] @ norm(v, state["norm.weight"]) for v in x])


def test_equals_the_slow_reference():
    made = model("rope", qk_norm=False, activation="gelu")
    ids = tokens(1, 10)
    position = made.position.rotation
    made.position.rotation = lambda pos, length: position(pos.double(), length)  # angles in float64 as in the reference
    torch.testing.assert_close(made.double().hidden(ids) @ made.embed.weight.T, slow(made, ids[0])[None], atol=1e-6, rtol=0)


@pytest.mark.parametrize("changes", [
    {"activation": "gelu", "norm": "layernorm", "bias": True, "tied": True, "qk_norm": False},
    {"activation": "relu2", "norm": "rmsnorm", "bias": False, "tied": False, "qk_norm": True},
    {"activation": "swiglu", "norm": "layernorm", "bias": False, "tied": True, "qk_norm": True}])
def test_every_option_changes_the_model_and_learns(changes):
    made = GPT(small(**changes), VOCABULARY)
    assert (made.head.weight is made.embed.weight) == changes["tied"]
    assert any(name.endswith("qkv.bias") for name, _ in made.named_parameters()) == changes["bias"]
    made.loss(tokens(2, 8), tokens(2, 8, seed=1)).backward()
    assert all(p.grad is not None and p.grad.isfinite().all() for p in made.parameters())


def test_swiglu_has_about_as_many_parameters_as_gelu():
    counts = [sum(p.numel() for p in GPT(small(activation=a, n_embd=96), VOCABULARY).parameters()) for a in ("gelu", "swiglu")]
    assert counts[1] == pytest.approx(counts[0], rel=0.01)


@pytest.mark.parametrize("tied", [True, False])
def test_loss_at_the_start_is_that_of_guessing(tied):
    made = GPT(small(tied=tied), 500)
    loss = made.loss(torch.randint(500, (8, 32)), torch.randint(500, (8, 32)))
    assert loss.item() == pytest.approx(math.log(500), rel=0.02)


@pytest.mark.parametrize("name", ["none", "sinusoidal", "rope"])
def test_losses_in_chunks_equal_losses_at_once(name, monkeypatch):
    made, ids = model(name), tokens(2, 61)
    whole = F.cross_entropy(made(ids[:, :-1]).flatten(0, 1), ids[:, 1:].flatten(), reduction="none").view(2, 60)
    monkeypatch.setattr(GPT, "CHUNK", 16)
    monkeypatch.setattr(GPT, "LOGITS", 7 * VOCABULARY)
    torch.testing.assert_close(made.losses(ids[:, :-1], ids[:, 1:]), whole, atol=1e-5, rtol=0)
    torch.testing.assert_close(made.losses(ids[:, :-1], ids[:, 1:], last=5), whole[:, -5:], atol=1e-5, rtol=0)


def test_loss_in_parts_has_the_gradients_of_the_whole(monkeypatch):
    ids, found = tokens(2, 31), []
    for logits, last in ((2**25, None), (7 * VOCABULARY, None), (2**25, 9), (7 * VOCABULARY, 9)):
        monkeypatch.setattr(GPT, "LOGITS", logits)
        made = model("rope").requires_grad_(True)
        loss = made.loss(ids[:, :-1], ids[:, 1:], last)
        expected = F.cross_entropy(made(ids[:, :-1])[:, -(last or 30):].flatten(0, 1), ids[:, -(last or 30):].flatten())
        torch.testing.assert_close(loss, expected)
        loss.backward()
        found.append([p.grad for p in made.parameters()])
    for whole, parts in (found[:2], found[2:]):
        assert all(torch.allclose(a, b, atol=1e-12) for a, b in zip(whole, parts, strict=True))


def test_only_a_part_of_the_logits_is_held_for_the_gradient(monkeypatch):
    monkeypatch.setattr(GPT, "LOGITS", 7 * VOCABULARY)
    made, held = model("rope").requires_grad_(True), []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: held.append(t.shape) or t, lambda t: t):
        made.loss(tokens(2, 30), tokens(2, 30))
    assert not [shape for shape in held if shape[-1:] == (VOCABULARY,)]


def attention_calls(monkeypatch, work):
    """Do the work -> [(queries, keys)] of every attention in it."""
    seen, attention = [], F.scaled_dot_product_attention
    monkeypatch.setattr(F, "scaled_dot_product_attention", lambda q, k, *rest, **kw: (
        seen.append((q, k)), attention(q, k, *rest, **kw))[1])
    work()
    return seen


def test_long_windows_never_see_more_than_a_chunk_of_queries(monkeypatch):
    monkeypatch.setattr(GPT, "CHUNK", 16)
    calls = attention_calls(monkeypatch, lambda: model("rope").losses(tokens(1, 100), tokens(1, 100), last=2))
    assert max(q.size(2) for q, _ in calls) == 16
    assert max(k.size(2) for _, k in calls) == 100


def test_gradients_are_those_of_finite_differences():
    made = model("rope", n_layer=1).requires_grad_(True)
    ids, targets = tokens(1, 8), tokens(1, 8, seed=1)

    def loss():
        return made.loss(ids, targets)

    loss().backward()
    weight = made.blocks[0].attention.qkv.weight
    for index in ((0, 0), (40, 3), (70, 9)):  # a query's, a key's and a value's
        with torch.no_grad():
            before = weight[index].item()
            weight[index] = before + 1e-5
            up = loss().item()
            weight[index] = before - 1e-5
            down = loss().item()
            weight[index] = before
        assert weight.grad[index].item() == pytest.approx((up - down) / 2e-5, rel=1e-4, abs=1e-9)


def test_values_are_not_turned(monkeypatch):
    turned = []
    import model as module

    original = module.rotate
    monkeypatch.setattr(module, "rotate", lambda x, rotation: (turned.append(x.shape), original(x, rotation))[1])
    model("rope")(tokens(1, 4))
    assert turned == [(1, 4, 4, 16)] * 2  # two layers; queries and keys of two heads, no values


def test_qk_norm_comes_before_the_rotation_and_bounds_scores(monkeypatch):
    made = model("rope", qk_norm=True)
    for q, k in attention_calls(monkeypatch, lambda: made(tokens(1, 6))):
        torch.testing.assert_close(q.norm(dim=-1), torch.full(q.shape[:3], 4.0, dtype=torch.float64), atol=1e-3, rtol=0)
        torch.testing.assert_close(k.norm(dim=-1), torch.full(k.shape[:3], 4.0, dtype=torch.float64), atol=1e-3, rtol=0)


# Variants of attention


def test_grouped_queries_equal_repeated_keys_and_values():
    grouped, full = model("rope", n_head=4, n_kv_head=2), model("rope", n_head=4)
    for a, b in zip(grouped.blocks, full.blocks):
        q, k, v = a.attention.qkv.weight.split((32, 16, 16))
        b.attention.qkv.weight.copy_(torch.cat((q, *(x.view(2, 8, 32).repeat_interleave(2, 0).flatten(0, 1) for x in (k, v)))))
    others = {k: v for k, v in grouped.state_dict().items() if not k.endswith("qkv.weight")}
    full.load_state_dict(others, strict=False)
    torch.testing.assert_close(grouped(tokens(2, 9)), full(tokens(2, 9)), atol=1e-10, rtol=0)


@pytest.mark.parametrize("windowed", [False, True])
@pytest.mark.parametrize("G", [4, 1])
@pytest.mark.parametrize("T", [7, 60, UNFUSED + 1])
def test_attention_in_bfloat16_is_near_that_in_float64(T, G, windowed, request):
    """Written out and fused, output and gradients; what is rounded are scores and weights, by up to a 256th of them."""
    allow = torch.backends.cuda.allow_fp16_bf16_reduction_math_sdp
    request.addfinalizer(partial(allow, torch.backends.cuda.fp16_bf16_reduction_math_sdp_allowed()))
    allow(True)  # as machine.set_up has it
    distance = torch.arange(T)[:, None] - torch.arange(T)
    mask = (distance >= 0) & (distance < 9) if windowed else None
    inputs = [torch.randn(2, heads, T, 16, generator=torch.Generator().manual_seed(heads + i)).bfloat16()
              for i, heads in enumerate((4, G, G))]
    results = []
    for dtype in (torch.bfloat16, torch.float64):
        leaves = [x.detach().to(dtype).requires_grad_() for x in inputs]
        y = attend(*leaves, mask, 0.0)
        assert y.dtype == dtype
        if dtype == torch.bfloat16:
            assert ("Flash" in y.grad_fn.name()) == (T > UNFUSED)
        results.append([y.double(), *(g.double() for g in torch.autograd.grad(y.double().sin().sum(), leaves))])
    for half, exact in zip(*results):
        assert (half - exact).norm() <= 0.01 * exact.norm()


def test_grouped_keys_need_a_smaller_cache():
    made = model("rope", n_head=4, n_kv_head=1)
    past = made.past(10)
    made(tokens(1, 10), past=past)
    assert past[0].k.shape == past[0].v.shape == (1, 1, 10, 8)


@pytest.mark.parametrize("steps", [[20, 1, 1, 1], [1] * 23, [3, 9, 1, 10]])
def test_cache_keeps_the_window_only(steps):
    made = model("rope", window=6)
    past, ids = made.past(23), tokens(1, 23)
    for n, part in zip(steps, ids.split(steps, 1)):
        before = past[0].kept
        made(part, past=past)
        assert past[0].k.size(2) == before + n and past[0].kept <= 5
    assert past[0].seen == 23


def quadratic(made, rotation, features_of, T):
    """Linear attention of one block as the paper writes it, in loops over tokens: hidden x (T, C) -> (T, C)."""
    config, attention = made.config, made.blocks[0].attention
    H, D = config.n_head, config.head_size

    def formula(x):
        qkv = attention.qkv(x).view(T, 3, H, D)
        out = torch.zeros(T, H, D, dtype=x.dtype)
        for h in range(H):
            q, k = (torch.nn.functional.elu(qkv[:, i, h]) + 1 for i in range(2))
            tq, tk = (features_of(y, rotation) for y in (q, k))
            for t in range(T):
                numerator = sum((tq[t] @ tk[s]) * qkv[s, 2, h] for s in range(t + 1))
                out[t, h] = numerator / sum(q[t] @ k[s] for s in range(t + 1))
        return attention.out(out.flatten(1))
    return formula


@pytest.mark.parametrize("name", ["none", "rope"])
@pytest.mark.parametrize("T", [1, 63, 64, 70, 200])
def test_linear_attention_in_chunks_is_the_papers_formula_and_a_recurrence(name, T):
    made = model(name, attention="linear")
    x = torch.randn(T, 32, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    rotation = made.position(torch.arange(T), T)[1]

    def turn(features, rotation):
        if rotation is None:
            return features
        pairs = torch.view_as_complex(features.view(T, -1, 2)) * torch.view_as_complex(rotation.double())
        return torch.view_as_real(pairs).flatten(1)

    attention = made.blocks[0].attention
    rotation = None if rotation is None else rotation.double()
    whole = attention(x[None], rotation, None)[0]
    torch.testing.assert_close(whole, quadratic(made, rotation, turn, T)(x), atol=1e-9, rtol=1e-9)
    state = made.past(T)[0]
    one = [attention(x[None, t:t + 1], None if rotation is None else rotation[t:t + 1], None, state)[0] for t in range(T)]
    torch.testing.assert_close(torch.cat(one), whole, atol=1e-9, rtol=1e-9)


def test_linear_attention_remembers_a_state_that_does_not_grow():
    made = model("rope", attention="linear")
    past = made.past(500)
    for part in tokens(1, 500).split(100, 1):
        made(part, past=past)
        assert [tuple(x.shape) for x in past[0].sums] == [(1, 2, 1, 16, 16), (1, 2, 1, 1, 16)]
    assert past[0].seen == 500


def test_linear_attention_is_finite_far_beyond_the_training_length():
    made = model("rope", torch.float32, attention="linear")
    assert made.losses(tokens(1, 3000), tokens(1, 3000)).isfinite().all()


def test_turned_values_leave_the_attention_weights_and_change_the_output(monkeypatch):
    plain, turned, ids = model("rope", n_layer=1), model("rope", n_layer=1, rope_values=True), tokens(1, 12)
    calls = [attention_calls(monkeypatch, lambda made=made: made(ids))[0] for made in (plain, turned)]
    assert torch.equal(calls[0][0], calls[1][0]) and torch.equal(calls[0][1], calls[1][1])  # queries and keys, so the weights
    assert not torch.allclose(plain(ids), turned(ids))
    values = []
    for made in (plain, model("rope", n_layer=1, rope_values=True, rope_scaling="yarn", rope_factor=8)):
        with monkeypatch.context() as patch:
            patch.setattr(F, "scaled_dot_product_attention", lambda q, k, v, *rest, **kw: values.append(v) or v)
            made(ids)
    torch.testing.assert_close(values[0].norm(dim=-1), values[1].norm(dim=-1))  # the gain of a scaling is for scores
    shifted = turned(ids, pos=torch.arange(12) + 5)
    assert not torch.allclose(shifted, turned(ids))  # and the model is no longer relative


def test_parallel_block_reads_the_same_input_twice():
    made = model("rope", n_layer=1, parallel_block=True)
    block, x = made.blocks[0], torch.randn(1, 5, 32, dtype=torch.float64)
    rotation = made.position(torch.arange(5), 5)[1]
    expected = x + block.attention(block.norm1(x), rotation, None) + block.mlp(block.norm2(x))
    torch.testing.assert_close(block(x, rotation, None), expected)


def test_canon_layers_are_the_papers_sum_and_nothing_at_first():
    layer = Canon(small(canon=4)).double()
    x = torch.randn(2, 9, 32, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    assert torch.equal(layer(x), x)
    with torch.no_grad():
        layer.weight.normal_(generator=torch.Generator().manual_seed(2))
    expected = x.clone()
    for t in range(9):
        for i in range(1, min(t, 3) + 1):  # what came before the first token is zero
            expected[:, t] += layer.weight[3 - i, 0] * x[:, t - i]
    torch.testing.assert_close(layer(x), expected, atol=1e-12, rtol=0)
    with_it, without = (GPT(small(canon=canon), 23) for canon in (4, None))
    assert torch.equal(with_it(tokens(2, 9)), without(tokens(2, 9)))


def test_canon_layers_tell_order_without_positions():
    for canon, alike in ((None, True), (2, False)):
        made, ids = model("none", n_layer=1, canon=canon), torch.tensor([[1, 2, 3, 4, 5], [1, 3, 2, 4, 5]])
        assert torch.allclose(*made(ids)[:, -1], atol=1e-12) == alike


# Layers for a few tokens


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("out", [1, 2, 7, 12])
def test_a_few_tokens_times_a_matrix_are_what_many_are(out, bias):
    layer = Linear(5, out, bias=bias).double()
    x = torch.randn(3, 2 * Linear.FEW, 5, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        whole = layer(x)
        for shape in ((1, 1), (3, 1), (1, 7), (2, Linear.FEW // 2)):
            part = layer(x[:shape[0], :shape[1]])
            assert part.is_contiguous() and torch.allclose(part, whole[:shape[0], :shape[1]], atol=1e-12)
        assert layer(x[:0]).shape == (0, 2 * Linear.FEW, out)
        assert torch.allclose(layer(x[:3, :4].transpose(0, 1)), whole[:3, :4].transpose(0, 1), atol=1e-12)
