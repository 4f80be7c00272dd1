"""Text to ids and back: characters, bytes, or byte pairs run by tiktoken.

Every tokenizer is a table of the bytes that each id stands for, and an `encode`. The separator is an id of its own that
stands before each document and for no bytes at all; it is None where the text is one document that needs none. No string
inside a text is ever special: `<|endoftext|>` is encoded like any other characters.
"""
import base64
import json
import sys
from pathlib import Path

import numpy as np
import tiktoken

import files
from options import UserError

# How text is cut before bytes are paired; no pair crosses a cut. Words and signs take one space before them, digits stay
# single so that numbers are spelled out, and the end of a line takes the indentation of the next, which is a third of all
# characters in source code. Written in what the regular expressions of tiktoken and of the trainer have in common.
PATTERN = r" ?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+|\s*\n[ \t]*|\s+(?!\S)|\s+"


class Tokenizer:
    """What the kinds share. tokens: the bytes of every id in order, empty for ids that stand for no text. STATE: the types of
    what `state` gives."""

    padding = 0

    def __init__(self, tokens, separator):
        if separator is not None and not 0 <= separator < len(tokens):
            raise ValueError(f"its separator {separator} is none of its {len(tokens)} ids")
        self.tokens = tokens
        self.separator = separator

    def pad(self, vocab_size):
        """Add ids that stand for no text, as models have that round their vocabulary up."""
        self.padding += vocab_size - self.vocab_size
        self.tokens = self.tokens + [b""] * (vocab_size - self.vocab_size)

    @property
    def vocab_size(self):
        return len(self.tokens)

    def decode_bytes(self, ids):
        """-> bytes. A character may span ids, so a stream is decoded with `codecs.getincrementaldecoder("utf-8")`."""
        return b"".join([self.tokens[i] for i in ids])

    def decode(self, ids):
        """-> text; bytes that are not UTF-8 become U+FFFD, separators vanish."""
        return self.decode_bytes(ids).decode("utf-8", errors="replace")

    def byte_lengths(self):
        """-> (V,) int64: UTF-8 bytes that each id stands for."""
        return np.array([len(token) for token in self.tokens], dtype=np.int64)


class Char(Tokenizer):
    """One id for each of `characters`, in their order."""

    STATE = {"characters": str, "separated": bool}

    def __init__(self, characters, separated=False):
        super().__init__([c.encode("utf-8") for c in characters] + [b""] * separated, len(characters) if separated else None)
        self.characters = characters
        self.ids = np.full(CODE_POINTS, -1, dtype=np.int32)
        self.ids[code_points(characters)] = np.arange(len(characters))

    def encode(self, text):
        """-> (n,) int32. UserError names characters that the vocabulary lacks."""
        ids = self.ids[code_points(text)]
        if (ids < 0).any():
            unknown = sorted(set(text) - set(self.characters))
            raise UserError(f"characters outside the vocabulary: {' '.join(map(repr, unknown[:10]))}",
                            f"the tokenizer char knows the {len(self.characters)} characters of its training text: "
                            f"{''.join(self.characters[:100])!r}")
        return ids

    def state(self):
        return {"characters": self.characters, "separated": self.separator is not None}


CODE_POINTS = sys.maxunicode + 1


def code_points(text):
    """-> (n,) uint32: the number of each character in Unicode."""
    return np.frombuffer(text.encode("utf-32-le", errors="surrogatepass"), dtype="<u4")


def alphabet(texts):
    """-> all characters that occur in an iterable of texts, sorted, as one text."""
    seen = np.zeros(CODE_POINTS, dtype=bool)
    for text in texts:
        seen[code_points(text)] = True
    return "".join(map(chr, np.flatnonzero(seen)))


