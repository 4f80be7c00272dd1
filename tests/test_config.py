"""One grammar for files and the command line, validated once."""
import subprocess
import sys
from pathlib import Path
from typing import get_args

import pytest

import compare
import config
import data.prepare
import lengths
import options
import position
import rope
import sample
import train
from config import Config, load
from options import UserError, parse

REPOSITORY = Path(__file__).resolve().parents[1]


@pytest.fixture
def files(tmp_path):
    """-> a function that writes a TOML file and gives its path."""
    def write(name, text):
        (tmp_path / name).write_text(text, encoding="utf-8")
        return str(tmp_path / name)
    return write


def test_later_files_win_over_earlier_ones_and_the_command_line_over_all(files):
    first = files("first.toml", 'n_layer = 1\nn_head = 1\nposition = "learned"\n')
    second = files("second.toml", "n_layer = 2\nn_head = 2\n")
    c = load([first, "--n_head", "8", second])
    assert (c.position, c.n_layer, c.n_head, c.n_embd) == ("learned", 2, 8, Config().n_embd)


@pytest.mark.parametrize("words, values", [
    (["--bias", "--no_bias", "--bias", "true"], {"bias": True}),
    (["--bias", "--no_bias"], {"bias": False}),
    (["--bias=false"], {"bias": False}),
    (["--no_compile"], {"compile": False}),
    (["--compile"], {"compile": True}),
    (["--compile", "auto"], {"compile": "auto"}),
    (["--learning_rate=3e-4", "--n-layer", "2"], {"learning_rate": 3e-4, "n_layer": 2}),
    (["--n_layer", "2", "--n_layer=3"], {"n_layer": 3}),
    (["--rope_factor", "4", "--rope_scaling", "yarn"], {"rope_factor": 4.0}),
    (["--dataset=a=b"], {"dataset": "a=b"}),
    (["--bias", "--qk_norm", "false"], {"bias": True, "qk_norm": False}),
    (["--qk_norm", "weighted"], {"qk_norm": "weighted"}),
    (["--rope_scaling", "longrope", "--n_embd=16", "--short_factor", "1", "2.5", "--long_factor=3,4"],
     {"short_factor": (1.0, 2.5), "long_factor": (3.0, 4.0)}),
])
def test_command_line_grammar(words, values):
    c = load(words)
    assert {key: getattr(c, key) for key in values} == values


def test_a_flag_may_be_followed_by_a_file(files):
    c = load(["--bias", files("a.toml", "n_layer = 7\n"), "--no_qk_norm", files("b.toml", "n_head = 2\n")])
    assert (c.bias, c.n_layer, c.qk_norm, c.n_head) == (True, 7, False, 2)


@pytest.mark.parametrize("words", [["--contexts", "64,128"], ["--contexts=64,128"], ["--contexts", "64", "128"]])
def test_lists_have_the_same_grammar(words):
    from lengths import Lengths

    folders, values = parse(["run", *words], Lengths)
    assert folders == ["run"] and config.build(Lengths, values).contexts == (64, 128)


@pytest.mark.parametrize("words", [["--n_layer"], ["--n_layer", "--bias"], ["--dataset"]])
def test_a_key_without_its_value_is_refused(words):
    with pytest.raises(UserError, match=f"{words[0]}: no value"):
        load(words)


def test_a_list_without_a_value_is_refused():
    from lengths import Lengths

    with pytest.raises(UserError):
        config.build(Lengths, parse(["run", "--contexts"], Lengths)[1])


@pytest.mark.parametrize("changes", [
    {}, {"dataset": 'C:\\texts\\"odd" näme\t.txt', "learning_rate": 1e-5, "bias": True},
    {"rope_scaling": "yarn", "rope_factor": 8, "beta_fast": 16, "attention_factor": 1.1, "rope_original_context": 64},
    {"compile": True, "stop_at": 3, "target_val_loss": 1.5, "min_lr": 1e-16, "out_dir": "out/x"},
    {"dataset": "deleted\x7f"},
    {"rope_scaling": "longrope", "n_embd": 16, "short_factor": [1, 2.5], "long_factor": (3, 4)},
])
def test_effective_config_reads_back_equal(changes, files):
    c = config.build(Config, changes)
    back = config.build(Config, config.read_toml(files("config.toml", c.toml())))
    assert back == c
    assert "None" not in c.toml() and "null" not in c.toml() and "overwrite" not in c.toml()


def test_byte_order_mark_in_a_file_does_not_matter(files):
    assert load([files("windows.toml", "\ufeffn_layer = 3\r\n")]).n_layer == 3


