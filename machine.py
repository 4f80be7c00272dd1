"""What a run computes on: device, precision, threads, and whether there is room for it."""
import contextlib
import ctypes
import importlib.util
import os
import platform
import shutil
import subprocess
import sysconfig
from pathlib import Path

import numpy as np
import torch
from torch.overrides import TorchFunctionMode

from model import GPT
from options import UserError
from parallel import ALONE


def resolve(config):
    """Settle what is automatic -> {"device", "dtype", "compile", "threads"}; a resumed run keeps what was settled."""
    device = config.device
    if device == "auto":
        device = "cuda" if torch.cuda.is_available() else "mps" if torch.backends.mps.is_available() else "cpu"
    available(device)
    dtype = config.dtype
    if dtype == "auto":
        dtype = "bfloat16" if device.startswith("cuda") and torch.cuda.is_bf16_supported() else "float32"
    if dtype == "bfloat16" and device == "cpu" and not computes_bfloat16():
        print("float32: this processor does not compute in bfloat16, and imitates it at a tenth of the speed")
        dtype = "float32"
    compiled = config.compile if config.compile != "auto" else worth_compiling(config, device)
    if compiled and (lacking := missing_for_compiling(device)):
        print(f"not compiled: there is no {lacking}")
        compiled = False
    return {"device": device, "dtype": dtype, "compile": compiled, "threads": config.threads or torch.get_num_threads()}


def available(device):
    """Refuse a device that this machine does not have."""
    kind, _, index = device.partition(":")
    here = {"cpu": True, "cuda": torch.cuda.is_available(), "mps": torch.backends.mps.is_available()}[kind]
    if not here or (index and int(index) >= torch.cuda.device_count()):
        raise UserError(f"device = {device}: not on this machine", "use --device auto, or --device cpu")


def computes_bfloat16():
    """Whether the CPU multiplies matrices in bfloat16 (AVX512_BF16 of x86, BF16 of ARM), twice as fast as in float32."""
    has = getattr(torch.cpu, "get_capabilities", dict)()  # torch 2.13; older ones may lack it
    return torch.backends.mkldnn.is_available() and bool(has.get("avx512_bf16") or has.get("bf16"))


def worth_compiling(config, device):
    """On a GPU, or on a CPU where training is long enough to win back the compiler's time."""
    if device != "cpu":
        return device.startswith("cuda")
    tokens = config.max_iters * config.batch_size * config.gradient_accumulation_steps * config.block_size
    return 6 * 12 * config.n_layer * config.n_embd**2 * tokens > 5e13


def missing_for_compiling(device):
    """-> what torch.compile needs and this machine does not have, or None."""
    if device.startswith("cuda") and importlib.util.find_spec("triton") is None:
        return "triton"
    if device == "cpu" and not any(shutil.which(name) for name in (os.environ.get("CXX", "g++"), "g++", "clang++", "cl")):
        return "C++ compiler"
    if device == "cpu" and not Path(sysconfig.get_path("include"), "Python.h").exists():
        return "Python.h (the package python3-dev)"
    return None


def set_up(threads):
    """Set the threads; let the C library keep freed memory: a tenth to a third of a step on CPUs is page faults; and let
    attention in bfloat16 that is written out (`attend`, model.py) stay in it on a CPU."""
    torch.set_num_threads(threads)
    if not torch.cuda.is_available():  # the setting has no other name for CPUs
        torch.backends.cuda.allow_fp16_bf16_reduction_math_sdp(True)
    with contextlib.suppress(OSError, AttributeError, TypeError):
        mallopt = ctypes.CDLL(None).mallopt  # glibc; elsewhere there is none, and nothing happens
        for option, value in ((-3, 2**30), (-1, 2**31 - 1), (-2, 2**27)):  # mmap threshold, trim threshold, top padding
            mallopt(option, value)


class Undrawn(TorchFunctionMode):
    """Leaves weights as they are. To draw them on the device "meta", torch imports its compiler: two seconds of a start."""

    def __torch_function__(self, function, types, args=(), kwargs=None):
        return kwargs["tensor"] if function is torch.nn.init.normal_ else function(*args, **kwargs or {})


def room_for(config, vocab_size, device, dtype=None, processes=ALONE):
    """Refuse a model that cannot fit into the memory of this machine, before the attempt ends the process without a word.

    dtype: that of its training; None if it is only read.
    """
    if not (present := memory(device)):
        return
    with torch.device("meta"), Undrawn():
        model = GPT(config, vocab_size)
    needed = 4 * model.size()
    if dtype:
        rows = config.batch_size * config.gradient_accumulation_steps
        windows = min(config.batch_size, -(-rows // processes.size))  # that a process computes at once
        states, activations = training_memory(model, windows, dtype)
        needed = (needed + states) / (processes.size if config.parallel == "fsdp" else 1) + activations
    if device == "cpu":
        needed *= processes.local_size
    if needed > present:
        place = "this machine" if device == "cpu" else device
        raise UserError(f"{model.size():,} parameters{' and their training' * bool(dtype)} need about {needed / 2**30:.1f} GiB "
                        f"of memory, and {place} has {present / 2**30:.1f}",
                        "a smaller n_layer, n_embd, block_size or batch_size needs less")


def training_memory(model, windows, dtype):
    """-> bytes that training needs beside the weights: for gradients and moments; for what a pass over `windows` keeps.

    Of the tensors that autograd is known to keep, so that nothing is refused that would have fitted; 0.9 to 2.4 times as much
    was held where it was measured, in float32 (docs/trust.md).
    """
    config, matrices = model.config, sum(p.numel() for p in model.blocks.parameters() if p.ndim == 2)
    moments = 2 * model.size() - (matrices if config.optimizer == "muon" else 0)
    tokens, heads = windows * config.block_size, config.n_head + 2 * config.kv_heads
    width = 4 if dtype == "float32" else 2
    block = (4 + 2 * bool(config.canon)) * config.n_embd + 3 * heads * config.head_size + 2 * config.mlp_width
    logits = 3 * min(tokens * model.embed.num_embeddings, model.LOGITS)
    return 4 * (model.size() + moments), 4 * logits + width * tokens * block * config.n_layer


def memory(device):
    """-> bytes of memory that a device has, None where the system does not say. On a CPU, what a container may use."""
    if device.startswith("cuda"):
        return torch.cuda.get_device_properties(device).total_memory
    try:
        sizes = [os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")]
    except (AttributeError, ValueError, OSError):  # Windows
        return None
    for file in ("memory.max", "memory/memory.limit_in_bytes"):  # control groups, version 2 and 1
        with contextlib.suppress(OSError, ValueError):  # there is none, or its limit is "max"
            sizes.append(int(Path("/sys/fs/cgroup", file).read_text()))
    return min(sizes)


def versions():
    """What the numbers were made with. A commit ends with -dirty where files differ from it."""
    git = ["git", "describe", "--always", "--abbrev=40", "--dirty", "--exclude=*"]
    commit = subprocess.run(git, cwd=Path(__file__).parent, capture_output=True, text=True, check=False).stdout.strip() \
        if shutil.which("git") else ""
    return {"python": platform.python_version(), "torch": torch.__version__, "numpy": np.__version__,
            "git_commit": commit or None}
