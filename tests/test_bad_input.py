"""Bad input is said in two lines, and neither writes nor loses anything."""
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import checkpoints
import compare
import data.prepare
import lengths
import sample
import train
from config import read_config
from options import UserError
from position import POSITIONS
from tests.conftest import SMALL, text

REPOSITORY = Path(__file__).resolve().parents[1]
PROGRAMS = {"train": train, "sample": sample, "lengths": lengths, "compare": compare}


def contents(folder):
    """-> {relative path: bytes, None for a folder} of all that is in a folder."""
    return {str(p.relative_to(folder)): p.read_bytes() if p.is_file() else None for p in sorted(folder.rglob("*"))}


def refused(call, *words):
    """The call must raise a UserError of two lines that says all the words."""
    with pytest.raises(UserError) as caught:
        call()
    message = str(caught.value)
    assert len(message.splitlines()) == 2, message
    assert not [word for word in words if word not in message], message


def arguments(values):
    """-> the command line that says {key: value}."""
    return [f"--{key}={','.join(map(str, value)) if isinstance(value, list) else value}" for key, value in values.items()]


@pytest.fixture
def here(tmp_path, monkeypatch):
    """An empty working folder, which must stay as the test leaves it."""
    folder = tmp_path / "here"
    folder.mkdir()
    monkeypatch.chdir(folder)
    return folder


@pytest.fixture
def copy(run_folder, tmp_path):
    """A finished run of one's own, which training would go on with."""
    folder = tmp_path / "runs" / run_folder.name
    shutil.copytree(run_folder, folder)
    config = (folder / "config.toml").read_text(encoding="utf-8")
    (folder / "config.toml").write_text(config.replace(str(run_folder), str(folder)), encoding="utf-8")
    return folder


# A wrong word or number


