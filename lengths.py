"""Length curves: how well a model predicts the same targets when it sees more context than it was trained on.

    python lengths.py out/rope-1337 --rope_scaling yarn

A mean over whole windows falls with their length by itself, whatever the model. So every context c here scores the same
targets, the tokens that follow the last K = block_size/16 inputs of a window, which see c-K+1 ... c tokens. Windows lie
inside one document, where the far context means something. Standard errors are over windows: neighbouring targets are
correlated.

Of a task (tasks.py), the curve is the share of problems of one length whose whole answer is right.
"""
import math

import numpy as np

import compare
import files
import logs
from batches import gather, load_data, window_ends
from config import Evaluation, read_config, run_arguments
from options import UserError, command, helped
from parallel import ALONE
from tasks import Problems

MULTIPLES = (1 / 4, 1 / 2, 1, 2, 4, 8, 16)  # contexts, as multiples of Config.unit
PROBLEMS = (1 / 4, 1 / 2, 3 / 4, 1, 5 / 4, 3 / 2, 2, 3, 4, 8)  # lengths of problems, as multiples of the longest in training
HELD = 2**16  # tokens of all windows whose keys and values are held at once
TOKENS = 2**11  # tokens of all windows that are computed at once: more do not fit the cache of a CPU


def ends(length, documents, unit, count):
    """-> (W,) window ends and the longest context they hold; the same whatever contexts are asked for.

    The longest of MULTIPLES for which the documents offer 16 windows at least, or the shortest.
    """
    spacing = targets(unit)
    for multiple in sorted(MULTIPLES, reverse=True):
        longest = int(multiple * unit)
        found = window_ends(length, documents, longest, count, spacing)
        if len(found) >= min(count, 16):
            break
    return found, longest


