"""One model, trained by several processes on one machine or on many.

    torchrun --nproc_per_node 2 train.py configs/rope.toml --parallel ddp

Every process draws the same global batch and computes its share; losses and gradients are sums over tokens divided by the
global count, so what is computed does not depend on the number of processes, rounding aside. Only the main one writes.
Imports no torch before there are several processes.
"""
import contextlib
import os
import sys
from datetime import timedelta

import numpy as np

from options import UserError


class Alone:
    """A single process: nothing to share, and nobody to wait for.

    As a context: only the main process prints, and where another is gone, this one says so and ends with code 1.
    """

    rank, size, local_size = 0, 1, 1  # which of all processes, how many there are, and how many on this machine

    def __enter__(self):
        return self

    def __exit__(self, *raised):
        pass

    @property
    def main(self):
        return self.rank == 0

    def device(self, kind):
        """-> the device of this process; kind: cpu, mps, cuda or cuda:N."""
        return kind

    def wait(self):
        """Until all processes are here."""

    def first(self):
        """A context that the main process leaves before the others enter: it prepares what they then find."""
        return contextlib.nullcontext()

    def distribute(self, model):
        """Share a model, which is on its device, among the processes."""

    def loss(self, model):
        """-> the function that computes the loss of a pass, to be differentiated; arguments as those of model.loss."""
        return model.loss

    def passes(self, rows, most):
        """The share of this process in `rows` windows, at most `most` at a time -> [slice, ...], as many in every process.

        Shares may be uneven, and slices empty.
        """
        begin, end = rows * self.rank // self.size, rows * (self.rank + 1) // self.size
        longest = -(-rows // self.size)
        return [slice(min(start, end), min(start + most, end)) for start in range(begin, begin + longest, most)]

    def last_pass(self, last):
        """A context for a backward pass; gradients are exchanged after the last one."""
        return contextlib.nullcontext()

    def total(self, numbers):
        """numbers: an array of the same shape in every process -> float64, summed over the processes."""
        return np.asarray(numbers, dtype=np.float64)

    def gather(self, state):
        """Nested dictionaries and lists of tensors -> the same with whole tensors, for the main process; others get None.

        All processes must call it.
        """
        return state

    def fill(self, model, weights):
        """Load whole weights into the distributed model."""
        model.load_state_dict(weights)

    def end(self):
        """Let go of the other processes."""


ALONE = Alone()


class DataParallel(Alone):
    """Every process holds the whole model (torch.nn.parallel.DistributedDataParallel)."""

    def __init__(self):
        import torch.distributed as dist

        self.dist, self.rank, self.size = dist, int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
        self.local_size = int(os.environ.get("LOCAL_WORLD_SIZE", 1))
        if not dist.is_initialized():
            store, *_ = next(dist.rendezvous("env://"))
            if os.environ.get("GROUP_WORLD_SIZE") == "1":
                # After a restart the addresses of dead processes are still in the store. With several agents, which do not
                # know of each other's restarts, torchrun itself must leave them behind (docs/trust.md).
                store = dist.PrefixStore(os.environ["TORCHELASTIC_RESTART_COUNT"], store)
            dist.init_process_group(store=store, rank=self.rank, world_size=self.size, timeout=timedelta(minutes=30))
        # A large text is prepared by the main process for hours, while the others wait.
        self.patient = dist.new_group(backend="gloo", timeout=timedelta(days=1))

    def __enter__(self):
        self.stdout = sys.stdout
        if not self.main:
            sys.stdout = open(os.devnull, "w", encoding="utf-8")
        return self

    def __exit__(self, kind, error, *trace):
        sys.stdout = self.stdout
        gloo = isinstance(error, RuntimeError) and "gloo" in str(error).lower()  # which has no kind of error of its own
        if gloo or isinstance(error, self.dist.DistError):
            print(f"error: process {self.rank} of {self.size}: another process of this job has ended\n"
                  "       the last checkpoint is whole: start the job again, or let torchrun --max-restarts do it",
                  file=sys.stderr, flush=True)
            raise SystemExit(1) from None

    def device(self, kind):
        import torch

        if kind.startswith("cuda"):
            kind = f"cuda:{os.environ['LOCAL_RANK']}"
            torch.cuda.set_device(kind)
        return kind

    def wait(self):
        self.dist.barrier(group=self.patient)

    @contextlib.contextmanager
    def first(self):
        if not self.main:
            self.wait()
        yield
        if self.main:
            self.wait()

    def distribute(self, model):
        from torch import nn

        class Loss(nn.Module):
            """The loss as a forward pass, which is what the engine watches."""

            def __init__(self, model):
                super().__init__()
                self.model = model

            def forward(self, *arguments, **settings):
                return self.model.loss(*arguments, **settings)

        self.engine = nn.parallel.DistributedDataParallel(Loss(model))

    def loss(self, model):
        return self.engine

    def last_pass(self, last):
        return contextlib.nullcontext() if last else self.engine.no_sync()

    def total(self, numbers):
        import torch

        sums = torch.tensor(numbers, dtype=torch.float64)
        self.dist.all_reduce(sums)
        return sums.numpy()

    def gather(self, state):
        return state if self.main else None

    def end(self):
        self.wait()
        self.dist.destroy_process_group()


class Sharded(DataParallel):
    """Every process holds a part of each matrix and of its moments (torch.distributed.fsdp.fully_shard), for models beyond the
    memory of one device. Blocks are put together when they are computed."""

    def distribute(self, model):
        from torch.distributed.fsdp import fully_shard, register_fsdp_forward_method

        for block in model.blocks:
            fully_shard(block)
        fully_shard(model)
        for method in ("loss", "losses"):
            register_fsdp_forward_method(model, method)

    def loss(self, model):
        return model.loss

    def last_pass(self, last):
        return contextlib.nullcontext()  # kept for a later exchange, gradients would be whole matrices

    def gather(self, state):
        if isinstance(state, dict):
            whole = {key: self.gather(value) for key, value in state.items()}
        elif isinstance(state, list):
            whole = [self.gather(value) for value in state]
        else:
            whole = full(state).cpu()
        return whole if self.main else None

    def fill(self, model, weights):
        from torch.distributed.checkpoint.state_dict import StateDictOptions, set_model_state_dict

        set_model_state_dict(model, weights, options=StateDictOptions(full_state_dict=True))


# Distributed tensors and what a process holds of them. What makes one whole must be called by all processes.


def full(tensor):
    """-> the whole of a tensor that may be distributed."""
    return tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor


def local(tensor):
    """-> the part of a tensor that this process holds: all of it, unless it is distributed."""
    return tensor.to_local() if hasattr(tensor, "to_local") else tensor


def joined(part, like):
    """-> the tensor whose part in this process is `part`, distributed as `like` is."""
    if not hasattr(like, "to_local"):
        return part
    from torch.distributed.tensor import DTensor

    return DTensor.from_local(part, like.device_mesh, like.placements, shape=like.shape, stride=like.stride()).full_tensor()


def part_of(tensor, like):
    """The reverse of `joined`."""
    if not hasattr(like, "to_local"):
        return tensor
    from torch.distributed.tensor import DTensor, Replicate

    everywhere = DTensor.from_local(tensor, like.device_mesh, [Replicate()] * like.device_mesh.ndim, run_check=False)
    return everywhere.redistribute(placements=like.placements).to_local()


KINDS = {"ddp": DataParallel, "fsdp": Sharded}


def started(parallel):
    """-> the processes that torchrun started, in the manner that Config.parallel names."""
    size = int(os.environ.get("WORLD_SIZE", 1))
    if size == 1:
        return ALONE
    if parallel == "none":
        raise UserError(f"parallel = none, and torchrun started {size} processes", "give --parallel ddp or fsdp")
    return KINDS["ddp" if parallel == "auto" else parallel]()
