"""The transformer: a pre-norm decoder in the manner of GPT-2, told about positions by one module.

Sizes, here and in position.py: B batch, T new tokens, S all keys, C width, H heads, D head size, V vocabulary.
"""
from functools import partial

import torch
import torch.nn as nn
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.checkpoint import checkpoint

from options import UserError
from position import POSITIONS, Position
from rope import precise, rotate


class Linear(nn.Linear):
    """A linear layer. For a few tokens, as in sampling, a CPU spends its time on reading the matrix, and MKL, which torch
    takes for products there, reads two halves as a batch up to three times as fast as the whole (docs/performance.md)."""

    FEW = 16  # tokens, up to which this was measured

    def forward(self, x):
        """x (..., in_features) -> (..., out_features)."""
        tokens, half = x.numel() // self.in_features, self.out_features // 2
        if tokens > self.FEW or torch.is_grad_enabled() or x.device.type != "cpu":
            return super().forward(x)
        flat, odd = x.reshape(tokens, self.in_features), self.out_features % 2
        halves = (self.weight[:-1] if odd else self.weight).view(2, half, self.in_features)
        y = torch.bmm(halves, flat.mT.expand(2, -1, -1)).view(2 * half, tokens).mT  # (tokens, out_features)
        if odd:
            y = torch.cat((y, flat @ self.weight[-1:].mT), -1)
        return (y if self.bias is None else y + self.bias.type_as(y)).reshape(*x.shape[:-1], self.out_features).contiguous()


class Memory:
    """What one block keeps of the tokens it has `seen`, at most `capacity`."""

    def __init__(self, capacity):
        self.capacity, self.seen = capacity, 0
        self.tails = {}  # the last inputs of each Canon layer


class Past(Memory):
    """Keys and values of one block's tokens so far, written in place into room that doubles.

    With a sliding window, the keys that no later token sees are let go: the last `kept` are held.
    """

    def __init__(self, capacity, window=None):
        super().__init__(capacity)
        self.window = window

    @property
    def kept(self):
        return min(self.seen, self.window - 1) if self.window else self.seen

    def extend(self, k, v):
        """Append k, v (B, H, T, D) -> all that are held so far (B, H, S, D)."""
        start, self.seen = self.kept, self.seen + k.size(2)
        if start == 0:
            self.k, self.v = k[:, :, :0], v[:, :, :0]
        if self.window:
            self.k, self.v = (torch.cat((old[:, :, old.size(2) - start:], new), 2) for old, new in ((self.k, k), (self.v, v)))
            return self.k, self.v
        if self.seen > self.k.size(2):
            room = max(self.seen, min(self.capacity, 2 * self.seen))
            self.k, self.v = (F.pad(held, (0, 0, 0, room - held.size(2))) for held in (self.k, self.v))
        self.k[:, :, start:self.seen], self.v[:, :, start:self.seen] = k, v
        return self.k[:, :, :self.seen], self.v[:, :, :self.seen]


class State(Memory):
    """What linear attention remembers of all tokens so far: sums over keys, of a size that does not grow."""

    kept, sums = 0, None  # no key is held


# Queries up to which attention in bfloat16 on a CPU is written out as products of matrices: the backward pass of PyTorch's
# fused kernel takes two to five times as long there. Beyond, T x T weights cost what that saves (docs/performance.md).
UNFUSED = 512


def attend(q, k, v, mask, dropout):
    """Softmax attention of q (B, H, T, D) over k, v (B, G, S, D); mask as Position.forward gives it -> (B, H, T, D)."""
    def attention(q, k, v, mask):
        return F.scaled_dot_product_attention(q, k, v, mask, dropout, is_causal=mask is None and q.size(2) > 1,
                                              enable_gqa=q.size(1) != k.size(1))

    if mask is None or mask.dtype == torch.bool:
        if q.device.type == "cpu" and q.dtype == torch.bfloat16 and q.size(2) <= UNFUSED:
            with sdpa_kernel(SDPBackend.MATH):
                return attention(q, k, v, mask)
        return attention(q, k, v, mask)
    with torch.autocast(q.device.type, enabled=False):  # in 16 bits, far distances would be biased alike
        q, k, v = precise(q), precise(k), precise(v)
        return attention(q, k, v, mask.type_as(q))


