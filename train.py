"""Train a model, measure how it generalizes to other lengths, and leave it all in a folder.

    python train.py configs/rope.toml --position learned --max_iters 1000

The loop is `train`, below. The same command again continues an unfinished run, bit for bit.
"""
import gc
import math
import os
import signal
import sys
import time

import numpy as np
from tqdm import tqdm

import lengths
from batches import load_data
from config import Config, load
from options import NotFinite, command, helped
from parallel import ALONE, full, started


class Stop:
    """Ctrl-C, SIGTERM and a closed terminal, remembered instead of obeyed at once, so that the iteration ends and is saved."""

    code = None

    def __enter__(self):
        numbers = [getattr(signal, name) for name in ("SIGINT", "SIGTERM", "SIGHUP") if hasattr(signal, name)]
        ignored = [s for s in numbers if signal.getsignal(s) == signal.SIG_IGN]  # as nohup has it
        self.before = {s: signal.signal(s, self.remember) for s in numbers if s not in ignored}
        return self

    def remember(self, number, frame):
        if self.code is not None and number == signal.SIGINT:  # a person, twice; systems repeat the others by themselves
            raise KeyboardInterrupt
        self.code = self.code or 128 + number

    def __exit__(self, *raised):
        for number, handler in self.before.items():
            signal.signal(number, handler)


class Progress:
    """A bar with loss, speed and time left on a terminal, plain lines elsewhere."""

    def __init__(self, step, max_iters, shown):
        self.bar = tqdm(total=max_iters, initial=step, unit="it", dynamic_ncols=True, disable=None if shown else True)
        self.step, self.max_iters, self.loss = step, max_iters, math.nan

    def __enter__(self):
        return self

    def __exit__(self, *raised):
        self.bar.close()

    def update(self, loss, tokens_per_second):
        self.step, self.loss, self.speed = self.step + 1, loss, tokens_per_second
        self.bar.set_postfix_str(f"loss {loss:.4f}, {tokens_per_second:,.0f} tokens/s", refresh=False)
        self.bar.update()

    def line(self, seconds_per_step):
        """Where there is no bar, the line that stands for it."""
        if self.bar.disable:
            self.say(f"step {self.step}/{self.max_iters}: loss {self.loss:.4f}, {self.speed:,.0f} tokens/s, "
                     f"{seconds_per_step * (self.max_iters - self.step):.0f} s left")

    def say(self, text):
        """A line of its own, above the bar. Where nobody reads it any more, as in `| head`, the run is stopped and saved."""
        try:
            self.bar.write(text, file=sys.stdout)
            sys.stdout.flush()
        except BrokenPipeError:
            sys.stdout = open(os.devnull, "w", encoding="utf-8")  # noqa: SIM115
            signal.raise_signal(signal.SIGTERM)


def update(model, optimizers, x, y, step, config, autocast, processes=ALONE):
    """One iteration on x, y (windows, T), of which each process computes its share, batch_size at a time.

    -> (mean loss over all tokens, norm of the gradient)
    """
    import torch

    total, device = 0.0, model.embed.weight.device
    pos = model.position.random_subset(x.size(1), step, device)
    passes, scored = processes.passes(len(x), config.batch_size), (y >= 0).sum().item()
    for i, part in enumerate(passes):
        if config.dropout:  # the fused kernels take no generator, so the global one is set by where training stands
            place = (config.seed, step, i, processes.rank)
            torch.manual_seed(int(np.random.SeedSequence(place).generate_state(1)[0]))
        share = (y[part] >= 0).sum().item() / scored
        part = part if share else slice(1)  # with nothing to do, a process goes along all the same, and counts for nothing
        with processes.last_pass(i + 1 == len(passes)):
            with autocast:
                loss = processes.loss(model)(x[part].to(device), y[part].to(device), pos=pos) * share
            (loss * processes.size).backward()  # the engines average gradients over processes, and sums are wanted
        total += loss.item()
    total = processes.total(total).item()
    norm = full(torch.nn.utils.clip_grad_norm_(model.parameters(), config.grad_clip or math.inf)).item()
    if not math.isfinite(total + norm):
        raise NotFinite(f"step {step + 1}: loss {total}, learning rate {optimizers[0].param_groups[0]['lr']:.3g}, "
                        f"gradient norm {norm:.3g}")
    for optimizer in optimizers:
        optimizer.step()
        optimizer.zero_grad()
    model.position.constrain()
    return total, norm


