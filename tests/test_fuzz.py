"""Whatever the programs are given, they work or say in two lines why not, and a refusal leaves everything as it was.

    python -m pytest tests/test_fuzz.py             # the same generated cases each time
    python -m pytest tests/test_fuzz.py -m slow     # five times as many, others each time
"""
import contextlib
import copy
import io
import json
import math
import os
import re
import shutil
import signal
import tempfile
import tomllib
import zipfile
from pathlib import Path
from unittest import mock

import pytest
import torch
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from hypothesis.configuration import set_hypothesis_home_dir

import compare
import data.sources
import lengths
import pretrained
import sample
import train
from config import Config
from data import prepare
from options import UserError, allowed
from tests.conftest import SMALL, text

resource = pytest.importorskip("resource", reason="alarms and the memory of a process are asked of POSIX")

SECONDS, MEMORY = 60, 2**20  # that a case may take, and KiB that it may add to the most that this process ever held
TINY = SMALL | {"dataset": "text.txt", "out_dir": "new", "n_layer": 1, "n_embd": 16, "block_size": 16, "max_iters": 2,
                "warmup_iters": 0, "eval_windows": 2, "length_windows": 2, "vocab_size": 300}
RUNS = {"char": {}, "byte": {"position": "learned", "dataset": "stdlib", "wandb": "offline"},
        "bpe": {"position": "fire", "dataset": "stdlib", "optimizer": "adamw"}}
PROGRAMS = {  # main, its keys, and words that it works with
    "train": (train.main, Config, ["mine.toml"]), "sample": (sample.main, sample.Sample, ["run", "--tokens=2"]),
    "lengths": (lengths.main, lengths.Lengths, ["run"]), "compare": (compare.main, compare.Compare, ["run"]),
    "import": (pretrained.main, pretrained.Pretrained, ["foreign", "--dataset=text.txt", "--out_dir=new"]),
    "export": (pretrained.main, pretrained.Pretrained, ["run", "--export=made"]),
    "prepare": (prepare.main, prepare.Arguments, ["text.txt", "--tokenizer=char"]),
}


# A folder to work in


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """-> a context: a working folder that holds a run of one kind, its text and config, and a foreign model.

    From there, no program reaches the network, the user's own folders, or what takes minutes when it works.
    """
    import huggingface_hub
    import requests
    import wandb

    def unreachable(*_, **__):
        raise requests.ConnectionError("no route")

    root, begin, threads = tmp_path_factory.mktemp("fuzz"), wandb.init, torch.get_num_threads()
    documents = {f"{i}.txt": text(300, seed=i) for i in range(100)}

    @contextlib.contextmanager
    def fresh(kind="char"):
        here = root / "here"
        shutil.copytree(root / kind, here)
        try:
            with contextlib.chdir(here):
                yield here
        finally:
            shutil.rmtree(here)

    set_hypothesis_home_dir(root / "hypothesis")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tempfile, "tempdir", str(root))
        patch.setattr(prepare, "ROOT", root / "data")
        patch.setattr(data.sources, "stdlib_texts", lambda: documents)
        patch.setattr(train, "compile_blocks", lambda model: None)
        patch.setattr(wandb, "init", lambda **settings: begin(**settings | {"mode": "disabled"}))
        for library, name in ((huggingface_hub, "snapshot_download"), (requests, "get"), (requests, "head")):
            patch.setattr(library, name, unreachable)
        for variable in ("HOME", "DATA_GYM_CACHE_DIR", "TIKTOKEN_CACHE_DIR"):
            patch.setenv(variable, str(root / variable))
        for kind, values in RUNS.items():
            (root / kind).mkdir()
            with contextlib.chdir(root / kind):
                Path("text.txt").write_text(text(3000), encoding="utf-8")
                config = TINY | {"tokenizer": kind} | values
                Path("mine.toml").write_text("".join(f"{key} = {toml(value)}\n" for key, value in config.items()))
                assert train.main(["mine.toml", "--out_dir=run"]) == 0
                Path("run", "wandb_id.txt").write_text("abcd1234 open\n")
                if kind == "char":
                    assert pretrained.main(["run", "--export=foreign"]) == 0
                    shutil.copy("run/tokenizer.json", "foreign")
        yield fresh
    torch.set_num_threads(threads)