@pytest.mark.parametrize("words, folder", [
    ([], "out/rope-1337"),
    (["--seed", "7"], "out/rope-7"),
    (["base.toml"], "out/base-1337"),
    (["base.toml", "more.toml", "--seed=2"], "out/base+more-2"),
    (["base.toml", "--position", "learned", "--n_layer=2"], "out/base-n_layer=2-position=learned-1337"),
    (["base.toml", "--dataset", "texts/my book.txt"], "out/base-dataset=my_book.txt-1337"),
    (["base.toml", "--wandb", "disabled", "--log_interval", "3", "--stop_at=4", "--overwrite"], "out/base-1337"),
    (["base.toml", "--out_dir", "elsewhere", "--n_layer=2"], "elsewhere"),
])
def test_folder_is_named_after_files_changes_and_seed(words, folder, files):
    for name in ("base.toml", "more.toml"):
        files(name, "")
    assert load([files(word, "") if word.endswith(".toml") else word for word in words]).out_dir == folder


@pytest.mark.parametrize("character", ["x", "ж"])
def test_long_names_of_folders_are_shortened_and_stay_apart(character):
    names = [load(["--dataset", character * 300 + end]).out_dir for end in "ab"]
    assert names[0] != names[1] and all(len(name.encode()) < 200 and name.endswith("-1337") for name in names)


def test_words_of_the_config_are_those_of_the_code():
    words = {key: list(get_args(Config.model_fields[key].annotation)) for key in ("rope_scaling", "position")}
    assert words == {"rope_scaling": list(rope.SCALINGS), "position": list(position.POSITIONS)}
    assert words["rope_scaling"] == list(config.SCALING_PARAMETERS)


@pytest.mark.parametrize("name", rope.SCALINGS)
def test_scalings_take_the_parameters_that_the_config_says(name):
    code = rope.SCALINGS[name].__code__
    names = code.co_varnames[:code.co_argcount + code.co_kwonlyargcount]
    assert set(names) - {"freq", "base", "factor", "context", "length"} == set(config.SCALING_PARAMETERS[name])


@pytest.mark.parametrize("path", sorted(REPOSITORY.glob("configs/*.toml")), ids=lambda path: path.stem)
def test_every_config_of_the_repository_is_valid(path):
    assert load([str(path)]).out_dir == f"out/{path.stem}-1337"


def test_importing_config_imports_neither_torch_nor_ours():
    ours = {path.stem for path in REPOSITORY.glob("*.py")} - {"config", "options"}
    code = "import sys, config; print(*sys.modules, sep='\\n')"
    done = subprocess.run([sys.executable, "-c", code], cwd=REPOSITORY, capture_output=True, text=True, check=True)
    loaded = set(done.stdout.split())
    assert "config" in loaded and not loaded & (ours | {"torch", "numpy", "data"})


def test_help_lists_every_key_with_its_meaning(capsys):
    assert train.main(["--help"]) == 0
    text = capsys.readouterr().out
    for key, field in Config.model_fields.items():
        assert f"  --{key}  (" in text and field.description and field.description.strip() in text


@pytest.mark.parametrize("program", [train, lengths, sample, compare, data.prepare], ids=lambda p: p.__name__)
@pytest.mark.parametrize("option", ["--help", "-h"])
def test_help_of_every_program_says_what_each_key_accepts(program, option, capsys):
    assert program.main([option]) == 0
    said = capsys.readouterr().out
    assert said.startswith("usage: python ")
    if "--rope_scaling" in said:
        assert "--rope_scaling  (none or linear or ntk or dynamic or yarn or llama3 or longrope" in said


def test_a_value_that_looks_like_help_is_a_value():
    assert parse(["run", "--prompt", "-h"], sample.Sample) == (["run"], {"prompt": "-h"})


def test_short_runs_warm_up_over_their_first_half():
    assert [config.build(Config, {"max_iters": n}).warmup for n in (1, 20, 40, 400)] == [0, 10, 20, 20]
    assert config.build(Config, {"warmup_iters": 7}).warmup == 7


@pytest.mark.parametrize("key, words", [
    ("position", " or ".join(position.POSITIONS)),
    ("rope_factor", "auto or a number >= 1 and <= 1000000"),
    ("short_factor", "several of: a number > 0 and <= 1000000"), ("qk_norm", "true or false or weighted"),
    ("compile", "auto or true or false"), ("dropout", "a number >= 0 and < 1"), ("n_layer", "an integer >= 1 and <= 1000"),
])
def test_what_a_key_accepts_is_said_in_words(key, words):
    assert options.allowed(Config.model_fields[key]) == words
