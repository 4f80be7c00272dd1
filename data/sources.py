"""Where texts come from: files, folders, downloads, streams, and the standard library of the running Python.

Files are UTF-8. A byte-order mark is dropped, and line ends become "\\n" as they do in Python's text mode, so that a prompt
typed on any system matches the text. Validation is the last tenth of a single file, by characters; of many documents it is
those whose hash says so, about a tenth. A file that the user names is only read.
"""
import ast
import codecs
import contextlib
import functools
import hashlib
import io
import itertools
import json
import os
import re
import sysconfig
import zipfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from tqdm import tqdm

from files import file_digest
from options import UserError, nearest

VALIDATION = 0.1
PIECE = 2**20  # bytes of a file that are read at a time
TIMEOUT = (5, 20)  # seconds to connect, and between two packets

DOWNLOADS = {
    "shakespeare": ("https://raw.githubusercontent.com/karpathy/char-rnn/master/data/tinyshakespeare/input.txt",
                    "shakespeare.txt", "86c4e6aa9db7c042ec79f339dcb96d42b0075e16b8fc2e86bf0ca57e2dc565ed"),
    "enwik8": ("https://mattmahoney.net/dc/enwik8.zip",
               "enwik8.zip", "547994d9980ebed1288380d652999f38a14fe291a6247c157c3d33d4932534bc"),
    "text8": ("https://mattmahoney.net/dc/text8.zip",
              "text8.zip", "a6640522afe85d1963ad56c05b0ede0a0c000dddc9671758a6cc09b7a38e5232"),
}
STREAMS = {  # name -> data set and configuration at Hugging Face
    "tinystories": ("roneneldan/TinyStories", None),
    "openwebtext": ("Skylion007/openwebtext", None),
    "fineweb": ("HuggingFaceFW/fineweb", "sample-10BT"),
}
DOCUMENTS = 100_000  # taken from a stream unless its name says another number, as in fineweb:1000000
NAMES = ("stdlib", *DOWNLOADS, *STREAMS)


@dataclass(frozen=True)
class Source:
    """A text before it becomes tokens.

    documents() iterates over (split, pieces of one document's text) and can be called again; `separated` says whether
    they are many documents, which a separator keeps apart, or the two parts of a single one.
    """
    name: str
    sha256: str
    separated: bool
    documents: Callable


# A document's split, and files as text


def share(text, errors="strict"):
    """A number in [0, 1) that depends on nothing but the text."""
    return int.from_bytes(hashlib.sha256(text.encode("utf-8", errors)).digest()[:8], "big") / 2**64


def validation(names):
    """The names that go to validation: a tenth by hash, but at least one, and never all."""
    shares = {name: share(name, "surrogateescape") for name in names}  # names of files may hold bytes that are not UTF-8
    ranked, count = sorted(shares, key=shares.get), sum(value < VALIDATION for value in shares.values())
    return set(ranked[:min(max(count, 1), len(ranked) - 1)])


def read_text(path):
    """Iterate over the text of a UTF-8 file in pieces. UserError with the position of the first byte that is not UTF-8."""
    decoder = io.IncrementalNewlineDecoder(codecs.getincrementaldecoder("utf-8-sig")(), translate=True)
    end = 0
    with path.open("rb") as file:
        while True:
            data = file.read(PIECE)
            end += len(data)
            try:
                yield decoder.decode(data, final=not data)
            except UnicodeDecodeError as error:
                position = end - len(error.object) + error.start
                raise UserError(f"{path}: not UTF-8 text: byte 0x{error.object[error.start]:02x} at position {position}",
                                "convert the file to UTF-8") from None
            if not data:
                return


def cut(texts, size):
    """Cut a text, given in pieces, after `size` characters -> two iterators, to be used one after the other."""
    texts, rest = iter(texts), []

    def first():
        left = size
        for text in texts:
            yield text[:left]
            if len(text) > left:
                rest.append(text[left:])
                return
            left -= len(text)

    def second(before):
        for _ in before:  # what nobody asked for
            pass
        yield from rest
        yield from texts

    before = first()
    return before, second(before)


def text_digest(path):
    """-> sha256 of the text in a file; None if that is not UTF-8 or holds a zero byte, as binary files do."""
    digest = hashlib.sha256()
    with contextlib.suppress(UserError):
        for text in read_text(path):
            if "\0" in text:
                return None
            digest.update(text.encode("utf-8"))
        return digest.hexdigest()