def targets(unit):
    """K: how many targets of each window are scored. unit: Config.unit, block_size unless a context was extended."""
    return max(1, unit // 16)


def window_losses(model, tokens, ends, context, last, processes=ALONE):
    """-> (W, last) float64: loss in nats of the last targets of the windows of `context` inputs before each end."""
    def losses(part, pos):
        ids, following = on_device(model, *gather(tokens, ends[part] - context, context))
        return model.losses(ids, following, last, pos).double().cpu().numpy()

    return in_parts(model, len(ends), context, last, losses, processes)


def answered(model, x, y, processes=ALONE):
    """Problems x, y (W, T), as Problems.rows has them -> (W, 2) float64: the mean loss of the answer's tokens in nats, and 1
    where each of them is the likeliest, else 0. Each is predicted after the right ones before it: whether all are right is
    what greedy decoding would show."""
    def score(part, pos):
        return np.stack([found.cpu().numpy() for found in model.answers(*on_device(model, x[part], y[part]), pos)], 1)

    return in_parts(model, len(x), x.shape[1], 2, score, processes)


def on_device(model, *arrays):
    import torch

    return [torch.from_numpy(np.ascontiguousarray(array)).to(model.embed.weight.device) for array in arrays]


def in_parts(model, count, context, columns, measure, processes):
    """measure(indices of some windows of `context` tokens, positions) -> (some, columns), for all of them: (count, columns)."""
    model.eval()
    device, found = model.embed.weight.device, np.zeros((count, columns))
    # Of long windows, the model takes a chunk at a time; the keys of all of them are held.
    at_once = max(1, min(TOKENS // min(context, model.CHUNK), HELD // context))
    parts = np.array_split(np.arange(count), math.ceil(count / at_once))
    for first in range(0, len(parts), processes.size):
        # As many calls in every process: a distributed model is put together in all of them. Some of the last do not count.
        number = min(first + processes.rank, len(parts) - 1)
        # Random positions are drawn anew for each part, so that a curve is not about one choice of them.
        measured = measure(parts[number], model.position.random_subset(context, number, device))
        if first + processes.rank < len(parts):
            found[parts[number]] = measured
    return processes.total(found)


def mean(per_window):
    """(W,) -> mean and its standard error over windows."""
    return float(per_window.mean()), float(per_window.std(ddof=1) / math.sqrt(len(per_window)))


def evaluate(model, data, some, processes=ALONE):
    """Validation loss in float32 over what data.validation gave: windows or problems -> what a line of the log says of it."""
    if isinstance(data, Problems):
        losses, right = answered(model, *some, processes).T
        loss, stderr = mean(losses)
        return {"val_loss": loss, "val_stderr": stderr, "val_accuracy": mean(right)[0], "windows": len(right)}
    size, starts = model.config.block_size, some
    losses = window_losses(model, data.val, starts + size, size, size, processes)
    loss, stderr = mean(losses.mean(1))
    scored = data.bytes(starts[:, None] + np.arange(1, size + 1))
    return {"val_loss": loss, "val_stderr": stderr, "val_bpb": bits_per_byte(losses, scored), "windows": len(starts)}


def said(result):
    """An evaluation in words."""
    text = f"{result['val_loss']:.4f} ± {result['val_stderr']:.4f} ({result['windows']} windows)"
    if "val_accuracy" in result:
        return f"{text}, {result['val_accuracy']:.1%} of the answers right"
    return f"{text}, {result['val_bpb']:.4f} bits per byte"


def bits_per_byte(losses, scored):
    return float(losses.sum() / math.log(2) / max(scored, 1))


def by_context(losses, bytes_scored):
    """losses (W, K) of the targets at one context, the bytes they stand for -> record of the curve."""
    loss, stderr = mean(losses.mean(1))
    return {"loss": loss, "stderr": stderr, "bpb": bits_per_byte(losses, bytes_scored),
            "windows": losses.shape[0], "targets": losses.size, "window_losses": losses.mean(1).round(4).tolist()}


def by_position(losses):
    """losses (W, T) at every position of the longest windows -> records, one for each bin; bins grow by half octaves."""
    T, records = losses.shape[1], []
    edges = sorted({min(T, round(2 ** (i / 2))) for i in range(2 * math.ceil(math.log2(T)) + 1)} | {0, T})
    for low, high in zip(edges, edges[1:]):
        loss, stderr = mean(losses[:, low:high].mean(1))
        records.append({"position": low, "loss": loss, "stderr": stderr, "count": losses.shape[0] * (high - low)})
    return records


def choose_contexts(model, asked, longest, windows=2):
    """-> (contexts that can be measured, sentences about the others)."""
    config, K, measured, skipped = model.config, targets(model.config.unit), [], []
    for context in sorted({int(m * config.unit) for m in MULTIPLES} if asked is None else set(asked)):
        if context < K:
            skipped.append(f"context {context}: shorter than the {K} targets that are scored")
        elif context > model.position.reach:
            skipped.append(f"context {context}: {config.position} positions end at {model.position.reach}")
        elif windows < 2:  # of one window there is no standard error
            skipped.append(f"context {context}: the validation text has too few documents longer than {longest} tokens")
        elif context > longest:
            reason = f"16 times {config.unit}" if longest == 16 * config.unit else "the text has few longer documents"
            skipped.append(f"context {context}: windows end at {longest} tokens, {reason}")
        else:
            measured.append(context)
    return measured, skipped


def curves(model, data, contexts=None, processes=ALONE):
    """-> (records by context, records by position at the longest of them, sentences about contexts left out)."""
    config, K = model.config, targets(model.config.unit)
    at, longest = ends(len(data.val), data.documents, config.unit, config.length_windows)
    measured, skipped = choose_contexts(model, contexts, longest, len(at))
    by_c, by_p = [], []
    for context in measured:
        far = context == measured[-1]
        losses = window_losses(model, data.val, at, context, context if far else K, processes)
        applied = {"context": context, "applied": config.applied(context)}
        by_c.append(applied | by_context(losses[:, -K:], data.bytes(at[:, None] + np.arange(1 - K, 1))))
        if far:
            by_p = [applied | record for record in by_position(losses)]
    return by_c, by_p, skipped


def by_length(model, data, lengths=None, processes=ALONE):
    """-> (records by length of the problems of a task, sentences about lengths left out). lengths: PROBLEMS unless given."""
    config, task = model.config, data.task
    N, records, skipped = task.longest(config.unit), [], []
    for length in sorted({int(m * N) for m in PROBLEMS} if lengths is None else set(lengths)):
        if length < task.shortest:
            skipped.append(f"length {length}: the shortest problem of {data.name} has {task.shortest}")
        elif length > 8 * N:
            skipped.append(f"length {length}: above 8 times {N}, the longest in training")
        elif (size := task.inputs(length)) > model.position.reach:
            skipped.append(f"length {length}: {size} inputs, and {config.position} positions end at {model.position.reach}")
        else:
            losses, right = answered(model, *data.tested(length, config.length_windows), processes).T
            (loss, _), (accuracy, stderr) = mean(losses), mean(right)
            records.append({"length": length, "trained": task.longest(config.block_size), "context": size,
                            "applied": config.applied(size), "accuracy": accuracy, "stderr": stderr, "loss": loss,
                            "chance": task.chance(length), "problems": len(right)})
    return records, skipped


def measure(folder, model, step, checkpoint, data, tracker, contexts=None, trained=None, processes=ALONE):
    """Compute the length curves of a model, write them into the run's folder, print, draw and track them.

    contexts: those in tokens, or lengths of problems. trained: the Config it was trained with, where model.config is another.
    A curve is called fine-tuned if the weights were trained with the very stretch that it is measured with; otherwise the
    stretch is zero-shot.
    """
    config = model.config
    trained = trained or config
    if isinstance(data, Problems):
        records, skipped = by_length(model, data, contexts, processes)
        found = {"accuracy.jsonl": records}
    else:
        by_c, by_p, skipped = curves(model, data, contexts, processes)
        found = {"lengths.jsonl": by_c, "positions.jsonl": by_p}
    if not processes.main:
        return
    stretch, applied = trained.applied(trained.block_size), {r["applied"] for records in found.values() for r in records}
    finetuned = config.reading() == trained.reading() and stretch > 1 and applied <= {1.0, stretch}
    # What tells one curve from another; `factor` is what was asked for, `applied` in each record what it came to.
    label = {"step": step, "checkpoint": checkpoint, **config.reading(), "finetuned": finetuned, "data": data.sha256[:12]}
    found = {name: [label | record for record in records] for name, records in found.items()}
    for name, records in found.items():
        store(folder, name, records)
    print("\n".join([TABLES[next(iter(found))](*found.values(), config), *skipped]))
    tracker.curves(found)
    compare.draw([folder], folder / "curves.png")


def store(folder, name, records):
    """Write a curve into a file of the run's folder in place of what was measured there before."""
    # Contexts may be measured one by one; bins of positions take the place of those of a longer or shorter curve.
    same = logs.curve if name == "positions.jsonl" else logs.IDENTITY[name]
    new = set(map(same, records))
    logs.put(folder, name, records, lambda record: same(record) in new)


def accuracy_table(records, config):
    """The curve of a task as text."""
    rows = [f"answers that are right by length of the problem ({config.position}, trained on {config.dataset} up to "
            f"{config.block_size} tokens{scaling(records)})",
            f"{'length':>8} {'tokens':>8} {'factor':>7} {'right':>8} {'stderr':>8} {'chance':>8}"]
    rows += [f"{r['length']:>8} {r['context']:>8} {r['applied']:>7g} {r['accuracy']:>8.1%} {r['stderr']:>8.1%} "
             f"{r['chance']:>8.1%}" for r in records]
    return "\n".join(rows)


def scaling(records):
    """-> the words for the scaling of a curve, none without one."""
    if not records or records[0]["scaling"] == "none":
        return ""
    return f", {logs.curve_name(records[0])}" + ", zero-shot" * (not records[0]["finetuned"])


def table(by_context, by_position, config):
    """Both curves as text, and of the positions only powers of two."""
    rows = []
    if by_context:
        rows += [f"loss on the same targets by context ({config.position}, trained at {config.block_size}"
                 f"{scaling(by_context)})",
                 f"{'context':>8} {'x train':>8} {'factor':>7} {'loss':>8} {'stderr':>8} {'bits/byte':>10}"]
    for r in by_context:
        rows.append(f"{r['context']:>8} {r['context'] / config.block_size:>8g} {r['applied']:>7g} {r['loss']:>8.4f} "
                    f"{r['stderr']:>8.4f} {r['bpb']:>10.4f}")
    shown = [r for r in by_position if r["position"] & (r["position"] - 1) == 0]
    if shown:
        rows += [f"loss by position in windows of {shown[0]['context']} tokens, factor {shown[0]['applied']:g}",
                 " position " + "".join(f"{r['position']:>7}" for r in shown),
                 " loss     " + "".join(f"{r['loss']:>7.3f}" for r in shown),
                 " stderr   " + "".join(f"{r['stderr']:>7.3f}" for r in shown)]
    return "\n".join(rows)


TABLES = {"lengths.jsonl": table, "accuracy.jsonl": accuracy_table}


class Lengths(Evaluation):
    contexts: tuple[int, ...] | None = None
    """Contexts in tokens; block_size times 1/4, 1/2, 1, 2, 4, 8, 16 unless given. For tasks, lengths of problems."""


@helped(Lengths, "python lengths.py RUN [--key value ...]")
def main(argv):
    folder, options = run_arguments(argv, Lengths)
    import run  # torch takes seconds to import; --help and refusals do without

    read_config(folder)  # it is a run's folder
    with files.hold(folder):
        restored = run.restore(folder, options.checkpoint, **options.changes())
        folder, data, trained = restored.folder, load_data(restored.config), restored.trained
        if restored.data_sha256 and data.sha256 != restored.data_sha256:  # of imported weights nobody knows the text
            raise UserError(f"dataset = {trained.dataset}: the text has changed since {folder} was trained",
                            "its curves would not be comparable; train again with --overwrite")
        tracker = logs.TRACKERS[trained.wandb](folder, trained)
        tracker.open()
        tracker.begin()
        measure(folder, restored.model, restored.step, options.checkpoint, data, tracker, options.contexts, trained)
        tracker.finish({})
        run.session(folder, step=restored.step, checkpoint=options.checkpoint, **restored.config.reading(),
                    contexts=options.contexts, data_sha256=data.sha256)
    return 0


if __name__ == "__main__":
    command(main)