BAD_VALUES = [
    ({"n_layr": 3}, "n_layr", "did you mean n_layer?"),
    ({"learning_rat": 0.1}, "did you mean learning_rate?"),
    ({"position": "ropee"}, "position = ropee", "did you mean rope?"),
    ({"rope_scaling": "yan"}, "did you mean yarn?"),
    ({"dtype": "bfloat"}, "did you mean bfloat16?"),
    ({"optimizer": "moun"}, "did you mean muon?"),
    ({"n_layer": 0}, "n_layer = 0", "an integer >= 1"),
    ({"n_layer": "many"}, "n_layer = many", "an integer"),
    ({"n_layer": 2.5}, "n_layer = 2.5", "an integer"),
    ({"dropout": 1}, "dropout = 1", "< 1"),
    ({"learning_rate": "nan"}, "learning_rate = nan", "a number > 0"),
    ({"weight_decay": "inf"}, "weight_decay = inf"),
    ({"bias": "perhaps"}, "bias = perhaps", "true or false"),
    ({"compile": "sometimes"}, "compile = sometimes", "auto or true or false"),
    ({"device": "gpu"}, "device = gpu", "cuda"),
    ({"seed": -1}, "seed = -1", ">= 0"),
    ({"dataset": ""}, "dataset = "),
    ({"n_embd": 30, "n_head": 4}, "n_embd = 30", "divisible by n_head = 4"),
    ({"n_embd": 12, "n_head": 4}, "n_embd = 12", "heads of 3"),
    ({"rope_fraction": 0.1}, "rope_fraction = 0.1", "rotates 3 of 32", "even"),
    ({"rope_fraction": 0.01}, "rope_fraction = 0.01", "rotates 0 of 32"),
    ({"rope_fraction": 1.5}, "rope_fraction = 1.5", "<= 1"),
    ({"position": "sinusoidal", "n_embd": 5, "n_head": 1}, "n_embd = 5", "even"),
    ({"position": "learned", "rope_scaling": "yarn"}, "rope_scaling = yarn", 'position = "rope"', '"learned"'),
    ({"rope_scaling": "linear", "beta_fast": 16}, "beta_fast = 16", "yarn", "linear"),
    ({"attention_factor": 1.2}, "attention_factor = 1.2", "yarn", "none"),
    ({"rope_scaling": "yarn", "beta_fast": 1}, "beta_fast = 1", "above beta_slow"),
    ({"rope_scaling": "linear", "rope_factor": 0.5}, "rope_factor = 0.5", ">= 1"),
    ({"rope_scaling": "linear", "rope_factor": "atuo"}, "rope_factor = atuo", "auto"),
    ({"rope_factor": 4}, "rope_factor = 4", "needs a rope_scaling"),
    ({"rope_scaling": "ntk", "rope_fraction": 0.0625}, "rope_scaling = ntk", "that is 2"),
    ({"rope_scaling": "llama3", "low_freq_factor": 1}, "high_freq_factor: missing", "rope_scaling = llama3 needs both"),
    ({"rope_scaling": "llama3"}, "low_freq_factor, high_freq_factor: missing", "1 and 4"),
    ({"position": "alibi", "rope_factor": 4}, "rope_factor = 4", 'needs position = "rope"'),
    ({"rope_scaling": "llama3", "low_freq_factor": 4, "high_freq_factor": 1}, "low_freq_factor = 4", "below high_freq_factor"),
    ({"rope_scaling": "longrope", "short_factor": [1], "long_factor": [1]}, "short_factor: 1 numbers", "16 planes"),
    ({"rope_scaling": "dynamic"}, "rope_factor = auto", "give a number"),
    ({"rope_scaling": "dynamic", "rope_factor": 2, "rope_fraction": 0.0625}, "rope_scaling = dynamic", "that is 2"),
    ({"rope_scaling": "yarn", "mscale": 1}, "mscale = 1", "only work together"),
    ({"rope_scaling": "yarn", "mscale": 1, "mscale_all_dim": 1, "attention_factor": 1}, "mscale", "attention_factor"),
    ({"rope_scaling": "yarn", "low_freq_factor": 1}, "low_freq_factor = 1", "llama3", "yarn"),
    ({"attention": "linear", "rope_scaling": "yarn", "rope_factor": 2}, "rope_scaling = yarn", "attention_factor = 1"),
    ({"attention": "linear", "window": 8}, "window = 8", "softmax"),
    ({"n_kv_head": 3}, "n_kv_head = 3", "divide n_head = 4"),
    ({"position": "alibi", "rope_values": True}, "rope_values = True", 'position = "rope"'),
    ({"learned_extension": "interpolate"}, "learned_extension = interpolate", 'position = "learned"'),
    ({"position": "learned", "learned_extension": "interpolate", "random_positions": 999}, "learned_extension", "random"),
    ({"random_positions": 999, "rope_scaling": "linear", "rope_factor": 2}, "rope_scaling = linear", "random positions"),
    ({"random_positions": 8}, "random_positions = 8", "at least block_size"),
    ({"t5_buckets": 300, "position": "t5"}, "t5_max_distance = 128", "above t5_buckets / 2"),
    ({"max_iters": 20, "warmup_iters": 20}, "warmup_iters = 20", "below max_iters = 20"),
    ({"rope_scaling": "yarn", "rope_factor": 1e300}, "rope_factor = 1e+300", "<= 1000000"),
    ({"n_embd": 10**10}, "n_embd = 10000000000", "<= 65536"),
    ({"threads": 10**9}, "threads", "<= 1024"),
    ({"out_dir": "o" * 300}, "name too long", "--out_dir"),
    ({"min_lr": 1}, "min_lr = 1", "at most learning_rate"),
    ({"tokenizer": "gpt3"}, "tokenizer = gpt3", "did you mean gpt2?"),
    ({"tokenizer": "a\nb"}, "tokenizer", "known"),
    ({"dataset": "shakespear"}, "dataset = shakespear", "did you mean shakespeare?"),
    ({"dataset": "nowhere/at_all.txt"}, "dataset = nowhere/at_all.txt", "no such name, file or folder", "give the path"),
]


