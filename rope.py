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
# length is the evaluated length; gain multiplies queries and keys. They equal ROPE_INIT_FUNCTIONS of transformers, which
# lacks ntk, and their parameters have the names of Hugging Face's `rope_parameters`.


def none(freq, *, base, factor, context, length):
    return freq, 1.0


def linear(freq, *, base, factor, context, length):
    """Position interpolation (Chen et al. 2023, arXiv:2306.15595): all planes alike."""
    return freq / factor, 1.0


def ntk(freq, *, base, factor, context, length):
    """NTK-aware scaling: a larger base, base factor^(D/(D-2)). The fastest plane stays, the slowest is slowed by factor."""
    dim = 2 * len(freq)
    return frequencies(dim, base * factor ** (dim / (dim - 2)), freq.device), 1.0


def dynamic(freq, *, base, factor, context, length):
    """Dynamic NTK: nothing up to the training length, beyond it ntk by factor length/context - (factor - 1). No memory."""
    return ntk(freq, base=base, factor=factor * max(length, context) / context - (factor - 1), context=context, length=length)


def yarn(freq, *, base, factor, context, length, beta_fast=32.0, beta_slow=1.0, attention_factor=None, mscale=None,
         mscale_all_dim=None, truncate=True):
    """YaRN (Peng et al. 2023, arXiv:2309.00071, section 3): planes that turn more than beta_fast times within the context
    stay, those below beta_slow are slowed by factor, with a linear ramp over the planes between; scores sharpen by gain^2."""
    dim = 2 * len(freq)

    def plane(turns):  # the plane, as a real number, that turns this often within the context
        return dim * math.log(context / (turns * 2 * math.pi)) / (2 * math.log(base))

    low, high = plane(beta_fast), plane(beta_slow)
    if truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, dim - 1)
    slowed = ((torch.arange(len(freq), device=freq.device) - low) / (high - low or 0.001)).clamp(0, 1)

    def sharpen(scale):  # equation 22
        return 0.1 * scale * math.log(factor) + 1.0

    gain = attention_factor or (sharpen(mscale) / sharpen(mscale_all_dim) if mscale and mscale_all_dim else sharpen(1.0))
    return freq * (1 - slowed) + freq / factor * slowed, gain


def llama3(freq, *, base, factor, context, length, low_freq_factor, high_freq_factor):
    """Llama 3.1: planes with more than high_freq_factor turns within the context stay, those with fewer than low_freq_factor
    are slowed by factor, between them by a share that is linear in the turns (Grattafiori et al. 2024, arXiv:2407.21783)."""
    turns = context * freq / (2 * math.pi)
    kept = ((turns - low_freq_factor) / (high_freq_factor - low_freq_factor)).clamp(0, 1)
    return freq * kept + freq / factor * (1 - kept), 1.0


def longrope(freq, *, base, factor, context, length, short_factor, long_factor, attention_factor=None):
    """LongRoPE (Ding et al. 2024, arXiv:2402.13753): each plane is slowed by a factor of its own, found by search, of one list
    up to the training length and of another beyond it."""
    factors = freq.new_tensor(long_factor if length > context else short_factor)
    return freq / factors, attention_factor or math.sqrt(1 + math.log(factor) / math.log(context))


SCALINGS = {"none": none, "linear": linear, "ntk": ntk, "dynamic": dynamic, "yarn": yarn, "llama3": llama3,
            "longrope": longrope}
