"""Train a model, measure how it generalizes to other lengths, and leave it all in a folder.

    python train.py configs/rope.toml --position learned --max_iters 1000

The loop is `train`, below. The same command again continues an unfinished run, bit for bit.
"""
import contextlib
import ctypes
import math
import signal
import sys
import time

import numpy as np
from tqdm import tqdm

from batches import batches, windows
from config import Config, UserError, command, load, usage


class NotFinite(Exception):
    """The loss is no number any more."""


class Stop:
    """Ctrl-C and SIGTERM, remembered instead of obeyed at once, so that the iteration ends and is saved."""

    code = None

    def __enter__(self):
        self.before = {s: signal.signal(s, self.remember) for s in (signal.SIGINT, signal.SIGTERM)}
        return self

    def remember(self, number, frame):
        if self.code is not None:  # the second time is meant
            raise KeyboardInterrupt
        self.code = 128 + number

    def __exit__(self, *raised):
        for number, handler in self.before.items():
            signal.signal(number, handler)


class Progress:
    """A bar on a terminal, plain lines elsewhere."""

    def __init__(self, step, max_iters):
        self.bar = tqdm(total=max_iters, initial=step, unit="it", dynamic_ncols=True, disable=None if sys.stderr.isatty() else True)

    def update(self, tokens_per_second, loss):
        if not self.bar.disable:
            self.bar.set_postfix_str(f"loss {loss:.4f}, {tokens_per_second:,.0f} tokens/s", refresh=False)
        self.bar.update()

    def line(self, text, everywhere=True):
        """Print a line above the bar; everywhere=False leaves it to the bar where there is one."""
        if self.bar.disable or everywhere:
            self.bar.write(text, file=sys.stdout)
            sys.stdout.flush()


def keep_memory():
    """Let the C library keep freed memory instead of returning it: a tenth to a third of a step on CPUs is page faults."""
    with contextlib.suppress(OSError, AttributeError):
        mallopt = ctypes.CDLL(None).mallopt  # glibc; elsewhere there is none, and nothing happens
        for option, value in ((-3, 2**30), (-1, 2**31 - 1), (-2, 2**27)):  # mmap threshold, trim threshold, top padding
            mallopt(option, value)