def contents(folder):
    """-> {path: bytes, None for a folder} of what is in a folder, but for the locks of runs."""
    return {str(path): path.read_bytes() if path.is_file() else None for path in folder.rglob("*") if path.name != ".lock"}


@contextlib.contextmanager
def bounded():
    """Fails what takes too long or too much memory."""
    def late(*_):
        pytest.fail(f"still at it after {SECONDS} s")

    before, most = signal.signal(signal.SIGALRM, late), resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    signal.alarm(SECONDS)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - most < MEMORY


def ends_well(program, argv, here):
    """-> whether a program works; else it must refuse in two lines, and leave all that is here as it was.

    A run that it wrote can be read. Only compare really draws, which takes longer than all else.
    """
    before, said = contents(here), io.StringIO()
    pictures = contextlib.nullcontext() if program == "compare" else mock.patch("matplotlib.figure.Figure.savefig")
    with bounded(), pictures, contextlib.redirect_stdout(said), contextlib.redirect_stderr(said):
        try:
            assert PROGRAMS[program][0](argv) in (0, 3)
        except UserError as error:
            assert len(str(error).splitlines()) == 2, repr(str(error))
            assert contents(here) == before, "something was written"
            return False
        for run in {path.parent for path in here.rglob("config.toml")}:
            if any(before.get(path, "") != content for path, content in contents(run).items()):
                assert compare.main([str(run)]) == 0
    return True


# Odd values, and whole ones in which something is odd


CHARACTERS = st.characters(exclude_categories=["Cs"], exclude_characters="/\0") \
    | st.characters(min_codepoint=0xDC80, max_codepoint=0xDCFF, categories=["Cs"])  # bytes of an argument that are not UTF-8
STRINGS = st.text(CHARACTERS, max_size=20) | st.sampled_from([
    "", " ", ".", "..", "~", "~nobody", "a\0b", "a\r\x0b\x85\u2028b", "$x^$", "$$", "-1", "1e400", "nan", "0x10", "1_0", "true",
    "none", "auto", "run", "run/tokenizer.json", "no/such.json", "mine.toml", "text.txt", "foreign", "stdlib", "byte", "bpe",
    "gpt2", "shakespeare", "fineweb:3", "%s{}", "é" * 150, "o" * 300 + ".json", "9" * 5000, "a" * 10**5])
NAMES = st.text(CHARACTERS, min_size=1, max_size=30).filter(lambda name: name not in (".", "..")) \
    | st.sampled_from(["$x^$", "_x", "~", "-x", "é" * 100, "a\nb", "%s{}", "*", "[a]"])
NUMBERS = st.sampled_from([-2**63, -1, 0, 1, 2, 3, 5, 8, 2**63, 10**400, -0.0, 0.5, 1.5, -1e-9, 1e-320, 1e30, 1e308,
                           math.inf, -math.inf, math.nan])
ODD = st.recursive(st.none() | st.booleans() | NUMBERS | STRINGS,
                   lambda inner: st.lists(inner, max_size=3) | st.dictionaries(STRINGS, inner, max_size=3), max_leaves=4)
RAW = [b"", b"null", b"[]", b"{}", b"0", b'"a"', b"\xff", b"\0" * 99, b"a = 3\n", b"NaN\n", b"9" * 5000, b"[" * 10**5,
       b'{"a":' * 10**5, b"a = " + b"[" * 10**4]


class Claim:
    """Is saved as a tensor that claims more than the file holds."""

    def __init__(self, tensor, size):
        self.tensor, self.size = tensor.contiguous(), size

    def __reduce__(self):
        function, (storage, _, _, _, *rest) = self.tensor.__reduce_ex__(2)
        return function, (storage, 7, self.size, (10**4,) * len(self.size), *rest)


