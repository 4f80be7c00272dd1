"""Optimizers and the schedule."""
import copy
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import optim
from model import GPT
from tests.conftest import small


@pytest.mark.parametrize("shape", [(16, 16), (48, 16), (16, 64)])
def test_muon_makes_the_update_of_torch(shape):
    """torch's works in bfloat16, so the two agree to a hundredth of the update's size."""
    generator = torch.Generator().manual_seed(0)
    weights = [torch.nn.Parameter(torch.randn(shape, generator=generator)) for _ in range(3)]
    theirs = [torch.nn.Parameter(w.detach().clone()) for w in weights]
    mine = optim.Muon([{"params": weights}], lr=0.1, weight_decay=0.1)
    reference = torch.optim.Muon(theirs, lr=0.1, weight_decay=0.1, momentum=0.95)
    for _ in range(5):
        before = weights[0].detach().clone()
        for a, b in zip(weights, theirs):
            a.grad = torch.randn(shape, generator=generator)
            b.grad = a.grad.clone()
        mine.step()
        reference.step()
        step = (weights[0] - before).norm()
        for a, b in zip(weights, theirs):
            assert (a - b).norm() < 0.03 * step
            b.data.copy_(a.data)


def test_muon_takes_each_head_of_queries_keys_and_values_as_a_matrix():
    config = small(n_head=2, n_kv_head=1, n_embd=32, muon_heads=True)
    model = GPT(config, 23)
    _, muon = optim.build(model, config)
    generator = torch.Generator().manual_seed(0)
    for p in model.parameters():
        p.grad = torch.randn(p.shape, generator=generator)
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    muon.step()
    for name, p in model.blocks.named_parameters():
        if p.ndim == 2:
            step = before["blocks." + name] * (1 - 0.1 * config.muon_learning_rate) - p
            parts = step.split(16) if name.endswith("qkv.weight") else [step]
            assert len(parts) == (4 if "qkv" in name else 1)
            for part in parts:
                values = torch.linalg.svdvals(part) / config.muon_learning_rate / max(1, part.size(0) / part.size(1)) ** 0.5
                assert values.min() > 0.3 and values.max() < 1.3
            if "qkv" in name:  # as a whole it is not orthogonal
                assert torch.linalg.svdvals(step).max() > 1.3 * config.muon_learning_rate


def test_adamw_makes_the_update_of_torch():
    generator = torch.Generator().manual_seed(0)
    mine = [torch.nn.Parameter(torch.randn(shape, generator=generator)) for shape in ((5, 3), (7,))]
    theirs = [torch.nn.Parameter(p.detach().clone()) for p in mine]
    groups = [[{"params": [p[0]]}, {"params": [p[1]], "weight_decay": 0.0}] for p in (mine, theirs)]
    ours = optim.AdamW(groups[0], lr=0.01, betas=(0.8, 0.9), weight_decay=0.1)
    reference = torch.optim.AdamW(groups[1], lr=0.01, betas=(0.8, 0.9), weight_decay=0.1, fused=True)
    for _ in range(5):
        for a, b in zip(mine, theirs):
            a.grad = torch.randn(a.shape, generator=generator)
            b.grad = a.grad.clone()
        ours.step()
        reference.step()
        assert all(torch.equal(a, b) for a, b in zip(mine, theirs))
    ours.zero_grad()
    assert all(p.grad is None for p in mine)


def test_optimizers_go_on_from_their_state():
    config, generator = small(bias=True), torch.Generator().manual_seed(0)
    models = [GPT(config, 23) for _ in range(2)]
    first, second = (optim.build(model, config) for model in models)

    def step(model, optimizers):
        for p in model.parameters():
            p.grad = torch.randn(p.shape, generator=generator)
        for optimizer in optimizers:
            optimizer.step()

    step(models[0], first)
    models[1].load_state_dict(models[0].state_dict())
    for a, b in zip(first, second):
        b.load_state_dict(copy.deepcopy(a.state_dict()))
    for model, optimizers in zip(models, (first, second)):
        generator.manual_seed(1)
        step(model, optimizers)
    assert all(torch.equal(a, b) for a, b in zip(models[0].parameters(), models[1].parameters()))
    other = optim.build(GPT(small(n_embd=64), 23), small(n_embd=64))
    for a, b in zip(first, other):
        with pytest.raises(ValueError):
            b.load_state_dict(a.state_dict())


@pytest.mark.parametrize("damage", [lambda m: None, lambda m: [], lambda m: {}, lambda m: {"exp_avg": m["mean"], **m},
                                    lambda m: {**m, "mean": 0.5}, lambda m: {**m, "mean": torch.zeros(())},
                                    lambda m: {"step": m["step"], "mean": m["mean"]}])
def test_foreign_state_is_refused(damage):
    adamw = optim.build(GPT(small(), 23), small())[0]
    state = adamw.state_dict()
    with pytest.raises(ValueError):
        adamw.load_state_dict([damage(state[0]), *state[1:]])
    for damaged in (state[1:], {}, [*state, state[0]]):
        with pytest.raises(ValueError):
            adamw.load_state_dict(damaged)