def compile_blocks(model):
    """Compile the blocks' forward and backward passes. All have one shape, so the first one's code is found again."""
    for block in model.blocks:
        block.compile(dynamic=False)


def train(config, processes=ALONE):
    """Run config to its end, or go on with it. -> exit code."""
    from run import Run  # torch takes seconds to import; --help and refusals do without

    with processes.first():
        run = Run(config, processes)
    with run:
        if run.finished:
            run.mend()
            print(f"{run.folder}: finished at step {run.state['step']}. "
                  "--overwrite trains it anew, a larger --max_iters goes on")
            return 0
        return loop(run, *prepare(run))


def prepare(run):
    """-> the data, the model and its optimizers as the run has them at its step, on the device; and the folder begun."""
    import optim
    from machine import room_for, set_up
    from model import GPT

    config, processes = run.config, run.processes
    with processes.first():
        data = load_data(config)
    resolved = run.settle(data)
    device = processes.device(resolved["device"])
    room_for(config, data.tokenizer.vocab_size, device, resolved["dtype"], processes)
    set_up(resolved["threads"])
    model = GPT(config, data.tokenizer.vocab_size)
    run.load_weights(model)
    model.to(device)
    if resolved["compile"]:
        compile_blocks(model)
    processes.distribute(model)
    optimizers = optim.build(model, config)
    run.load_optimizers(optimizers)
    run.begin(data.tokenizer)
    print(f"{run.folder}: {config.position} positions, {model.size():,} parameters, {resolved['device']}, {resolved['dtype']}, "
          f"{'compiled' if resolved['compile'] else 'not compiled'}, {resolved['threads']} threads"
          + (f", {processes.size} processes" if processes.size > 1 else "")
          + (f", going on at step {run.step}" if run.step else ""))
    return data, model, optimizers


