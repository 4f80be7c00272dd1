"""The menu of position encodings, behind one seam.

Position can reach a transformer at three places, so an encoding is the answer to one of three questions about integer
positions. The base class answers None, "not here", three times. To add an encoding: one class, one entry in POSITIONS, one
word in config.py.
"""
import math

import torch
import torch.nn as nn

from config import SCALING_PARAMETERS, UserError
from rope import SCALINGS, angles, frequencies


class Position(nn.Module):
    """No encoding (NoPE; Kazemnejad et al. 2023, arXiv:2305.19466), and the base of the others.

    Holds no state but what is learned: angles, masks and biases are computed from positions when they are needed.
    """

    reach = math.inf  # how many positions it can tell apart
    relative = True  # whether only differences of positions matter

    def __init__(self, config):
        super().__init__()
        self.config = config

    def embedding(self, pos):
        """pos (T,) -> (T, C), added to the token embeddings, or None."""

    def rotation(self, pos, length):
        """pos (T,) -> (T, D/2, 2), the cosine and sine by which each plane of queries and keys turns, or None.

        length: tokens of the whole evaluated window, for scalings that depend on it.
        """

    def bias(self, head, query, key):
        """head (H, 1, 1), query positions (T, 1), key positions (S,) -> (H, T, S), added to the scores, or None."""

    def forward(self, pos, T, length=None):
        """pos (S,): positions of all keys, of which the last T are also queries -> (embedding, rotation, mask).

        Owns every mask, so that no encoding can leak the future: the bias with -inf where a key is not visible, a boolean
        for a chunk after cached keys, else None, which means plain causal. length: tokens of the whole window when this
        is a part of it; len(pos) unless given.
        """
        S, device = len(pos), pos.device
        if self.reach < math.inf and pos.max() >= self.reach:
            raise UserError(f"position {pos.max()} asked of {self.config.position} positions",
                            f"the table holds {self.reach}, from 0 on; there is no answer beyond it")
        new = pos[S - T:]
        mask = self.bias(torch.arange(self.config.n_head, device=device)[:, None, None], new[:, None], pos)
        if mask is not None or 1 < T < S:
            index = torch.arange(S, device=device)  # who sees whom is a matter of order, not of positions
            visible = index <= index[S - T:, None]
            mask = visible if mask is None else mask.masked_fill(~visible, -math.inf)
        return self.embedding(new), self.rotation(new, length or S), mask


class Learned(Position):
    """A vector for each position, learned (GPT-2; Radford et al. 2019)."""

    relative = False

    def __init__(self, config):
        super().__init__(config)
        self.reach = config.block_size
        self.table = nn.Embedding(self.reach, config.n_embd)

    def embedding(self, pos):
        return self.table(pos)


class Sinusoidal(Position):
    """Sines and cosines of the position (Vaswani et al. 2017, arXiv:1706.03762, section 3.5).

    Scaled to the token embeddings' initial standard deviation: at unit amplitude they would drown the tokens.
    """

    relative = False

    def embedding(self, pos):
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
        still = turns.new_tensor([1.0, 0.0]).expand(len(pos), (self.config.head_dim - self.config.rope_dim) // 2, 2)
        return torch.cat((turns, still), 1)


POSITIONS = {"none": Position, "learned": Learned, "sinusoidal": Sinusoidal, "rope": RoPE}