def walk(folder, left_out=()):
    """-> {relative posix path: path}, sorted, of the files in a folder that are not empty, at any depth.

    Hidden files and folders are left out, and folders whose name is in `left_out`.
    """
    files = {}
    for base, folders, names in os.walk(folder):
        folders[:] = [name for name in folders if not name.startswith(".") and name not in left_out]
        for path in (Path(base, name) for name in names if not name.startswith(".")):
            if path.is_file() and path.stat().st_size:
                files[path.relative_to(folder).as_posix()] = path
    return dict(sorted(files.items()))


# Downloads


def download(url, path):
    """Fetch a file unless it is there. An interrupted download leaves path + ".part", and the next one goes on from there."""
    import requests

    part = path.with_name(path.name + ".part")
    if path.exists():
        return
    path.parent.mkdir(parents=True, exist_ok=True)
    have = part.stat().st_size if part.exists() else 0
    # Compressed in transit, the bytes that are here would not be the first bytes of what is sent.
    headers = {"Accept-Encoding": "identity"} | ({"Range": f"bytes={have}-"} if have else {})
    try:
        with requests.get(url, headers=headers, stream=True, timeout=TIMEOUT) as reply:
            if reply.status_code != requests.codes.range_not_satisfiable:  # that is, unless all of it is here
                reply.raise_for_status()
                resumed = reply.status_code == requests.codes.partial_content
                save(reply, part, have if resumed else 0)
    except requests.RequestException as error:
        reason = f"HTTP status {error.response.status_code}" if error.response is not None else type(error).__name__
        raise UserError(f"{url}: download failed ({reason})",
                        f"connect to the network and try again, or put the file there yourself: {path}") from None
    part.replace(path)


def save(reply, part, have):
    """Write what a server sends behind the first `have` bytes of a file."""
    left = int(reply.headers.get("Content-Length", 0))
    with part.open("r+b" if have else "wb") as file, tqdm(desc=part.stem, initial=have, total=have + left or None, unit="B",
                                                          unit_scale=True, disable=None) as bar:
        file.seek(have)
        for data in reply.iter_content(2**16):  # what is not yet full when the connection breaks is lost
            file.write(data)
            bar.update(len(data))


def hub_texts(name, path):
    """Iterate over the documents of a data set at Hugging Face while they arrive."""
    advice = f"put the documents there yourself, as JSON lines with the key text: {path}"
    try:
        from datasets import load_dataset
    except ImportError:
        raise UserError(f"dataset = {name}: needs the library datasets", f"pip install datasets, or {advice}") from None
    import requests

    def arriving():
        try:
            requests.head("https://huggingface.co", timeout=TIMEOUT)  # the library itself would go on trying for minutes
            for row in load_dataset(*STREAMS[name], split="train", streaming=True):
                yield row["text"]
        except Exception as error:
            raise UserError(f"dataset = {name}: download failed ({type(error).__name__})",
                            f"connect to the network and try again, or {advice}") from None

    return arriving()


def save_documents(texts, count, path):
    """Write the first `count` documents as JSON lines."""
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_name(path.name + ".part")
    with part.open("w", encoding="utf-8") as file:
        for text in tqdm(itertools.islice(texts, count), desc=path.stem, total=count, disable=None):
            file.write(json.dumps({"text": text}) + "\n")
    part.replace(path)


# Sources


def file_source(name, path, sha256):
    """A single file is one document; its last tenth is the validation split, as in nanoGPT."""
    @functools.cache
    def characters():
        return sum(map(len, read_text(path)))

    def documents():
        if not characters():
            raise UserError(f"{path}: empty", "give a file that contains text")
        return zip(("train", "val"), cut(read_text(path), int((1 - VALIDATION) * characters())))

    return Source(name, sha256, False, documents)


def download_source(name, raw):
    """One of DOWNLOADS. An archive is never unpacked: its text is read where it is."""
    url, file, expected = DOWNLOADS[name]
    path = raw / file
    download(url, path)
    sha256 = file_digest(path)
    if sha256 != expected:
        raise UserError(f"{path}: its sha256 is {sha256}, that of {name} is {expected}", "delete the file to download it again")
    return file_source(name, zipfile.Path(path, name) if path.suffix == ".zip" else path, sha256)


def many_source(name, digests, text):
    """Documents by name, {name: sha256}; text(name) iterates over pieces of one."""
    held_out = validation(digests)

    def documents():
        for key in digests:
            yield "val" if key in held_out else "train", text(key)

    return Source(name, hashlib.sha256(json.dumps(digests).encode()).hexdigest(), True, documents)


