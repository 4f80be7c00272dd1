"""Text to tokens: what is encoded comes back, what is prepared is whole, and what cannot be done is said in two lines."""
import hashlib
import http.server
import io
import json
import os
import random
import re
import subprocess
import sys
import threading
import types
import zipfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
import tiktoken

import tokenizer
from data import prepare as data
from data import sources
from data.prepare import prepare, read
from options import UserError
from tokenizer import BPE, Byte, Char

REPOSITORY = Path(__file__).resolve().parents[1]
VARIED = (
    "def f(self, x=10):\n    if x > 12345:\n\n        return self.x['a']  # it's done\n\tend\n" * 3
    + "Größe, naïve café; 你好世界 \U0001f600\u200d\U0001f469 e\u0301 ٣٤٥ Ⅷ ½\u00a0x\u2028y\n   \n\n  trailing   "
    + "<|endoftext|> can't I'LL _private __init__ a_b->c ... !!!\n\r\n===\n"
)


def noise(seed, size=4000):
    """Random text of letters, marks, digits, signs and white space of many scripts, in short runs."""
    draw = random.Random(seed)
    alphabet = "abcXYZ éß你Жж\u0301٣½7 09 \n\n\t  '_.,(){}#\U0001f600\u00a0"
    return "".join(draw.choice(alphabet) * draw.choice([1, 1, 1, 2, 5]) for _ in range(size))


@pytest.fixture(scope="module")
def trained():
    return BPE.trained([VARIED, noise(0)], 600)


@pytest.fixture
def book(tmp_path):
    """A single text file of 10,000 characters."""
    path = tmp_path / "book.txt"
    path.write_text("".join(f"{i:04d} words\n" for i in range(1000))[:10000], encoding="utf-8", newline="")
    return path


@pytest.fixture
def library(tmp_path):
    """A folder of 30 texts, each about itself."""
    folder = tmp_path / "library"
    for i in range(30):
        path = folder / f"shelf {i % 3}" / f"{i}.txt"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f"This is text number {i}.\n" * (i + 1), encoding="utf-8")
    return folder


def tokens_of(folder):
    """-> (tokenizer, train ids, val ids, manifest)"""
    return tokenizer.load(folder / "tokenizer.json"), *read(folder)


def message(problem):
    """The two lines of the UserError that `problem()` must raise."""
    with pytest.raises(UserError) as caught:
        problem()
    assert str(caught.value).count("\n") == 1 and caught.value.advice
    return str(caught.value)


# Tokenizers


@pytest.fixture(params=["char", "byte", "bpe"])
def any_tokenizer(request, trained):
    return {"char": Char("".join(sorted(set(VARIED))), True), "byte": Byte(), "bpe": trained}[request.param]


def test_text_comes_back_and_every_byte_is_counted(any_tokenizer):
    ids = any_tokenizer.encode(VARIED)
    assert any_tokenizer.decode(ids) == VARIED
    assert any_tokenizer.decode_bytes(ids) == VARIED.encode()
    assert any_tokenizer.byte_lengths()[ids].sum() == len(VARIED.encode())
    assert len(any_tokenizer.byte_lengths()) == any_tokenizer.vocab_size > max(ids)
    assert len(any_tokenizer.encode("")) == 0


def test_separator_is_an_id_that_no_text_has(any_tokenizer):
    assert any_tokenizer.separator == any_tokenizer.vocab_size - 1
    assert any_tokenizer.separator not in any_tokenizer.encode(VARIED)
    assert any_tokenizer.byte_lengths()[any_tokenizer.separator] == 0
    assert any_tokenizer.decode([any_tokenizer.separator]) == ""


def test_saved_tokenizer_is_the_same(any_tokenizer, tmp_path):
    tokenizer.save(any_tokenizer, tmp_path / "tokenizer.json")
    loaded = tokenizer.load(tmp_path / "tokenizer.json")
    assert type(loaded) is type(any_tokenizer)
    assert (loaded.tokens, loaded.separator) == (any_tokenizer.tokens, any_tokenizer.separator)
    assert np.array_equal(loaded.encode(VARIED), any_tokenizer.encode(VARIED))


@pytest.mark.parametrize("content", ["", "{}", "[]", '{"kind": "bpe"}', '{"kind": "morse"}', '{"kind": "bpe", "tokens": ["!"]}',
                                     '{"kind": "bpe", "tokens": ["YQ=="], "pattern": "a", "separator": null}', "\xff"])
