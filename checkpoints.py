"""Checkpoints: tensors and plain values in a file that is whole, checked, and executes nothing."""
import io
import shutil
import sys
import zipfile
from pathlib import Path

import torch

import files
from options import UserError
from parallel import ALONE

FORMAT = 2  # a larger number means that older programs must not read them
CONTENT = {"format": int, "step": int, "model": dict, "data_sha256": str, "config": dict}
RESUMABLE = {"optimizers": list, "resolved": dict, "best": dict, "reached": bool, "logged": int}
BEST = {"step": int | None, "val_loss": float | int}
RESOLVED = {"device": str, "dtype": str, "compile": bool, "threads": int}


def fresh(value):
    """Copy nested containers so that no object but a string occurs twice: a file tells a shared object from an equal copy,
    and a resumed run must write the same bytes as one that never stopped."""
    if isinstance(value, dict):
        return {fresh(k): fresh(v) for k, v in value.items()}
    if isinstance(value, list | tuple):
        return type(value)([fresh(v) for v in value])
    return sys.intern(value) if isinstance(value, str) else value


def save(path, content):
    """Write content {name: value} as a checkpoint. UserError if the disk has no room for it, OSError if it fills meanwhile;
    what was at the path is then still there."""
    path, buffer = Path(path), io.BytesIO()
    torch.save(fresh({"format": FORMAT, **content}), buffer)
    size, free = buffer.getbuffer().nbytes, shutil.disk_usage(path.parent).free
    if size > free:
        raise UserError(f"{path}: {size / 2**20:.1f} MiB to write, and the disk has {free / 2**20:.1f} MiB left",
                        "what was saved before is whole: make room, and the same command goes on from there")
    files.replace(path, buffer.getbuffer())


def tensors(value):
    """-> the tensors in nested containers."""
    if isinstance(value, dict | list | tuple):
        for part in value.values() if isinstance(value, dict) else value:
            yield from tensors(part)
    elif isinstance(value, torch.Tensor):
        yield value


def require(path, content, wanted):
    """Refuse a checkpoint that lacks one of the entries {name: type}."""
    if not isinstance(content, dict) or not all(isinstance(content.get(key), kind) for key, kind in wanted.items()):
        raise UserError(f"{path}: not a checkpoint of this program, or not of this kind", "give a folder that train.py wrote")


def load(path):
    """-> what `save` wrote, on the CPU. Nothing in the file is executed. UserError if it is missing, foreign or damaged."""
    path = Path(path)
    if not path.is_file():
        raise UserError(f"{path}: no checkpoint", "train the run first: python train.py CONFIG.toml")
    try:
        with zipfile.ZipFile(path) as archive:
            if any(part.compress_type != zipfile.ZIP_STORED for part in archive.infolist()):
                raise ValueError("compressed")  # torch never does, and a small file could fill the memory
            if part := archive.testzip():  # torch does not look at the checksums
                raise ValueError(f"checksum of {part}")
        content = torch.load(path, map_location="cpu", weights_only=True)
        if any(tensor.is_meta or tensor.layout != torch.strided for tensor in tensors(content)):
            raise ValueError("tensors without numbers")
    except Exception as error:  # torch raises a dozen kinds for damaged files, pickle's among them
        reason = (str(error) or type(error).__name__).splitlines()[0][:100]
        raise UserError(f"{path}: damaged, or no checkpoint ({reason})",
                        "delete it: train.py goes on from the other of last.pt and best.pt; --checkpoint reads it") from None
    if isinstance(content, dict) and isinstance(content.get("format"), int) and content["format"] != FORMAT:
        raise UserError(f"{path}: checkpoint format {content['format']}, and this program reads {FORMAT}",
                        "use the version that wrote it")
    require(path, content, CONTENT)
    return content


def load_resumable(path):
    """-> what `save` wrote, if training can go on from it."""
    content = load(path)
    if RESUMABLE.keys() - content.keys():
        raise UserError(f"{path}: weights that were not trained here",
                        f"begin from them in another folder: --init_from {Path(path).parent}")
    require(path, content, RESUMABLE)
    require(path, content["best"], BEST)
    require(path, content["resolved"], RESOLVED)
    return content


def fill(model, weights, path, processes=ALONE):
    """Load whole weights into the model, all or none; wrappers' prefixes are taken off."""
    weights = {str(key).removeprefix("module.").replace("_orig_mod.", ""): value for key, value in weights.items()}
    own = model.state_dict()
    for key in sorted(own.keys() | weights.keys()):
        here, there = (tuple(getattr(d[key], "shape", ())) if key in d else "nothing" for d in (own, weights))
        if here != there:
            raise UserError(f"{path}: weights of another configuration: {key} is {there} there and {here} here",
                            "the checkpoint belongs to a model of another shape")
    processes.fill(model, weights)
