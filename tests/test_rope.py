"""The rotation against the paper's own forms, and the scalings against transformers."""
import math
import random

import pytest
import torch

import rope
from config import SCALING_PARAMETERS
from position import RoPE
from tests.conftest import small


def heads(*shape, seed=0, dtype=torch.float64):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=dtype)


def turns(pos, dim, base=10000.0):
    """Rotation by the plain frequencies, in float64: (T, dim/2, 2)."""
    angle = rope.angles(pos.double(), rope.frequencies(dim, base).double())
    return torch.stack((angle.cos(), angle.sin()), -1)


def block_diagonal(m, dim, base=10000.0):
    """The matrix R of RoFormer, equation 15, written out: (dim, dim)."""
    matrix = torch.zeros(dim, dim, dtype=torch.float64)
    for i in range(dim // 2):
        angle = m * base ** (-2 * i / dim)
        matrix[2 * i: 2 * i + 2, 2 * i: 2 * i + 2] = torch.tensor(
            [[math.cos(angle), -math.sin(angle)], [math.sin(angle), math.cos(angle)]], dtype=torch.float64)
    return matrix


@pytest.mark.parametrize("dim", [2, 8, 64])
def test_equals_the_block_diagonal_matrix(dim):
    x = heads(2, 7, 3, dim)
    pos = torch.tensor([0, 1, 2, 50, 51, 1000, 4096])
    expected = torch.stack([x[:, t] @ block_diagonal(int(m), dim).T for t, m in enumerate(pos)], 1)
    # The frequencies are float32, so at position 4096 the angle is known to 4096 * 6e-8.
    torch.testing.assert_close(rope.rotate(x, turns(pos, dim)), expected, atol=2e-3, rtol=0)


def test_equals_the_complex_form_of_the_score():
    """Re[(q e^{i m theta}) (k e^{i n theta})*], RoFormer equation 12, summed over the planes."""
    q, k, pos = heads(1, 5, 1, 16), heads(1, 5, 1, 16, seed=1), torch.tensor([0, 3, 4, 90, 700])
    theta = rope.frequencies(16).double()
    rotated = torch.einsum("btnd,bsnd->ts", rope.rotate(q, turns(pos, 16)), rope.rotate(k, turns(pos, 16)))
    for t, m in enumerate(pos):
        for s, n in enumerate(pos):
            a = torch.view_as_complex(q[0, t, 0].view(-1, 2)) * torch.exp(1j * m * theta)
            b = torch.view_as_complex(k[0, s, 0].view(-1, 2)) * torch.exp(1j * n * theta)
            assert rotated[t, s].item() == pytest.approx((a * b.conj()).real.sum().item(), abs=1e-10)


def test_score_depends_on_the_difference_only():
    q, k = heads(1, 1, 1, 32), heads(1, 1, 1, 32, seed=1)

    def score(m, n):
        turned = rope.rotate(q, turns(torch.tensor([m]), 32)) * rope.rotate(k, turns(torch.tensor([n]), 32))
        return turned.sum().item()

    assert score(10, 3) == pytest.approx(score(1010, 1003), abs=1e-10)
    assert score(10, 3) != pytest.approx(score(10, 4), abs=1e-3)


def test_rotation_keeps_norms():
    x = heads(2, 9, 3, 16)
    torch.testing.assert_close(rope.rotate(x, turns(torch.arange(9) * 100, 16)).norm(dim=-1), x.norm(dim=-1))


def test_fastest_plane_turns_one_radian_and_slowest_nearly_once_in_the_base():
    freq = rope.frequencies(64, 10000.0)
    assert freq[0] == 1.0
    assert freq[-1].item() == pytest.approx(10000 ** (-62 / 64), rel=1e-6)


def test_real_arithmetic_of_the_compiler_equals_the_complex_product(monkeypatch):
    x, rotation = heads(2, 5, 3, 8, dtype=torch.float32), turns(torch.arange(5), 8).float()
    eager = rope.rotate(x, rotation)
    monkeypatch.setattr(torch.compiler, "is_compiling", lambda: True)
    torch.testing.assert_close(rope.rotate(x, rotation), eager, atol=1e-6, rtol=1e-6)


def test_half_precision_input_is_rotated_in_float32():
    x, rotation = heads(1, 3, 1, 8, dtype=torch.float32), turns(torch.tensor([0, 1000, 100_000]), 8).float()
    half = rope.rotate(x.bfloat16(), rotation)
    assert half.dtype == torch.bfloat16
    torch.testing.assert_close(half, rope.rotate(x.bfloat16().float(), rotation).bfloat16(), atol=0, rtol=0)


def test_angles_do_not_fall_to_16_bits_under_autocast():
    with torch.autocast("cpu", torch.bfloat16):
        rotation = RoPE(small()).rotation(torch.arange(5000), 5000)
    assert rotation.dtype == torch.float32
    assert rotation[4999, 0, 0].item() == pytest.approx(math.cos(4999), abs=1e-3)


@pytest.mark.parametrize("fraction, rotated", [(0.5, 8), (0.25, 4), (1.0, 16)])
def test_partial_rotation_uses_the_rotary_dimension_and_leaves_the_rest(fraction, rotated):
    position = RoPE(small(rope_fraction=fraction))
    x = heads(1, 4, 2, 16, dtype=torch.float32)
    turned = rope.rotate(x, position.rotation(torch.arange(4), 4))
    assert torch.equal(turned[..., rotated:], x[..., rotated:])
    expected = rope.rotate(x[..., :rotated], turns(torch.arange(4), rotated).float())
    torch.testing.assert_close(turned[..., :rotated], expected, atol=1e-6, rtol=1e-6)


def reference(method, dim, base, factor, context, length, fraction, **parameters):
    """-> (inverse frequencies, attention factor) of transformers for a window of `length` tokens."""
    modeling = pytest.importorskip("transformers.modeling_rope_utils")
    from transformers import LlamaConfig

    settings = {"rope_type": method, "rope_theta": base, "factor": factor, "partial_rotary_factor": fraction,
                "original_max_position_embeddings": context, **parameters}
    llama = LlamaConfig(hidden_size=4 * dim, num_attention_heads=4, head_dim=dim, rope_parameters=settings,
                        max_position_embeddings=context)
    return modeling.ROPE_INIT_FUNCTIONS[method](llama, "cpu", seq_len=length)


def parameters(method, planes, draw):
    """-> a random valid choice of the parameters that a method takes."""
    if method == "yarn":
        return draw.choice([
            {}, {"beta_fast": draw.uniform(8, 64), "beta_slow": draw.uniform(0.5, 4)}, {"truncate": False},
            {"attention_factor": draw.uniform(0.5, 2)},
            {"mscale": draw.uniform(0.5, 2), "mscale_all_dim": draw.uniform(0.5, 2)}])
    if method == "llama3":
        return {"low_freq_factor": draw.uniform(0.5, 2), "high_freq_factor": draw.uniform(3, 8)}
    if method == "longrope":
        lists = {name: [draw.uniform(1, 40) for _ in range(planes)] for name in ("short_factor", "long_factor")}
        return lists | draw.choice([{}, {"attention_factor": draw.uniform(0.5, 2)}])
    return {}


@pytest.mark.parametrize("method", ["linear", "dynamic", "yarn", "llama3", "longrope"])
@pytest.mark.parametrize("seed", range(40))
def test_scaling_equals_transformers(method, seed):
    draw = random.Random(seed)
    dim, fraction = draw.choice([(32, 1.0), (64, 1.0), (64, 0.5), (80, 0.4), (128, 0.25), (8, 1.0), (96, 0.75)])
    base, factor, context = 10 ** draw.uniform(3, 6), draw.uniform(1, 40), draw.choice([64, 100, 256, 2048, 8192])
    own = parameters(method, int(dim * fraction) // 2, draw)
    made = small(n_embd=4 * dim, n_head=4, rope_scaling=method, rope_factor=factor, rope_base=base, rope_fraction=fraction,
                 rope_original_context=context, **own)
    for length in (context // 2, context, context + 1, 3 * context):
        freq, gain = RoPE(made).frequencies(length)
        expected, attention_factor = reference(method, dim, base, factor, context, length, fraction, **own)
        torch.testing.assert_close(freq, expected, rtol=1e-6, atol=0)
        assert gain == pytest.approx(attention_factor, rel=1e-6)


def test_config_holds_parameters_of_every_method_that_has_some():
    assert {m for m in rope.SCALINGS if parameters(m, 4, random.Random(0)) or m == "yarn"} == {
        m for m, names in SCALING_PARAMETERS.items() if names}


def test_dynamic_is_ntk_beyond_the_training_length_and_has_no_memory():
    position = RoPE(small(rope_scaling="dynamic", rope_factor=2.0))
    plain = rope.frequencies(16)
    before = position.frequencies(32)[0]
    torch.testing.assert_close(before, plain)
    longer = position.frequencies(128)[0]
    torch.testing.assert_close(longer, rope.ntk(plain, base=1e4, factor=2 * 4 - 1, context=32, length=128)[0])
    assert torch.equal(position.frequencies(32)[0], before) and torch.equal(position.frequencies(128)[0], longer)


@pytest.mark.parametrize("dim", [4, 32, 128])
def test_ntk_is_a_larger_base(dim):
    freq, gain = rope.ntk(rope.frequencies(dim), base=10000.0, factor=4.0, context=256, length=256)
    torch.testing.assert_close(freq, rope.frequencies(dim, 10000.0 * 4.0 ** (dim / (dim - 2))), rtol=1e-6, atol=0)
    assert freq[0] == 1.0 and gain == 1.0
    assert (rope.frequencies(dim)[-1] / freq[-1]).item() == pytest.approx(4.0, rel=1e-5)


@pytest.mark.parametrize("method", rope.SCALINGS)
def test_factor_one_is_the_identity(method):
    plain = rope.frequencies(64)
    own = {"longrope": {"short_factor": [1.0] * 32, "long_factor": [7.0] * 32},
           "llama3": {"low_freq_factor": 1.0, "high_freq_factor": 4.0}}.get(method, {})
    freq, gain = rope.SCALINGS[method](plain, base=10000.0, factor=1.0, context=256, length=256, **own)
    torch.testing.assert_close(freq, plain, rtol=1e-6, atol=0)
    assert gain == 1.0


def test_yarn_keeps_fast_planes_and_stretches_slow_ones():
    plain = rope.frequencies(64)
    freq, gain = rope.yarn(plain, base=10000.0, factor=4.0, context=256, length=1024)
    ratio = plain / freq
    turned = 256 * plain / (2 * math.pi)  # how often each plane turns within the context
    assert torch.allclose(ratio[turned > 32], torch.tensor(1.0)) and torch.allclose(ratio[turned < 0.5], torch.tensor(4.0))
    assert ((ratio[1:] - ratio[:-1]) >= -1e-6).all()
    assert gain == pytest.approx(0.1 * math.log(4) + 1)


def test_gain_multiplies_rotated_planes_only():
    rotation = RoPE(small(rope_scaling="yarn", rope_factor=4.0, rope_fraction=0.5)).rotation(torch.arange(3), 3)
    size = rotation.norm(dim=-1)
    torch.testing.assert_close(size[:, :4], torch.full((3, 4), 0.1 * math.log(4) + 1), rtol=1e-6, atol=0)
    assert torch.equal(size[:, 4:], torch.ones(3, 4))


def test_auto_factor_follows_the_evaluated_length_and_forgets_it():
    position = RoPE(small(rope_scaling="linear"))
    plain = rope.frequencies(16)
    torch.testing.assert_close(position.frequencies(128)[0], plain / 4)
    torch.testing.assert_close(position.frequencies(16)[0], plain)
    torch.testing.assert_close(RoPE(small(rope_scaling="linear", rope_original_context=64)).frequencies(128)[0], plain / 2)