def test_damaged_tokenizer_is_named(content, tmp_path):
    path = tmp_path / "tokenizer.json"
    path.write_bytes(content.encode("latin-1"))
    assert str(path) in message(lambda: tokenizer.load(path))


def test_missing_tokenizer_is_named(tmp_path):
    assert "tokenizer.json" in message(lambda: tokenizer.load(tmp_path / "tokenizer.json"))


def test_unknown_characters_are_named():
    assert "'é' '😀'" in message(lambda: Char("abc").encode("a😀bé"))
    assert "'`'" in message(lambda: Char("abc").encode("`"))


def test_bytes_that_are_no_text_are_replaced_and_a_character_may_span_ids():
    assert Byte().decode([0xE2, 0x82, 0xAC, 0xFF, 0x61]) == "€\ufffda"
    assert Byte().decode_bytes([0xE2]) + Byte().decode_bytes([0x82, 0xAC]) == "€".encode()


@pytest.mark.parametrize("kind", [Byte, lambda: BPE.trained([VARIED], 300)])
def test_half_a_surrogate_pair_does_not_stop_encoding(kind):
    assert kind().decode(kind().encode("a\udc80b")) == "a?b"


@pytest.mark.parametrize("text", [VARIED, noise(1), noise(2)])
def test_both_engines_give_the_same_ids(text):
    """tiktoken runs what the library `tokenizers` learned: equal pieces, equal order of merges."""
    ours, theirs = (make([VARIED, noise(0)], 600) for make in (lambda *a: BPE.trained(*a, separated=False), tokenizer.learn))
    assert ours.encode(text).tolist() == theirs.encode(text).ids


def test_pattern_keeps_digits_single_and_indentation_whole():
    ours = BPE.trained(["    x = 2024\n        y = 2024\n\n    z\n" * 50], 400)
    tokens = [ours.tokens[i] for i in ours.encode("    x = 2024\n        y")]
    assert b"\n        " in tokens and [t for t in tokens if t.isdigit()] == [b"2", b"0", b"2", b"4"]


def test_small_text_gives_a_smaller_vocabulary_aloud(book, tmp_path, capsys):
    manifest = read(prepare(str(book), "bpe", 5000, tmp_path))[-1]
    assert 256 < manifest["vocab_size"] < 4000
    assert f"{manifest['vocab_size']} only, not 5000" in capsys.readouterr().out


def fake_encoding(name="fake", end=300):
    """Like tiktoken's own: some merges, a gap in the ids, special tokens."""
    ranks = {bytes([b]): b for b in range(256)} | {b"he": 256, b"hell": 258}
    return tiktoken.Encoding(name, pat_str=r" ?\p{L}+|\s+|.", mergeable_ranks=ranks,
                             special_tokens={"<|endoftext|>": end, "<|end|>": end + 2})


def test_named_encoding_is_stored_whole(tmp_path):
    encoding = fake_encoding()
    tokenizer.save(BPE.named(encoding), tmp_path / "tokenizer.json")
    loaded = tokenizer.load(tmp_path / "tokenizer.json")
    assert loaded.vocab_size == encoding.n_vocab == 303 and loaded.separator == 300
    text = "hello <|endoftext|> <|end|>"
    assert loaded.encode(text).tolist() == encoding.encode_ordinary(text)
    assert loaded.decode([*loaded.encode(text), 270, 300, 302]) == text  # a model can sample ids that stand for nothing