class Byte(Tokenizer):
    """The 256 bytes of UTF-8, and 256 as the separator."""

    STATE = {"separated": bool}

    def __init__(self, separated=True):
        super().__init__([bytes([b]) for b in range(256)] + [b""] * separated, 256 if separated else None)

    def encode(self, text):
        """-> (n,) uint8, n = bytes of the text in UTF-8."""
        return np.frombuffer(text.encode("utf-8", errors="replace"), dtype=np.uint8)

    def state(self):
        return {"separated": self.separator is not None}


def byte_table():
    """-> {printable character: byte} by which byte-level vocabularies are spelled: those of Latin-1 stand for themselves, the
    others follow in order from U+0100."""
    printable = [b for b in range(256) if chr(b).isprintable() and chr(b) != " "]
    others = [b for b in range(256) if b not in printable]
    return {chr(b): b for b in printable} | {chr(256 + i): b for i, b in enumerate(others)}


BYTES = byte_table()


def byte_level(token):
    """-> the bytes that a token of a byte-level vocabulary stands for."""
    return bytes(BYTES[c] for c in token)


def sentence_piece(token):
    """SentencePiece spells a space as U+2581, and a single byte as <0x41>."""
    if len(token) == 6 and token.startswith("<0x"):
        return bytes([int(token[3:5], 16)])
    return token.replace("\u2581", " ").encode("utf-8")


def learn(texts, vocab_size):
    """-> a byte-pair tokenizer of the library `tokenizers`, trained on an iterable of texts."""
    from tokenizers import Regex, Tokenizer, models, pre_tokenizers, trainers

    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    trainee = Tokenizer(models.BPE())
    trainee.pre_tokenizer = pre_tokenizers.Sequence([pre_tokenizers.Split(Regex(PATTERN), "isolated"), byte_level])
    trainer = trainers.BpeTrainer(vocab_size=vocab_size, initial_alphabet=byte_level.alphabet(), show_progress=False)
    trainee.train_from_iterator(texts, trainer)
    return trainee


class BPE(Tokenizer):
    """Byte pairs. An id is also the rank of its merge: of two neighbours the pair with the lowest id merges first."""

    STATE = {"pattern": str, "separator": int | None, "tokens": list}

    def __init__(self, tokens, pattern, separator=None):
        super().__init__(tokens, separator)
        self.pattern = pattern
        ranks = {token: i for i, token in enumerate(tokens) if token}
        if not all(bytes([b]) in ranks for b in range(256)):
            raise ValueError("a byte-pair vocabulary must contain the 256 bytes")
        # One special token, which is never allowed: without any, tiktoken looks for the empty string at every character.
        self.engine = tiktoken.Encoding("positions", pat_str=pattern, mergeable_ranks=ranks,
                                        special_tokens={"<|endoftext|>": len(tokens)})

    @classmethod
    def named(cls, encoding):
        """The vocabulary of a `tiktoken.Encoding`; of its special tokens only <|endoftext|> is kept, as the separator."""
        tokens = [b""] * encoding.n_vocab
        for token, rank in encoding._mergeable_ranks.items():
            tokens[rank] = token
        separator = encoding._special_tokens.get("<|endoftext|>", encoding.n_vocab)
        return cls(tokens + [b""] * (separator == len(tokens)), encoding._pat_str, separator)

    @classmethod
    def trained(cls, texts, vocab_size, separated=True):
        """Learn merges from an iterable of texts until there are vocab_size ids, fewer if the text has no more pairs."""
        vocabulary = learn(texts, vocab_size - separated).get_vocab()
        tokens = [byte_level(word) for word in sorted(vocabulary, key=vocabulary.get)]
        return cls(tokens + [b""] * separated, PATTERN, len(tokens) if separated else None)

    def encode(self, text):
        """-> (n,) uint32."""
        try:
            return self.engine.encode_to_numpy(text, disallowed_special=())
        except UnicodeEncodeError:  # half a surrogate pair: how Python holds a byte of the command line that is not UTF-8
            return self.encode(text.encode("utf-8", errors="replace").decode("utf-8"))
        except BaseException as error:
            if not isinstance(error, ValueError) and type(error).__name__ != "PanicException":  # of a library in Rust
                raise
            raise UserError(f"text that this tokenizer cannot cut ({error})",
                            "a million spaces in a row are too many for it: shorten them, or take the tokenizer byte") from None

    def state(self):
        tokens = self.tokens[:self.vocab_size - self.padding]
        return {"pattern": self.pattern, "separator": self.separator,
                "tokens": [base64.b64encode(token).decode("ascii") for token in tokens]}