@pytest.mark.parametrize("place", ["file", "command line"])
@pytest.mark.parametrize("values, words", [(values, words) for values, *words in BAD_VALUES], ids=lambda v: str(v)[:60])
def test_wrong_value_is_named_alike_in_a_file_and_on_the_command_line(values, words, place, here, tmp_path):
    argv = arguments(values)
    if place == "file":
        argv = [str(tmp_path / "mine.toml")]
        lines = [f"{key} = {json.dumps(value)}\n" for key, value in values.items()]
        (tmp_path / "mine.toml").write_text("".join(lines), encoding="utf-8")
    refused(lambda: train.main(argv), *words)
    assert contents(here) == {}


@pytest.mark.parametrize("content, words", [
    (b"n_layer = = 3\n", ("line 1",)),
    (b"n_layer = 3\nn_layer = 4\n", ()),
    (b"\x80\x81 = 3\n", ("utf-8",)),
    (b"[model]\nn_layer = 3\n", ("model",)),
    (b"n_layer = [3]\n", ("n_layer", "an integer")),
    (b"dataset = 2020-01-01\n", ("dataset", "text")),
    (b"init_from = 3\n", ("init_from", "text")),
])
def test_bad_toml_is_named(content, words, here, tmp_path):
    (tmp_path / "bad.toml").write_bytes(content)
    refused(lambda: train.main([str(tmp_path / "bad.toml")]), *words)
    assert contents(here) == {}


def test_missing_config_file_is_named_with_the_nearest(here, tmp_path):
    (tmp_path / "rope.toml").write_text("", encoding="utf-8")
    refused(lambda: train.main([str(tmp_path / "roep.toml")]), "roep.toml: no such config file", f"did you mean {tmp_path}")
    refused(lambda: train.main([str(tmp_path)]), "not a readable TOML file")
    assert contents(here) == {}


@pytest.mark.parametrize("program, argv, words", [
    ("sample", [], "0 run folders"), ("sample", ["one", "two"], "2 run folders"), ("lengths", [], "0 run folders"),
    ("compare", [], "no run folders"),
    ("sample", ["RUN", "--tokens", "0"], "tokens = 0"), ("sample", ["RUN", "--temperature=-1"], "a number >= 0"),
    ("sample", ["RUN", "--temperature", "nan"], "temperature = nan"), ("sample", ["RUN", "--top_p", "0"], "top_p = 0"),
    ("sample", ["RUN", "--top_k", "0"], "top_k = 0"), ("sample", ["RUN", "--temprature", "1"], "did you mean temperature?"),
    ("sample", ["RUN", "--checkpoint", "lst"], "did you mean last?"), ("sample", ["RUN", "--prompt"], "--prompt: no value"),
    ("sample", ["RUN", "--rope_scaling", "yan"], "did you mean yarn?"), ("sample", ["RUN", "--device", "cuda:9"], "cuda:9"),
    ("sample", ["RUN", "--rope_factor", "2"], "needs a rope_scaling"),
    ("lengths", ["RUN", "--rope_scaling", "yan"], "did you mean yarn?"),
    ("lengths", ["RUN", "--rope_scaling", "linear", "--rope_factor", "0.5"], ">= 1"),
    ("lengths", ["RUN", "--rope_scaling", "linear", "--beta_fast", "3"], "parameter of rope_scaling = yarn"),
    ("lengths", ["RUN", "--context", "64"], "did you mean contexts?"),
    ("lengths", ["RUN", "--contexts", "many"], "many"),
    ("lengths", ["RUN", "--contexts"], "contexts"),
    ("compare", ["RUN", "--pictur", "x.png"], "did you mean picture?"),
])
def test_wrong_option_of_the_other_programs_is_named(program, argv, words, run_folder, here):
    before = contents(run_folder)
    argv = [str(run_folder) if word == "RUN" else word for word in argv]
    refused(lambda: PROGRAMS[program].main(argv), words)
    assert contents(run_folder) == before and contents(here) == {}


