"""The menu of position encodings, behind one seam.

Position can reach a transformer at three places, so an encoding is the answer to one of three questions about integer
positions. The base class answers None, "not here", three times. To add an encoding: one class, one entry in POSITIONS, one
word in config.py.
"""
import math

import numpy as np
import torch
import torch.nn as nn
from torch.nn import functional as F

from config import SCALING_PARAMETERS
from options import UserError
from rope import SCALINGS, angles, frequencies


class Position(nn.Module):
    """No encoding (NoPE; Kazemnejad et al. 2023, arXiv:2305.19466), and the base of the others.

    Holds no state but what is learned: angles, masks and biases are computed from positions when they are needed.
    """

    relative = True  # whether only differences of positions matter; None: only up to a threshold

    def __init__(self, config):
        super().__init__()
        self.config = config
        self.reach = config.random_positions or math.inf  # how many positions it can tell apart

    def random_subset(self, size, n, device=None):
        """-> sorted (size,) of 0 .. random_positions-1 that depends on (seed, n) alone, or None, which means 0 .. size-1.

        Randomized positional encodings (Ruoss et al. 2023, arXiv:2305.16843): training has seen positions as far apart as
        those of longer windows.
        """
        if self.config.random_positions:
            # The third number keeps it apart from the generator of batches, seeded by (seed, n).
            generator = np.random.default_rng((self.config.seed, n, 1))
            chosen = generator.choice(self.config.random_positions, size, replace=False)
            return torch.from_numpy(np.sort(chosen)).to(device)

    def embedding(self, pos, length):
        """pos (T,) -> (T, C), added to the token embeddings, or None. length: tokens of the whole evaluated window."""

    def rotation(self, pos, length):
        """pos (T,) -> (T, D/2, 2), the cosine and sine by which each plane of queries and keys turns, or None."""

    def bias(self, head, query, key):
        """head (H, 1, 1), query positions (T, 1), key positions (S,) -> (H, T, S), added to the scores, or None."""

    def constrain(self):
        """Bring parameters back into their range after an update, if they have one."""

    def forward(self, pos, T, length=None):
        """pos (S,): positions of all keys, of which the last T are also queries -> (embedding, rotation, mask).

        Owns every mask, so that no encoding can leak the future: the bias with -inf where a key is not visible, a boolean
        for a sliding window or for a chunk after cached keys, else None, which means plain causal. length: tokens of the
        whole window when this is a part of it; len(pos) unless given. All in float32 at least, whatever autocast is on.
        """
        S, device, window = len(pos), pos.device, self.config.window or math.inf
        if self.reach < math.inf and pos.max() >= self.reach:
            raise UserError(f"position {pos.max()} asked of {self.config.position} positions",
                            f"there are {self.reach}, from 0 on, and no answer beyond them")
        new, length = pos[S - T:], length or S
        with torch.autocast(device.type, enabled=False):
            mask = self.bias(torch.arange(self.config.n_head, device=device)[:, None, None], new[:, None], pos)
            if mask is not None or 1 < T < S or window < S:
                index = torch.arange(S, device=device)  # who sees whom is a matter of order, not of positions
                distance = index[S - T:, None] - index
                visible = (distance >= 0) & (distance < window)
                # Four dimensions, or the fused kernel is not taken.
                mask = visible if mask is None else mask.masked_fill(~visible, -math.inf)[None]
            return self.embedding(new, length), self.rotation(new, length), mask


class Learned(Position):
    """A vector for each position, learned (GPT-2; Radford et al. 2019).

    learned_extension = "interpolate" resamples the table to windows longer than it, as vision transformers do for images.
    """

    relative = False

    def __init__(self, config):
        super().__init__(config)
        self.reach = config.random_positions or config.block_size
        self.table = nn.Embedding(self.reach, config.n_embd)
        if config.learned_extension == "interpolate":
            self.reach = math.inf

    def embedding(self, pos, length):
        rows = self.table.num_embeddings
        if length <= rows:
            return self.table(pos)
        place = pos * ((rows - 1) / (length - 1))
        low = place.long()
        share = (place - low)[:, None].type_as(self.table.weight)
        return torch.lerp(self.table(low), self.table((low + 1).clamp(max=rows - 1)), share)


class Sinusoidal(Position):
    """Sines and cosines of the position (Vaswani et al. 2017, arXiv:1706.03762, section 3.5).

    Scaled to the token embeddings' initial standard deviation: at unit amplitude they would drown the tokens.
    """

    relative = False

    def embedding(self, pos, length):
        angle = angles(pos, frequencies(self.config.n_embd, device=pos.device))
        return math.sqrt(2) * self.config.embedding_std * torch.stack((angle.sin(), angle.cos()), -1).flatten(-2)