@pytest.fixture(scope="module")
def reckless():
    """Byte pairs that were learned from uncut text, so that many span what a pattern should keep apart."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tokenizer, "PATTERN", r"[\s\S]+")
        return BPE.trained([noise(seed, 300) for seed in range(30)], 1500).tokens


@pytest.mark.parametrize("name", ["ours", *tiktoken.list_encoding_names()])
def test_cutting_a_text_changes_no_token(name, reckless, monkeypatch):
    """For the expressions of all encodings; their vocabularies, which would need the network, are not what matters."""
    pattern = tokenizer.PATTERN
    if name != "ours":
        for loader in ("load_tiktoken_bpe", "data_gym_to_mergeable_bpe_ranks"):
            monkeypatch.setattr(f"tiktoken_ext.openai_public.{loader}", lambda *_, **__: {})
        pattern = tiktoken.registry.ENCODING_CONSTRUCTORS[name]()["pat_str"]
    encode = BPE(reckless, pattern).encode
    monkeypatch.setattr(data, "PIECE", 50)
    for text in (VARIED, noise(3), noise(4)):
        pieces = list(data.whole_words([text[i:i + 37] for i in range(0, len(text), 37)]))
        assert "".join(pieces) == text and len(pieces) > 5
        assert np.concatenate([encode(piece) for piece in pieces]).tolist() == encode(text).tolist()


def test_text_without_a_place_to_cut_stays_whole(monkeypatch):
    monkeypatch.setattr(data, "PIECE", 10)
    assert list(data.whole_words(["." * 30, "." * 30, ""])) == ["." * 60]


# Files and folders


def test_a_file_is_split_by_characters_as_in_nanogpt(tmp_path):
    text = "".join(random.Random(0).choices("aé你\n ", k=10004))
    path = tmp_path / "text.txt"
    path.write_text(text, encoding="utf-8", newline="")
    made, train, val, manifest = tokens_of(prepare(str(path), "char", 1024, tmp_path))
    assert made.decode(train) == text[:int(0.9 * len(text))] and made.decode(val) == text[int(0.9 * len(text)):]
    assert made.vocab_size == 5 and made.separator is manifest["separator"] is None
    assert manifest["val"]["starts"] == [0] and manifest["train"]["documents"] == 1


@pytest.mark.parametrize("name", ["char", "byte", "bpe"])
def test_pieces_and_threads_change_nothing(name, tmp_path, monkeypatch):
    path = tmp_path / "text.txt"
    path.write_text(VARIED * 20, encoding="utf-8", newline="")
    whole = tokens_of(prepare(str(path), name, 400, tmp_path / "whole"))
    monkeypatch.setattr(data, "PIECE", 100)
    monkeypatch.setattr(sources, "PIECE", 333)
    monkeypatch.setattr(data, "AHEAD", 700)
    cut = tokens_of(prepare(str(path), name, 400, tmp_path / "cut"))
    assert np.array_equal(whole[1], cut[1]) and np.array_equal(whole[2], cut[2]) and whole[3] == cut[3]


def test_no_more_is_read_ahead_than_asked_for(monkeypatch):
    monkeypatch.setattr(data, "AHEAD", 50)
    read, done = [], 0
    items = ((len(read), read.append(1), "x" * 10) for _ in range(30))
    with ThreadPoolExecutor(3) as pool:
        for item, length in data.ahead(pool, lambda item: len(item[-1]), items):
            assert item[0] == done and length == 10
            done += 1
            assert done <= len(read) <= done + 6
    assert done == 30


@pytest.mark.parametrize("size", [0, 1, 5, 6, 7, 14])
def test_a_text_is_cut_into_its_two_parts(size):
    pieces = ["abc", "", "def", "ghijklm", "n"]
    first, second = sources.cut(pieces, size)
    assert "".join(first) == "abcdefghijklmn"[:size] and "".join(second) == "abcdefghijklmn"[size:]
    first, second = sources.cut(pieces, size)
    next(first, None)  # the rest of the first is not asked for
    assert "".join(second) == "abcdefghijklmn"[size:]


def test_every_document_starts_with_a_separator(library, tmp_path):
    made, train, val, manifest = tokens_of(prepare(str(library), "bpe", 300, tmp_path))
    starts = manifest["val"]["starts"]
    assert starts == np.flatnonzero(val == made.separator).tolist() and starts[0] == 0
    assert len(starts) == manifest["val"]["documents"] and manifest["separator"] == made.separator
    assert np.count_nonzero(train == made.separator) == manifest["train"]["documents"]
    found = [made.decode(part) for ids in (train, val) for part in np.split(ids, np.flatnonzero(ids == made.separator))]
    assert sorted(filter(None, found)) == sorted(path.read_text(encoding="utf-8") for path in library.rglob("*.txt"))
    assert 1 <= len(starts) <= 8


def test_manifest_tells_the_truth(library, tmp_path):
    folder = prepare(str(library), "bpe", 270, tmp_path)
    made, *splits, manifest = tokens_of(folder)
    for name, ids in zip(("train", "val"), splits, strict=True):
        assert manifest[name]["tokens"] == len(ids)
        assert manifest[name]["bytes"] == len(made.decode_bytes(ids))
        assert manifest[name]["sha256"] == hashlib.sha256((folder / f"{name}.bin").read_bytes()).hexdigest()
    assert manifest["vocab_size"] == 270 and manifest["dtype"] == "uint16" and manifest["tokenizer"] == "bpe"
    assert sorted(path.name for path in folder.iterdir()) == ["manifest.json", "tokenizer.json", "train.bin", "val.bin"]


def test_byte_pairs_are_learned_from_the_beginning_of_the_training_split(library, tmp_path, monkeypatch):
    (library / "held out.txt").write_text("zq" * 1000)
    (library / "~late.txt").write_text("kw" * 1000)
    monkeypatch.setattr(sources, "validation", lambda names: {"held out.txt"})
    monkeypatch.setattr(data, "BPE_SAMPLE", 5000)
    tokens = tokens_of(prepare(str(library), "bpe", 280, tmp_path))[0].tokens
    assert b" text" in tokens and b"zq" not in tokens and b"kw" not in tokens


@pytest.mark.parametrize(("vocab_size", "dtype"), [(256, "uint8"), (257, "uint16"), (65536, "uint16"), (65537, "uint32")])
def test_ids_are_stored_in_the_smallest_type(vocab_size, dtype, book, tmp_path, monkeypatch):
    made = Byte(separated=False)
    made.tokens = made.tokens + [b""] * (vocab_size - 256)
    made.encode = lambda text: np.full(len(text), vocab_size - 1, dtype=np.uint32)
    monkeypatch.setattr(data, "make_tokenizer", lambda *_: made)
    train, val, manifest = read(prepare(str(book), "byte", 1024, tmp_path))
    assert manifest["dtype"] == dtype and train.dtype.itemsize == np.dtype(dtype).itemsize
    assert set(train.tolist()) == set(val.tolist()) == {vocab_size - 1}


def test_validation_goes_by_name_and_is_never_empty():
    names = [f"folder/{i}.txt" for i in range(2000)]
    held_out = sources.validation(names)
    assert 150 < len(held_out) < 250
    assert held_out - {names[0]} == sources.validation(names[1:])  # another file changes nothing for the rest
    for i in range(50):
        assert len(sources.validation([f"{i}", f"{i}b"])) == 1


def test_byte_order_mark_and_line_ends_are_those_of_text_mode(tmp_path, monkeypatch):
    path = tmp_path / "windows.txt"
    path.write_bytes(b"\xef\xbb\xbf" + "été\r\nline\rend\n".encode() * 10)
    for size in (1, 2, 3, 5, 1000):
        monkeypatch.setattr(sources, "PIECE", size)
        assert "".join(sources.read_text(path)) == path.read_text(encoding="utf-8-sig") == "été\nline\nend\n" * 10


def test_hidden_and_binary_files_are_left_out_and_nothing_is_written(library, tmp_path, capsys):
    (library / ".hidden").mkdir()
    (library / ".hidden" / "secret.txt").write_text("secret")
    (library / ".note").write_text("secret")
    (library / "empty.txt").write_text("")
    (library / "picture.bin").write_bytes(b"GIF\0" * 10)
    (library / "latin.txt").write_bytes("Größe".encode("latin-1"))
    before = {path: path.stat().st_mtime_ns for path in [library, *library.rglob("*")]}
    made, train, val, manifest = tokens_of(prepare(str(library), "byte", 1024, tmp_path))
    assert manifest["train"]["documents"] + manifest["val"]["documents"] == 30
    assert "2 files left out" in capsys.readouterr().out
    assert "secret" not in made.decode(train) + made.decode(val)
    assert before == {path: path.stat().st_mtime_ns for path in [library, *library.rglob("*")]}


def test_folder_with_one_text_is_a_file(tmp_path):
    (tmp_path / "one").mkdir()
    (tmp_path / "one" / "a.txt").write_text("to be or not to be\n" * 20)
    (tmp_path / "one" / "b.txt").write_text("")
    _, train, val, manifest = tokens_of(prepare(str(tmp_path / "one"), "char", 1024, tmp_path))
    assert manifest["separator"] is None and len(train) == 342 and len(val) == 38


# Once prepared


def test_same_key_is_looked_up_and_a_changed_text_is_not(library, tmp_path, capsys, monkeypatch):
    first = prepare(str(library), "bpe", 270, tmp_path)
    line = capsys.readouterr().out
    with monkeypatch.context() as patch:
        patch.setattr(data, "write", lambda *_: pytest.fail("prepared again"))
        assert prepare(str(library), "bpe", 270, tmp_path) == first
        assert capsys.readouterr().out == line and line.count("\n") == 1 and first.name in line
    assert re.fullmatch(r"library-bpe-270-[0-9a-f]{12}", first.name) and first.parent == tmp_path / "prepared"
    others = [prepare(str(library), "bpe", 269, tmp_path), prepare(str(library), "byte", 270, tmp_path)]
    (library / "shelf 0" / "0.txt").write_text("another text")
    others.append(prepare(str(library), "bpe", 270, tmp_path))
    (library / "shelf 0" / "0.txt").rename(library / "shelf 0" / "00.txt")
    others.append(prepare(str(library), "bpe", 270, tmp_path))
    assert len({first, *others}) == 5 and all(folder.is_dir() for folder in others)


def break_size(folder):
    (folder / "train.bin").write_bytes(b"\0" * 5)


def break_split(folder):
    (folder / "val.bin").unlink()


def break_tokenizer(folder):
    (folder / "tokenizer.json").write_text('{"kind"')


def break_manifest(folder):
    (folder / "manifest.json").write_text("{}")


@pytest.mark.parametrize("damage", [break_size, break_split, break_tokenizer, break_manifest])
def test_damaged_folder_is_prepared_again_aloud(damage, book, tmp_path, capsys):
    folder = prepare(str(book), "char", 1024, tmp_path)
    whole = {path.name: path.read_bytes() for path in folder.iterdir()}
    damage(folder)
    if damage is not break_tokenizer:
        assert str(folder) in message(lambda: read(folder))
    capsys.readouterr()
    assert prepare(str(book), "char", 1024, tmp_path) == folder
    assert "preparing it again" in capsys.readouterr().out
    assert whole == {path.name: path.read_bytes() for path in folder.iterdir()}


def test_interrupted_preparation_leaves_nothing(book, tmp_path, monkeypatch):
    def interrupted(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr(data, "save_tokenizer", interrupted)
    with pytest.raises(KeyboardInterrupt):
        prepare(str(book), "char", 1024, tmp_path)
    assert list((tmp_path / "prepared").iterdir()) == []


def test_two_processes_may_prepare_the_same(book, tmp_path, monkeypatch):
    def slow(*arguments, write=data.write):
        assert arguments[3].is_relative_to(tmp_path / "prepared")  # renaming is atomic within one file system only
        write(*arguments)
        monkeypatch.setattr(data, "write", write)
        prepare(str(book), "char", 1024, tmp_path)  # the other one comes first

    monkeypatch.setattr(data, "write", slow)
    folder = prepare(str(book), "char", 1024, tmp_path)
    assert read(folder)[0].size == 9000 and list(folder.parent.iterdir()) == [folder]


# The standard library


def test_stdlib_is_source_and_help_without_tests_and_tables():
    texts = sources.stdlib_texts()
    assert {"argparse.py", "json/decoder.py", "pydoc_data/topics/assert.txt"} <= set(texts)
    assert texts["pydoc_data/topics/assert.txt"].startswith('The "assert" statement\n')
    assert not any(re.search(r"(^|/)(tests?|encodings|site-packages)/|_sysconfigdata|entities", name) for name in texts)
    assert sum(map(len, texts.values())) > 5_000_000
    assert next(iter(sources.stdlib_source().documents()))[1] == [texts[next(iter(texts))]]


def test_stdlib_is_prepared_with_its_version(tmp_path, monkeypatch):
    some = dict(list(sources.stdlib_texts().items())[:120])
    monkeypatch.setattr(sources, "stdlib_texts", lambda: some)
    manifest = read(prepare("stdlib", "byte", 1024, tmp_path))[-1]
    assert manifest["python"] == ".".join(map(str, sys.version_info[:3])) and manifest["dataset"] == "stdlib"
    assert manifest["train"]["documents"] + manifest["val"]["documents"] == 120


# Downloads, from a server on this machine


class Server(http.server.BaseHTTPRequestHandler):
    """Serves `content`, ranges of it too; breaks off after `limit` bytes of a reply."""
    content, limit, ranges, requests = b"", None, True, []

    def do_GET(self):
        if "missing" in self.path or self.headers["Accept-Encoding"] != "identity":
            self.send_error(404)
            return
        wanted = re.fullmatch(r"bytes=(\d+)-", self.headers.get("Range", "")) if self.ranges else None
        start = int(wanted[1]) if wanted else 0
        self.requests.append(start)
        self.send_response(416 if start >= len(self.content) else 206 if wanted else 200)
        body = self.content[start:]
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body[:self.limit])

    def log_message(self, *_):
        pass


@pytest.fixture
def server(monkeypatch):
    """A server, and the data set `shakespeare` as a text that it serves."""
    class Handler(Server):
        content, requests = b"".join(b"%05d to be\n" % i for i in range(30000)), []

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler) as running:
        threading.Thread(target=running.serve_forever, args=[0.01], daemon=True).start()
        Handler.url = f"http://127.0.0.1:{running.server_port}/input.txt"
        sha256 = hashlib.sha256(Handler.content).hexdigest()
        monkeypatch.setitem(sources.DOWNLOADS, "shakespeare", (Handler.url, "shakespeare.txt", sha256))
        yield Handler
        running.shutdown()


def test_download_happens_once(server, tmp_path):
    folder = prepare("shakespeare", "char", 1024, tmp_path)
    assert read(folder)[0].size == int(0.9 * len(server.content))
    assert (tmp_path / "raw" / "shakespeare.txt").read_bytes() == server.content
    assert prepare("shakespeare", "char", 1024, tmp_path) == folder and prepare("shakespeare", "byte", 1024, tmp_path)
    assert server.requests == [0] and [path.name for path in (tmp_path / "raw").iterdir()] == ["shakespeare.txt"]


@pytest.mark.parametrize("ranges", [True, False])
def test_interrupted_download_goes_on(ranges, server, tmp_path):
    server.limit, server.ranges = 100_000, ranges
    advice = message(lambda: prepare("shakespeare", "char", 1024, tmp_path))
    assert "download failed" in advice and str(tmp_path / "raw" / "shakespeare.txt") in advice
    part = tmp_path / "raw" / "shakespeare.txt.part"
    have = part.read_bytes()
    assert len(have) > 30_000 and server.content.startswith(have) and not (tmp_path / "raw" / "shakespeare.txt").exists()
    server.limit = None
    prepare("shakespeare", "char", 1024, tmp_path)
    assert server.requests == ([0, len(have)] if ranges else [0, 0]) and not part.exists()


def test_complete_part_needs_only_its_name(server, tmp_path):
    (tmp_path / "raw").mkdir()
    (tmp_path / "raw" / "shakespeare.txt.part").write_bytes(server.content)
    prepare("shakespeare", "char", 1024, tmp_path)


def test_wrong_content_is_refused_with_both_hashes(server, tmp_path):
    expected = sources.DOWNLOADS["shakespeare"][2]
    server.content = server.content.replace(b"5", b"6")
    words = message(lambda: prepare("shakespeare", "char", 1024, tmp_path))
    assert expected in words and hashlib.sha256(server.content).hexdigest() in words and "shakespeare.txt" in words


def test_a_file_that_the_user_put_there_is_taken(server, tmp_path):
    (tmp_path / "raw").mkdir()
    (tmp_path / "raw" / "shakespeare.txt").write_bytes(server.content)
    prepare("shakespeare", "char", 1024, tmp_path)
    assert server.requests == []


def test_archive_is_read_without_being_unpacked(server, tmp_path, monkeypatch):
    text, packed = b"the anarchists and others " * 400, io.BytesIO()
    with zipfile.ZipFile(packed, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("text8", text)
    server.content = packed.getvalue()
    monkeypatch.setitem(sources.DOWNLOADS, "text8", (server.url, "text8.zip", hashlib.sha256(server.content).hexdigest()))
    made, train, val, _ = tokens_of(prepare("text8", "char", 1024, tmp_path))
    assert made.decode(train) + made.decode(val) == text.decode()
    assert [path.name for path in (tmp_path / "raw").iterdir()] == ["text8.zip"]


def test_archive_of_the_user_is_no_text(tmp_path):
    path = tmp_path / "texts" / "a.zip"
    path.parent.mkdir()
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("a.txt", b"words " * 100)
    for dataset in (path, path.parent):
        message(lambda dataset=dataset: prepare(str(dataset), "byte", 1024, tmp_path))


def test_missing_page_is_not_taken_for_the_text(server, tmp_path, monkeypatch):
    monkeypatch.setitem(sources.DOWNLOADS, "enwik8", (server.url.replace("input", "missing"), "enwik8.zip", "0"))
    assert "404" in message(lambda: prepare("enwik8", "char", 1024, tmp_path))
    assert list((tmp_path / "raw").iterdir()) == []


def test_no_network_names_the_file_to_put_where(tmp_path, monkeypatch):
    monkeypatch.setitem(sources.DOWNLOADS, "enwik8", ("http://127.0.0.1:9/enwik8.zip", "enwik8.zip", "0"))
    words = message(lambda: prepare("enwik8", "char", 1024, tmp_path))
    assert "127.0.0.1:9" in words and str(tmp_path / "raw" / "enwik8.zip") in words


# Vocabularies of tiktoken


@pytest.fixture
def fake_vocabulary(server, tmp_path, monkeypatch):
    """An encoding whose vocabulary is on our server."""
    encoding = fake_encoding()
    server.content = b"".join(b"%s %d\n" % (tokenizer.base64.b64encode(token), rank)
                              for token, rank in encoding._mergeable_ranks.items())
    sha256 = hashlib.sha256(server.content).hexdigest()

    def construct():
        ranks = tiktoken.load.load_tiktoken_bpe(server.url.replace("input", "fake"), sha256)
        return {"name": "fake", "pat_str": encoding._pat_str, "mergeable_ranks": ranks,
                "special_tokens": encoding._special_tokens}

    tiktoken.list_encoding_names()  # fills the registry
    monkeypatch.setitem(tiktoken.registry.ENCODING_CONSTRUCTORS, "fake", construct)
    monkeypatch.setattr(tiktoken.registry, "ENCODINGS", {})
    monkeypatch.setenv("TIKTOKEN_CACHE_DIR", str(tmp_path / "cache"))
    return encoding


def test_named_encoding_is_fetched_and_then_needed_no_more(fake_vocabulary, server, book, tmp_path):
    folder = prepare(str(book), "fake", 1024, tmp_path)
    made, train, _, manifest = tokens_of(folder)
    text = book.read_text()
    assert train.tolist() == [300, *fake_vocabulary.encode_ordinary(text[:9000])]
    assert manifest["vocab_size"] == 303 and manifest["tokenizer"] == "fake" and made.separator == 300
    tiktoken.registry.ENCODINGS.clear()
    server.content = b""
    (tmp_path / "raw" / "fake.txt").unlink()
    assert prepare(str(book), "fake", 1024, tmp_path) == folder


def test_named_encoding_without_network_says_what_to_put_where(fake_vocabulary, server, book, tmp_path):
    server.url = "http://127.0.0.1:9/input.txt"
    theirs = tiktoken.load.read_file
    words = message(lambda: prepare(str(book), "fake", 1024, tmp_path))
    assert str(tmp_path / "raw" / "fake.txt") in words and tiktoken.load.read_file is theirs


def test_damaged_vocabulary_is_refused(fake_vocabulary, book, tmp_path):
    (tmp_path / "raw").mkdir()
    (tmp_path / "raw" / "fake.txt").write_bytes(b"something else")
    assert str(tmp_path / "raw") in message(lambda: prepare(str(book), "fake", 1024, tmp_path))


# Streams


def stories():
    for i in range(1000):
        yield {"text": f"Story {i}: once upon a time there were {i} mice.\nThey ate.\u2028\n"}


@pytest.fixture
def hub(monkeypatch, server):
    """The library `datasets`, answering with stories."""
    calls = []

    def load_dataset(*arguments, **options):
        calls.append((arguments, options))
        return stories()

    monkeypatch.setitem(sys.modules, "datasets", types.SimpleNamespace(load_dataset=load_dataset))
    monkeypatch.setattr("requests.head", lambda *_, **__: None)
    return calls


@pytest.mark.parametrize("name", ["byte", "bpe", "char"])
def test_stream_is_fetched_once_and_cut_into_documents(name, hub, tmp_path):
    made, train, val, manifest = tokens_of(prepare("tinystories:300", name, 300, tmp_path))
    assert hub == [(("roneneldan/TinyStories", None), {"split": "train", "streaming": True})]
    found = [made.decode(part) for ids in (train, val) for part in np.split(ids, np.flatnonzero(ids == made.separator))]
    assert sorted(filter(None, found)) == sorted(row["text"] for row, _ in zip(stories(), range(300), strict=False))
    assert 10 < manifest["val"]["documents"] < 60
    prepare("tinystories:300", name, 301, tmp_path)
    assert len(hub) == 1


def test_stream_that_breaks_off_leaves_no_file(hub, tmp_path, monkeypatch):
    def broken(*_, **__):
        yield from [{"text": "a"}] * 5
        raise RuntimeError("connection lost")

    monkeypatch.setattr(sys.modules["datasets"], "load_dataset", broken)
    assert "fineweb-100000.jsonl" in message(lambda: prepare("fineweb", "byte", 1024, tmp_path))
    assert not list((tmp_path / "raw").glob("*.jsonl"))


def test_stream_without_the_library_says_what_to_install(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "datasets", None)
    words = message(lambda: prepare("openwebtext", "byte", 1024, tmp_path))
    assert "pip install datasets" in words and str(tmp_path / "raw" / "openwebtext-100000.jsonl") in words


@pytest.mark.parametrize("line", ["not json", "[1]", '{"title": "x"}', '{"text": 5}', '{"text": "\\ud800"}'])
def test_bad_line_is_named(line, tmp_path):
    (tmp_path / "raw").mkdir()
    (tmp_path / "raw" / "fineweb-7.jsonl").write_text('{"text": "good"}\n' + line + "\n")
    assert "line 2" in message(lambda: prepare("fineweb:7", "byte", 1024, tmp_path))


@pytest.mark.parametrize("name", ["char", "byte", "bpe"])
def test_stream_without_documents_is_too_short(name, tmp_path):
    (tmp_path / "raw").mkdir()
    (tmp_path / "raw" / "fineweb-7.jsonl").write_text("")
    assert "too short" in message(lambda: prepare("fineweb:7", name, 1024, tmp_path))


def test_number_of_documents_is_checked(tmp_path):
    assert "fineweb:many" in message(lambda: prepare("fineweb:many", "byte", 1024, tmp_path))


# Bad input


@pytest.mark.parametrize(("dataset", "kind", "words"), [
    ("shakespear", "char", ["shakespear", "did you mean shakespeare?"]),
    ("no/such/file.txt", "char", ["no/such/file.txt"]),
    ("stdlib", "bype", ["bype", "did you mean"]),
    ("stdlib", "gtp2", ["did you mean gpt2?"]),
])
def test_unknown_words_are_named_with_the_nearest_right_one(dataset, kind, words, tmp_path):
    text = message(lambda: prepare(dataset, kind, 1024, tmp_path))
    assert all(word in text for word in words)


@pytest.mark.parametrize(("content", "words"), [
    (b"", ["book.txt", "empty"]),
    (b"\xef\xbb\xbf", ["book.txt", "empty"]),
    (b"abcdefgh", ["too short", "val"]),
    (b"a" * 100_003 + b"\xff" + b"b" * 10, ["book.txt", "0xff", "position 100003"]),
    (b"\xef\xbb\xbfabc\xe4", ["0xe4", "position 6"]),
    ("é".encode() * 999 + b"\xc3", ["0xc3", "position 1998"]),
])
@pytest.mark.parametrize("piece", [2**20, 7])
def test_bad_file_is_named(content, words, piece, book, tmp_path, monkeypatch):
    monkeypatch.setattr(sources, "PIECE", piece)
    book.write_bytes(content)
    text = message(lambda: prepare(str(book), "byte", 1024, tmp_path))
    assert all(word in text for word in words), text
    assert not list((tmp_path / "prepared").iterdir())


def test_folder_without_text_is_named(tmp_path):
    (tmp_path / "pictures").mkdir()
    (tmp_path / "pictures" / "a.gif").write_bytes(b"GIF\0\xff")
    assert "pictures" in message(lambda: prepare(str(tmp_path / "pictures"), "byte", 1024, tmp_path))


def test_unwritable_place_is_named(book, tmp_path):
    (tmp_path / "root").write_text("a file where a folder should be")
    assert str(tmp_path / "root") in message(lambda: prepare(str(book), "byte", 1024, tmp_path / "root"))


# The command


def test_command_line(book, tmp_path, monkeypatch, capsys):
    calls = []
    monkeypatch.setattr(data, "prepare", lambda *arguments: calls.append(arguments))
    assert data.main([str(book), "--tokenizer", "bpe", "--vocab_size=300"]) == 0 and data.main([]) == 0
    assert calls == [(str(book), "bpe", 300), ("stdlib", "bpe", 1024)]
    assert data.main(["--help"]) == 0 and "--vocab_size" in capsys.readouterr().out
    message(lambda: data.main(["one", "two"]))
    assert "tokenizer" in message(lambda: data.main(["--tokeniser", "char"]))
    message(lambda: data.main(["--vocab_size", "3"]))


def test_script_runs_anywhere_and_ends_with_two_lines(tmp_path):
    run = subprocess.run([sys.executable, REPOSITORY / "data" / "prepare.py", "no_such_text"], cwd=tmp_path, text=True,
                         capture_output=True, check=False, env={**os.environ, "PYTHONPATH": ""})
    assert run.returncode == 2 and run.stderr.count("\n") == 2 and "no_such_text" in run.stderr and not run.stdout


def test_manifest_and_tokenizer_are_plain_json(book, tmp_path):
    folder = prepare(str(book), "bpe", 300, tmp_path)
    for name in ("manifest.json", "tokenizer.json"):
        json.loads((folder / name).read_text(encoding="utf-8"))
