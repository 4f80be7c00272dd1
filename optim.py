"""Optimizers, parameter groups and the learning rate's schedule."""
import math

import torch
from torch.optim.adamw import adamw

from parallel import joined, local, part_of


class Optimizer:
    """Groups of parameters, and of each parameter its moments: what AdamW and Muon share.

    A kind of optimizer has `start(p)` -> the moments {name: tensor} that a parameter begins with, and `update(params, grads,
    group)`. In place of torch.optim.Optimizer, which imports the compiler whether it is used or not: two seconds of a start.
    """

    def __init__(self, groups, **defaults):
        """groups: dictionaries with "params", and what differs from the defaults."""
        self.param_groups = [{**defaults, **group} for group in groups]
        self.state = {p: self.start(p) for group in groups for p in group["params"]}

    @torch.no_grad()
    def step(self):
        """Update every parameter that has a gradient."""
        for group in self.param_groups:
            params = [p for p in group["params"] if p.grad is not None]
            if params:
                self.update(params, [local(p.grad) for p in params], group)

    def moments(self, name, params):
        return [local(self.state[p][name]) for p in params]

    def zero_grad(self):
        for p in self.state:
            p.grad = None

    def state_dict(self):
        """-> the moments of all parameters, in order. Rates and the like are not state: they come from the config."""
        return list(self.state.values())

    def load_state_dict(self, state):
        """Take up what `state_dict` gave. ValueError if it belongs to other parameters or another optimizer."""
        for own, moments in zip(self.state.values(), state, strict=True):
            if not isinstance(moments, dict) or own.keys() != moments.keys():
                raise ValueError(f"moments other than {', '.join(own)}")
            for name, moment in own.items():
                if getattr(moments[name], "shape", None) != moment.shape:
                    raise ValueError(f"{name} is not of the shape {tuple(moment.shape)}")
                local(moment).copy_(part_of(moments[name].to(moment.device), moment))


class AdamW(Optimizer):
    """Adam with decoupled weight decay (Loshchilov and Hutter 2017, arXiv:1711.05101), by torch's fused kernel."""

    def __init__(self, groups, lr, betas, weight_decay):
        super().__init__(groups, lr=lr, betas=betas, weight_decay=weight_decay)

    def start(self, p):
        return {"step": torch.zeros((), device=p.device), "mean": torch.zeros_like(p), "square": torch.zeros_like(p)}

    def update(self, params, grads, group):
        beta1, beta2 = group["betas"]
        mean, square, steps = (self.moments(name, params) for name in ("mean", "square", "step"))
        adamw([local(p) for p in params], grads, mean, square, [], steps, fused=True, amsgrad=False, maximize=False,
              beta1=beta1, beta2=beta2, lr=group["lr"], weight_decay=group["weight_decay"], eps=1e-8)


class Muon(Optimizer):
    """Momentum made orthogonal, for matrices (Jordan et al. 2024, kellerjordan.github.io/posts/muon).

    The same update as torch.optim.Muon, which a test holds it to, and many times faster on a CPU: that one works in
    bfloat16, for which most CPUs have no fast arithmetic, and on one matrix at a time. The parameters of a group have one
    shape; with "rows", each so many of their rows are a matrix of their own.
    """

    def __init__(self, groups, lr, weight_decay=0.1, momentum=0.95):
        super().__init__(groups, lr=lr, weight_decay=weight_decay, momentum=momentum, rows=None)

    def start(self, p):
        return {"momentum": torch.zeros_like(p)}

    def update(self, params, grads, group):
        if len(params) > 1 and hasattr(params[0], "full_tensor"):  # whole only one at a time
            for p, grad in zip(params, grads):
                self.update([p], [grad], group)
            return
        buffers = self.moments("momentum", params)
        torch._foreach_lerp_(buffers, grads, 1 - group["momentum"])
        nesterov = torch._foreach_lerp(grads, buffers, group["momentum"])
        x = torch.stack([joined(part, p) for part, p in zip(nesterov, params)])  # (N, rows, columns)
        rows, columns = group["rows"] or x.size(1), x.size(2)
        x = orthogonalize(x.view(-1, rows, columns)).reshape(x.shape)
        own, steps = [local(p) for p in params], [part_of(y, p) for y, p in zip(x.unbind(), params)]
        torch._foreach_mul_(own, 1 - group["lr"] * group["weight_decay"])
        torch._foreach_add_(own, steps, alpha=-group["lr"] * math.sqrt(max(1, rows / columns)))


def orthogonalize(x, steps=5):
    """Matrices x (N, rows, cols) -> the same with singular values near 1, by Newton-Schulz iteration of order five.

    Each step multiplies x by a polynomial of its Gram matrix. All of them are polynomials of the first Gram matrix, so the
    steps are gathered there, on the shorter side, and x is multiplied once: half the work where one side is four times the
    other. That needs the precision of float32.
    """
    if x.size(1) > x.size(2):
        return orthogonalize(x.mT, steps).mT
    x = x / x.norm(dim=(1, 2), keepdim=True).clamp(min=1e-7)
    gram, identity, product = x @ x.mT, torch.eye(x.size(1), device=x.device), None
    for step in range(steps):
        factor = torch.baddbmm(gram, gram, gram, beta=-4.7750, alpha=2.0315) + 3.4445 * identity
        product = factor if product is None else factor @ product
        if step + 1 < steps:
            gram = factor @ gram @ factor
    return product @ x


def build(model, config):
    """-> optimizers of all parameters: weight decay on matrices, none on vectors, positions and Muon's momentum.

    With muon_heads, each head of queries, keys and values is a matrix of its own for Muon.
    """
    plain, decayed, blocks = [], [], {}  # blocks: the part of a block -> its matrix in every block
    for name, p in model.named_parameters():
        if p.ndim != 2 or name.startswith("position."):
            plain.append(p)
        elif config.optimizer == "muon" and name.startswith("blocks."):
            blocks.setdefault(name.split(".", 2)[2], []).append(p)
        else:
            decayed.append(p)
    groups = [{"params": decayed}, {"params": plain, "weight_decay": 0.0}]
    adamw = AdamW([g for g in groups if g["params"]], config.learning_rate, (config.beta1, config.beta2), config.weight_decay)
    split = {"attention.qkv.weight": config.head_size} if config.muon_heads else {}
    groups = [{"params": params, "rows": split.get(part)} for part, params in blocks.items()]
    return [adamw] + ([Muon(groups, config.muon_learning_rate, config.weight_decay, config.muon_momentum)] if groups else [])


def learning_rate(step, config):
    """Learning rate of adamw at iteration `step`, counted from 0: up in warmup_iters, level, then down to min_lr."""
    if step < config.warmup:
        return config.learning_rate * (step + 1) / (config.warmup + 1)
    start = max(config.warmup, min(round((1 - config.decay_fraction) * config.max_iters), config.max_iters - 1))
    done = min(1.0, max(0.0, (step - start) / (config.max_iters - start)))
    left = 1 - done if config.lr_decay == "linear" else 0.5 * (1 + math.cos(math.pi * done))
    return config.min_lr + (config.learning_rate - config.min_lr) * left


def set_learning_rate(optimizers, step, config):
    """Set every optimizer's rate for iteration `step`, muon's in proportion to adamw's. -> adamw's."""
    rate = learning_rate(step, config)
    for optimizer in optimizers:
        scale = config.muon_learning_rate / config.learning_rate if isinstance(optimizer, Muon) else 1.0
        for group in optimizer.param_groups:
            group["lr"] = rate * scale
    return rate