def loop(run, data, model, optimizers):
    """Train from the run's step on. -> exit code."""
    import torch

    import optim

    config, processes = run.config, run.processes
    rows = config.batch_size * config.gradient_accumulation_steps
    tokens = rows * config.block_size
    stream = data.batches(rows, config.block_size, config.seed, run.step)
    autocast = torch.autocast(model.embed.weight.device.type, torch.bfloat16, enabled=run.resolved["dtype"] == "bfloat16")
    few, whole = (data.validation(config.block_size, count) for count in (config.eval_windows, None))
    step, reached, final, last = run.step, run.reached, None, min(config.max_iters, config.stop_at or config.max_iters)
    began, stopping = time.perf_counter() - run.seconds, False
    gc.set_threshold(700)  # all is imported; now, where logits come in parts, an iteration leaves circles of objects behind
    with Stop() as stop, Progress(step, config.max_iters, processes.main) as progress:
        while step < last and not reached and not stopping:
            before, rate = time.perf_counter(), optim.set_learning_rate(optimizers, step, config)
            x, y = map(torch.from_numpy, next(stream))
            loss, norm = update(model.train(), optimizers, x, y, step, config, autocast, processes)
            step += 1
            end, now = step == config.max_iters, time.perf_counter()
            progress.update(loss, tokens / (now - before))
            if step % config.log_interval == 0 or end:
                run.log({"step": step, "tokens": step * tokens, "seconds": round(now - began, 3), "train_loss": loss,
                         "lr": rate, "grad_norm": norm, "tokens_per_second": round(tokens / (now - before))})
                progress.line((now - began) / step)
            if step % config.eval_interval == 0 or end:
                result = lengths.evaluate(model, data, few, processes)
                if not math.isfinite(result["val_loss"]):
                    raise NotFinite(f"step {step}: validation loss {result['val_loss']}, learning rate {rate:.3g}, "
                                    f"gradient norm {norm:.3g}")
                progress.say(f"step {step}: validation loss {lengths.said(result)}")
                run.log({"step": step, **result})
                if config.target_val_loss and result["val_loss"] - result["val_stderr"] <= config.target_val_loss:
                    final = lengths.evaluate(model, data, whole, processes)
                    reached = final["val_loss"] <= config.target_val_loss
                    progress.say(f"step {step}: {final['val_loss']:.4f} over the whole validation split")
            if config.length_interval and step % config.length_interval == 0 and not end:
                lengths.measure(run.folder, model, step, "last", data, run.tracker, processes=processes)
            # Saved after all that is measured at a step: what is found at a checkpoint is not measured again.
            if step % config.eval_interval == 0 or end:
                run.save_best(model, optimizers, step, reached, result["val_loss"])
            if step % config.checkpoint_interval == 0:
                run.save("last.pt", model, optimizers, step, reached)
            stopping = processes.total(stop.code or 0).item() > 0  # if one process was told to

        if step > run.step or run.origin is None or run.origin.name != "last.pt":
            run.save("last.pt", model, optimizers, step, reached)
        if run.best["step"] is None and (reached or step == config.max_iters):  # best.pt was lost after the last evaluation
            run.save_best(model, optimizers, step, reached, lengths.evaluate(model, data, few, processes)["val_loss"])
    if step < config.max_iters and not reached:
        run.tracker.finish({})
        print(f"{run.folder}: stopped at step {step} of {config.max_iters} and saved; the same command goes on from here")
        return (stop.code or 128 + signal.SIGTERM) if stopping else 0
    if config.target_val_loss and not reached:
        print(f"target_val_loss = {config.target_val_loss} was not reached")
    # An evaluation of the whole split that was not the last does not count.
    conclude(run, model, data, step, final if reached else None, time.perf_counter() - began, processes)
    return 0


def conclude(run, model, data, step, final, seconds, processes):
    """Evaluate the last and the best weights over the whole validation split, measure the length curve, end the run."""
    began, whole = time.perf_counter(), data.validation(run.config.block_size)
    print("trained and saved; now the whole validation split, and the length curve", flush=True)
    final = final or lengths.evaluate(model, data, whole, processes)
    run.load_best(model)
    best = final if run.best["step"] == step else lengths.evaluate(model, data, whole, processes)
    print(f"validation loss over the whole split: {lengths.said(final)} at the end, "
          f"{best['val_loss']:.4f} with the weights of step {run.best['step']} (best.pt)")
    lengths.measure(run.folder, model, run.best["step"], "best", data, run.tracker, processes=processes)
    tokens = step * run.config.batch_size * run.config.gradient_accumulation_steps * run.config.block_size
    run.finish({"position": run.config.position, "parameters": model.size(), "step": step, "tokens": tokens,
                "seconds": round(seconds + time.perf_counter() - began, 3), "best_step": run.best["step"],
                **{f"{which}_{key}": value for which, result in (("final", final), ("best", best))
                   for key, value in result.items() if key.startswith("val_")}})


@helped(Config, "python train.py [CONFIG.toml ...] [--key value ...]")
def main(argv):
    try:
        config = load(argv)
        with started(config.parallel) as processes:
            code = train(config, processes)
            processes.end()
        return code
    except NotFinite as error:
        print(f"error: {error}\n       the run is not finite any more; its last good checkpoint is untouched. "
              "Try a lower learning_rate", file=sys.stderr)
        return 3


if __name__ == "__main__":
    command(main)