def linear_attention(features, turned, v, state=None, chunk=64):
    """Causal linear attention (Su et al. 2021, arXiv:2104.09864, equation 19; Katharopoulos et al. 2020, arXiv:2006.16236).

    features, turned: queries and keys as positive features, plain and rotated, each a pair of (B, H, T, D); v (B, H, T, D)
    -> (B, H, T, D): y_t = sum over s <= t of (turned q_t . turned k_s) v_s / sum over s <= t of q_t . k_s. The rotation is
    in the numerator alone: turned features may be negative, and their sum zero. Cost grows linearly with T: within a chunk
    by scores, across chunks by the sum of k v^T over all that came before.
    """
    T = v.size(2)
    chunk = min(chunk, T)
    padding = -T % chunk
    q, k, q_turned, k_turned, v = (F.pad(x, (0, 0, 0, padding)).unflatten(2, (-1, chunk)) for x in (*features, *turned, v))
    added = (k_turned.mT @ v, k.sum(-2, keepdim=True))  # by each chunk: (B, H, N, D, D), (B, H, N, 1, D)
    before = [F.pad(x.cumsum(2), (0, 0, 0, 0, 1, -1)) for x in added]  # shifted by a chunk: nothing of its own is in it
    if state is not None:
        before = [x + held for x, held in zip(before, state.sums)] if state.seen else before
        state.sums, state.seen = [(x + y)[:, :, -1:] for x, y in zip(before, added)], state.seen + T
    future = torch.ones(chunk, chunk, dtype=torch.bool, device=v.device).triu(1)
    numerator = (q_turned @ k_turned.mT).masked_fill(future, 0) @ v + q_turned @ before[0]
    denominator = (q @ k.mT).masked_fill(future, 0).sum(-1, keepdim=True) + q @ before[1].mT
    return (numerator / denominator.clamp(min=1e-12)).flatten(2, 3)[:, :, :T]  # padded rows would be 0 / 0


class Attention(nn.Module):
    """Causal multi-head attention. It never learns the name of the encoding, and turns queries and keys only; values are
    turned in an ablation, rope_values."""

    def __init__(self, config):
        super().__init__()
        self.config, C, D = config, config.n_embd, config.head_size
        self.qkv = Linear(C, (config.n_head + 2 * config.kv_heads) * D,
                          bias=config.bias if config.qkv_bias is None else config.qkv_bias)
        self.out = Linear(config.n_head * D, C, bias=config.bias)
        if config.qk_norm == "weighted":
            self.q_norm, self.k_norm = (nn.RMSNorm(D, config.norm_eps) for _ in range(2))

    def forward(self, x, rotation, mask, past=None):
        """x (B, T, C) -> (B, T, C); rotation and mask as Position.forward gives them."""
        B, T, C = x.shape
        H, G = self.config.n_head, self.config.kv_heads  # G heads of keys and values
        qk, v = self.qkv(x).view(B, T, H + 2 * G, -1).split((H + G, G), 2)  # (B, T, H + G | G, D)
        if self.config.qk_norm == "weighted":
            qk = torch.cat((self.q_norm(precise(qk[:, :, :H])), self.k_norm(precise(qk[:, :, H:]))), 2).type_as(qk)
        elif self.config.qk_norm:
            qk = F.rms_norm(qk, qk.shape[-1:])
        if self.config.rope_values:
            v = rotate(v, F.normalize(rotation, dim=-1))  # without the gain, which is for scores
        y = self.mix(qk, v.transpose(1, 2), rotation, mask, past)  # (B, H, T, D)
        return self.out(y.transpose(1, 2).reshape(B, T, -1))

    def split(self, qk):
        """(B, T, H + G, D) -> queries (B, H, T, D), keys (B, G, T, D)."""
        return qk.transpose(1, 2).split((self.config.n_head, self.config.kv_heads), 1)

    def past(self, capacity):
        return Past(capacity, self.config.window)

    def mix(self, qk, v, rotation, mask, past):
        q, k = self.split(qk if rotation is None else rotate(qk, rotation))
        if past is not None:
            k, v = past.extend(k, v)  # (B, G, S, D)
        return attend(q, k, v, mask, self.config.dropout if self.training else 0.0)