def folder_source(name, folder):
    """Every text file in a folder is a document."""
    files = walk(folder)
    digests = {file: digest for file, path in files.items() if (digest := text_digest(path))}
    if len(digests) < len(files):
        print(f"{folder}: {len(files) - len(digests)} files left out that are not UTF-8 text")
    if not digests:
        raise UserError(f"{folder}: no UTF-8 text in this folder", "give a folder that contains text files")
    if len(digests) == 1:
        return file_source(name, files[next(iter(digests))], *digests.values())
    return many_source(name, digests, lambda file: read_text(files[file]))


def stdlib_texts():
    """-> {name: text}: the standard library's own source, and the help topics as the text that `help()` shows.

    Left out are tests, installed packages, and tables that programs wrote: character maps, build settings, entities.
    """
    root = Path(sysconfig.get_path("stdlib"))
    tables = re.compile(r"_sysconfigdata.*|html/entities\.py|stringprep\.py")
    files = walk(root, ("test", "tests", "idle_test", "site-packages", "dist-packages", "encodings", "pydoc_data"))
    texts = {}
    for name, path in files.items():
        if name.endswith(".py") and not tables.fullmatch(name):
            with contextlib.suppress(UserError):
                texts[name] = "".join(read_text(path))
    topics = root / "pydoc_data" / "topics.py"
    if topics.is_file():
        table = ast.parse("".join(read_text(topics))).body[-1].value
        texts |= {f"pydoc_data/topics/{topic}.txt": text for topic, text in sorted(ast.literal_eval(table).items())}
    return texts


def stdlib_source():
    texts = stdlib_texts()
    if len(texts) < 100:
        raise UserError("dataset = stdlib: this Python comes without its library's source", "give the path of a text instead")
    return many_source("stdlib", {name: hashlib.sha256(text.encode("utf-8")).hexdigest() for name, text in texts.items()},
                       lambda name: [texts[name]])


def lines_source(name, path):
    """Every line of a file is a JSON object whose key text is a document; it goes to validation by a hash of its text."""
    def documents():
        with path.open(encoding="utf-8") as file:
            for number, line in enumerate(file, 1):
                try:
                    text = json.loads(line)["text"]
                    split = "val" if share(text) < VALIDATION else "train"
                except (ValueError, KeyError, TypeError, AttributeError):
                    raise UserError(f"{path}: line {number} is not a JSON object with the key text",
                                    "delete the file to download it again") from None
                yield split, [text]

    return Source(name, file_digest(path), True, documents)


def stream_source(name, count, raw):
    """The first documents of a data set that is too large to be downloaded as a whole."""
    if not re.fullmatch(r"[1-9]\d*", count):
        raise UserError(f"dataset = {name}:{count}: not a number of documents", f"for example {name}:{DOCUMENTS}")
    path = raw / f"{name}-{count}.jsonl"
    if not path.exists():
        save_documents(hub_texts(name, path), int(count), path)
    return lines_source(path.stem, path)


def located(dataset):
    """-> the path of a data set, None of one that is a name; UserError where it is neither. Nothing is read."""
    path = Path(os.path.expanduser(dataset))  # that of pathlib raises for users that are not there
    if dataset in NAMES or dataset.partition(":")[0] in STREAMS:
        return None
    if os.path.isfile(path) or os.path.isdir(path):  # those of pathlib raise for names that are too long
        return path
    # A path is not a name misspelled.
    advice = "give the path of a UTF-8 file or folder" if len(path.parts) > 1 or path.suffix else nearest(dataset, NAMES)
    raise UserError(f"dataset = {dataset}: no such name, file or folder", advice)


def find(dataset, raw):
    """-> the Source that a name or path means; what must be downloaded goes to the folder `raw`."""
    if dataset == "stdlib":
        return stdlib_source()
    if dataset in DOWNLOADS:
        return download_source(dataset, raw)
    name, _, count = dataset.partition(":")
    if dataset.startswith("task:"):
        raise UserError(f"dataset = {dataset}: made while it is trained on", "it needs no preparation")
    if name in STREAMS:
        return stream_source(name, count or str(DOCUMENTS), raw)
    path = located(dataset)
    if path.is_file():
        return file_source(path.stem, path, file_digest(path))
    return folder_source(path.resolve().name, path)
