"""The transformer: a pre-norm decoder in the manner of GPT-2, told about positions by one module.

Sizes, here and in position.py: B batch, T new tokens, S all keys, C width, H heads, D head size, V vocabulary.
"""
import math
from functools import partial

import torch
import torch.nn as nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from position import POSITIONS
from rope import precise, rotate


class Past:
    """Keys and values of one block's tokens so far, `seen` of at most `capacity`, written in place into room that doubles."""

    def __init__(self, capacity):
        self.capacity, self.seen = capacity, 0

    def extend(self, k, v):
        """Append k, v (B, H, T, D) -> all so far (B, H, S, D)."""
        start, self.seen = self.seen, self.seen + k.size(2)
        if start == 0:
            self.k, self.v = k[:, :, :0], v[:, :, :0]
        if self.seen > self.k.size(2):
            room = max(self.seen, min(self.capacity, 2 * self.seen))
            self.k, self.v = (F.pad(held, (0, 0, 0, room - held.size(2))) for held in (self.k, self.v))
        self.k[:, :, start:self.seen], self.v[:, :, start:self.seen] = k, v
        return self.k[:, :, :self.seen], self.v[:, :, :self.seen]


class Attention(nn.Module):
    """Causal multi-head attention. It never learns the name of the encoding, and turns queries and keys only."""

    def __init__(self, config):
        super().__init__()
        self.n_head, self.dropout, self.qk_norm = config.n_head, config.dropout, config.qk_norm
        self.qkv = nn.Linear(config.n_embd, 3 * config.n_embd, bias=config.bias)
        self.out = nn.Linear(config.n_embd, config.n_embd, bias=config.bias)

    def forward(self, x, rotation, mask, past=None):
        B, T, C = x.shape
        qk, v = self.qkv(x).view(B, T, 3 * self.n_head, -1).split((2 * self.n_head, self.n_head), 2)  # (B, T, 2H | H, D)
        if self.qk_norm:
            qk = F.rms_norm(qk, qk.shape[-1:])
        if rotation is not None:
            qk = rotate(qk, rotation)
        q, k, v = *qk.transpose(1, 2).chunk(2, 1), v.transpose(1, 2)  # each (B, H, T, D)
        if past is not None:
            k, v = past.extend(k, v)  # (B, H, S, D)
        y = F.scaled_dot_product_attention(q, k, v, mask, self.dropout if self.training else 0.0,
                                           is_causal=mask is None and T > 1)
        return self.out(y.transpose(1, 2).reshape(B, T, C))


