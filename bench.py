"""How fast the programs are: every row against a reference, the two in turn (A B A B ...), in one run of this program.

    python bench.py                          # all rows but speedrun and encodings: twenty minutes with --pairs 3
    python bench.py step rope --pairs 11     # rows by name
    python bench.py speedrun --dataset shakespeare
    python bench.py step encodings --device cuda

Ratios are what counts: absolute times differ from machine to machine, and on a busy one from minute to minute. Prints a table,
and with --json_file writes it as JSON.
"""
import contextlib
import hashlib
import json
import math
import multiprocessing
import os
import statistics
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass
from functools import partial
from itertools import product
from pathlib import Path

import numpy as np
import tiktoken
import torch
from pydantic import Field
from torch import nn
from torch.nn import functional as F

import checkpoints
import lengths
import logs
import machine
import optim
import pretrained
import sample
import train
from batches import gather, load_data
from config import Config
from data.prepare import prepare, read
from data.sources import find
from model import GPT
from options import Options, UserError, build, command, helped, nearest, parse
from position import POSITIONS, RoPE
from rope import rotate

HERE = Path(__file__).parent


@dataclass
class Row:
    """One comparison. ours, theirs: median seconds; value: what is asked about, in `unit` ("x": a ratio)."""

    what: str
    against: str
    ours: float
    theirs: float
    value: float
    sign: str
    asked: float | None  # None: only to know
    unit: str = "x"

    @property
    def met(self):
        if self.asked is None:
            return True
        return self.value >= self.asked if self.sign == ">=" else self.value <= self.asked

    def __str__(self):
        asked = "" if self.asked is None else f"{self.sign} {self.asked:g}"
        return (f"{self.what:46}{self.ours:>9.3f}s{self.theirs:>10.3f}s{self.value:>8.2f} {self.unit:2}{asked:>8}"
                f" {'' if self.met else 'MISSED':6}  against: {self.against}")


# Two sides in turn


def held():
    """-> the most gigabytes that this process has held, where the system tells (Linux)."""
    # What getrusage says is inherited from the process that started this one.
    with contextlib.suppress(OSError):
        status = Path("/proc/self/status").read_text()
        return int(status.partition("VmHWM:")[2].split()[0]) / 2**20
    return math.nan


WORK = {}  # in a process that measures: what each side does


def begin(side, make):
    """-> seconds of the first call, which compiles and warms up and does not count, and the most gigabytes held until then."""
    WORK[side] = make()
    return again(side), held()


def again(side):
    before = time.perf_counter()
    WORK[side]()
    return time.perf_counter() - before


def in_turn(ours, theirs, pairs, times=1, apart=False):
    """ours, theirs: functions that return the work to be timed -> (median seconds of ours, of `times` times theirs, median of
    the pairs' ratios, seconds of ours' first call, gigabytes of ours), all in processes of their own: what a row sets up,
    imports and caches changes no other row.

    The sides share one, which makes small differences plain; apart, the reference does without what machine.set_up sets.
    """
    def process():
        return ProcessPoolExecutor(1, multiprocessing.get_context("spawn"))

    with process() as mine, process() if apart else contextlib.nullcontext(mine) as reference:
        once = mine.submit(begin, "ours", ours).result()
        reference.submit(begin, "theirs", theirs).result()
        a, b = zip(*((mine.submit(again, "ours").result(), times * reference.submit(again, "theirs").result())
                     for _ in range(pairs)))
    return statistics.median(a), statistics.median(b), statistics.median(x / y for x, y in zip(a, b)), *once


def faster(what, against, at_least, *sides, **how):
    """-> the Row of how many times faster ours is."""
    a, b, ratio, *_ = in_turn(*sides, **how)
    return Row(what, against, a, b, 1 / ratio, ">=", at_least)


def costs(what, against, at_most, *sides, **how):
    """-> the Row of how many times longer ours takes."""
    a, b, ratio, *_ = in_turn(*sides, **how)
    return Row(what, against, a, b, ratio, "<=", at_most)


# The reference for training: the same model and loop as they are plainly written, in the manner of nanoGPT


