"""Fetch a text once, tokenize it once: writes train.bin, val.bin, tokenizer.json and manifest.json.

    python data/prepare.py shakespeare --tokenizer char
    python data/prepare.py path/to/my/texts --tokenizer bpe --vocab_size 4096

A name, a tokenizer and the text itself (by its sha256) are the key of a folder in data/prepared; a key that was prepared
before is only looked up. Downloads go to data/raw. A document starts with the tokenizer's separator.
"""
import hashlib
import json
import os
import platform
import re
import shutil
import sys
import tempfile
from collections import deque
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import tiktoken
import tiktoken.load
from pydantic import Field, create_model
from tqdm import tqdm

if not __package__:  # run as a script: sys.path begins with this folder instead of the repository
    sys.path[0] = str(Path(__file__).resolve().parents[1])
from config import fields
from data.sources import download, file_digest, find
from options import Options, UserError, build, command, helped, nearest, parse
from tokenizer import BPE, Byte, Char, alphabet
from tokenizer import load as load_tokenizer
from tokenizer import save as save_tokenizer

ROOT = Path(__file__).resolve().parent  # holds raw/ and prepared/
FORMAT = 1  # in the key of a prepared folder: raise it when the same text would come out otherwise
PIECE = 2**20  # characters that one thread encodes at a time, at least
AHEAD = 2 * PIECE * (os.cpu_count() or 1)  # characters that are encoded before they are written
BPE_SAMPLE = 2**25  # characters of the training split that byte pairs are learned from


def last_cut(text):
    """Where the text can be cut without changing a token, as far right as possible; 0 if nowhere.

    That is between a letter or digit and a space or line end: the expressions that all byte-pair tokenizers cut text by
    end a match there, whatever stands further left or right.
    """
    for i in range(len(text) - 1, 0, -1):
        if text[i] in " \n" and text[i - 1].isalnum():
            return i
    return 0


def whole_words(texts):
    """Cut a document, given in pieces of any size, into pieces of at least PIECE characters that have the same tokens."""
    rest = ""
    for text in texts:
        end = last_cut(rest) if len(rest) >= PIECE else 0
        if end:
            yield rest[:end]
        rest = rest[end:] + text
    if rest:
        yield rest


def pieces(source):
    """Iterate over (split, whether a document starts here, text) of all that are not empty."""
    for split, texts in source.documents():
        for i, text in enumerate(whole_words(texts)):
            yield split, i == 0, text


def ahead(pool, work, items):
    """Iterate over (item, work(item)) in order, done in the pool's threads while what came before is written.

    About AHEAD characters are read before they are asked for: a text may be larger than the memory.
    """
    waiting, size = deque(), 0
    for item in items:
        waiting.append((item, pool.submit(work, item)))
        size += len(item[-1])
        while size > AHEAD:
            done, result = waiting.popleft()
            size -= len(done[-1])
            yield done, result.result()
    for done, result in waiting:
        yield done, result.result()


class Split:
    """A growing file of ids, and what the manifest says about it."""

    def __init__(self, file, separator):
        """separator: its id as an array (1,), or None."""
        self.file, self.separator = file, separator
        self.tokens, self.bytes, self.starts, self.digest = 0, 0, [], hashlib.sha256()

    def append(self, ids, size, document_starts):
        """ids (n,) in the dtype of the file; size: UTF-8 bytes that they stand for."""
        if document_starts:
            self.starts.append(self.tokens)
            if self.separator is not None:
                self.write(self.separator)
        self.bytes += size
        self.write(ids)

    def write(self, ids):
        self.file.write(ids)
        self.digest.update(ids)
        self.tokens += len(ids)

    def entry(self):
        return {"tokens": self.tokens, "bytes": self.bytes, "documents": len(self.starts), "sha256": self.digest.hexdigest()}