class MLP(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.activation = config.activation
        # swiglu has three matrices where the others have two; two thirds of the width keep the parameters equal.
        hidden = 8 * math.ceil(config.n_embd / 3) if self.activation == "swiglu" else 4 * config.n_embd
        self.up = nn.Linear(config.n_embd, hidden * (1 + (self.activation == "swiglu")), bias=config.bias)
        self.out = nn.Linear(hidden, config.n_embd, bias=config.bias)

    def forward(self, x):
        x = self.up(x)
        if self.activation == "swiglu":
            gate, x = x.chunk(2, -1)
            return self.out(F.silu(gate) * x)
        return self.out(F.gelu(x) if self.activation == "gelu" else F.relu(x).square())


def norm(config):
    return nn.RMSNorm(config.n_embd) if config.norm == "rmsnorm" else nn.LayerNorm(config.n_embd, bias=config.bias)


class Block(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.norm1, self.attention = norm(config), Attention(config)
        self.norm2, self.mlp = norm(config), MLP(config)
        self.drop = nn.Dropout(config.dropout)

    def forward(self, x, rotation, mask, past=None):
        x = x + self.drop(self.attention(self.norm1(x), rotation, mask, past))
        return x + self.drop(self.mlp(self.norm2(x)))


class GPT(nn.Module):
    CHUNK = 512  # queries at once in windows longer than the training length: no T x T matrix ever exists
    LOGITS = 2**25  # logits at once

    def __init__(self, config, vocab_size):
        super().__init__()
        self.config = config
        self.embed = nn.Embedding(vocab_size, config.n_embd)
        self.drop = nn.Dropout(config.dropout)
        self.blocks = nn.ModuleList(Block(config) for _ in range(config.n_layer))
        self.norm = norm(config)
        self.head = nn.Linear(config.n_embd, vocab_size, bias=False)
        if config.tied:
            self.head.weight = self.embed.weight
        initialize(self, config, config.seed)
        # Last, and from a generator of its own: with one seed, every encoding starts from the same shared weights.
        self.position = POSITIONS[config.position](config)
        initialize(self.position, config, config.seed + 2**31)

    def hidden(self, ids, pos=None, past=None):
        """ids (B, T) -> (B, T, C) before the head. pos (S,): positions of all tokens so far, 0 .. S-1 unless given.
        past: from self.past(), to continue after the tokens it has seen."""
        T = ids.size(1)
        seen, length = (past[0].seen, past[0].capacity) if past else (0, T)
        pos = torch.arange(seen + T, device=ids.device) if pos is None else pos
        embedding, rotation, mask = self.position(pos, T, length)
        x = self.embed(ids)
        if embedding is not None:
            x = x + embedding.type_as(x)
        x = self.drop(x)
        for i, block in enumerate(self.blocks):
            # Compilation is for the one shape of training; other shapes would each compile anew.
            x = (block if self.training else block.forward)(x, rotation, mask, past and past[i])
        return self.norm(x)

    def forward(self, ids, pos=None, past=None):
        """ids (B, T) -> logits (B, T, V); arguments as in `hidden`."""
        return precise(self.head(self.hidden(ids, pos, past)))

    def loss(self, ids, targets, last=None):
        """ids, targets (B, T) -> mean cross-entropy in nats of the last targets, all unless given, to be differentiated."""
        return self.cross_entropy(self.hidden(ids), targets, last or ids.size(1)).mean()

    @torch.no_grad()
    def losses(self, ids, targets, last=None):
        """ids, targets (B, T) -> cross-entropy in nats (B, last) of the last targets, all unless given.

        Memory grows with T, not with its square: long windows run in chunks of queries through the cache, and only the
        logits that are scored exist, a part at a time.
        """
        T = ids.size(1)
        past = self.past(T) if T > self.CHUNK else None
        x = torch.cat([self.hidden(chunk, past=past) for chunk in ids.split(self.CHUNK, 1)], 1)
        return self.cross_entropy(x, targets, last or T)

    def cross_entropy(self, x, targets, last):
        """Hidden x (B, T, C), targets (B, T) -> (B, last) nats, with no more than LOGITS logits in memory at once."""
        def score(x, targets):
            return F.cross_entropy(precise(self.head(x)), targets, reduction="none")

        size = max(1, self.LOGITS // self.head.out_features)
        parts = list(zip(x[:, -last:].flatten(0, 1).split(size), targets[:, -last:].flatten().split(size)))
        if len(parts) > 1 and torch.is_grad_enabled():  # the gradient computes each part's logits once more
            score = partial(checkpoint, score, use_reentrant=False, preserve_rng_state=False)
        return torch.cat([score(*part) for part in parts]).view(-1, last)

    def size(self):
        """Number of parameters, a learned position table included."""
        return sum(p.numel() for p in self.parameters())

    def past(self, capacity):
        """An empty cache for a window of `capacity` tokens."""
        return [Past(capacity) for _ in self.blocks]


def initialize(module, config, seed):
    """Draw the weights from a generator of their own; biases start at 0 and norms at 1."""
    generator = torch.Generator().manual_seed(seed)
    for name, part in module.named_modules():
        if isinstance(part, nn.Embedding):
            nn.init.normal_(part.weight, std=config.embedding_std, generator=generator)
        elif isinstance(part, nn.Linear) and not (name == "head" and config.tied):
            # What a block adds to the residual stream starts small, so that depth does not matter at the start.
            std = part.in_features ** -0.5 * ((2 * config.n_layer) ** -0.5 if name.endswith(".out") else 1)
            if name == "head":  # as the tied one: the first guess is an even one
                std = config.embedding_std
            nn.init.normal_(part.weight, std=std, generator=generator)
            if part.bias is not None:
                nn.init.zeros_(part.bias)
