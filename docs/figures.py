"""The figures of rope.md, drawn from rope.py's own functions: decay.png, planes.png, scalings.png.

    python docs/figures.py [FOLDER]           # beside this file unless a folder is given
"""
import math
import sys
from pathlib import Path

import matplotlib
import torch

matplotlib.use("Agg")
from matplotlib import pyplot as plt

if not __package__:  # run as a script: sys.path begins with this folder instead of the repository
    sys.path[0] = str(Path(__file__).resolve().parents[1])
import rope
from compare import COLOURS, DASHES, MARKERS

BASE, CONTEXT, FACTOR = 10000.0, 256, 4  # base and training length of config.py's defaults, and a stretch to show
LLAMA3 = {"low_freq_factor": 1.0, "high_freq_factor": 4.0}  # as released with Llama 3.1


def turns(pos, freq):
    """Positions (T,), frequencies (P,) -> rotation (T, P, 2) as rope.rotate takes it, in float64."""
    angle = rope.angles(pos.double(), freq.double())
    return torch.stack((angle.cos(), angle.sin()), -1)


def partial_sums(distance, freq):
    """Distances (T,), frequencies (P,) -> |S_1| ... |S_P| (T, P), S_j the sum of e^{i distance freq} over the first j planes
    (Su et al. 2021, arXiv:2104.09864, section 3.4.3)."""
    return torch.view_as_complex(turns(distance, freq)).cumsum(-1).abs()


def draw_decay(dim=64, samples=1000):
    """The paper's bound by distance, and the score of random vectors with themselves at that distance."""
    figure, (bound, score) = plt.subplots(1, 2, figsize=(11, 4))
    distance, generator = torch.arange(CONTEXT + 1), torch.Generator().manual_seed(0)
    x = torch.randn(samples, 1, 1, dim, generator=generator, dtype=torch.float64)
    for base, colour, dash in zip((BASE, 100.0), COLOURS, DASHES):
        freq, style = rope.frequencies(dim, base), {"color": colour, "linestyle": dash, "label": f"base {base:,.0f}"}
        bound.plot(distance, partial_sums(distance, freq).mean(-1), **style)
        turned = rope.rotate(x.expand(-1, len(distance), -1, -1), turns(distance, freq))
        score.plot(distance, (turned * x).sum(-1).mean((0, 2)) / x.square().sum(-1).mean(), **style)
    bound.set(title="the bound", ylabel=r"mean of $|S_j|$ over j", ylim=0)
    score.set(title=f"the score of q = k, mean of {samples:,} random vectors", ylabel="score / score at distance 0")
    score.axhline(0, color="black", linewidth=0.8)
    for axes in (bound, score):
        axes.set_xlabel("distance m - n")
        axes.legend(title=f"{dim} dimensions")
    return figure


def draw_planes(dim=32, planes=(0, 6, 10), near=64, far=4096):
    """What a fast, a middle and a slow plane add to the score by distance, and which of their angles training has seen."""
    figure, rows = plt.subplots(3, 2, figsize=(12, 7.5), sharey=True, width_ratios=(2, 3))
    for speed, plane, (left, right) in zip(("fast", "middle", "slow"), planes, rows):
        freq = rope.frequencies(dim, BASE)[plane].item()
        for axes, distance in ((left, torch.arange(near * 8 + 1) / 8), (right, torch.arange(far + 1))):
            # From a whole turn on, training has seen every angle; before that, those from 0 to where it ended.
            seen = distance * freq % (2 * math.pi) <= CONTEXT * freq
            for which, colour, dash, label in ((seen, COLOURS[0], "-", "seen"), (~seen, COLOURS[1], "--", "never seen")):
                values = (distance * freq).cos().masked_fill(~which, math.nan)
                axes.plot(distance, values, color=colour, linestyle=dash, linewidth=1, label=f"angle {label} in training")
            axes.axvspan(0, CONTEXT, color=COLOURS[7], alpha=0.3, linewidth=0, label=f"training length, {CONTEXT}")
            axes.set(xlim=(0, distance[-1]), xlabel="distance m - n" if plane == planes[-1] else None)
        left.plot((torch.arange(near + 1) * freq).cos(), "o", color=COLOURS[0], markersize=3)
        left.set(ylabel=r"cos(distance $\cdot$ freq)", title=f"{speed}: plane {plane}, wavelength {2 * math.pi / freq:,.4g}")
        right.set(title=f"{speed}: {CONTEXT * freq / (2 * math.pi):.2g} turns within the training length")
    figure.legend(*rows[-1, -1].get_legend_handles_labels(), loc="outside lower center", ncols=3)
    return figure


def draw_scalings(dim=64):
    """Scaled over plain frequency by plane; not longrope, whose factors are found by search for one model."""
    figure, axes = plt.subplots(figsize=(11, 5))
    plain = rope.frequencies(dim, BASE)
    for i, name in enumerate(name for name in rope.SCALINGS if name != "longrope"):
        freq, gain = rope.SCALINGS[name](plain, base=BASE, factor=FACTOR, context=CONTEXT, length=FACTOR * CONTEXT,
                                         **LLAMA3 if name == "llama3" else {})
        # Thinner from line to line, markers in turn: where lines coincide, all of them are seen.
        axes.plot(freq / plain, color=COLOURS[i], linestyle=DASHES[i % 4], linewidth=4 - 0.5 * i, marker=MARKERS[i],
                  markersize=7, markevery=(i, 6), label=f"{name}, gain {gain:.3g}")
    turned = CONTEXT * plain / (2 * math.pi)
    axes.axvline((turned > 1).sum() - 0.5, color="black", linewidth=0.8, label="right of it: less than\none turn in training")
    axes.set(xlabel="plane (turns within the training length)", ylabel="scaled / plain frequency", ylim=(0, 1.05),
             title=f"{dim} dimensions, base {BASE:,.0f}, trained at {CONTEXT}, read at {FACTOR * CONTEXT}, factor {FACTOR}")
    axes.set_xticks(range(dim // 2)[::5], [f"{i}\n({n:.2g})" for i, n in enumerate(turned)][::5])
    figure.legend(loc="outside right center")
    return figure


def main(folder=Path(__file__).parent):
    style = {"axes.grid": True, "grid.alpha": 0.25, "legend.frameon": False, "figure.constrained_layout.use": True}
    Path(folder).mkdir(parents=True, exist_ok=True)
    for name, draw in (("decay", draw_decay), ("planes", draw_planes), ("scalings", draw_scalings)):
        with plt.rc_context(style):
            figure = draw()
            figure.savefig(Path(folder) / f"{name}.png", dpi=100)
        plt.close(figure)


if __name__ == "__main__":
    main(*sys.argv[1:])