def plain_model(vocab_size, n_layer, n_head, n_embd, block_size):
    """A GPT with learned positions, LayerNorm and GELU, without biases and dropout: forward(ids, targets) -> loss."""
    class Attention(nn.Module):
        def __init__(self):
            super().__init__()
            self.qkv, self.out = nn.Linear(n_embd, 3 * n_embd, bias=False), nn.Linear(n_embd, n_embd, bias=False)

        def forward(self, x):
            B, T, C = x.shape
            q, k, v = (part.view(B, T, n_head, -1).transpose(1, 2) for part in self.qkv(x).split(C, 2))
            y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
            return self.out(y.transpose(1, 2).contiguous().view(B, T, C))

    class Block(nn.Module):
        def __init__(self):
            super().__init__()
            self.norm1, self.norm2 = (nn.LayerNorm(n_embd, bias=False) for _ in range(2))
            self.attention = Attention()
            self.mlp = nn.Sequential(nn.Linear(n_embd, 4 * n_embd, bias=False), nn.GELU(),
                                     nn.Linear(4 * n_embd, n_embd, bias=False))

        def forward(self, x):
            x = x + self.attention(self.norm1(x))
            return x + self.mlp(self.norm2(x))

    class Plain(nn.Module):
        def __init__(self):
            super().__init__()
            self.tokens, self.positions = nn.Embedding(vocab_size, n_embd), nn.Embedding(block_size, n_embd)
            self.blocks = nn.ModuleList(Block() for _ in range(n_layer))
            self.norm, self.head = nn.LayerNorm(n_embd, bias=False), nn.Linear(n_embd, vocab_size, bias=False)
            self.head.weight = self.tokens.weight
            for p in self.parameters():
                if p.ndim == 2:
                    nn.init.normal_(p, std=0.02)

        def forward(self, ids, targets):
            x = self.tokens(ids) + self.positions(torch.arange(ids.size(1), device=ids.device))
            for block in self.blocks:
                x = block(x)
            logits = self.head(self.norm(x))
            return F.cross_entropy(logits.view(-1, vocab_size), targets.view(-1))

    return Plain()


def plain_optimizer(model, learning_rate, cuda=False):
    groups = [{"params": [p for p in model.parameters() if p.ndim > 1], "weight_decay": 0.1},
              {"params": [p for p in model.parameters() if p.ndim < 2], "weight_decay": 0.0}]
    return torch.optim.AdamW(groups, lr=learning_rate, betas=(0.9, 0.99), **({"fused": True} if cuda else {}))


def plain_batch(tokens, batch_size, block_size):
    starts = torch.randint(len(tokens) - block_size, (batch_size,))
    x, y = (torch.stack([torch.from_numpy(tokens[i + shift:i + shift + block_size].astype(np.int64)) for i in starts])
            for shift in (0, 1))
    return x, y


def plain_update(model, forward, optimizer, x, y):
    loss = forward(x, y)
    loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    return loss.item()


def plain_training(prepared, out):
    """nanoGPT's published CPU command, on a prepared text: 2,000 iterations of 12 windows of 64 characters."""
    splits = read(prepared)[:2]
    model = plain_model(65, 4, 4, 128, 64)
    optimizer = plain_optimizer(model, 1e-3)
    for step in range(2001):
        rate = 1e-3 * (step + 1) / 101 if step < 100 else 1e-4 + 0.45e-3 * (1 + math.cos(math.pi * (step - 100) / 1900))
        for group in optimizer.param_groups:
            group["lr"] = rate
        if step % 250 == 0:
            with torch.no_grad():
                losses = [statistics.fmean(model(*plain_batch(tokens, 12, 64)).item() for _ in range(20)) for tokens in splits]
            print(f"step {step}: train {losses[0]:.4f}, val {losses[1]:.4f}", flush=True)
            torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, Path(out, "plain.pt"))
        print(f"iter {step}: {plain_update(model, model, optimizer, *plain_batch(splits[0], 12, 64)):.4f}")


# What is timed: functions that return the work to be done


