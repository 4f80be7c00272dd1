"""Optimizers, parameter groups and the learning rate's schedule."""
import math

import torch


class Muon(torch.optim.Optimizer):
    """Momentum made orthogonal, for matrices (Jordan et al. 2024, kellerjordan.github.io/posts/muon).

    The same update as torch.optim.Muon, which a test holds it to, and many times faster on a CPU: that one works in
    bfloat16, for which most CPUs have no fast arithmetic, and on one matrix at a time.
    """

    def __init__(self, params, lr, weight_decay=0.1, momentum=0.95):
        super().__init__(params, dict(lr=lr, weight_decay=weight_decay, momentum=momentum))

    @torch.no_grad()
    def step(self):
        for group in self.param_groups:
            shapes = {}
            for p in group["params"]:
                if p.grad is not None:
                    shapes.setdefault(p.shape, []).append(p)
            for (rows, cols), params in shapes.items():
                grads = [p.grad for p in params]
                for p in params:
                    if "momentum_buffer" not in self.state[p]:
                        self.state[p]["momentum_buffer"] = torch.zeros_like(p)
                buffers = [self.state[p]["momentum_buffer"] for p in params]
                torch._foreach_lerp_(buffers, grads, 1 - group["momentum"])
                update = orthogonalize(torch.stack(torch._foreach_lerp(grads, buffers, group["momentum"])))  # Nesterov
                torch._foreach_mul_(params, 1 - group["lr"] * group["weight_decay"])
                torch._foreach_add_(params, list(update.unbind()), alpha=-group["lr"] * math.sqrt(max(1, rows / cols)))


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
    """-> optimizers of all parameters: weight decay on matrices, none on vectors, positions and Muon's momentum."""
    named = [(name, p) for name, p in model.named_parameters() if p.requires_grad]
    blocks = [p for name, p in named if name.startswith("blocks.") and p.ndim == 2]
    decayed = [p for name, p in named if p.ndim == 2 and not name.startswith(("blocks.", "position."))]
    plain = [p for name, p in named if p.ndim != 2 or name.startswith("position.")]
    muon = config.optimizer == "muon"
    groups = [{"params": decayed + ([] if muon else blocks)}, {"params": plain, "weight_decay": 0.0}]
    adamw = torch.optim.AdamW([g for g in groups if g["params"]], lr=config.learning_rate, betas=(config.beta1, config.beta2),
                              weight_decay=config.weight_decay, fused=True)
    return [adamw] + ([Muon(blocks, config.muon_learning_rate, config.weight_decay, config.muon_momentum)] if muon else [])


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