class LinearAttention(Attention):
    """Attention whose scores are products of features, so that the past is a sum and no mask is needed."""

    def past(self, capacity):
        return State(capacity)

    def mix(self, qk, v, rotation, mask, past):
        features = F.elu(precise(qk)) + 1
        shared = self.config.n_head // self.config.kv_heads

        def pair(qk):
            q, k = self.split(qk)
            return q, k.repeat_interleave(shared, 1)

        plain = pair(features)
        turned = plain if rotation is None else pair(rotate(features, rotation))
        return linear_attention(plain, turned, precise(v).repeat_interleave(shared, 1), past).type_as(v)


ATTENTIONS = {"softmax": Attention, "linear": LinearAttention}


class MLP(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.activation = config.activation
        self.up = Linear(config.n_embd, config.mlp_width * (2 if self.activation == "swiglu" else 1), bias=config.bias)
        self.out = Linear(config.mlp_width, config.n_embd, bias=config.bias)

    def forward(self, x):
        return self.out(ACTIVATIONS[self.activation](self.up(x)))


def swiglu(x):
    gate, x = x.chunk(2, -1)
    return F.silu(gate) * x


ACTIVATIONS = {"gelu": F.gelu, "gelu_tanh": partial(F.gelu, approximate="tanh"), "relu2": lambda x: F.relu(x).square(),
               "swiglu": swiglu}


def norm(config):
    if config.norm == "rmsnorm":
        return nn.RMSNorm(config.n_embd, config.norm_eps)
    return nn.LayerNorm(config.n_embd, config.norm_eps, bias=config.bias)


class Canon(nn.Module):
    """Each token with a learned mixture of the few before it, in every channel by itself (Canon layers; Allen-Zhu 2025,
    arXiv:2512.17351): order that is not told by positions. The share of the token itself is the gain of the norm before."""

    def __init__(self, config):
        super().__init__()
        # From the farthest token to the nearest. Nothing at first, so that models with and without start alike; of three
        # dimensions, so that it is no matrix for Muon or decay.
        self.weight = nn.Parameter(torch.zeros(config.canon - 1, 1, config.n_embd))

    def forward(self, x, past=None):
        """x (B, T, C) -> (B, T, C); past: of the block, which holds the tokens before x."""
        n, T = len(self.weight), x.size(1)
        first = past is None or self not in past.tails
        x = F.pad(x, (0, 0, n, 0)) if first else torch.cat((past.tails[self], x), 1)
        if past is not None:
            past.tails[self] = x[:, T:]
        mixed = x[:, n:]
        for i in range(n):
            mixed = torch.addcmul(mixed, x[:, i:i + T], self.weight[i])
        return mixed


class Block(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.norm1, self.attention = norm(config), ATTENTIONS[config.attention](config)
        self.norm2, self.mlp = norm(config), MLP(config)
        self.canon1, self.canon2 = (Canon(config) if config.canon else None for _ in range(2))
        self.drop, self.parallel = nn.Dropout(config.dropout), config.parallel_block

    def forward(self, x, rotation, mask, past=None):
        def mixed(x, canon):
            return canon(x, past) if canon else x

        attended = x + self.drop(self.attention(mixed(self.norm1(x), self.canon1), rotation, mask, past))
        return attended + self.drop(self.mlp(mixed(self.norm2(x if self.parallel else attended), self.canon2)))


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
        self.head = Linear(config.n_embd, vocab_size, bias=config.head_bias)
        if config.tied:
            self.head.weight = self.embed.weight
        initialize(self, config, config.seed)
        # Last, and from a generator of its own: with one seed, every encoding starts from the same shared weights.
        self.position = POSITIONS[config.position](config)
        if config.attention == "linear" and type(self.position).bias is not Position.bias:
            raise UserError(f"attention = linear, position = {config.position}",
                            "linear attention builds no score matrix, and that is what this encoding acts on")
        initialize(self.position, config, config.seed + 2**31)

    def hidden(self, ids, pos=None, past=None):
        """ids (B, T) -> (B, T, C) before the head. pos: positions of all tokens so far or of more, 0, 1, 2 ... unless given.
        past: from self.past(), to continue after the tokens it has seen."""
        T = ids.size(1)
        seen, kept, length = (past[0].seen, past[0].kept, past[0].capacity) if past else (0, 0, T)
        pos = torch.arange(seen - kept, seen + T, device=ids.device) if pos is None else pos[seen - kept:seen + T]
        embedding, rotation, mask = self.position(pos, T, length)
        x = self.embed(ids)
        if embedding is not None:
            x = x + embedding.type_as(x)
        x = self.drop(x)
        for i, block in enumerate(self.blocks):
            # Compilation, which __call__ looks for, is for the one shape of training; other shapes would each compile anew.
            x = (block if self.training else block._call_impl)(x, rotation, mask, past and past[i])
        return self.norm(x)

    def forward(self, ids, pos=None, past=None):
        """ids (B, T) -> logits (B, T, V); arguments as in `hidden`."""
        return precise(self.head(self.hidden(ids, pos, past)))

    def loss(self, ids, targets, last=None, pos=None):
        """ids, targets (B, T) -> mean cross-entropy in nats of the last targets, all unless given, to be differentiated.
        A target of -1 does not count."""
        last = last or ids.size(1)
        return self.cross_entropy(self.hidden(ids, pos), targets, last).sum() / (targets[:, -last:] >= 0).sum()

    @torch.no_grad()
    def losses(self, ids, targets, last=None, pos=None):
        """ids, targets (B, T) -> cross-entropy in nats (B, last) of the last targets, all unless given.

        Memory grows with T, not with its square: long windows run in chunks of queries through the cache, and only the
        logits that are scored exist, a part at a time.
        """
        return self.cross_entropy(self.in_chunks(ids, pos), targets, last or ids.size(1))

    @torch.no_grad()
    def answers(self, ids, targets, pos=None):
        """ids, targets (B, T) -> mean cross-entropy in nats of each row's targets, and whether each of them is the likeliest
        token, both (B,). Targets of -1 do not count."""
        scored = targets >= 0
        logits = precise(self.head(self.in_chunks(ids, pos)[scored]))  # (scored targets, V): few of all
        losses = targets.new_zeros(targets.shape, dtype=logits.dtype)
        losses[scored] = F.cross_entropy(logits, targets[scored], reduction="none")
        wrong = torch.zeros_like(scored)
        wrong[scored] = logits.argmax(-1) != targets[scored]
        return losses.sum(1) / scored.sum(1), ~wrong.any(1)

    def in_chunks(self, ids, pos=None):
        """What `hidden` gives, of long windows a chunk of queries at a time."""
        T = ids.size(1)
        past = self.past(T) if T > self.CHUNK else None
        return torch.cat([self.hidden(part, pos, past) for part in ids.split(self.CHUNK, 1)], 1)

    def cross_entropy(self, x, targets, last):
        """Hidden x (B, T, C), targets (B, T) -> (B, last) nats, 0 where a target is -1, with no more than LOGITS logits in
        memory at once."""
        def score(x, targets):
            return F.cross_entropy(precise(self.head(x)), targets, ignore_index=-1, reduction="none")

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
        return [block.attention.past(capacity) for block in self.blocks]


def initialize(module, config, seed):
    """Draw the weights from a generator of their own; biases start at 0 and norms at 1."""
    generator = torch.Generator().manual_seed(seed)
    for name, part in module.named_modules():
        if isinstance(part, nn.Embedding):
            nn.init.normal_(part.weight, std=config.embedding_std, generator=generator)
        elif isinstance(part, nn.Linear):
            if part.bias is not None:
                nn.init.zeros_(part.bias)
            if name == "head":
                if not config.tied:  # as small as the tied one, so that the first guess is an even one
                    nn.init.normal_(part.weight, std=config.embedding_std, generator=generator)
                continue
            # What a block adds to the residual stream starts small, so that depth does not matter at the start.
            std = part.in_features ** -0.5 * ((2 * config.n_layer) ** -0.5 if name.endswith(".out") else 1)
            nn.init.normal_(part.weight, std=std, generator=generator)