SMALL = {"n_layer": 4, "n_head": 4, "n_embd": 128, "block_size": 64, "batch_size": 12}  # nanoGPT's published CPU shape
MEDIUM = {"n_layer": 6, "n_head": 6, "n_embd": 384, "block_size": 256, "batch_size": 4}
VOCABULARY = 65


def config_of(**values):
    return build(Config, {"wandb": "disabled", **values})


def ids_of(shape, device="cpu", vocab_size=VOCABULARY):
    return torch.randint(vocab_size, shape, generator=torch.Generator().manual_seed(0)).to(device)


def waiting(work, device):
    """work(), over when the device is done with it."""
    def done():
        work()
        if device != "cpu":
            getattr(torch, device.partition(":")[0]).synchronize()
    return done


def our_step(device, compiled, count, **shape):
    """-> `count` updates as train.py does them, on a batch that stays."""
    machine.set_up(torch.get_num_threads())
    config = config_of(grad_clip=1.0, **shape)
    model = GPT(config, VOCABULARY).to(device).train()
    optimizers = optim.build(model, config)
    x, y = (ids_of((config.batch_size, config.block_size), device) for _ in range(2))
    half = config.dtype == "bfloat16" or device.startswith("cuda")
    autocast = torch.autocast(device.partition(":")[0], torch.bfloat16, enabled=half)
    if compiled:
        if lacking := machine.missing_for_compiling(device):
            raise UserError(f"compiling: there is no {lacking}", "install it")
        from torch._inductor import config as inductor

        inductor.force_disable_caches = True  # or what an earlier run compiled is found again
        train.compile_blocks(model)
    return waiting(lambda: [train.update(model, optimizers, x, y, 0, config, autocast) for _ in range(count)], device)


def plain_step(device, count, n_layer, n_head, n_embd, block_size, batch_size):
    model = plain_model(VOCABULARY, n_layer, n_head, n_embd, block_size).to(device)
    optimizer = plain_optimizer(model, 1e-3, device.startswith("cuda"))
    x, y = (ids_of((batch_size, block_size), device) for _ in range(2))
    loss = torch.autocast("cuda", torch.bfloat16)(model) if device.startswith("cuda") else model
    return waiting(lambda: [plain_update(model, loss, optimizer, x, y) for _ in range(count)], device)


def rotation(compiled):
    """-> turning 6 heads of queries and 6 of keys of 8 x 1024 tokens, as attention does it: in one tensor."""
    machine.set_up(torch.get_num_threads())
    turns = RoPE(config_of(n_head=6, n_embd=384)).rotation(torch.arange(1024), 1024)
    qk = torch.randn(8, 1024, 12, 64)
    turn = torch.compile(rotate, dynamic=False) if compiled else rotate
    return lambda: [turn(qk, turns) for _ in range(20)]


def cloning():
    machine.set_up(torch.get_num_threads())
    q, k = torch.randn(8, 6, 1024, 64), torch.randn(8, 6, 1024, 64)
    return lambda: [(q.clone(), k.clone()) for _ in range(20)]


def sampling(device, context, samples, tokens):
    """-> `samples` texts of `tokens` tokens with the cache, as sample.py does them; learned positions end at the context."""
    model = GPT(config_of(**MEDIUM | {"block_size": context, "position": "learned"}), VOCABULARY).to(device).eval()
    start = ids_of((samples, 1), device)
    return waiting(lambda: list(sample.stream(model, start, tokens, generator=torch.Generator().manual_seed(0))), device)


def recomputing(device, context, tokens, every):
    """-> each `every`-th of the steps that sample without a cache, the whole window of `context` tokens for each token."""
    model = GPT(config_of(**MEDIUM | {"block_size": context, "position": "learned"}), VOCABULARY).to(device).eval()
    text, generator = ids_of((1, tokens), device), torch.Generator().manual_seed(0)

    def steps():
        with torch.inference_mode():
            for seen in range(1, tokens + 1, every):
                sample.choose(model(text[:, max(0, seen - context):seen])[:, -1], 1.0, None, None, generator)
    return waiting(steps, device)


def foreign(folder):
    """A GPT-2 with random weights, as transformers writes it."""
    from transformers import GPT2Config, GPT2LMHeadModel

    GPT2LMHeadModel(GPT2Config(n_layer=6, n_head=6, n_embd=384)).save_pretrained(folder)


