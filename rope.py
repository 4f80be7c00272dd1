"""The mathematics of rotary position embedding (RoPE; Su et al. 2021, arXiv:2104.09864).

A head of D dimensions is read as D/2 planes, each a neighbouring pair of dimensions. Plane i of the query at position m is
turned by the angle m freq[i], plane i of the key at n by n freq[i], with freq[i] = base^(-2i/D) (section 3.2.2). The score
of the two then depends on m - n alone, since turning both by the same angle changes no dot product. Values are not turned:
they carry what is read, not where it is looked for.
"""
import math

import torch


def frequencies(dim, base=10000.0, device=None):
    """Radians per position of each of the dim/2 planes, fastest first: (dim/2,) float32."""
    return base ** (-torch.arange(0, dim, 2, device=device).float() / dim)


def angles(pos, freq):
    """Positions (T,), frequencies (P,) -> (T, P) radians; a product, never `@`, which autocast would round to 16 bits."""
    return pos[:, None] * freq


def precise(x):
    """x in float32 at least, whatever half precision it comes in."""
    return x.to(torch.promote_types(x.dtype, torch.float32))


def rotate(x, rotation):
    """Turn x (B, T, N, D) by rotation (T, D/2, 2), the cosine and sine of every plane's angle -> (B, T, N, D).

    Neighbouring pairs are complex numbers, so turning them is one complex product, several times faster than shuffling
    halves. The compiler wants the same in real arithmetic. At least float32 whatever x is, and cast back.
    """
    pairs = precise(x).unflatten(-1, (-1, 2))
    if torch.compiler.is_compiling():
        (a, b), (cos, sin) = pairs.unbind(-1), rotation[:, None].unbind(-1)
        turned = torch.stack((a * cos - b * sin, a * sin + b * cos), -1)
    else:
        turned = torch.view_as_real(torch.view_as_complex(pairs) * torch.view_as_complex(rotation)[:, None])
    return turned.flatten(-2).type_as(x)


# A scaling slows the planes so that a window `factor` times longer than `context`, the training length, stays within
# angles seen in training: (freq (P,), base, factor, context, length, and the method's own parameters) -> (freq (P,), gain).
# length is the evaluated length; gain multiplies queries and keys. Every one equals ROPE_INIT_FUNCTIONS of transformers.


def none(freq, *, base, factor, context, length):
    return freq, 1.0


def linear(freq, *, base, factor, context, length):
    """Position interpolation (Chen et al. 2023, arXiv:2306.15595): all planes alike."""
    return freq / factor, 1.0


def ntk(freq, *, base, factor, context, length):
    """NTK-aware scaling: a larger base, base factor^(D/(D-2)). The fastest plane stays, the slowest is slowed by factor."""
    dim = 2 * len(freq)
    return frequencies(dim, base * factor ** (dim / (dim - 2)), freq.device), 1.0


def yarn(freq, *, base, factor, context, length, beta_fast=32.0, beta_slow=1.0, attention_factor=None):
    """YaRN (Peng et al. 2023, arXiv:2309.00071, section 3): planes that turn more than beta_fast times within the context
    stay, those below beta_slow are slowed by factor, with a linear ramp over the planes between; scores sharpen by gain^2."""
    dim = 2 * len(freq)

    def plane(turns):  # the plane, as a real number, that turns this often within the context
        return dim * math.log(context / (turns * 2 * math.pi)) / (2 * math.log(base))

    low, high = max(math.floor(plane(beta_fast)), 0), min(math.ceil(plane(beta_slow)), dim - 1)
    width = high - low or 0.001
    slowed = ((torch.arange(len(freq), device=freq.device) - low) / width).clamp(0, 1)
    gain = attention_factor or 0.1 * math.log(factor) + 1.0
    return freq * (1 - slowed) + freq / factor * slowed, gain


SCALINGS = {"none": none, "linear": linear, "ntk": ntk, "yarn": yarn}