def test_scaling_of_a_run_without_rope_is_refused(copy):
    config = (copy / "config.toml").read_text(encoding="utf-8").replace('position = "rope"', 'position = "none"')
    (copy / "config.toml").write_text(config, encoding="utf-8")
    for program in (sample, lengths):
        refused(lambda program=program: program.main([str(copy), "--rope_scaling", "yarn"]), 'needs position = "rope"')


@pytest.mark.parametrize("argv", [["--temperature", "1e-40"], ["--temperature", "1e-320"], ["--temperature", "1e300"],
                                  ["--top_k", "9" * 30], ["--top_p", "1e-300"]])
def test_extreme_numbers_end_without_a_traceback(argv, run_folder):
    try:
        assert sample.main([str(run_folder), "--tokens", "3", *argv]) == 0
    except UserError as error:
        assert len(str(error).splitlines()) == 2


@pytest.mark.parametrize("position", [name for name, kind in POSITIONS.items() if kind.bias is not POSITIONS["none"].bias])
def test_linear_attention_refuses_what_acts_on_scores(position, corpus, here):
    values = SMALL | {"dataset": corpus, "position": position, "attention": "linear"}
    refused(lambda: train.main(arguments(values)), f"attention = linear, position = {position}", "no score matrix")
    assert contents(here) == {}


# The text


@pytest.mark.parametrize("content, words", [
    (b"", ("empty",)),
    (b"a", ("too short",)),
    (text(300).encode(), ("validation tokens", "block_size = 32", "longer text")),
    (b"\xff\xfe text", ("not UTF-8",)),
])
def test_text_that_cannot_be_trained_on_is_named(content, words, here, tmp_path):
    path = tmp_path / "text.txt"
    path.write_bytes(content)
    refused(lambda: train.main(arguments(SMALL | {"dataset": path})), *words)
    assert contents(here) == {} and path.read_bytes() == content


def test_empty_folder_of_texts_is_named(here, tmp_path):
    (tmp_path / "texts").mkdir()
    refused(lambda: train.main(arguments(SMALL | {"dataset": tmp_path / "texts"})), "no UTF-8 text")
    assert contents(here) == {}


@pytest.mark.parametrize("values", [{"dataset": "shakespeare"}, {"dataset": "enwik8"}, {"tokenizer": "p50k_edit"}])
def test_no_network_says_what_file_to_put_where(values, corpus, here, monkeypatch):
    import requests

    def unreachable(*_, **__):
        raise requests.ConnectionError("no route")

    monkeypatch.setattr(requests, "get", unreachable)
    monkeypatch.delenv("TIKTOKEN_CACHE_DIR", raising=False)
    monkeypatch.setenv("DATA_GYM_CACHE_DIR", str(here.parent / "cache"))
    refused(lambda: train.main(arguments(SMALL | {"dataset": corpus} | values)), "download failed", "put the file there",
            str(data.prepare.ROOT / "raw"))
    assert contents(here) == {}


def test_device_that_is_not_here_is_named(corpus, here):
    values = SMALL | {"dataset": corpus, "device": "cuda:99"}
    refused(lambda: train.main(arguments(values)), "device = cuda:99", "--device cpu")
    assert contents(here) == {}


def test_wandb_that_cannot_be_reached_is_named(corpus, here, monkeypatch):
    import wandb

    def unreachable(*_, **__):
        raise wandb.errors.CommError("no route\nsecond line")

    monkeypatch.setattr(wandb, "init", unreachable)
    refused(lambda: train.main(arguments(SMALL | {"dataset": corpus, "wandb": "online", "out_dir": "run"})),
            "wandb = online: no route", "--wandb offline")
    assert contents(here) == {}


# The run's folder


def test_missing_run_is_named_with_the_nearest(copy, here):
    wrong = str(copy).replace("rope-1", "rop-1")
    for program in (sample, lengths, compare):
        refused(lambda program=program: program.main([wrong]), f"{wrong}: no run in this folder", f"did you mean {copy.name}?")
        refused(lambda program=program: program.main([str(copy.parent)]), "no run in this folder", f"below it are {copy.name}")
        refused(lambda program=program: program.main([str(copy / "log.jsonl")]), "a file, not a run's folder")
    assert contents(here) == {}


