"""One grammar for TOML files and the command line, and one manner for what is wrong in them.

A program declares its keys as a pydantic model of Options; a docstring behind a field is its help. Everything is merged as
dictionaries and validated once, so that files and command line get the same errors: two lines and exit code 2. Imports
nothing of this project, and no torch.
"""
import difflib
import errno
import functools
import gc
import os
import re
import sys
import tomllib
import types
import typing
from pathlib import Path
from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, ValidationError

# Characters that steer a terminal instead of being shown on it; a stranger's text could set its title or its clipboard.
STEERING = dict.fromkeys((*range(9), *range(11, 32), *range(127, 160)), "\ufffd")


class UserError(Exception):
    """Bad input: what is wrong in one line, and in a second what is allowed or what to do."""

    def __init__(self, problem, advice):
        super().__init__(problem, advice)
        self.problem, self.advice = problem, advice

    def __str__(self):
        # Two lines, whatever is quoted.
        problem, advice = (" ".join(text.splitlines()).translate(STEERING) for text in (self.problem, self.advice))
        return f"error: {problem}\n       {advice}"


class NotFinite(Exception):
    """A loss or a weight is no number any more: exit code 3."""


class Options(BaseModel):
    """The base of everything that is read from files and command lines."""

    model_config = ConfigDict(extra="forbid", frozen=True, use_attribute_docstrings=True, allow_inf_nan=False)


def nearest(word, words):
    """-> 'did you mean X?' or all words, for the second line of an error."""
    close = difflib.get_close_matches(word, words, n=1, cutoff=0.5)
    return f"did you mean {close[0]}?" if close else f"known: {', '.join(words)}"


def takes(field, kind):
    """Whether a pydantic field accepts values of this type."""
    kinds = (field.annotation, *typing.get_args(field.annotation))
    return kind in kinds or kind in map(typing.get_origin, kinds)


def allowed(field):
    """What a pydantic field accepts, in words: 'auto or a number >= 1'."""
    if any(getattr(part, "pattern", None) for part in field.metadata):
        return field.description.strip().rstrip(".")  # no regular expression says it better
    signs = {"ge": ">=", "gt": ">", "le": "<=", "lt": "<"}

    def plain(limit):
        return int(limit) if isinstance(limit, float) and limit.is_integer() else limit

    def words(kind, limits):
        if typing.get_origin(kind) is Literal:
            return list(typing.get_args(kind))
        if typing.get_origin(kind) is Annotated:
            inner, constraint = typing.get_args(kind)
            return words(inner, constraint.metadata)
        if typing.get_origin(kind) is tuple:
            return [f"several of: {words(typing.get_args(kind)[0], limits)[0]}"]
        if typing.get_origin(kind) in (typing.Union, types.UnionType):
            return [w for k in typing.get_args(kind) if k is not type(None) for w in words(k, limits)]
        name = {bool: "true or false", int: "an integer", float: "a number"}.get(kind, "text")
        conditions = [f"{sign} {plain(getattr(part, key))}" for part in limits for key, sign in signs.items()
                      if getattr(part, key, None) is not None]
        return [f"{name} {' and '.join(conditions)}".strip()]

    return " or ".join(words(field.annotation, field.metadata))


def usage(model, line):
    """The help text: a usage line and every key with what it accepts, its default and its docstring."""
    rows = [f"usage: {line}\n"]
    for key, field in model.model_fields.items():
        default = "" if field.is_required() or field.default is None else f", default {field.default}"
        rows.append(f"  --{key}  ({allowed(field)}{default})\n      {(field.description or '').strip()}")
    return "\n".join(rows)


class Help(Exception):
    """--help was asked for."""


def helped(model, line):
    """Decorate a program's main(argv) -> exit code: --help prints the keys of `model` below a usage line, and that is all. A
    file or folder that the system refuses is bad input."""
    def decorate(main):
        @functools.wraps(main)
        def program(argv):
            try:
                return main(argv)
            except Help:
                print(usage(model, line))
                return 0
            except OSError as error:
                if error.filename is None or error.errno in FULL:
                    raise
                raise UserError(f"{error.filename}: {error.strerror}", "give another path, or see to this one") from None
        return program
    return decorate