class RoPE(Position):
    """Rotation of queries and keys (Su et al. 2021, arXiv:2104.09864, section 3.2); the mathematics is in rope.py."""

    def frequencies(self, length, device=None):
        """-> (rope_dim/2,) radians per position under the configured scaling, and its gain. length: evaluated tokens."""
        c = self.config
        chosen = {name: getattr(c, name) for name in SCALING_PARAMETERS[c.rope_scaling] if getattr(c, name) is not None}
        return SCALINGS[c.rope_scaling](frequencies(c.rope_dim, c.rope_base, device), base=c.rope_base,
                                        factor=c.factor(length), context=c.original_context, length=length, **chosen)

    def rotation(self, pos, length):
        freq, gain = self.frequencies(length, pos.device)
        angle = angles(pos, freq)
        turns = gain * torch.stack((angle.cos(), angle.sin()), -1)
        # Planes beyond rope_dim turn by no angle and get no gain: cosine 1, sine 0.
        still = turns.new_tensor([1.0, 0.0]).expand(len(pos), (self.config.head_size - self.config.rope_dim) // 2, 2)
        return torch.cat((turns, still), 1)


class ALiBi(Position):
    """Scores fall with distance (Press et al. 2021, arXiv:2108.12409), at a slope of its own in every head."""

    def bias(self, head, query, key):
        n = 2 ** int(math.log2(self.config.n_head))  # heads beyond a power of two lie between the others
        slope = 2.0 ** (-8 * torch.where(head < n, head + 1, head - n + 0.5) / n)
        return -slope * (query - key)


class T5(Position):
    """A learned number for each head and each bucket of distances (Raffel et al. 2019, arXiv:1910.10683, section 2.1).

    Half of the buckets hold one distance each, the others logarithmically more, up to t5_max_distance.
    """

    def __init__(self, config):
        super().__init__(config)
        self.table = nn.Embedding(config.t5_buckets, config.n_head)

    def bias(self, head, query, key):
        buckets = self.config.t5_buckets
        exact = buckets // 2
        distance = (query - key).clamp(min=0)
        share = torch.log(distance.clamp(min=exact) / exact) / math.log(self.config.t5_max_distance / exact)
        far = (exact + (share * (buckets - exact)).long()).clamp(max=buckets - 1)
        return self.table(torch.where(distance < exact, distance.long(), far)).permute(2, 0, 1)


class KERPLE(Position):
    """A learned kernel of the distance in every head: -r1 log(1 + r2 |m - n|), or -r1 |m - n|^r2 with kerple_kernel = "power"
    (Chi et al. 2022, arXiv:2205.09921, equation 2), both positive, and r2 at most 2 as a power."""

    def __init__(self, config):
        super().__init__(config)
        # The authors draw both uniformly, from 0 to these numbers; here the heads are spread evenly over the same range.
        furthest = (1, 2) if config.kerple_kernel == "power" else (2, 1)
        spread = [(head + 0.5) / config.n_head for head in range(config.n_head)]
        self.r1 = nn.Parameter(torch.tensor([furthest[0] * share for share in spread]))
        self.r2 = nn.Parameter(torch.tensor([furthest[1] * share for share in reversed(spread)]))

    @torch.no_grad()
    def constrain(self):
        self.r1.clamp_(min=0.01)
        self.r2.clamp_(min=0.01, max=2 if self.config.kerple_kernel == "power" else None)

    def bias(self, head, query, key):
        r1, r2, distance = self.r1[head], self.r2[head], (query - key).clamp(min=0)
        if self.config.kerple_kernel == "power":
            # Where the distance is 0, the gradient of the power would not be finite.
            return -r1 * torch.where(distance > 0, distance.clamp(min=1) ** r2, 0.0)
        return -r1 * torch.log1p(r2 * distance)


class FIRE(Position):
    """A small network of the distance, relative to the query's position (Li et al. 2023, arXiv:2310.04418, equation 19):
    f(psi(m - n) / psi(max(L, m))) with psi(x) = log(c x + 1); c and the threshold L are learned."""

    relative = None  # up to the threshold; beyond it the distance is measured against the position

    def __init__(self, config):
        super().__init__(config)
        self.up, self.out = nn.Linear(1, config.fire_hidden), nn.Linear(config.fire_hidden, config.n_head)
        self.c, self.threshold = nn.Parameter(torch.tensor([0.1])), nn.Parameter(torch.tensor([1.0]))

    def bias(self, head, query, key):
        limit = (self.threshold * (self.config.fire_threshold or self.config.block_size / 4)).abs()

        def psi(x):
            return torch.log1p((self.c * x).abs())

        near = psi((query - key).clamp(min=0)) / (psi(torch.maximum(query, limit)) + 1e-6)
        # A few rows at a time: the network is wider than there are heads.
        return torch.cat([self.out(F.relu(self.up(rows[..., None]))) for rows in near.split(32)]).permute(2, 0, 1)


POSITIONS = {"none": Position, "learned": Learned, "sinusoidal": Sinusoidal, "rope": RoPE,
             "alibi": ALiBi, "t5": T5, "kerple": KERPLE, "fire": FIRE}