def imported_sampling(folder, tokens):
    (values, weights), _ = pretrained.load(folder)
    model = GPT(config_of(**values), len(weights["embed.weight"])).eval()
    checkpoints.fill(model, weights, folder)
    start = ids_of((1, 8), vocab_size=50257)
    return lambda: list(sample.stream(model, start, tokens, generator=torch.Generator().manual_seed(0)))


def transformers_sampling(folder, tokens):
    from transformers import GPT2LMHeadModel

    model = GPT2LMHeadModel.from_pretrained(folder).eval()
    start = ids_of((1, 8), vocab_size=50257)
    return lambda: model.generate(start, attention_mask=start > -1, min_new_tokens=tokens, max_new_tokens=tokens,
                                  do_sample=True, top_k=0, pad_token_id=0)


LONG = {"length_windows": 4}  # windows of a length curve here


def untrained(position):
    """-> (a model of the default shape, the embedded corpus)."""
    machine.set_up(torch.get_num_threads())
    config = config_of(position=position, learned_extension="interpolate" if position == "learned" else "none", **LONG)
    with contextlib.redirect_stdout(None):
        data = load_data(config)
    return GPT(config, data.tokenizer.vocab_size).eval(), data


def curve(position):
    """-> its length curve, from a quarter of to sixteen times 256 tokens."""
    model, data = untrained(position)
    return lambda: lengths.curves(model, data)


def forward(position):
    """-> the same windows as one forward pass each, with the whole mask and all logits."""
    model, data = untrained(position)
    ends, _ = lengths.ends(len(data.val), data.documents, model.config.unit, model.config.length_windows)

    def passes():
        with torch.no_grad():
            for size in (int(model.config.unit * multiple) for multiple in lengths.MULTIPLES):
                for end in ends:
                    model(torch.from_numpy(gather(data.val, [end - size], size)[0]))
    return passes


def linear_attention(context, windows):
    model = GPT(config_of(attention="linear"), VOCABULARY).eval()
    ids = ids_of((1, context))
    return lambda: [model.losses(ids, ids) for _ in range(windows)]


def preparing(path, tokenizer):
    """-> data/prepare.py on a text file: digests, tokens, splits and manifest, a new folder every time."""
    def work():
        with tempfile.TemporaryDirectory() as root, contextlib.redirect_stdout(None):
            prepare(str(path), tokenizer, 1024, root)
    return work


def tokenizing(path, tokenizer):
    """-> the tokens alone by tiktoken's batch encoding, from memory; or by numpy all of it, with the whole text in memory."""
    def by_tiktoken():
        tiktoken.get_encoding(tokenizer).encode_ordinary_batch(documents, num_threads=os.cpu_count())

    def by_numpy():
        data = path.read_bytes()
        if tokenizer == "byte":
            ids = np.frombuffer(data.decode("utf-8").encode("utf-8"), dtype=np.uint8)
        else:
            points = np.frombuffer(data.decode("utf-8").encode("utf-32-le"), dtype=np.uint32)
            seen = np.zeros(sys.maxunicode + 1, dtype=bool)
            seen[points] = True
            ids = (np.cumsum(seen) - 1).astype(np.uint16)[points]
        hashlib.sha256(data)
        cut = len(ids) * 9 // 10
        with tempfile.TemporaryDirectory() as folder:
            for name, part in (("train", ids[:cut]), ("val", ids[cut:])):
                part.tofile(Path(folder, f"{name}.bin"))
                hashlib.sha256(part)

    if tokenizer in ("byte", "char"):
        return by_numpy
    whole = path.read_text(encoding="utf-8")
    documents = [whole[i:i + 2**20] for i in range(0, len(whole), 2**20)]
    return by_tiktoken


def program(*words):
    """-> a whole process of Python."""
    return partial(subprocess.run, [sys.executable, *words], cwd=HERE, check=True, stdout=subprocess.DEVNULL)


# The rows


