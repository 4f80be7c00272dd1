"""Foreign weights against transformers, on small random models of every family; and our own on the way back."""
import json
import random
import re

import numpy as np
import pytest
import torch

import checkpoints
import config
import lengths
import pretrained
import run
import sample
import tokenizer
import train
from model import GPT
from options import UserError
from tests.conftest import SMALL, small

transformers = pytest.importorskip("transformers")
V = 61
SHAPE = {"vocab_size": V, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 52,
         "max_position_embeddings": 24, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
PLAIN = {"rope_type": "default", "rope_theta": 5000.0}


def scaled(kind, **more):
    return {"rope_parameters": {**PLAIN, "rope_type": kind, **more}}


LLAMA3 = scaled("llama3", factor=4.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_position_embeddings=8)
YARN = scaled("yarn", factor=3.0, original_max_position_embeddings=8)
LONGROPE = scaled("longrope", factor=3.0, original_max_position_embeddings=8, short_factor=[1.0, 1.5, 2.0, 2.5],
                  long_factor=[2.0, 3.0, 4.0, 5.0])
CASES = [
    ("gpt2", {"n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 24}),
    ("gpt2", {"n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 24, "n_inner": 50, "activation_function": "gelu",
              "tie_word_embeddings": False}),
    ("gpt_neox", {"rope_parameters": {**PLAIN, "partial_rotary_factor": 0.5}}),
    ("gpt_neox", {"use_parallel_residual": False, "rope_parameters": {**PLAIN, "partial_rotary_factor": 1.0}}),
    ("gpt_neox", {"rope_parameters": {**PLAIN, "rope_type": "linear", "factor": 2.0, "partial_rotary_factor": 0.5}}),
    ("llama", {"num_key_value_heads": 2, "rope_parameters": PLAIN}),
    ("llama", {"num_key_value_heads": 1, "head_dim": 12, "attention_bias": True, "mlp_bias": True, "rope_parameters": PLAIN}),
    ("llama", {"num_key_value_heads": 2, "tie_word_embeddings": True, **LLAMA3}),
    ("llama", {"num_key_value_heads": 2, **YARN}),
    ("llama", {"num_key_value_heads": 2, **scaled("linear", factor=4.0)}),
    ("llama", {"num_key_value_heads": 2, **scaled("dynamic", factor=2.0)}),
    ("llama", {"num_key_value_heads": 2, **LONGROPE}),
    ("mistral", {"num_key_value_heads": 2, "sliding_window": 7, "rope_parameters": PLAIN}),
    ("mistral", {"num_key_value_heads": 2, "sliding_window": None, **YARN}),
    ("qwen2", {"num_key_value_heads": 2, "rope_parameters": PLAIN}),
    ("qwen2", {"num_key_value_heads": 2, "use_sliding_window": True, "sliding_window": 9, "max_window_layers": 0,
               "rope_parameters": PLAIN}),
    ("qwen2", {"num_key_value_heads": 2, **YARN}),
    ("qwen3", {"num_key_value_heads": 2, "head_dim": 16, "rope_parameters": PLAIN}),
    ("qwen3", {"num_key_value_heads": 2, "head_dim": 8, **YARN}),
    ("phi", {"rope_parameters": {**PLAIN, "partial_rotary_factor": 0.5}}),
    ("phi", {"num_key_value_heads": 2, "rope_parameters": {**PLAIN, "partial_rotary_factor": 1.0}}),
]


def foreign(kind, changes, folder, seed=0):
    """A random model of a family, saved as transformers does. -> the model in evaluation mode."""
    shape = {"vocab_size": V, "bos_token_id": 1, "eos_token_id": 2} if kind == "gpt2" else SHAPE
    torch.manual_seed(seed)
    made = transformers.AutoModelForCausalLM.from_config(transformers.AutoConfig.for_model(kind, **{**shape, **changes}))
    for parameter in made.parameters():  # norms and biases too, or their order would not matter
        parameter.data += 0.1 * torch.randn(parameter.shape)
    made.eval().save_pretrained(folder)
    return made


def imported(folder):
    (values, weights), _ = pretrained.load(folder)
    made = GPT(config.build(config.Config, values), weights["embed.weight"].size(0)).eval()
    checkpoints.fill(made, weights, folder)
    return made


def ids(length, seed=0):
    return torch.randint(V, (2, length), generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("kind, changes", CASES, ids=lambda v: v if isinstance(v, str) else "")
def test_logits_equal_those_of_transformers(kind, changes, tmp_path):
    theirs = foreign(kind, changes, tmp_path)
    ours = imported(tmp_path)
    method = changes.get("rope_parameters", PLAIN)["rope_type"]
    for length in (5, 24, *([] if kind == "gpt2" else [40])):
        with torch.no_grad():
            expected = theirs(ids(length)).logits
        torch.testing.assert_close(ours(ids(length)), expected, atol=1e-4, rtol=1e-4)
        if method not in ("dynamic", "longrope"):  # of which the cached keys of transformers were turned otherwise
            past, parts = ours.past(length), []
            for part in ids(length).split([3] + [1] * (length - 3), 1):
                parts.append(ours(part, past=past))
            torch.testing.assert_close(torch.cat(parts, 1), expected, atol=1e-4, rtol=1e-4)
    if kind == "gpt2":
        with pytest.raises(UserError, match="position 24 asked"):
            ours(ids(25))


@pytest.mark.parametrize("kind", pretrained.FAMILIES)
@pytest.mark.parametrize("seed", range(3))
def test_other_shapes_and_parameters_come_in_alike(kind, seed, tmp_path):
    draw = random.Random(f"{kind}{seed}")
    heads = draw.choice([2, 4])
    changes = {"num_attention_heads": heads, "hidden_size": 24 * heads, "num_hidden_layers": draw.choice([1, 3]),
               "intermediate_size": draw.randint(20, 90), "max_position_embeddings": draw.randint(20, 60)}
    changes["rope_parameters"] = {"rope_type": "default", "rope_theta": 10 ** draw.uniform(2, 6)}
    if kind in ("gpt_neox", "phi"):
        changes["rope_parameters"]["partial_rotary_factor"] = draw.choice([0.25, 0.5, 1.0])
        changes["layer_norm_eps"] = 1e-3
    else:
        changes |= {"num_key_value_heads": draw.choice([1, heads]), "rms_norm_eps": 1e-3}
    if kind == "gpt2":
        changes = {"n_embd": 24 * heads, "n_head": heads, "n_layer": 1, "n_positions": 30, "layer_norm_epsilon": 1e-3}
    theirs, ours = foreign(kind, changes, tmp_path, seed), imported(tmp_path)
    with torch.no_grad():
        torch.testing.assert_close(ours(ids(20)), theirs(ids(20)).logits, atol=1e-4, rtol=1e-4)


def test_every_family_has_a_case():
    assert {kind for kind, _ in CASES} == set(pretrained.FAMILIES)


def test_weights_in_parts_and_in_bin_files_are_read(tmp_path):
    theirs = foreign("llama", {"num_key_value_heads": 2, "rope_parameters": PLAIN}, tmp_path / "whole")
    theirs.save_pretrained(tmp_path / "parts", max_shard_size="10KB")
    assert len(list((tmp_path / "parts").glob("*.safetensors"))) > 1
    (tmp_path / "bin").mkdir()
    torch.save(theirs.state_dict(), tmp_path / "bin" / "pytorch_model.bin")
    (tmp_path / "bin" / "config.json").write_bytes((tmp_path / "whole" / "config.json").read_bytes())
    expected = imported(tmp_path / "whole")(ids(9))
    for name in ("parts", "bin"):
        assert torch.equal(imported(tmp_path / name)(ids(9)), expected)


def test_configurations_of_older_versions_are_read(tmp_path):
    """rope_theta and rope_scaling beside the rest, with type for rope_type, as files before transformers 5 have them."""
    theirs = foreign("llama", {"num_key_value_heads": 2, **YARN}, tmp_path)
    file = json.loads((tmp_path / "config.json").read_text())
    parameters = file.pop("rope_parameters")
    file["rope_theta"] = parameters.pop("rope_theta")
    parameters["type"] = parameters.pop("rope_type")
    (tmp_path / "config.json").write_text(json.dumps(file | {"rope_scaling": parameters}))
    with torch.no_grad():
        torch.testing.assert_close(imported(tmp_path)(ids(30)), theirs(ids(30)).logits, atol=1e-4, rtol=1e-4)


# What cannot be read


@pytest.mark.parametrize("kind, changes, words", [
    ("opt", {"hidden_size": 32, "ffn_dim": 32, "word_embed_proj_dim": 32}, "models of type opt are not known"),
    ("llama", {"attention_bias": True, "rope_parameters": PLAIN}, "attention_bias and mlp_bias differ"),
    ("llama", {"hidden_act": "relu", "rope_parameters": PLAIN}, "activation relu"),
    ("phi", {"qk_layernorm": True, "rope_parameters": {**PLAIN, "partial_rotary_factor": 0.5}}, "qk_layernorm"),
    ("qwen2", {"use_sliding_window": True, "max_window_layers": 1, "rope_parameters": PLAIN}, "with and without a sliding"),
    ("gpt_neox", {"attention_bias": False, "rope_parameters": {**PLAIN, "partial_rotary_factor": 0.5}}, "attention_bias ="),
    ("gpt2", {"n_embd": 32, "n_head": 4, "n_layer": 1, "scale_attn_by_inverse_layer_idx": True}, "scale_attn_by_inverse"),
])
def test_what_is_not_supported_is_named(kind, changes, words, tmp_path):
    foreign(kind, changes, tmp_path / "model")
    with pytest.raises(UserError, match=re.escape(words)) as caught:
        pretrained.main([str(tmp_path / "model"), "--out_dir", str(tmp_path / "run"), "--tokenizer", "byte"])
    assert len(str(caught.value).splitlines()) == 2 and not (tmp_path / "run").exists()


def edit(**changes):
    """-> a function that changes keys of a model's config.json."""
    def damage(folder):
        path = folder / "config.json"
        path.write_text(json.dumps(json.loads(path.read_text()) | changes))
    return damage


def with_tensor(name, shape):
    """-> a function that adds a tensor to a model's weights, or puts it in the place of another."""
    def damage(folder):
        from safetensors.torch import load_file, save_file

        save_file(load_file(folder / "model.safetensors") | {name: torch.ones(shape)}, folder / "model.safetensors")
    return damage


DAMAGES = {
    "quantized": (edit(quantization_config={"quant_method": "fp8"}), "quantized weights"),
    "a tensor too many": (with_tensor("model.layers.0.self_attn.q_norm.weight", (8,)), "self_attn.q_norm.weight and 0 more"),
    "other heads": (edit(num_key_value_heads=1), "qkv.weight has 64 rows, its configuration says 48"),
    "scaling without factor": (edit(rope_parameters={"rope_type": "linear", "rope_theta": 1e4}), "without a factor"),
    "a list": (lambda f: (f / "config.json").write_text("[]"), "config.json"),
    "parameters in a list": (edit(rope_parameters=[1]), "not of this kind"),
    "an index without a map": (lambda f: (f / "model.safetensors.index.json").write_text("{}"), "no weight_map"),
    "no config": (lambda f: (f / "config.json").unlink(), "config.json"),
    "no weights": (lambda f: (f / "model.safetensors").unlink(), "no weights"),
    "truncated": (lambda f: (f / "model.safetensors").write_bytes((f / "model.safetensors").read_bytes()[:5000]), "damaged"),
    "not json": (lambda f: (f / "config.json").write_text("{"), "config.json"),
    "a key missing": (lambda f: (f / "config.json").write_text('{"model_type": "llama"}'), "lacks"),
    "another shape": (lambda f: (f / "config.json").write_text(
        (f / "config.json").read_text().replace('"num_hidden_layers": 2', '"num_hidden_layers": 3')), "blocks.2"),
    "unknown scaling": (lambda f: (f / "config.json").write_text(
        (f / "config.json").read_text().replace('"default"', '"spiral"')), "rope_scaling = spiral"),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_damaged_folders_are_named(damage, tmp_path):
    foreign("llama", {"num_key_value_heads": 2, "rope_parameters": PLAIN}, tmp_path / "model")
    change, words = DAMAGES[damage]
    change(tmp_path / "model")
    with pytest.raises(UserError, match=words) as caught:
        pretrained.main([str(tmp_path / "model"), "--out_dir", str(tmp_path / "run"), "--tokenizer", "byte"])
    assert len(str(caught.value).splitlines()) == 2 and not (tmp_path / "run").exists()


def test_a_model_without_a_tokenizer_and_a_folder_that_exists_are_refused(tmp_path):
    foreign("llama", {"rope_parameters": PLAIN}, tmp_path / "model")
    with pytest.raises(UserError, match="without a tokenizer"):
        pretrained.main([str(tmp_path / "model"), "--out_dir", str(tmp_path / "run")])
    with pytest.raises(UserError, match="61 embeddings, and the tokenizer has 257 ids"):
        pretrained.main([str(tmp_path / "model"), "--out_dir", str(tmp_path / "run"), "--tokenizer", "byte"])
    with pytest.raises(UserError, match="exists"):
        pretrained.main([str(tmp_path / "model"), "--out_dir", str(tmp_path / "model"), "--tokenizer", "byte"])


def test_a_name_without_a_network_says_what_to_give(monkeypatch):
    import huggingface_hub

    def unreachable(*_, **__):
        raise ConnectionError("no route")

    monkeypatch.setattr(huggingface_hub, "snapshot_download", unreachable)
    with pytest.raises(UserError, match="not available from the hub"):
        pretrained.main(["someone/model"])


class Bomb:
    """What makes a folder when it is unpickled."""

    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        import os

        return os.mkdir, (str(self.path),)


def test_nothing_in_a_foreign_file_is_executed(tmp_path):
    torch.save({"model": {}, "model_args": {}, "x": Bomb(tmp_path / "exploded")}, tmp_path / "ckpt.pt")
    with pytest.raises(UserError, match="damaged, or no weights"):
        pretrained.main([str(tmp_path / "ckpt.pt")])
    assert not (tmp_path / "exploded").exists()


@pytest.mark.parametrize("content", [3, [1], torch.ones(3), {"model": 3, "model_args": {}}, {"model": {}, "model_args": None},
                                     {"model": {}, "model_args": {"n_layer": 1}}])
def test_what_is_not_nanogpts_is_named(content, tmp_path):
    torch.save(content, tmp_path / "ckpt.pt")
    with pytest.raises(UserError):
        pretrained.main([str(tmp_path / "ckpt.pt"), "--out_dir", str(tmp_path / "run")])
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("kind, changes, key", [
    ("llama", {}, {"sliding_window": 7}), ("llama", {}, {"partial_rotary_factor": 0.5}),
    ("qwen2", {"use_sliding_window": True, "sliding_window": 9, "max_window_layers": 0}, {"layer_types": None}),
])
def test_keys_are_read_as_the_family_reads_them(kind, changes, key, tmp_path):
    theirs = foreign(kind, {"num_key_value_heads": 2, "rope_parameters": PLAIN, **changes}, tmp_path)
    edit(**key)(tmp_path)
    with torch.no_grad():
        torch.testing.assert_close(imported(tmp_path)(ids(24)), theirs(ids(24)).logits, atol=1e-4, rtol=1e-4)


def test_two_matrices_that_are_called_tied_stay_two(tmp_path):
    theirs = foreign("llama", {"rope_parameters": PLAIN}, tmp_path)
    edit(tie_word_embeddings=True)(tmp_path)
    with torch.no_grad():
        torch.testing.assert_close(imported(tmp_path)(ids(9)), theirs(ids(9)).logits, atol=1e-4, rtol=1e-4)


# Tokenizers


@pytest.fixture(scope="module")
def byte_level():
    """A byte-level tokenizer as the files of Llama 3 or Qwen have it."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    made = Tokenizer(models.BPE())
    made.pre_tokenizer, made.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    trainer = trainers.BpeTrainer(vocab_size=300, special_tokens=["<|endoftext|>"], show_progress=False,
                                  initial_alphabet=pre_tokenizers.ByteLevel.alphabet())
    made.train_from_iterator(["def f(self): return self.x\n" * 9, "Größe naïve 你好"], trainer)
    return made.to_str()


@pytest.fixture(scope="module")
def sentence_piece():
    """One that marks spaces, with bytes for what it does not know, as the file of Llama 2 has it."""
    words = ["<unk>", "<s>", "</s>", *(f"<0x{b:02X}>" for b in range(256)), "▁", "a", "b", "▁a", "▁ab", "c"]
    merges = [["▁", "a"], ["▁a", "b"]]
    special = [{"id": i, "content": words[i], "single_word": False, "lstrip": False, "rstrip": False, "normalized": False,
                "special": True} for i in range(3)]
    return json.dumps({
        "version": "1.0", "truncation": None, "padding": None, "added_tokens": special, "pre_tokenizer": None,
        "normalizer": {"type": "Sequence", "normalizers": [
            {"type": "Prepend", "prepend": "▁"}, {"type": "Replace", "pattern": {"String": " "}, "content": "▁"}]},
        "post_processor": None,
        "decoder": {"type": "Sequence", "decoders": [{"type": "Replace", "pattern": {"String": "▁"}, "content": " "},
                                                     {"type": "ByteFallback"}, {"type": "Fuse"}]},
        "model": {"type": "BPE", "vocab": {word: i for i, word in enumerate(words)}, "merges": merges, "unk_token": "<unk>",
                  "byte_fallback": True, "fuse_unk": True, "dropout": None, "continuing_subword_prefix": None,
                  "end_of_word_suffix": None, "ignore_merges": False}})


@pytest.mark.parametrize("text", ["def f(self):\n  return 1", "Größe, naïve; 你好 😀", "<|endoftext|> and </s> are text"])
def test_tokenizers_of_models_come_back_in_bytes(text, byte_level, sentence_piece, tmp_path):
    for file, lead in ((byte_level, ""), (sentence_piece, " ")):
        made = tokenizer.Hub(file)
        found = made.encode(text)
        assert made.decode(found) == lead + text and made.byte_lengths()[found].sum() == len((lead + text).encode())
        assert made.separator not in found
        made.pad(made.vocab_size + 7)
        tokenizer.save(made, tmp_path / "tokenizer.json")
        again = tokenizer.load(tmp_path / "tokenizer.json")
        assert again.vocab_size == made.vocab_size and again.encode(text).tolist() == found.tolist()
    assert tokenizer.Hub(byte_level).separator == 0 and tokenizer.Hub(sentence_piece).separator == 1


def test_settings_of_a_tokenizer_that_would_change_the_text_do_not(byte_level):
    plain, text = tokenizer.Hub(byte_level), "def f(self): " * 30
    file = json.loads(byte_level)
    file["truncation"] = {"max_length": 4, "strategy": "LongestFirst", "stride": 0, "direction": "Right"}
    file["padding"] = {"strategy": {"Fixed": 640}, "direction": "Right", "pad_to_multiple_of": None, "pad_id": 0,
                       "pad_type_id": 0, "pad_token": "<|endoftext|>"}
    assert tokenizer.Hub(json.dumps(file)).encode(text).tolist() == plain.encode(text).tolist()
    file["added_tokens"].append(file["added_tokens"][0] | {"id": 300, "content": "été", "special": False})
    made = tokenizer.Hub(json.dumps(file))
    assert made.decode(made.encode("un été là")) == "un été là"
    file["normalizer"] = {"type": "Lowercase"}
    with pytest.raises(ValueError, match="Lowercase changes the text"):
        tokenizer.Hub(json.dumps(file))


def gpt2_files(folder, vocabulary):
    words = {token: i for i, token in enumerate(vocabulary)}
    (folder / "vocab.json").write_text(json.dumps(words), encoding="utf-8")


def test_gpt2_brings_its_vocabulary_and_tiktoken_runs_it(tmp_path):
    spelled = {b: c for c, b in tokenizer.BYTES.items()}
    words = [spelled[b] for b in range(256)] + ["Ġt", "he", "Ġthe", "<|endoftext|>"]
    foreign("gpt2", {"n_embd": 32, "n_layer": 1, "n_head": 4, "n_positions": 24, "vocab_size": 260}, tmp_path)
    gpt2_files(tmp_path, words)
    _, made = pretrained.load(tmp_path)
    assert isinstance(made, tokenizer.BPE) and made.separator == 259 and made.vocab_size == 260
    assert made.encode(" the").tolist() == [258] and made.decode([258, 259, 0]) == " the\0"


# What became a run


@pytest.fixture(scope="module")
def llama_run(byte_level, corpus, tmp_path_factory):
    """A run made of a random Llama with a tokenizer file and a vocabulary rounded up. -> (folder, transformers' model)."""
    folder = tmp_path_factory.mktemp("llama")
    theirs = foreign("llama", {"num_key_value_heads": 2, "vocab_size": 320, "rope_parameters": PLAIN}, folder / "model")
    (folder / "model" / "tokenizer.json").write_text(byte_level, encoding="utf-8")
    assert pretrained.main([str(folder / "model"), "--out_dir", str(folder / "run"), "--dataset", str(corpus)]) == 0
    return folder / "run", theirs


def test_sampling_reads_what_was_taken_in(llama_run, capsys):
    folder, theirs = llama_run
    capsys.readouterr()
    assert sample.main([str(folder), "--prompt", "abc", "--tokens", "12", "--temperature", "0"]) == 0
    made = tokenizer.load(folder / "tokenizer.json")
    prompt = torch.tensor([made.encode("abc").tolist()])
    new = theirs.generate(prompt, max_new_tokens=12, min_new_tokens=12, do_sample=False)[0, prompt.size(1):]
    assert capsys.readouterr().out == "abc" + made.decode(new.tolist()) + "\n"


def test_length_curves_read_what_was_taken_in(llama_run, capsys):
    folder, _ = llama_run
    assert lengths.main([str(folder), "--contexts", "24", "48"]) == 0
    assert "trained at 24" in capsys.readouterr().out and config.read_config(folder).length_unit == 24


def test_training_begins_from_what_was_taken_in(llama_run, tmp_path):
    values = {k: v for k, v in SMALL.items() if not k.startswith("n_") and k not in ("block_size", "tokenizer", "n_embd")}
    argv = [f"--{k}={v}" for k, v in values.items()] + ["--init_from", str(llama_run[0]), "--out_dir", str(tmp_path / "run")]
    assert train.main([*argv, "--max_iters", "8"]) == 0
    made = config.read_config(tmp_path / "run")
    assert (made.norm, made.activation, made.n_kv_head, made.block_size) == ("rmsnorm", "swiglu", 2, 24)


def test_nanogpts_checkpoint_becomes_a_run(corpus, tmp_path, capsys):
    """Its names, with the prefix that compiling leaves; the character vocabulary is rebuilt from the text."""
    ours = GPT(small(position="learned"), 10)
    theirs = pretrained.to_theirs(pretrained.NanoGPT(), ours.config, ours.state_dict())
    made = {name: tensor.clone() for name, tensor in theirs.items() if not name.endswith(".bias")}
    made["lm_head.weight"] = made["transformer.wte.weight"]
    arguments = {"n_layer": 2, "n_head": 2, "n_embd": 32, "block_size": 32, "bias": False, "vocab_size": 10, "dropout": 0.0}
    torch.save({"model": {f"_orig_mod.{k}": v for k, v in made.items()}, "model_args": arguments, "iter_num": 9,
                "optimizer": {"state": {}}, "config": {"dataset": "x"}}, tmp_path / "ckpt.pt")
    argv = [str(tmp_path / "ckpt.pt"), "--out_dir", str(tmp_path / "run"), "--dataset", str(corpus), "--tokenizer", "char"]
    assert pretrained.main(argv) == 0
    restored = run.restore(tmp_path / "run")
    x = torch.randint(10, (1, 20), generator=torch.Generator().manual_seed(0))
    torch.testing.assert_close(restored.model(x), ours.eval()(x), atol=1e-6, rtol=0)
    assert sample.main([str(tmp_path / "run"), "--prompt", "ab", "--tokens", "5"]) == 0


# The way back


EXPORTED = [
    ({"position": "rope", "bias": True, "activation": "gelu_tanh", "rope_fraction": 0.5}, "gpt_neox"),
    ({"position": "rope"}, "gpt_neox"), ({"position": "learned"}, "gpt2"), ({"position": "learned", "bias": True}, "gpt2"),
    ({"norm": "rmsnorm", "activation": "swiglu", "n_kv_head": 1}, "llama"),
    ({"norm": "rmsnorm", "activation": "swiglu", "qk_norm": "weighted", "tied": False}, "qwen3"),
    ({"norm": "rmsnorm", "activation": "swiglu", "rope_scaling": "yarn", "rope_factor": 4, "rope_original_context": 16},
     "llama"),
    ({"norm": "rmsnorm", "activation": "swiglu", "rope_scaling": "llama3", "rope_factor": 4, "low_freq_factor": 1,
      "high_freq_factor": 4, "rope_original_context": 16}, "llama"),
    ({"rope_scaling": "linear", "rope_factor": 2, "parallel_block": True}, "gpt_neox"),
]


def random_run(folder, **changes):
    """The folder of a run with random weights."""
    made = small(out_dir=str(folder), **changes)
    model = GPT(made, 10).eval()
    generator = torch.Generator().manual_seed(3)
    for p in model.parameters():
        p.data += 0.2 * torch.randn(p.shape, generator=generator)
    folder.mkdir()
    (folder / "config.toml").write_text(made.toml(), encoding="utf-8")
    tokenizer.save(tokenizer.Char("abcdefghij"), folder / "tokenizer.json")
    checkpoints.save(folder / "best.pt", {"step": 1, "model": model.state_dict(), "data_sha256": "", "config": made.essence()})
    return model


@pytest.mark.parametrize("changes, kind", EXPORTED, ids=str)
def test_exported_runs_are_loaded_by_transformers(changes, kind, tmp_path):
    ours = random_run(tmp_path / "run", **changes)
    assert pretrained.main([str(tmp_path / "run"), "--export", str(tmp_path / "model")]) == 0
    theirs, report = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "model", output_loading_info=True)
    assert theirs.config.model_type == kind and not report["missing_keys"] and not report["unexpected_keys"]
    x = torch.randint(10, (2, 30), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        torch.testing.assert_close(theirs.eval()(x).logits, ours(x), atol=1e-4, rtol=1e-4)
    torch.testing.assert_close(imported(tmp_path / "model")(x), ours(x), atol=1e-5, rtol=0)  # and back again


def test_the_config_of_make_run_can_be_exported():
    made = config.load(["configs/rope.toml"])
    assert "gpt_neox" in [kind for kind, _, wanted in pretrained.EXPORTS if not pretrained.mismatches(made, wanted)]


@pytest.mark.parametrize("changes, words", [
    ({"position": "alibi"}, "position = alibi"), ({"position": "sinusoidal"}, "position = sinusoidal"),
    ({"rope_scaling": "ntk", "rope_factor": 2}, "rope_scaling = ntk"), ({"window": 8}, "window = 8"),
    ({"rope_scaling": "yarn"}, "rope_factor = auto"), ({"activation": "relu2"}, "activation = relu2"),
    ({"attention": "linear"}, "attention = linear"), ({"random_positions": 99}, "random_positions = 99"),
    ({"canon": 4}, "canon = 4"),
    ({"norm": "rmsnorm"}, "rmsnorm"),
    ({"norm": "rmsnorm", "activation": "swiglu", "rope_fraction": 0.5}, "rope_fraction = 0.5"),
])
def test_what_cannot_be_exported_is_named(changes, words, tmp_path):
    random_run(tmp_path / "run", **changes)
    with pytest.raises(UserError, match=f"not exportable; .*{words}"):
        pretrained.main([str(tmp_path / "run"), "--export", str(tmp_path / "model")])
    assert not (tmp_path / "model").exists()


def test_pairs_of_dimensions_are_permuted_and_permuted_back():
    made = small(rope_fraction=0.5, n_embd=32, n_head=2)
    assert pretrained.pairs(made).tolist() == [0, 4, 1, 5, 2, 6, 3, 7, *range(8, 16)]
    family = pretrained.NeoX()
    rows = family.rows(made)
    assert sorted(rows.tolist()) == list(range(96)) and np.array_equal(rows[rows.argsort()], np.arange(96))
