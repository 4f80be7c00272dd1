"""What the tests share: a small config, a small text, and a trained run."""
import random
import signal

import pytest
import torch

import config
import train

torch.set_num_threads(1)  # the models are small, and the tests run side by side
for number in (signal.SIGINT, getattr(signal, "SIGHUP", signal.SIGINT)):
    if signal.getsignal(number) is signal.SIG_IGN:  # as in the background of a shell, or under nohup; processes inherit it
        signal.signal(number, signal.SIG_DFL)

SMALL = {"n_layer": 2, "n_head": 2, "n_embd": 32, "block_size": 32, "batch_size": 4, "max_iters": 30, "warmup_iters": 5,
         "eval_interval": 10, "eval_windows": 8, "checkpoint_interval": 10, "length_windows": 16, "threads": 1,
         "compile": False, "device": "cpu", "tokenizer": "char", "wandb": "disabled"}


def small(**changes):
    """-> a Config of a model that trains in a second."""
    return config.build(config.Config, SMALL | changes)


def text(length, seed=0):
    """-> a text of `length` characters with words and lines to learn from."""
    generator = random.Random(seed)
    words = ["".join(generator.choices("abcdefgh", k=generator.randint(2, 6))) for _ in range(40)]
    lines = ("".join(generator.choice(words) + generator.choice(" \n") for _ in range(length)))
    return lines[:length]


@pytest.fixture(scope="session")
def corpus(tmp_path_factory):
    """A text file of 12,000 characters."""
    path = tmp_path_factory.mktemp("corpus") / "corpus.txt"
    path.write_text(text(12_000), encoding="utf-8")
    return path


@pytest.fixture(scope="session", autouse=True)
def own_data_folder(tmp_path_factory):
    """Prepared data of the tests goes to a folder of their own."""
    import data.prepare

    patch = pytest.MonkeyPatch()
    patch.setattr(data.prepare, "ROOT", tmp_path_factory.mktemp("data"))
    yield
    patch.undo()


@pytest.fixture(scope="session")
def run_folder(corpus, tmp_path_factory):
    """The folder of a finished run with rope positions."""
    folder = tmp_path_factory.mktemp("runs") / "rope-1"
    assert train.train(small(dataset=str(corpus), out_dir=str(folder), seed=1)) == 0
    return folder