def starting(options):
    for words in (["train.py", "--help"], ["sample.py", "--help"], ["compare.py", "--help"]):
        a, b, *_ = in_turn(partial(program, *words), partial(program, "-c", "import torch"), options.pairs)
        yield Row(" ".join(words), "import torch", a, b, a, "<=", 1, "s")
    with tempfile.TemporaryDirectory() as out:
        program("train.py", "--max_iters", "2", "--length_windows", "2", "--wandb", "disabled", "--out_dir", f"{out}/run")()
        a, b, *_ = in_turn(partial(program, "compare.py", f"{out}/run", "--picture", f"{out}/compare.png"),
                           partial(program, "-c", "import matplotlib.figure"), options.pairs)
        yield Row("compare.py, table and picture", "import matplotlib.figure", a, b, a, "<=", 1, "s")


def step(options):
    """On a CPU in float32, as the reference computes there, and in bfloat16 where the processor has it."""
    dtypes = ("auto", "bfloat16") if options.device == "cpu" and machine.computes_bfloat16() else ("auto",)
    for (name, shape, count), dtype in product((("4 x 128, 12 x 64", SMALL, 10), ("6 x 384, 4 x 256", MEDIUM, 2)), dtypes):
        ours = {**shape, "position": "learned", "optimizer": "adamw", "dtype": dtype}
        plain, name = partial(plain_step, options.device, count, **shape), name + ", bfloat16" * (dtype == "bfloat16")
        for compiled, limit in ((False, 1.1), (True, 1.5)):
            sides = partial(our_step, options.device, compiled, count, **ours), plain
            a, b, ratio, first, _ = in_turn(*sides, options.pairs, apart=True)
            yield Row(f"step, {name}{', compiled' * compiled}", "the same model written plainly, eager",
                      a, b, 1 / ratio, ">=", limit)
            if compiled:
                yield Row(f"compiling, {name}", f"its own {count} steps", first, a, first - a, "<=", 15, "s")


def rope_cost(options):
    for compiled, limit in ((False, 1.06), (True, 1.03)):
        sides = [partial(our_step, options.device, compiled, 2, **MEDIUM, position=position) for position in ("rope", "none")]
        yield costs(f"training step with rope{', compiled' * compiled}", "none", limit, *sides, pairs=options.pairs)


def encodings(options):
    shape = {"n_layer": 12, "n_head": 12, "n_embd": 768, "block_size": 1024} if options.device != "cpu" else {}
    for position in POSITIONS:
        yield costs(f"training step with {position}", "none", None, *(
            partial(our_step, options.device, options.device != "cpu", 2, position=p, **shape) for p in (position, "none")),
            pairs=options.pairs)


def rotating(options):
    for compiled in (False, True):
        yield costs(f"rotating q and k, (8, 6, 1024, 64){', compiled' * compiled}", "cloning both", 2,
                    partial(rotation, compiled), cloning, pairs=options.pairs)


def sampled(options):
    tokens, every = 1000, 20
    for context in (256, 1024):
        yield faster(f"sampling {tokens} tokens, context {context}", "recomputing the window (each 20th step, times 20)", 10,
                     partial(sampling, options.device, context, 1, tokens),
                     partial(recomputing, options.device, context, tokens, every), pairs=1, times=every)
    yield faster("eight samples at once", "one, eight times", 4, partial(sampling, options.device, 256, 8, 300),
                 partial(sampling, options.device, 256, 1, 300), pairs=options.pairs, times=8)


def imported(options):
    with tempfile.TemporaryDirectory() as folder:
        foreign(folder)
        yield faster("sampling from an imported GPT-2, 6 x 384", "transformers' generate", 2,
                     partial(imported_sampling, folder, 200), partial(transformers_sampling, folder, 200), pairs=options.pairs)


def curves(options):
    for position in POSITIONS:
        a, b, ratio, _, memory = in_turn(partial(curve, position), partial(forward, position), options.pairs)
        yield Row(f"length curve to 16 x 256, {position}", "whole forward passes", a, b, ratio, "<=", 1.5)
        yield Row(f"length curve to 16 x 256, {position}", "memory", a, b, memory, "<=", 1.5, "GB")