def train(config):
    """Run config to its end, or go on with it. -> exit code."""
    import torch  # here and below: torch takes seconds to import; --help and refusals do without

    import lengths
    import optim
    import run as runs
    from data.prepare import prepare, read
    from model import GPT
    from tokenizer import load as load_tokenizer

    run = runs.Run(config)
    if run.finished:
        print(f"{run.folder}: finished at step {run.state['step']}. --overwrite trains it anew, a larger --max_iters goes on")
        return 0
    folder = prepare(config.dataset, config.tokenizer, config.vocab_size)
    train_tokens, val_tokens, manifest = read(folder)
    for name, tokens in (("training", train_tokens), ("validation", val_tokens)):
        if len(tokens) <= 2 * config.block_size:
            raise UserError(f"dataset = {config.dataset}: {len(tokens)} {name} tokens", f"two windows of block_size = {config.block_size} "
                            "must fit: give a longer text or a smaller block_size")
    text = load_tokenizer(folder / "tokenizer.json")
    machine = run.begin(text, manifest["source_sha256"])
    torch.set_num_threads(machine["threads"])
    torch.set_float32_matmul_precision("high")  # TF32 where a GPU has it; nothing on CPUs
    keep_memory()

    model = GPT(config, text.vocab_size)
    parameters = sum(p.numel() for p in model.parameters())
    model = model.to(machine["device"])
    optimizers = optim.build(model, config)
    if run.state:
        runs.fill(model, run.state["model"], run.folder / "last.pt")
        for optimizer, state in zip(optimizers, run.state["optimizers"], strict=True):
            optimizer.load_state_dict(state)
    if machine["compile"]:
        for block in model.blocks:
            block.compile(dynamic=False)
    print(f"{run.folder}: {config.position} positions, {parameters:,} parameters, {machine['device']}, {machine['dtype']}, "
          f"{'compiled' if machine['compile'] else 'not compiled'}, {machine['threads']} threads"
          + (f", going on at step {run.step}" if run.step else ""))

    autocast = torch.autocast(machine["device"].partition(":")[0], torch.bfloat16, enabled=machine["dtype"] == "bfloat16")
    byte_lengths = text.byte_lengths()
    few, whole = windows(val_tokens, config.block_size, config.eval_windows), windows(val_tokens, config.block_size)
    micro, per_step = config.gradient_accumulation_steps, config.batch_size * config.gradient_accumulation_steps
    stream = batches(train_tokens, per_step, config.block_size, config.seed, run.step)
    last = min(config.max_iters, config.stop_at if config.stop_at is not None else config.max_iters)
    step, reached = run.step, False
    started = time.perf_counter() - run.seconds
    progress = Progress(step, config.max_iters)

    def evaluate(starts):
        return {"step": step, **lengths.evaluate(model, val_tokens, starts, byte_lengths)}

    with Stop() as stop, contextlib.closing(progress.bar):
        while step < last and not reached and stop.code is None:
            rate = optim.learning_rate(step, config)
            optim.set_learning_rate(optimizers, rate, config)
            before = time.perf_counter()
            model.train()
            x, y = (torch.from_numpy(a).to(machine["device"]) for a in next(stream))
            total = 0.0
            for i, (inputs, targets) in enumerate(zip(x.chunk(micro), y.chunk(micro))):
                if config.dropout:  # the fused kernels take no generator, so the global one is set by where we are
                    torch.manual_seed(int(np.random.SeedSequence((config.seed, step, i)).generate_state(1)[0]))
                with autocast:
                    loss = model.loss(inputs, targets) / micro
                loss.backward()
                total += loss.detach()
            norm = torch.nn.utils.clip_grad_norm_(model.parameters(), config.grad_clip or math.inf)
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad()
            step += 1

            total = total.item()
            if not math.isfinite(total):
                raise NotFinite(f"step {step}: loss {total}, learning rate {rate:.3g}, gradient norm {norm.item():.3g}")
            now = time.perf_counter()
            speed = per_step * config.block_size / (now - before)
            progress.update(speed, total)
            if step % config.log_interval == 0 or step == config.max_iters:
                run.log({"step": step, "tokens": step * per_step * config.block_size, "seconds": round(now - started, 3),
                         "train_loss": total, "lr": rate, "tokens_per_second": round(speed)})
                progress.line(f"step {step}/{config.max_iters}: loss {total:.4f}, {speed:,.0f} tokens/s, "
                              f"{(now - started) / step * (config.max_iters - step):.0f} s left", everywhere=False)
            if step % config.eval_interval == 0 or step == config.max_iters:
                result = evaluate(few)
                run.save_best(model, step, result["val_loss"])
                if config.target_val_loss and result["val_loss"] - 2 * result["val_stderr"] <= config.target_val_loss:
                    result = evaluate(whole)
                    reached = result["val_loss"] <= config.target_val_loss
                run.log(result)
                progress.line(f"step {step}: validation loss {result['val_loss']:.4f} ± {result['val_stderr']:.4f} "
                              f"({result['windows']} windows), {result['val_bpb']:.4f} bits per byte")
            if step % config.checkpoint_interval == 0 or step == config.max_iters or step == last or reached or stop.code:
                run.save_last(model, optimizers, step)
            if config.length_interval and step % config.length_interval == 0 and step < config.max_iters:
                lengths.measure(run.folder, model, step, "last", val_tokens, manifest, byte_lengths, run.tracker)

    if stop.code or (step < config.max_iters and not reached):
        print(f"{run.folder}: stopped at step {step} of {config.max_iters} and saved; the same command goes on from here")
        run.tracker.finish({})
        return stop.code or 0

    final = evaluate(whole)
    run.log(final)
    runs.fill(model, runs.load(run.folder / "best.pt")["model"], run.folder / "best.pt")
    best = final if run.best["step"] == step else evaluate(whole)
    print(f"validation loss over all {len(whole)} windows: {final['val_loss']:.4f} at the end, "
          f"{best['val_loss']:.4f} with the weights of step {run.best['step']} (best.pt)")
    lengths.measure(run.folder, model, run.best["step"], "best", val_tokens, manifest, byte_lengths, run.tracker)
    run.finish({"position": config.position, "parameters": parameters, "step": step, "tokens": step * per_step * config.block_size,
                "seconds": round(time.perf_counter() - started, 3), "final_val_loss": final["val_loss"],
                "final_val_bpb": final["val_bpb"], "best_step": run.best["step"], "best_val_loss": best["val_loss"],
                "best_val_bpb": best["val_bpb"]})
    return 0


def main(argv):
    if "--help" in argv or "-h" in argv:
        print(usage(Config, "python train.py [CONFIG.toml ...] [--key value ...]"))
        return 0
    try:
        return train(load(argv))
    except NotFinite as error:
        print(f"error: {error}\n       the run is not finite any more; its last good checkpoint is untouched. "
              "Try a lower learning_rate", file=sys.stderr)
        return 3


if __name__ == "__main__":
    command(main)
