"""How files are written so that nothing is lost, and how a folder is held by one process.

What a function here has written is on the disk when it returns, and a process that is killed leaves the old file or the new
one, and at most a file *.new beside it.
"""
import hashlib
import os
import sys
from pathlib import Path

from options import UserError


def replace(path, content):
    """Write bytes beside path, flush them to the disk, and move them there: the old or the new file, never a part."""
    path = Path(path)
    beside = path.with_name(path.name + ".new")
    try:
        with open(beside, "wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        os.replace(beside, path)
    except OSError:
        beside.unlink(missing_ok=True)  # of a full disk, say
        raise
    flush(path.parent)


def flush(folder):
    """Put the names in a folder on the disk: after a power failure, a file that was flushed may lack its name."""
    if os.name == "posix":
        handle = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)


def file_digest(path):
    """-> the sha256 of a file, in hexadecimal."""
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


class Held(UserError):
    """Another process holds a folder."""


def hold(folder):
    """-> an open file; until it is closed, or this process ends in whatever way, no other can hold the folder.

    Held if another does, another UserError if it cannot be written.
    """
    try:
        file = open(Path(folder, ".lock"), "ab")  # noqa: SIM115
    except OSError as error:
        raise UserError(f"{folder}: {error.strerror}", "give a folder that can be written") from None
    try:
        if os.name == "nt":
            import msvcrt

            msvcrt.locking(file.fileno(), msvcrt.LK_NBLCK, 1)
        else:
            import fcntl

            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except (BlockingIOError, PermissionError):
        file.close()
        raise Held(f"{folder}: another process is writing into this folder",
                   "wait until it has ended, or give another folder") from None
    except OSError as error:  # of file systems without locks
        print(f"{folder}: cannot be locked ({error.strerror}); see to it that no other process writes into it", file=sys.stderr)
    return file