@pytest.mark.parametrize("change", [{"n_layer": 3}, {"seed": 8}, {"max_iters": 20}, {"position": "learned"}, {"dropout": 0.1}])
def test_folder_with_another_config_is_refused_with_the_difference(change, copy, here):
    before, (key, new) = contents(copy), *change.items()
    old = getattr(read_config(copy), key)
    refused(lambda: train.main([str(copy / "config.toml"), *arguments(change)]), f"{key} = {old}, not {new}", "--overwrite")
    assert contents(copy) == before


@pytest.mark.parametrize("overwrite", [[], ["--overwrite"]])
@pytest.mark.parametrize("name", ["thesis.tex", "config.toml"])
def test_folder_that_is_no_run_is_never_touched(name, overwrite, corpus, tmp_path):
    folder = tmp_path / "precious"
    (folder / "chapters").mkdir(parents=True)
    (folder / "chapters" / "one.tex").write_text("years of work", encoding="utf-8")
    (folder / name).write_text('[package]\nname = "mine"\n', encoding="utf-8")
    before = contents(folder)
    refused(lambda: train.main([*arguments(SMALL | {"dataset": corpus, "out_dir": folder}), *overwrite]))
    assert contents(folder) == before


def test_file_where_the_folder_should_be_is_refused(corpus, tmp_path):
    path = tmp_path / "taken"
    path.write_text("mine", encoding="utf-8")
    for place in (path, path / "below"):
        refused(lambda place=place: train.main([*arguments(SMALL | {"dataset": corpus, "out_dir": place}), "--overwrite"]))
    assert path.read_text(encoding="utf-8") == "mine"


@pytest.mark.parametrize("values", [{"dataset": "nowhere.txt"}, {"device": "cuda:99"}, {"tokenizer": "gpt3"},
                                    {"block_size": 4096}])
def test_overwriting_deletes_nothing_before_the_rest_is_known_to_be_right(values, copy):
    before = contents(copy)
    refused(lambda: train.main([str(copy / "config.toml"), "--overwrite", *arguments(values)]))
    assert contents(copy) == before


def test_overwriting_deletes_nothing_when_wandb_cannot_be_reached(copy, monkeypatch):
    import wandb

    def unreachable(*_, **__):
        raise wandb.errors.CommError("no route")

    monkeypatch.setattr(wandb, "init", unreachable)
    before = contents(copy)
    refused(lambda: train.main([str(copy / "config.toml"), "--overwrite", "--wandb=online"]), "wandb = online: no route")
    assert contents(copy) == before


def test_changed_text_is_refused(copy, corpus, tmp_path):
    other = tmp_path / "other.txt"
    other.write_text(text(12_000, seed=1), encoding="utf-8")
    config = (copy / "config.toml").read_text(encoding="utf-8").replace(str(corpus), str(other))
    (copy / "config.toml").write_text(config, encoding="utf-8")
    before = contents(copy)
    refused(lambda: train.main([str(copy / "config.toml"), "--max_iters=40"]), "has changed")
    refused(lambda: lengths.main([str(copy)]), "has changed")
    assert contents(copy) == before


class Bomb:
    """What runs a command when it is unpickled."""

    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return os.mkdir, (str(self.path),)


def rewritten(**changes):
    """-> a function that changes entries of a checkpoint; None removes them."""
    def damage(path):
        content = torch.load(path, weights_only=True) | changes
        torch.save({key: value for key, value in content.items() if value is not None}, path)
    return damage


def norm(weight):
    """-> a function that changes one weight of a checkpoint."""
    def damage(path):
        content = torch.load(path, weights_only=True)
        content["model"]["norm.weight"] = weight
        torch.save(content, path)
    return damage