class Hub(Tokenizer):
    """A tokenizer of the library `tokenizers`, as Hugging Face models bring it: the text of its tokenizer.json."""

    STATE = {"file": str}
    SEPARATORS = ("<|begin_of_text|>", "<s>", "<bos>", "<|endoftext|>", "</s>", "<eos>")  # the first of them that it has
    NORMALIZERS = {"Sequence", "NFC", "Prepend", "Replace"}  # those after which the text is nearly the same

    def __init__(self, file):
        from tokenizers import Tokenizer as Engine

        self.file, self.engine = file, Engine.from_str(file)
        self.engine.encode_special_tokens = True  # no string inside a text is special
        self.engine.no_truncation()
        self.engine.no_padding()
        state, vocabulary = json.loads(file), self.engine.get_vocab(with_added_tokens=True)
        added = {token["content"]: b"" if token["special"] else token["content"].encode() for token in state["added_tokens"]}
        normalizer = state.get("normalizer") or {"type": "Sequence", "normalizers": []}
        kinds = {normalizer["type"], *(part["type"] for part in normalizer.get("normalizers", ()))}
        if kinds - self.NORMALIZERS:
            raise ValueError(f"its normalizer {', '.join(sorted(kinds - self.NORMALIZERS))} changes the text")
        manner = json.dumps([state.get("decoder"), state.get("pre_tokenizer")])
        spell = byte_level if '"ByteLevel"' in manner else sentence_piece
        tokens = [b""] * (max(vocabulary.values()) + 1)
        for token, i in vocabulary.items():
            tokens[i] = added[token] if token in added else spell(token)
        super().__init__(tokens, next((vocabulary[name] for name in self.SEPARATORS if name in vocabulary), None))

    def encode(self, text):
        """-> (n,) uint32."""
        return np.array(self.engine.encode(text, add_special_tokens=False).ids, dtype=np.uint32)

    def state(self):
        return {"file": self.file}


KINDS = {"char": Char, "byte": Byte, "bpe": BPE, "hub": Hub}


def save(tokenizer, path):
    """Write all that encoding and decoding need, byte-pair vocabularies included, so that sampling needs no network."""
    kind = next(name for name, kind in KINDS.items() if type(tokenizer) is kind)
    state = {"kind": kind, **({"padding": tokenizer.padding} if tokenizer.padding else {}), **tokenizer.state()}
    files.replace(path, json.dumps(state).encode())


def load(path):
    """-> the tokenizer that `save` wrote, or one of the library `tokenizers`. UserError if the file is missing or neither."""
    try:
        text = Path(path).read_text(encoding="utf-8")
        state = json.loads(text)
        if "kind" not in state and "added_tokens" in state:
            return Hub(text)
        kind, padding = KINDS[state.pop("kind")], state.pop("padding", 0)
        if padding not in range(2**20) or not all(isinstance(state[key], types) for key, types in kind.STATE.items()):
            raise ValueError("an entry is of another type")
        if kind is BPE:
            state["tokens"] = [base64.b64decode(token) for token in state["tokens"]]
        made = kind(**state)
        made.pad(made.vocab_size + padding)
        return made
    except OSError as error:
        raise UserError(f"{path}: cannot be read", f"{error.strerror}") from None
    except Exception as error:  # the library raises plain Exception for what it cannot read
        raise UserError(f"{path}: not a tokenizer of this program ({error!r})",
                        "copy it from the folder of data/prepared that the run was trained on") from None