def tokenize(source, tokenizer, folder, dtype):
    """Write train.bin and val.bin, encoding in as many threads as there are cores. -> their entries in the manifest."""
    lengths = tokenizer.byte_lengths().astype(np.int32)
    separator = None if tokenizer.separator is None else np.array([tokenizer.separator], dtype)

    def encode(item):
        ids = tokenizer.encode(item[-1])
        return ids.astype(dtype, copy=False), int(lengths[ids].sum(dtype=np.int64))

    bar = tqdm(desc=source.name, unit=" characters", unit_scale=True, disable=None, leave=False)
    with (bar, ThreadPoolExecutor(os.cpu_count()) as pool,
          (folder / "train.bin").open("wb") as train, (folder / "val.bin").open("wb") as val):
        splits = {"train": Split(train, separator), "val": Split(val, separator)}
        for (split, document_starts, text), encoded in ahead(pool, encode, pieces(source)):
            splits[split].append(*encoded, document_starts)
            bar.update(len(text))
    return {"train": splits["train"].entry(), "val": splits["val"].entry() | {"starts": splits["val"].starts}}


def training_sample(source):
    """Iterate over the beginning of the training split."""
    left = BPE_SAMPLE
    for split, _, text in pieces(source):
        if split == "train":
            yield text[:left]
            left -= len(text)
        if left <= 0:
            return


def vocabulary(name, raw):
    """-> the tiktoken.Encoding of that name, its files found in tiktoken's cache or downloaded to `raw`.

    tiktoken downloads without a time limit, so it is lent our way of reading while it loads. It checks the sha256 itself.
    """
    def read_file(url):
        path = raw / url.rsplit("/", 1)[-1]
        download(url, path)
        return path.read_bytes()

    theirs, tiktoken.load.read_file = tiktoken.load.read_file, read_file
    try:
        return tiktoken.get_encoding(name)
    except (ValueError, AssertionError) as error:
        raise UserError(f"tokenizer = {name}: damaged vocabulary ({error})", f"delete its files in {raw}") from None
    finally:
        tiktoken.load.read_file = theirs


def make_tokenizer(name, vocab_size, source, raw):
    if name == "char":
        return Char(alphabet(text for _, _, text in pieces(source)), source.separated)
    if name == "byte":
        return Byte(source.separated)
    if name == "bpe":
        return BPE.trained(training_sample(source), vocab_size, source.separated)
    if Path(name).is_file():
        return load_tokenizer(name)
    return BPE.named(vocabulary(name, raw))


# Prepared folders


class Part(Options):
    """What the manifest says about a split."""

    tokens: int = Field(ge=2)
    bytes: int = Field(ge=0)
    documents: int
    sha256: str


class Validation(Part):
    starts: list[int]


class Manifest(Options):
    format: int
    dataset: str
    tokenizer: str
    vocab_size: int = Field(ge=1, le=2**32)
    dtype: str
    python: str
    source_sha256: str
    separator: int | None
    train: Part
    val: Validation


def read(folder):
    """-> (train, val, manifest): the ids as read-only memory maps. UserError if the folder is not whole."""
    folder = Path(folder)
    try:
        manifest = Manifest.model_validate_json((folder / "manifest.json").read_bytes(), strict=True).model_dump()
        dtype, val = np.min_scalar_type(manifest["vocab_size"] - 1).newbyteorder("<"), manifest["val"]
        starts = np.array([*val["starts"], val["tokens"]])
        if dtype.name != manifest["dtype"] or len(starts) != val["documents"] + 1 or starts[0] or (np.diff(starts) < 0).any():
            raise ValueError("its manifest contradicts itself")
        maps = []
        for split in ("train", "val"):
            size = manifest[split]["tokens"] * dtype.itemsize
            if (folder / f"{split}.bin").stat().st_size != size:
                raise ValueError(f"{split}.bin does not have {size} bytes")
            maps.append(np.memmap(folder / f"{split}.bin", dtype=dtype, mode="r"))
    except (OSError, ValueError, OverflowError) as error:
        raise UserError(f"{folder}: damaged prepared data", f"prepare the data set again ({error})") from None
    return *maps, manifest