DAMAGES = {
    "empty": lambda path: path.write_bytes(b""),
    "truncated": lambda path: path.write_bytes(path.read_bytes()[:-1000]),
    "half": lambda path: path.write_bytes(path.read_bytes()[:path.stat().st_size // 2]),
    "text": lambda path: path.write_text("not a checkpoint", encoding="utf-8"),
    "missing": lambda path: path.unlink(),
    "foreign list": lambda path: torch.save([torch.zeros(3)], path),
    "foreign dict": lambda path: torch.save({"model": {}, "iter_num": 3}, path),
    "newer": rewritten(format=checkpoints.FORMAT + 1),
    "one weight": lambda path: path.write_bytes(path.read_bytes().replace(
        torch.load(path, weights_only=True)["model"]["norm.weight"].numpy().tobytes(), bytes(128))),
    "code": lambda path: torch.save({"format": 1, "model": {}, "step": 0, "x": Bomb(path.with_name("exploded"))}, path),
    "model is a number": rewritten(model=5),
    "step is a word": rewritten(step="x"),
    "no data": rewritten(data_sha256=None),
    "another shape": norm(torch.ones(64)),
    "no numbers": norm(torch.ones(32, device="meta")),
    "sparse": norm(torch.ones(32).to_sparse()),
    "weights missing": rewritten(model={}),
}


READERS = [("sample", "best"), ("lengths", "best"), ("lengths", "last"), ("train", "last")]


@pytest.mark.parametrize("damage, program, checkpoint", [
    (damage, *reader) for damage in DAMAGES for reader in READERS
    if (damage, *reader) != ("missing", "train", "last")])  # a run without a checkpoint starts
def test_damaged_or_foreign_checkpoint_is_named_and_nothing_is_lost(damage, program, checkpoint, copy):
    path = copy / f"{checkpoint}.pt"
    DAMAGES[damage](path)
    before = contents(copy)
    argv = {"train": [str(copy / "config.toml"), "--max_iters=40"], "sample": [str(copy), "--tokens=3"],
            "lengths": [str(copy), "--checkpoint", checkpoint]}[program]
    refused(lambda: PROGRAMS[program].main(argv), str(path))
    assert contents(copy) == before and not path.with_name("exploded").exists()


@pytest.mark.parametrize("changes", [{key: None} for key in ("optimizers", "resolved", "best", "reached")] + [
    {"best": {}}, {"resolved": {}}, {"best": {"step": "x", "val_loss": 1.0}}])
def test_checkpoint_that_cannot_be_resumed_is_named(changes, copy):
    rewritten(**changes)(copy / "last.pt")
    before = contents(copy)
    refused(lambda: train.main([str(copy / "config.toml"), "--max_iters=40"]), "last.pt")
    assert contents(copy) == before


@pytest.mark.parametrize("content", ['{"kind": "nothing"}', "{", '{"kind": "byte", "separated": true}'])
def test_damaged_tokenizer_is_named(content, copy):
    (copy / "tokenizer.json").write_text(content, encoding="utf-8")
    before = contents(copy)
    for program in (sample, lengths):
        refused(lambda program=program: program.main([str(copy)]))
    assert contents(copy) == before


@pytest.mark.parametrize("name, line", [
    ("log.jsonl", "nonsense"), ("log.jsonl", "[1]"), ("log.jsonl", "{}"), ("log.jsonl", '{"step": "x", "val_loss": "y"}'),
    ("lengths.jsonl", '{"step": 1}'),
    ("lengths.jsonl", '{"step": 30, "checkpoint": "best", "scaling": "none", "factor": 1, "finetuned": false, "context": 8}'),
])
def test_damaged_line_is_named_and_nothing_is_lost(name, line, copy, here):
    (copy / name).write_text(line + "\n" + (copy / name).read_text(encoding="utf-8"), encoding="utf-8")
    before = contents(copy)
    refused(lambda: compare.main([str(copy)]), name, "line 1")
    refused(lambda: train.main([str(copy / "config.toml"), "--max_iters=40"]), name, "line 1")
    assert contents(copy) == before and contents(here) == {}


@pytest.mark.parametrize("content", ["{", "[1]"])
def test_damaged_summary_is_that_of_an_unfinished_run_and_made_anew(content, copy, here):
    before = (copy / "summary.json").read_text(encoding="utf-8")
    (copy / "summary.json").write_text(content, encoding="utf-8")
    assert compare.main([str(copy)]) == 0
    assert train.main([str(copy / "config.toml")]) == 0
    after = json.loads((copy / "summary.json").read_text(encoding="utf-8"))
    assert after | {"seconds": 0} == json.loads(before) | {"seconds": 0}


@pytest.mark.parametrize("content", [b"n_layer = = 3", b"\xff", b"n_layr = 3\n"])
def test_damaged_config_of_a_run_is_named_and_can_be_overwritten(content, copy, here):
    argv = [str(shutil.copy(copy / "config.toml", copy.parent / "mine.toml"))]
    (copy / "config.toml").write_bytes(content)
    before = contents(copy)
    for program, words in ((sample, [str(copy)]), (lengths, [str(copy)]), (compare, [str(copy)]), (train, argv)):
        refused(lambda program=program, words=words: program.main(words), str(copy / "config.toml"))
    assert contents(copy) == before
    assert train.main([*argv, "--overwrite", "--stop_at=1"]) == 0
    assert read_config(copy).n_layer == SMALL["n_layer"]


# Prompts


@pytest.mark.parametrize("argv, words", [
    (["--prompt", "Zäh"], ("outside the vocabulary", "'Z'", "'ä'")),
    (["--prompt", "a", "--prompt_file", "b"], ("prompt and prompt_file",)),
    (["--prompt_file", "nowhere.txt"], ("prompt_file = nowhere.txt", "No such file")),
    (["--prompt_file", "."], ("prompt_file = .",)),
])
def test_bad_prompt_is_named(argv, words, run_folder, here):
    refused(lambda: sample.main([str(run_folder), *argv]), *words)


def test_prompt_file_that_is_not_utf8_is_named(run_folder, tmp_path):
    (tmp_path / "latin.txt").write_bytes("é".encode("latin-1"))
    refused(lambda: sample.main([str(run_folder), "--prompt_file", str(tmp_path / "latin.txt")]), "not UTF-8")


# As a process


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs a device that is always full")
def test_a_full_disk_is_said_in_two_lines():
    code = "import options; options.command(lambda argv: open('/dev/full', 'w').write('x' * 10**6))"
    done = subprocess.run([sys.executable, "-c", code], cwd=REPOSITORY, text=True, capture_output=True, check=False)
    assert done.returncode == 2 and len(done.stderr.splitlines()) == 2 and "No space left" in done.stderr


@pytest.mark.parametrize("words", [
    ["train.py", "--positon", "rope"], ["sample.py", "run", "--tokens", "0"], ["lengths.py"], ["compare.py", "no_run"],
    ["data/prepare.py", "--tokenizer", "nosuch"],
])
def test_process_ends_with_two_lines_and_code_2(words, here):
    done = subprocess.run([sys.executable, REPOSITORY / words[0], *words[1:]], cwd=here, text=True, capture_output=True,
                          check=False, env={**os.environ, "OMP_NUM_THREADS": "1"})
    lines = done.stderr.splitlines()
    assert done.returncode == 2 and len(lines) == 2 and lines[0].startswith("error: ") and not done.stdout, done.stderr
    assert contents(here) == {}


def test_learned_positions_asked_beyond_their_reach_are_skipped_by_name(corpus, tmp_path, capsys):
    folder = tmp_path / "learned-1"
    values = SMALL | {"dataset": corpus, "position": "learned", "max_iters": 6, "out_dir": folder}
    assert train.main(arguments(values)) == 0
    capsys.readouterr()
    assert lengths.main([str(folder), "--contexts", "32", "33", "64"]) == 0
    said = capsys.readouterr().out
    assert "context 33: learned positions end at 32" in said and "context 64: learned positions end at 32" in said
    assert "context 32:" not in said