def test_heads_may_be_wider_than_the_model():
    config = small(head_dim=64, muon_heads=True)
    model = GPT(config, 23)
    x = torch.randint(23, (2, 8), generator=torch.Generator().manual_seed(0))
    model.loss(x, x).backward()
    before = model.blocks[0].attention.qkv.weight.detach().clone()
    for optimizer in optim.build(model, config):
        optimizer.step()
    assert (model.blocks[0].attention.qkv.weight - before).abs().max() > 1e-3


def test_training_does_not_import_the_compiler():
    """It takes two seconds. torch.optim's optimizers import it whether it is used or not, and so does some of what a model
    without memory may do."""
    program = ("import sys, torch, optim, machine; from model import GPT; from tests.conftest import small\n"
               "from position import POSITIONS; x = torch.zeros(2, 8, dtype=torch.long)\n"
               "for position in POSITIONS:\n"
               "    c = small(position=position); machine.room_for(c, 9, 'cpu', 'float32'); m = GPT(c, 9)\n"
               "    m.loss(x, x).backward(); [o.step() for o in optim.build(m, c)]\n"
               "    if 'torch._dynamo' in sys.modules: sys.exit(position)")
    assert subprocess.run([sys.executable, "-c", program], cwd=Path(optim.__file__).parent, check=False).returncode == 0


def test_orthogonalized_matrices_have_singular_values_near_one():
    x = torch.randn(3, 40, 24, generator=torch.Generator().manual_seed(1))
    values = torch.linalg.svdvals(optim.orthogonalize(x))
    assert values.min() > 0.5 and values.max() < 1.3
    u, _, v = torch.linalg.svd(x, full_matrices=False)
    together = torch.einsum("nij,nij->n", optim.orthogonalize(x), u @ v)
    assert (together / 24 > 0.8).all()  # the same directions as the exact answer


def test_every_parameter_is_in_one_group_and_positions_do_not_decay():
    for name in ("adamw", "muon"):
        model = GPT(small(position="learned", optimizer=name, bias=True), 23)
        groups = [g for o in optim.build(model, small(optimizer=name)) for g in o.param_groups]
        grouped = [id(p) for g in groups for p in g["params"]]
        assert sorted(grouped) == sorted(id(p) for p in model.parameters())
        plain = {id(p) for g in groups if g["weight_decay"] == 0 for p in g["params"]}
        assert id(model.position.table.weight) in plain
        assert plain == {id(p) for n, p in model.named_parameters() if p.ndim < 2 or n.startswith("position")}


def test_muon_takes_the_matrices_of_the_blocks_only():
    model = GPT(small(), 23)
    adamw, muon = optim.build(model, small(optimizer="muon"))
    names = {id(p): n for n, p in model.named_parameters()}
    assert all(names[id(p)].startswith("blocks.") and p.ndim == 2 for g in muon.param_groups for p in g["params"])
    assert len(optim.build(model, small(optimizer="adamw"))) == 1


@pytest.mark.parametrize("shape", ["cosine", "linear"])
def test_learning_rate_rises_falls_and_is_never_zero_while_training(shape):
    config = small(max_iters=100, warmup_iters=10, learning_rate=1.0, min_lr=0.1, lr_decay=shape)
    rates = [optim.learning_rate(step, config) for step in range(101)]
    assert 0 < rates[0] < rates[9] < rates[10] == 1.0
    assert all(a > b for a, b in zip(rates[10:], rates[11:]))
    assert rates[100] == pytest.approx(0.1) and min(rates) > 0
    assert rates[55] == pytest.approx(0.55)


def test_learning_rate_stays_level_until_the_last_part():
    config = small(max_iters=100, warmup_iters=0, learning_rate=1.0, decay_fraction=0.25)
    assert [optim.learning_rate(step, config) for step in (0, 40, 75)] == [1.0, 1.0, 1.0]
    assert optim.learning_rate(99, config) == pytest.approx(0.04)


def test_a_decay_shorter_than_an_iteration_is_no_division_by_zero():
    config = small(max_iters=400, warmup_iters=0, learning_rate=1.0, decay_fraction=0.001)
    assert [optim.learning_rate(step, config) for step in (0, 398, 399, 400)] == [1.0, 1.0, 1.0, 0.0]


def test_rates_of_both_optimizers_keep_their_proportion():
    config = small(max_iters=100, learning_rate=1e-3, muon_learning_rate=0.02, warmup_iters=0)
    optimizers = optim.build(GPT(config, 23), config)
    for step in (0, 50, 99):
        assert optim.set_learning_rate(optimizers, step, config) == pytest.approx(optim.learning_rate(step, config))
        assert optimizers[1].param_groups[0]["lr"] == pytest.approx(20 * optimizers[0].param_groups[0]["lr"])