def linear(options):
    yield costs("linear attention, 65,536 tokens", "1,024 tokens, 64 times", 1.2, partial(linear_attention, 65536, 1),
                partial(linear_attention, 1024, 64), pairs=options.pairs)


def preparation(options):
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "text.txt")
        source = "".join(part for _, texts in find("stdlib", Path(folder)).documents() for part in texts)
        with path.open("w", encoding="utf-8") as file:
            for _ in range(math.ceil(options.megabytes * 10**6 / len(source.encode()))):
                file.write(source)
        for tokenizer, against in (("byte", NUMPY), ("char", NUMPY), ("gpt2", "tiktoken's batch encoding")):
            sides = partial(preparing, path, tokenizer), partial(tokenizing, path, tokenizer)
            a, b, ratio, _, memory = in_turn(*sides, options.pairs)
            yield Row(f"preparing {options.megabytes} MB, {tokenizer}", against, a, b, 1 / ratio, ">=", 0.9)
            yield Row(f"preparing {options.megabytes} MB, {tokenizer}", "memory", a, b, memory, "<=", 1, "GB")


def speedrun(options):
    prepared = prepare(options.dataset, "char", 1024)
    if read(prepared)[-1]["vocab_size"] != 65:
        raise UserError(f"dataset = {options.dataset}: not tiny Shakespeare", "its loss means nothing for another text")
    with tempfile.TemporaryDirectory() as out:
        ours = partial(program, "train.py", "configs/cpu_speedrun.toml", "--dataset", options.dataset, "--target_val_loss",
                       "1.8857", "--out_dir", f"{out}/run", "--overwrite")
        plain = partial(program, "-c", f"import bench; bench.plain_training({str(prepared)!r}, {out!r})")
        row = faster("speedrun to 1.8857, whole process", "nanoGPT's 2,000 iterations, written plainly", 6, ours, plain,
                     pairs=options.pairs)
        if (loss := logs.read_summary(f"{out}/run")["final_val_loss"]) > 1.8857:
            raise UserError(f"speedrun: ended at {loss:.4f}, above 1.8857", "rounding differs between machines: another --seed")
        yield row


NUMPY = "numpy, from file to file, the same digests"
ROWS = {"start": starting, "step": step, "rope": rope_cost, "encodings": encodings, "rotate": rotating, "sampling": sampled,
        "imported": imported, "curves": curves, "linear": linear, "prepare": preparation, "speedrun": speedrun}


class Bench(Options):
    dataset: str = Field("shakespeare", min_length=1)
    """Text of the speedrun: tiny Shakespeare, by its name or path."""
    device: str = Field("cpu", pattern=r"^(cpu|mps|cuda(:\d+)?)$")
    """cpu, cuda, cuda:N or mps, for the rows step, rope, encodings and sampling."""
    pairs: int = Field(5, ge=1, le=1000)
    """Times that both sides are measured, in turn."""
    megabytes: int = Field(100, ge=1, le=10**6)
    """Size of the text that is prepared."""
    json_file: str | None = None
    """Where to write the rows as JSON."""


@helped(Bench, f"python bench.py [{' | '.join(ROWS)}] [--key value ...]")
def main(argv):
    names, values = parse(argv, Bench)
    options = build(Bench, values)
    for name in names:
        if name not in ROWS:
            raise UserError(f"{name}: no such row", nearest(name, list(ROWS)))
    machine.available(options.device)
    output, rows = Path(options.json_file or os.devnull), []
    if not output.parent.is_dir():
        raise UserError(f"json_file = {output}: no such folder", "give the path of a file in a folder that is there")
    print(f"{'':46}{'ours':>10}{'reference':>11}{'':>10}{'asked':>10}")
    for name in names or [name for name in ROWS if name not in ("speedrun", "encodings")]:
        try:
            for row in ROWS[name](options):
                rows.append({"row": name, **asdict(row), "met": row.met})
                print(row, flush=True)
        except (UserError, ImportError) as error:  # a vocabulary that only a network has, for example
            print(f"{name}: not measured: {error.problem if isinstance(error, UserError) else error}", flush=True)
        output.write_text(json.dumps(rows, indent=1) + "\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    command(main)
