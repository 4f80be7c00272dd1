"""What docs/rope.md claims and no other test checks; and that its quotes, its names of tests and its figures are real."""
import importlib
import inspect
import math
import operator
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import rope
from config import SCALING_PARAMETERS
from docs.figures import LLAMA3, partial_sums, turns
from position import POSITIONS
from tests.conftest import small

REPOSITORY = Path(__file__).resolve().parents[1]
PAGE = (REPOSITORY / "docs" / "rope.md").read_text(encoding="utf-8")


def draw(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def scores(q, k, distance, freq):
    """Scores of one query q (D,), `distance` (T,) tokens after one key k (D,) -> (T,)."""
    turned = rope.rotate(q.expand(1, len(distance), 1, -1), turns(distance, freq))
    return turned[0, :, 0] @ k


# Absolute injection, relative effect


@pytest.mark.parametrize("name", ["learned", "sinusoidal"])
def test_added_positions_give_four_terms_and_none_is_of_the_distance(name):
    position = POSITIONS[name](small(embedding_std=1.0))
    rows = position.embedding(torch.arange(32), 32).detach().double()
    (x, y), matrix = draw(2, 32), draw(32, 32, seed=1)

    def terms(m, n):
        return torch.stack([a @ matrix @ b for a in (x, rows[m]) for b in (y, rows[n])])

    assert terms(9, 4).sum().item() == pytest.approx(((x + rows[9]) @ matrix @ (y + rows[4])).item(), rel=1e-12)
    moved = (terms(9, 4) - terms(16, 11)).abs()  # the same distance
    assert moved[0] == 0 and (moved[1:] > 0.1).all()


def test_moving_a_sinusoid_is_a_rotation_and_its_product_is_of_the_distance():
    rows = POSITIONS["sinusoidal"](small(embedding_std=1.0)).embedding(torch.arange(40), 40)
    back = turns(torch.full((33,), -7), rope.frequencies(32))  # the pairs are (sine, cosine), which turn the other way
    torch.testing.assert_close(rope.rotate(rows[None, :33, None], back)[0, :, 0], rows[7:], atol=1e-5, rtol=0)
    product = rows @ rows.T
    torch.testing.assert_close(product[1:, 1:], product[:-1, :-1], atol=1e-4, rtol=0)
    assert not torch.allclose(product[0, :-1], product[0, 1:], atol=0.1)


def test_half_split_rotation_is_ours_after_a_permutation():
    """The reference is the Llama of transformers, whose pairs are (i, i + D/2)."""
    llama = pytest.importorskip("transformers.models.llama.modeling_llama")
    dim, (q, k) = 16, draw(2, 1, 9, 3, 16)
    rotation = turns(torch.arange(9) * 11, rope.frequencies(dim))
    cos, sin = torch.cat((rotation, rotation), 1)[None].unbind(-1)
    order = torch.tensor([*range(0, dim, 2), *range(1, dim, 2)])
    half_q, half_k = llama.apply_rotary_pos_emb(q[..., order], k[..., order], cos, sin, unsqueeze_dim=2)
    our_q, our_k = rope.rotate(q, rotation), rope.rotate(k, rotation)
    torch.testing.assert_close(half_q, our_q[..., order], atol=1e-12, rtol=0)
    torch.testing.assert_close(torch.einsum("btnd,bsnd->bnts", half_q, half_k), torch.einsum("btnd,bsnd->bnts", our_q, our_k))
    assert not torch.allclose(llama.apply_rotary_pos_emb(q, k, cos, sin, unsqueeze_dim=2)[0], our_q, atol=0.1)


# Frequencies and decay


def test_fast_planes_turn_often_within_the_training_length_and_slow_ones_less_than_once():
    turned = 256 * rope.frequencies(32, 10000.0) / (2 * math.pi)
    assert turned[0] > 40 and turned[-1] < 0.01
    assert (turned < 1).sum() == 9 and len(turned) == 16
    assert (turned[1:] / turned[:-1]).std() < 1e-6  # the same ratio from plane to plane


@pytest.mark.parametrize("dim, base", [(2, 10000.0), (32, 10000.0), (128, 10000.0), (64, 100.0)])
def test_score_is_abels_sum_and_within_its_bound(dim, base):
    """RoFormer, section 3.4.3, with h = q conj(k) by plane, h_{D/2} = 0 and S_{i+1} the sum over the first i + 1 planes."""
    freq, distance = rope.frequencies(dim, base), torch.arange(257)
    sums = torch.view_as_complex(turns(distance, freq)).cumsum(-1)
    for seed in range(20):
        q, k = draw(2, dim, seed=seed)
        h = torch.view_as_complex(q.view(-1, 2)) * torch.view_as_complex(k.view(-1, 2)).conj()
        steps = torch.cat((h, h.new_zeros(1))).diff()
        score = scores(q, k, distance, freq)
        torch.testing.assert_close(score, -(sums * steps).sum(-1).real, atol=1e-10, rtol=0)
        assert (score.abs() <= steps.abs().max() * partial_sums(distance, freq).sum(-1) + 1e-10).all()


@pytest.mark.parametrize("dim, base", [(32, 10000.0), (64, 10000.0), (128, 10000.0), (64, 100.0)])
def test_bound_falls_with_distance_but_not_steadily(dim, base):
    bound = partial_sums(torch.arange(257), rope.frequencies(dim, base)).mean(-1)
    assert bound[0].item() == pytest.approx((dim / 2 + 1) / 2)  # at distance 0, S_j is j
    assert bound[:33].mean() > 1.3 * bound[128:].mean()
    assert bound.diff().max() > 0.1


@pytest.mark.parametrize("preferred", [0, 1, 60, 255])
def test_a_head_can_prefer_any_distance(preferred):
    q, freq = draw(32), rope.frequencies(32)
    k = rope.rotate(q.view(1, 1, 1, 32), turns(torch.tensor([preferred]), freq)).flatten()
    assert scores(q, k, torch.arange(257), freq).argmax() == preferred


# Scalings, and the tables


@pytest.mark.parametrize("method, kept", [("none", "none"), ("linear", "all"), ("ntk", "the slowest"), ("yarn", "all"),
                                          ("llama3", "all")])
@pytest.mark.parametrize("dim, factor", [(32, 4.0), (64, 4.0), (64, 8.0)])
def test_which_scalings_keep_slow_planes_within_trained_angles(method, kept, dim, factor):
    plain = rope.frequencies(dim)
    freq, _ = rope.SCALINGS[method](plain, base=10000.0, factor=factor, context=256, length=int(256 * factor),
                                    **LLAMA3 if method == "llama3" else {})
    slow = 256 * plain < 2 * math.pi
    within = (256 * factor * freq <= 256 * plain * (1 + 1e-5))[slow].tolist()
    assert within == {"none": [False] * len(within), "all": [True] * len(within),
                      "the slowest": [False] * (len(within) - 1) + [True]}[kept]


def table(header):
    """The table of the page whose header row begins with this cell -> {name in the first cell: other cells}."""
    found = re.search(rf"^\| `{header}` \|.*\n\|[-|]+\|\n((?:\|.*\n)+)", PAGE, re.MULTILINE)[1]
    cells = ([cell.strip() for cell in line.strip("|").split("|")] for line in found.splitlines())
    return {first.strip("`"): others for first, *others in cells}


def test_every_encoding_answers_the_question_that_the_table_says():
    found = {}
    for name, encoding in POSITIONS.items():
        answers = encoding(small(position=name))(torch.arange(8), 8)
        found[name] = " and ".join(q for q, a in zip(("embedding", "rotation", "bias"), answers) if a is not None) or "nothing"
    assert found == {name: cells[0] for name, cells in table("position").items()}


def test_the_table_of_scalings_has_their_parameters():
    found = {name: re.findall(r"`(\w+)`", cells[-1]) for name, cells in table("rope_scaling").items()}
    assert found == {name: list(parameters) for name, parameters in SCALING_PARAMETERS.items()}


# The page itself


def test_tests_that_the_page_names_exist():
    named = set(re.findall(r"(tests/\w+\.py)::(\w+)", PAGE))
    assert len(named) > 20
    for file, name in named:
        assert re.search(rf"^def {name}\(", (REPOSITORY / file).read_text(encoding="utf-8"), re.MULTILINE), f"{file}::{name}"


def test_tests_of_this_file_are_named_on_the_page():
    here = re.findall(r"^def (test_\w+)\(", Path(__file__).read_text(encoding="utf-8").partition("# The page itself\n")[0],
                      re.MULTILINE)
    assert here and set(here) == set(re.findall(r"tests/test_claims\.py::(\w+)", PAGE))


def test_quotes_are_lines_of_the_functions_they_are_quoted_from():
    quotes = re.findall(r"`(\w+)\.([\w.]+)`:\s+(?:```python\n(.*?)```|`([^`]+)`)", PAGE, re.DOTALL)
    assert len(quotes) > 15 and sum(bool(block) for *_, block, _ in quotes) == PAGE.count("```python")
    for module, name, block, line in quotes:
        source = inspect.getsource(operator.attrgetter(name)(importlib.import_module(module)))
        for quoted in block.splitlines() or [line]:
            assert quoted.strip() in source, f"{module}.{name}: {quoted}"


def test_figures_are_drawn_and_shown(tmp_path):
    done = subprocess.run([sys.executable, str(REPOSITORY / "docs" / "figures.py"), str(tmp_path)], cwd=tmp_path,
                          capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert {path.name for path in tmp_path.iterdir()} == set(re.findall(r"!\[[^]]*\]\((\w+\.png)\)", PAGE))
    assert all(path.read_bytes()[:4] == b"\x89PNG" for path in tmp_path.iterdir())