def write(source, tokenizer, vocab_size, folder, raw):
    """Fill a folder with all that belongs to prepared data."""
    made = make_tokenizer(tokenizer, vocab_size, source, raw)
    if tokenizer == "bpe" and made.vocab_size < vocab_size:
        print(f"{source.name}: has pairs for a vocabulary of {made.vocab_size} only, not {vocab_size}")
    dtype = np.min_scalar_type(made.vocab_size - 1).newbyteorder("<")
    entries = tokenize(source, made, folder, dtype)
    for split, entry in entries.items():
        if entry["tokens"] < 2:
            raise UserError(f"{source.name}: too short, {entry['tokens']} tokens in the {split} split", "give a longer text")
    save_tokenizer(made, folder / "tokenizer.json")
    manifest = {"format": FORMAT, "dataset": source.name, "tokenizer": Path(tokenizer).name, "vocab_size": made.vocab_size,
                "dtype": dtype.name, "python": platform.python_version(), "source_sha256": source.sha256,
                "separator": made.separator, **entries}
    (folder / "manifest.json").write_text(json.dumps(manifest, indent=1), encoding="utf-8")


def whole(folder):
    """Whether prepared data is there; damaged data is deleted, aloud."""
    if not folder.exists():
        return False
    try:
        *splits, manifest = read(folder)
        size = load_tokenizer(folder / "tokenizer.json").vocab_size
        # Of a text of gigabytes, which every start would read as a whole, the beginning.
        if size != manifest["vocab_size"] or any(ids[:2**28].max() >= size for ids in splits):
            raise UserError(f"{folder}: ids that its tokenizer does not have", "prepare the data set again")
        return True
    except UserError as error:
        print(f"{error.problem}: preparing it again")
        shutil.rmtree(folder)
        return False


def summary(folder):
    """One line on what was prepared."""
    manifest = read(folder)[-1]
    train, val = manifest["train"], manifest["val"]
    return (f"{folder.name}: {train['tokens']:,} tokens in {train['documents']:,} documents, for validation {val['tokens']:,} "
            f"in {val['documents']:,}; {manifest['vocab_size']:,} kinds, {train['bytes'] / train['tokens']:.2f} bytes a token")


def prepare(dataset, tokenizer, vocab_size, root=None):
    """-> the folder with the tokens of a data set, made unless it is there, and one printed line about it.

    dataset: one of NAMES or a path. tokenizer: char, byte, bpe, a tiktoken encoding, or the path of a tokenizer.json, ours or
    Hugging Face's. vocab_size: for bpe only; a text too short for so many merges gets fewer.
    root: the folder with raw/ and prepared/, the one of this file unless given.
    """
    root = Path(root or ROOT)
    known = ["char", "byte", "bpe", *tiktoken.list_encoding_names()]
    file = Path(tokenizer) if tokenizer.endswith(".json") else None
    if tokenizer not in known and not (file and file.is_file()):
        raise UserError(f"tokenizer = {tokenizer}: no such {'file' if file else 'tokenizer'}",
                        "give the path of a tokenizer.json" if file else nearest(tokenizer, known))
    try:
        source = find(dataset, root / "raw")
        label = f"{source.name}-{file_digest(file)[:8] if file else tokenizer}"
        label += f"-{vocab_size}" if tokenizer == "bpe" else ""
        key = hashlib.sha256(json.dumps([FORMAT, label, source.sha256]).encode()).hexdigest()[:12]
        folder = root / "prepared" / re.sub(r"[^\w.-]", "_", f"{label}-{key}")
        if not whole(folder):
            folder.parent.mkdir(parents=True, exist_ok=True)
            # Written beside its place and moved there when it is whole, so that nothing half-written is ever found.
            with tempfile.TemporaryDirectory(prefix=".unfinished-", dir=folder.parent) as unfinished:
                made = Path(unfinished, "made")
                made.mkdir()
                write(source, tokenizer, vocab_size, made, root / "raw")
                if not folder.exists():  # another process may have been faster
                    made.rename(folder)
    except OSError as error:
        raise UserError(f"{error.filename or root}: {error.strerror or error}", "check permissions and free space") from None
    print(summary(folder))
    return folder


Arguments = create_model("Arguments", __base__=Options, **fields(("dataset", "tokenizer", "vocab_size")))


@helped(Arguments, "python data/prepare.py [NAME_OR_PATH] [--key value ...]")
def main(argv):
    words, values = parse(argv, Arguments)
    if len(words) > 1:
        raise UserError(f"{words[1]}: one name or path at a time", "put a path with spaces in quotes")
    arguments = build(Arguments, {"dataset": words[0], **values} if words else values)
    prepare(arguments.dataset, arguments.tokenizer, arguments.vocab_size)
    return 0


if __name__ == "__main__":
    command(main)