TENSORS = {
    "meta": lambda t: t.to("meta"), "complex": lambda t: t.to(torch.complex64), "sparse": lambda t: t.to_sparse(),
    "nan": lambda t: t * math.nan, "double": lambda t: t.double(), "int8": lambda t: t.to(torch.int8), "bool": lambda t: t > 0,
    "quantized": lambda t: torch.quantize_per_tensor(t.float(), 0.1, 0, torch.qint8), "one": lambda t: t.flatten()[:1],
    "strided": lambda t: t.new_zeros(()).expand(t.shape), "vast": lambda t: t.new_zeros(()).expand(10**6, 10**6),
    "claim": lambda t: Claim(t, tuple(t.shape)), "vast claim": lambda t: Claim(t, (10**6, 10**6)),
    "number": lambda t: 1.0, "deep": lambda t: "DEEP",
}


def near(field):
    """The words by which its help says what a key takes, and the numbers at its limits and just beyond."""
    said = allowed(field)
    low, high = (map(json.loads, re.findall(rf"{sign}=? (\S+)", said)) for sign in "><")
    return st.sampled_from([*said.split(" or "), *(n + d for n in low for d in (-1, 0, 1, 2)), *(n + 1 for n in high)])


def odd_keys(draw, model):
    """-> {key: strategy of its values} of up to three keys of a program, now and then of none."""
    known = list(model.model_fields)
    drawn = draw(st.lists(st.sampled_from(known + [None] * (len(known) // 9)), max_size=3))
    return {key or draw(STRINGS): near(model.model_fields[key]) | NUMBERS | ODD if key else ODD for key in drawn}


def toml(value):
    """-> a value as TOML."""
    if isinstance(value, dict):
        return "{" + ", ".join(f"{toml(key)} = {toml(part)}" for key, part in value.items()) + "}"
    if isinstance(value, list):
        return f"[{', '.join(map(toml, value))}]"
    if isinstance(value, str):
        return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")
    return str(value).lower()


def load_lines(content):
    return [json.loads(line) for line in content.splitlines()]


def dump_weights(value):
    """-> a checkpoint; lists within lists in the place of "DEEP", of which Python itself would save a few hundred only."""
    made, buffer, nested = io.BytesIO(), io.BytesIO(), b"]" * 10**5 + b"a" * (10**5 - 1)
    torch.save(value, made)
    with zipfile.ZipFile(made) as plain, zipfile.ZipFile(buffer, "w") as archive:
        for name in plain.namelist():
            archive.writestr(name, plain.read(name).replace(b"X\x04\x00\x00\x00DEEP", nested))
    return buffer.getvalue()


FORMATS = {
    ".json": (json.loads, lambda value: json.dumps(value).encode()),
    ".jsonl": (load_lines, lambda value: "".join(f"{json.dumps(line)}\n" for line in value).encode()),
    ".toml": (lambda content: tomllib.loads(content.decode()),
              lambda value: "".join(f"{key} = {toml(part)}\n" for key, part in value.items()).encode(errors="replace")),
    ".pt": (lambda content: torch.load(io.BytesIO(content), weights_only=True), dump_weights),
}


def changed(draw, value, top=True):
    """-> a nested value in which one thing is missing or another."""
    keys = list(value) if isinstance(value, dict) else list(range(len(value))) if isinstance(value, list) else []
    if not keys or not (top or draw(st.integers(0, 4))):
        how = draw(st.sampled_from(["odd", *TENSORS] if isinstance(value, torch.Tensor) else ["odd"]))
        return draw(ODD) if how == "odd" else TENSORS[how](value)
    key, value = draw(st.sampled_from(keys)), copy.copy(value)
    if draw(st.integers(0, 9)):
        value[key] = changed(draw, value[key], top=False)
    else:
        del value[key]
    return value


def spoiled(draw, content):
    """-> bytes that were cut off, overwritten, put between, or that are of another kind."""
    at, part = draw(st.integers(0, len(content))), draw(st.binary(min_size=1, max_size=8))
    return draw(st.sampled_from([
        content[:at], content[:at] + part + content[at + len(part):], content[:at] + part + content[at:], *RAW]))


def damage(draw, folder, names):
    """Change one of the files in a folder."""
    path = folder / draw(st.sampled_from(names))
    content = path.read_bytes()
    if path.suffix in FORMATS and draw(st.integers(0, 3)):
        parse, dump = FORMATS[path.suffix]
        path.write_bytes(dump(changed(draw, parse(content))))
    else:
        path.write_bytes(spoiled(draw, content))


# What is tried


def configs(draw, place):
    """A config file in which keys are odd or unknown, behind a good one."""
    with place() as here:
        lines = {key: toml(value) for key, value in tomllib.loads(Path("mine.toml").read_text(encoding="utf-8")).items()}
        for key, values in odd_keys(draw, Config).items():
            lines[key if key.isidentifier() else toml(key)] = toml(draw(values)) if draw(st.integers(0, 5)) else draw(
                st.sampled_from(["", "0x" + "f" * 4000, "9" * 5000, "[" * 10**4, "2020-01-01", "[[1, 2], 3]"]))
        content = "".join(f"{key} = {value}\n" for key, value in lines.items()).encode(errors="surrogateescape")
        Path("odd.toml").write_bytes(content if draw(st.integers(0, 4)) else spoiled(draw, content))
        ends_well("train", ["mine.toml", "odd.toml"], here)


def commands(draw, place):
    """A command line with odd keys, values and words."""
    program = draw(st.sampled_from(list(PROGRAMS)))
    _, model, words = PROGRAMS[program]
    for key, values in odd_keys(draw, model).items():
        key, value = (str(part).replace("\0", "") for part in (key, draw(values)))  # no argument holds a zero byte
        words = words + draw(st.sampled_from([[f"--{key}={value}"]] * 4 + [[f"--{key}", value], [f"--{key}"], [f"--no_{key}"],
                                                                           [value]]))
    with place() as here:
        ends_well(program, words, here)


def prompts(draw, place):
    """Something to go on from, and how."""
    Prompt = st.text(CHARACTERS, max_size=50) | st.text("abcdefgh \n")
    with place(draw(st.sampled_from(list(RUNS)))) as here:
        Path("prompt").write_bytes(draw(st.binary(max_size=99) | st.text().map(str.encode)))
        words = [f"--prompt={draw(Prompt)}".replace("\0", "")] if draw(st.booleans()) else ["--prompt_file=prompt"]
        for key in draw(st.lists(st.sampled_from(["samples", "temperature", "top_k", "top_p", "seed"]), max_size=2)):
            words.append(f"--{key}={draw(NUMBERS | near(sample.Sample.model_fields[key]))}")
        ends_well("sample", ["run", "--tokens=2", *words], here)


def names(draw, place):
    """A file or folder of an odd name."""
    name = draw(NAMES)
    with place() as here:
        odd = here / "odd"
        odd.mkdir()
        what, program, words = draw(st.sampled_from([
            ("run", "sample", ["ODD", "--tokens=2"]), ("run", "lengths", ["ODD"]), ("run", "compare", ["ODD"]),
            ("run", "export", ["ODD", "--export=made"]),
            ("run", "train", ["--init_from=ODD", "--out_dir=new", "--max_iters=2"]),
            ("run", "train", ["mine.toml", "--out_dir=ODD", "--max_iters=3"]), ("mine.toml", "train", ["ODD"]),
            ("text.txt", "train", ["mine.toml", "--dataset=ODD"]), ("text.txt", "sample", ["run", "--prompt_file=ODD"]),
            ("text.txt", "prepare", ["ODD", "--tokenizer=byte"]), ("foreign", "import", ["ODD", "--out_dir=new"]),
            ("run/tokenizer.json", "train", ["mine.toml", "--tokenizer=ODD"])]))
        os.rename(what, odd / name)
        ends_well(program, [word.replace("ODD", f"odd/{name}") for word in words], here)


GO_ON, AGAIN = ["mine.toml", "--out_dir=run", "--max_iters=3"], ["mine.toml", "--out_dir=run"]
READERS = [("sample", ["run", "--tokens=2"]), ("sample", ["run", "--tokens=2", "--checkpoint=last"]), ("lengths", ["run"]),
           ("export", ["run", "--export=made"]), ("train", GO_ON), ("train", AGAIN),
           ("train", ["--init_from=run", "--out_dir=new", "--max_iters=2", "--threads=1"])]


def weights(draw, place):
    """A checkpoint that is damaged or holds odd things."""
    with place(draw(st.sampled_from(list(RUNS)))) as here:
        names = ["best.pt", "last.pt"]
        damage(draw, here / "run", names)
        ends_well(*draw(st.sampled_from(READERS)), here)


def records(draw, place):
    """Another file of a run's folder that is damaged or holds odd things."""
    with place(draw(st.sampled_from(list(RUNS)))) as here:
        damage(draw, here / "run", ["config.toml", "log.jsonl", "lengths.jsonl", "positions.jsonl", "summary.json",
                                    "wandb_id.txt", "sessions.jsonl"])
        ends_well(*draw(st.sampled_from([("compare", ["run"]), ("compare", ["run"]), *READERS])), here)


def tokenizers(draw, place):
    """A tokenizer of each kind that is damaged or holds odd things."""
    with place(draw(st.sampled_from(list(RUNS)))) as here:
        damage(draw, here / "run", ["tokenizer.json"])
        ends_well(*draw(st.sampled_from([*READERS, ("train", ["mine.toml", "--tokenizer=run/tokenizer.json"]),
                                         ("sample", ["run", "--tokens=2", "--prompt=abc d"])])), here)


def prepared(draw, place):
    """Prepared data that is damaged or holds odd things."""
    kind = draw(st.sampled_from(list(RUNS)))
    with place(kind) as here, tempfile.TemporaryDirectory() as root, mock.patch.object(prepare, "ROOT", Path(root)):
        folder = prepare.prepare(RUNS[kind].get("dataset", "text.txt"), kind, TINY["vocab_size"])
        damage(draw, folder, ["manifest.json", "train.bin", "val.bin", "tokenizer.json"])
        ends_well(*draw(st.sampled_from([("train", ["mine.toml"]), ("lengths", ["run"]), ("train", GO_ON)])), here)
        assert not list(folder.parent.glob(".unfinished*"))


def foreign(draw, place):
    """A foreign model that is damaged or holds odd things."""
    with place() as here:
        damage(draw, here / "foreign", ["config.json", "model.safetensors", "tokenizer.json"])
        if ends_well("import", ["foreign", "--dataset=text.txt", "--out_dir=new"], here):
            ends_well("sample", ["new", "--tokens=2"], here)


CASES = {configs: 100, commands: 100, prompts: 50, weights: 60, records: 50, tokenizers: 50, foreign: 40, names: 30,
         prepared: 30}


def test_there_are_many_cases():
    assert sum(CASES.values()) >= 500


@pytest.mark.parametrize("rounds", [1, pytest.param(5, marks=pytest.mark.slow)])
@pytest.mark.parametrize("attempt", CASES, ids=lambda attempt: attempt.__name__)
def test_it_works_or_says_why_not(attempt, rounds, place):
    @settings(max_examples=CASES[attempt] * rounds, derandomize=rounds == 1, database=None, deadline=None,
              phases=(Phase.generate, Phase.shrink), suppress_health_check=list(HealthCheck))
    @given(st.data())
    def case(data):
        attempt(data.draw, place)

    case()