def parse(argv, model):
    """Split a command line by the keys of `model`: -> (positional words, {key: value as text})."""
    words, values, i = [], {}, 0
    while i < len(argv):
        word, i = argv[i], i + 1
        if word in ("-h", "--help"):
            raise Help
        if not word.startswith("--"):
            words.append(word)
            continue
        key, equals, value = word[2:].partition("=")
        key = key.replace("-", "_")
        field = model.model_fields.get(key)
        if field is None and key.startswith("no_") and key[3:] in model.model_fields and not equals:
            key, value = key[3:], "false"
        elif field is None:
            raise UserError(f"--{key}: no such key", nearest(key, list(model.model_fields)))
        elif equals and takes(field, tuple):
            value = value.split(",")
        elif not equals:
            following = argv[i] if i < len(argv) and not argv[i].startswith("--") else None
            if takes(field, bool):
                # A flag needs no value, and config files may follow it.
                alone = following is None or following.endswith(".toml")
                i, value = (i, "true") if alone else (i + 1, following)
            elif following is None:
                raise UserError(f"--{key}: no value", f"allowed: {allowed(field)}")
            elif takes(field, tuple):
                value, i = following.split(","), i + 1
                while i < len(argv) and re.fullmatch(r"[\d.,]+", argv[i]):
                    value, i = value + argv[i].split(","), i + 1
            else:
                i, value = i + 1, following
        values[key] = value
    return words, values


def build(model, values):
    """Validate a dictionary into `model`; the first thing wrong is a UserError."""
    for key, value in values.items():
        if key not in model.model_fields:
            raise UserError(f"{key} = {value}: no such key", nearest(key, list(model.model_fields)))
        if isinstance(value, str) and "\0" in value:
            raise UserError(f"{key} = {value!r}", "allowed: text without the character 0, which ends every path")
    try:
        return model(**values)
    except ValidationError as error:
        first = error.errors()[0]
        key = first["loc"][0] if first["loc"] else "config"
        if first["type"] == "missing":
            raise UserError(f"{key}: missing", f"allowed: {allowed(model.model_fields[key])}") from None
        advice = f"allowed: {allowed(model.model_fields[key])}"
        if first["type"] == "literal_error" and isinstance(first["input"], str):
            options = allowed(model.model_fields[key]).split(" or ")
            close = difflib.get_close_matches(first["input"], options, n=1)
            advice = f"did you mean {close[0]}? {advice}" if close else advice
        raise UserError(f"{key} = {values.get(key)}", advice) from None


def read_toml(path):
    try:
        values = tomllib.loads(Path(path).read_bytes().decode("utf-8-sig"))
        str(values)  # which nothing nested too deeply survives, nor a number of thousands of digits
        return values
    except FileNotFoundError:
        near = [str(p) for p in sorted(Path(path).parent.glob("*.toml"))]
        advice = nearest(str(path), near) if near else "give the path of a TOML file"
        raise UserError(f"{path}: no such config file", advice) from None
    except (OSError, ValueError, RecursionError) as error:
        raise UserError(f"{path}: not a readable TOML file", f"{error}") from None


FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO, errno.EROFS)  # a disk that takes no more


def command(main):
    """Run a program's main(argv) as a process: bad input is two lines and exit code 2, never a traceback."""
    gc.set_threshold(100_000)  # what is imported stays; to look for garbage in it, again and again, takes a second
    for stream in filter(None, (sys.stdout, sys.stderr)):
        stream.reconfigure(errors="replace")  # a console that cannot print a character must not end a run
    try:
        sys.exit(main(sys.argv[1:]))
    except UserError as error:
        print(error, file=sys.stderr)
        sys.exit(2)
    except BrokenPipeError:  # as in `python sample.py RUN | head`: whoever read has enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(141)
    except OSError as error:
        if error.errno not in FULL:
            raise
        print(UserError(f"{error.filename or 'the system'}: {error.strerror or error}", "what was saved before is whole"),
              file=sys.stderr)
        sys.exit(2)
    except KeyboardInterrupt:
        sys.exit(130)
    finally:
        gc.freeze()
