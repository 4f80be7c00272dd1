"""Weights from and to the outside: Hugging Face checkpoints and nanoGPT's ckpt.pt become runs, runs become checkpoints.

    python pretrained.py path/to/Llama-3.2-1B --out_dir out/llama       # a folder, or a name at the hub
    python pretrained.py ckpt.pt --dataset shakespeare --tokenizer char  # nanoGPT's
    python pretrained.py out/rope-1337 --export path/to/folder          # for transformers.AutoModelForCausalLM

What comes in is a run's folder, which sample.py, lengths.py and train.py --init_from read like any other. Nothing in a
foreign file is executed: weights are read from safetensors, or by torch.load with weights_only.
"""
import json
import re
import warnings
from pathlib import Path

from pydantic import Field

from config import SCALING_PARAMETERS, Config
from options import Options, UserError, build, command, helped, parse

GATED = {"silu": "swiglu", "swish": "swiglu"}
ACTIVATIONS = {"gelu": "gelu", "gelu_new": "gelu_tanh", "gelu_pytorch_tanh": "gelu_tanh", "gelu_fast": "gelu_tanh"}
THEIR_ACTIVATIONS = {"gelu": "gelu", "gelu_tanh": "gelu_new", "swiglu": "silu"}
SCALING_KEYS = {"factor": "rope_factor", "original_max_position_embeddings": "rope_original_context",
                **{key: key for keys in SCALING_PARAMETERS.values() for key in keys}}
BUFFERS = r"(.*\.)?(rotary_emb\.inv_freq|attn\.bias|attn\.masked_bias|attention\.bias|attention\.masked_bias)"  # not weights


def activation(name, known):
    if name not in known:
        raise UserError(f"activation {name}: not one that this program knows in such a model", f"known: {', '.join(known)}")
    return known[name]


class Family:
    """How a family of models is configured and what its parts are called. The base is that of Llama.

    outer, layer: {our module: their modules}, whose rows stand below one another in ours.
    """

    outer = {"embed": ["model.embed_tokens"], "norm": ["model.norm"], "head": ["lm_head"]}
    prefix = "model.layers.{}."
    layer = {"norm1": ["input_layernorm"], "attention.qkv": ["self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"],
             "attention.out": ["self_attn.o_proj"], "norm2": ["post_attention_layernorm"],
             "mlp.up": ["mlp.gate_proj", "mlp.up_proj"], "mlp.out": ["mlp.down_proj"]}
    transposed = ()  # modules whose weights are stored the other way round
    fused = False  # query, key and value of a head stand together
    biased = False  # there are biases everywhere, and where ours has none they are zero
    tied = False  # unless the file says otherwise
    partial = None  # share of a head's dimensions that is rotated unless the file says otherwise; None: always all

    def settings(self, theirs):
        """Their config.json -> the keys of our config."""
        bias = theirs.get("attention_bias", False)
        if bias != theirs.get("mlp_bias", False):
            raise UserError("attention_bias and mlp_bias differ", "this program has biases in both or in neither")
        return {"norm": "rmsnorm", "norm_eps": theirs.get("rms_norm_eps", 1e-6), "bias": bias,
                **self.common(theirs, GATED), "window": self.window(theirs)}

    def window(self, theirs):
        return None

    def common(self, theirs, activations=ACTIVATIONS):
        """What most families call alike."""
        return {"n_layer": theirs["num_hidden_layers"], "n_embd": theirs["hidden_size"], "head_dim": theirs.get("head_dim"),
                "n_head": theirs["num_attention_heads"], "n_kv_head": theirs.get("num_key_value_heads"),
                "mlp_hidden": theirs["intermediate_size"], "block_size": theirs["max_position_embeddings"],
                "activation": activation(theirs.get("hidden_act"), activations), **self.rope(theirs)}

    def rope(self, theirs):
        """Their rope_parameters, or rope_scaling and rope_theta as it was called before -> our keys."""
        base = theirs.get("rope_theta", theirs.get("rotary_emb_base", 10000.0))
        given = {"rope_theta": base, **(theirs.get("rope_parameters") or theirs.get("rope_scaling") or {})}
        kind = given.pop("rope_type", None) or given.pop("type", None) or "default"
        share = given.pop("partial_rotary_factor", theirs.get("partial_rotary_factor", theirs.get("rotary_pct", self.partial)))
        values = {"position": "rope", "rope_base": given.pop("rope_theta"),
                  "rope_fraction": share if self.partial else 1.0}
        if kind == "default":
            return values
        if kind in ("linear", "dynamic", "llama3") and given.get("factor") is None:
            raise UserError(f"rope_type {kind} without a factor", "is it a whole config.json?")
        longest = theirs["max_position_embeddings"]
        context = given.get("original_max_position_embeddings") or theirs.get("original_max_position_embeddings") or longest
        if kind == "dynamic":
            context = longest
        elif kind in ("yarn", "longrope") and given.get("factor") is None:
            given["factor"] = longest / context
        own = {SCALING_KEYS[key]: value for key, value in given.items() if key in SCALING_KEYS and value is not None}
        return {**values, "rope_scaling": {"su": "longrope"}.get(kind, kind), **own, "rope_original_context": context}

    def describe(self, config):
        """Our config -> their config.json."""
        scaling = {"rope_type": "default" if config.rope_scaling == "none" else config.rope_scaling}
        if config.rope_scaling != "none":
            settings = config.reading()["settings"]
            scaling |= {name: settings[ours] for name, ours in SCALING_KEYS.items() if ours in settings}
            scaling |= {"factor": config.rope_factor, "original_max_position_embeddings": config.original_context}
        return {"num_hidden_layers": config.n_layer, "num_attention_heads": config.n_head, "hidden_size": config.n_embd,
                "num_key_value_heads": config.kv_heads, "head_dim": config.head_size, "intermediate_size": config.mlp_width,
                "max_position_embeddings": config.original_context if config.rope_scaling == "dynamic" else config.block_size,
                "hidden_act": THEIR_ACTIVATIONS[config.activation], "rms_norm_eps": config.norm_eps,
                "layer_norm_eps": config.norm_eps, "attention_bias": config.bias, "mlp_bias": config.bias,
                "use_parallel_residual": config.parallel_block,
                "rope_parameters": scaling | {"rope_theta": config.rope_base, "partial_rotary_factor": config.rope_fraction}}

    def rows(self, config):
        """-> index of the rows of their queries, keys and values, below one another, in the order of ours.

        Rotary families pair dimension i of a head with i + rope_dim/2, this program with its neighbour.
        """
        import torch

        H, G, D = config.n_head, config.kv_heads, config.head_size
        order = torch.arange((H + 2 * G) * D)
        if self.fused:
            order = order.view(H, 3, D).transpose(0, 1).flatten()
        heads = order.view(H + 2 * G, D)
        return torch.cat((heads[:H + G][:, pairs(config)], heads[H + G:])).flatten()


def pairs(config):
    """-> index that brings a half-split head's dimensions into neighbouring pairs; of each head, where position is rope."""
    import torch

    half = config.rope_dim // 2 if config.position == "rope" else 0
    turned = torch.arange(2 * half).view(2, half).T.flatten()
    return torch.cat((turned, torch.arange(2 * half, config.head_size)))


class Mistral(Family):
    def window(self, theirs):
        return theirs.get("sliding_window", 4096)


class Qwen2(Family):
    def settings(self, theirs):
        return super().settings(theirs) | {"qkv_bias": True}

    def window(self, theirs):
        layers, first = theirs["num_hidden_layers"], theirs.get("max_window_layers", 28)
        slides = theirs.get("use_sliding_window", False) and theirs.get("sliding_window", 4096) is not None
        kinds = set(theirs.get("layer_types")
                    or ["full_attention"] * (first > 0) + ["sliding_attention"] * (slides and layers > first))
        if kinds == {"full_attention"} or not slides:
            return None
        if len(kinds) > 1:
            raise UserError("layers with and without a sliding window", "this program has one window for all layers")
        return theirs.get("sliding_window", 4096)


class Qwen3(Qwen2):
    layer = {**Family.layer, "attention.q_norm": ["self_attn.q_norm"], "attention.k_norm": ["self_attn.k_norm"]}

    def settings(self, theirs):
        return Family.settings(self, theirs) | {"qk_norm": "weighted", "head_dim": theirs.get("head_dim", 128)}


class Phi(Family):
    outer = {**Family.outer, "norm": ["model.final_layernorm"]}
    # It has one norm for attention and MLP; here each gets a copy.
    layer = {"norm1": ["input_layernorm"], "norm2": ["input_layernorm"], "attention.out": ["self_attn.dense"],
             "attention.qkv": Family.layer["attention.qkv"], "mlp.up": ["mlp.fc1"], "mlp.out": ["mlp.fc2"]}
    partial = 0.5

    def settings(self, theirs):
        if theirs.get("qk_layernorm"):
            raise UserError("qk_layernorm", "this program has RMS norms of queries and keys only")
        return {**self.common(theirs), "norm_eps": theirs.get("layer_norm_eps", 1e-5), "bias": True, "head_bias": True,
                "parallel_block": True}


class NeoX(Family):
    outer = {"embed": ["gpt_neox.embed_in"], "norm": ["gpt_neox.final_layer_norm"], "head": ["embed_out"]}
    prefix = "gpt_neox.layers.{}."
    layer = {"norm1": ["input_layernorm"], "attention.qkv": ["attention.query_key_value"], "attention.out": ["attention.dense"],
             "norm2": ["post_attention_layernorm"], "mlp.up": ["mlp.dense_h_to_4h"], "mlp.out": ["mlp.dense_4h_to_h"]}
    fused, biased = True, True
    partial = 0.25

    def settings(self, theirs):
        if not theirs.get("attention_bias", True):
            raise UserError("attention_bias = false", "this program has biases in attention and MLP or in neither")
        return {**self.common(theirs), "norm_eps": theirs.get("layer_norm_eps", 1e-5), "bias": True,
                "parallel_block": theirs.get("use_parallel_residual", True)}

    def describe(self, config):
        return {**super().describe(config), "attention_bias": True}


class GPT2(Family):
    outer = {"embed": ["transformer.wte"], "norm": ["transformer.ln_f"], "head": ["lm_head"],
             "position.table": ["transformer.wpe"]}
    prefix = "transformer.h.{}."
    layer = {"norm1": ["ln_1"], "attention.qkv": ["attn.c_attn"], "attention.out": ["attn.c_proj"], "norm2": ["ln_2"],
             "mlp.up": ["mlp.c_fc"], "mlp.out": ["mlp.c_proj"]}
    transposed = ("attention.qkv", "attention.out", "mlp.up", "mlp.out")
    tied, biased = True, True

    def settings(self, theirs):
        for key, wanted in (("scale_attn_by_inverse_layer_idx", False), ("scale_attn_weights", True),
                            ("add_cross_attention", False)):
            if theirs.get(key, wanted) != wanted:
                raise UserError(f"{key} = {theirs[key]}", "this program has no such model")
        return {"position": "learned", "n_layer": theirs["n_layer"], "n_head": theirs["n_head"], "n_embd": theirs["n_embd"],
                "block_size": theirs.get("n_positions", theirs.get("n_ctx")), "mlp_hidden": theirs.get("n_inner"), "bias": True,
                "activation": activation(theirs.get("activation_function", "gelu_new"), ACTIVATIONS),
                "norm_eps": theirs.get("layer_norm_epsilon", 1e-5)}

    def describe(self, config):
        return {"n_layer": config.n_layer, "n_head": config.n_head, "n_embd": config.n_embd, "n_inner": config.mlp_hidden,
                "n_positions": config.block_size, "activation_function": THEIR_ACTIVATIONS[config.activation],
                "layer_norm_epsilon": config.norm_eps}


class NanoGPT(GPT2):
    """nanoGPT's own: GPT-2 with plain linear layers, the exact gelu, and biases only if it was told so."""

    transposed = ()

    def settings(self, theirs):
        return {"position": "learned", **{key: theirs[key] for key in ("n_layer", "n_head", "n_embd", "block_size", "bias")}}


FAMILIES = {"gpt2": GPT2, "gpt_neox": NeoX, "llama": Family, "mistral": Mistral, "qwen2": Qwen2, "qwen3": Qwen3, "phi": Phi}


def orders(family, config):
    """-> {module of a block: index of their rows in the order of ours}, of the modules whose rows are permuted."""
    return {"attention.qkv": family.rows(config), "attention.q_norm": pairs(config), "attention.k_norm": pairs(config)}


def modules(family, n_layer):
    """Iterate over (our module, its name within a block or the model, their modules)."""
    for ours, theirs in family.outer.items():
        yield ours, ours, theirs
    for i in range(n_layer):
        for ours, theirs in family.layer.items():
            yield f"blocks.{i}.{ours}", ours, [family.prefix.format(i) + name for name in theirs]


def to_ours(family, config, weights):
    """{their name: tensor} -> {our name: tensor}."""
    import torch

    permuted, made, used = orders(family, config), {}, set()
    for ours, kind, theirs in modules(family, config.n_layer):
        for end in ("weight", "bias"):
            parts = [weights[f"{name}.{end}"] for name in theirs if f"{name}.{end}" in weights]
            if not parts:
                continue
            used |= {f"{name}.{end}" for name in theirs}
            tensor = torch.cat([part.T if kind in family.transposed and part.ndim == 2 else part for part in parts])
            if kind in permuted:
                if len(tensor) != len(permuted[kind]):
                    raise UserError(f"{ours}.{end} has {len(tensor)} rows, its configuration says {len(permuted[kind])}",
                                    "config.json and weights do not belong together")
                tensor = tensor[permuted[kind]]
            made[f"{ours}.{end}"] = tensor.float().contiguous()
    left = sorted(name for name in weights if name not in used and not re.fullmatch(BUFFERS, name))
    if left:
        raise UserError(f"{left[0]} and {len(left) - 1} more of its weights are not known", "this program has no such part")
    return made


def to_theirs(family, config, weights):
    """{our name: tensor} -> {their name: tensor}; biases that theirs always have and ours lack are zero."""
    import torch

    permuted, made = orders(family, config), {}
    H, G, D = config.n_head, config.kv_heads, config.head_size
    for ours, kind, theirs in modules(family, config.n_layer):
        for end in ("weight", "bias"):
            tensor = weights.get(f"{ours}.{end}")
            if tensor is None and end == "bias" and family.biased and kind not in ("embed", "head", "position.table"):
                tensor = torch.zeros(weights[f"{ours}.weight"].size(0))
            if tensor is None:
                continue
            if kind in permuted:
                tensor = tensor[permuted[kind].argsort()]
            sizes = {1: [tensor.size(0)], 2: [tensor.size(0) // 2] * 2, 3: [H * D, G * D, G * D]}[len(theirs)]
            for name, part in zip(theirs, tensor.split(sizes), strict=True):
                part = part.T if kind in family.transposed and part.ndim == 2 else part
                made[f"{name}.{end}"] = part.contiguous().clone()
    if config.tied:
        made.pop(f"{family.outer['head'][0]}.weight")
    return made


# From the outside


def read_tensors(path):
    """-> {name: tensor} of a file, without executing anything in it."""
    import torch

    try:
        if path.suffix == ".safetensors":
            from safetensors.torch import load_file

            return load_file(path)
        content = torch.load(path, map_location="cpu", weights_only=True)
        if not isinstance(content, dict):
            raise ValueError("no dictionary")
        return content
    except Exception as error:  # either library raises many kinds for damaged files
        reason = (str(error) or type(error).__name__).splitlines()[0][:100]
        raise UserError(f"{path}: damaged, or no weights ({reason})", "download it again") from None


def read_json(path):
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
        if not isinstance(content, dict):
            raise ValueError("not an object")
        return content
    except (OSError, ValueError, RecursionError) as error:
        raise UserError(f"{path}: cannot be read ({error})", "a model's folder has a config.json and its weights") from None


def read_weights(folder):
    """-> {name: tensor} of a model's folder, in one file or several."""
    for name in ("model.safetensors", "pytorch_model.bin"):
        index = folder / f"{name}.index.json"
        if index.is_file():
            places = read_json(index).get("weight_map")
            if not isinstance(places, dict) or not all(isinstance(file, str) for file in places.values()):
                raise UserError(f"{index}: no weight_map", "download it again")
            files = sorted(set(places.values()))
            return {k: v for file in files for k, v in read_tensors(folder / file).items()}
        if (folder / name).is_file():
            return read_tensors(folder / name)
    raise UserError(f"{folder}: no weights", "wanted: model.safetensors or pytorch_model.bin, whole or in parts with an index")


def fetch(name):
    """-> the local folder of a model at the hub, downloaded where it is not there yet."""
    from huggingface_hub import snapshot_download

    if len(Path(name).parts) > 2 or Path(name).is_absolute() or name.startswith("."):  # no hub has such names
        raise UserError(f"{name}: no such folder", "give a folder with config.json and model.safetensors")
    try:
        return Path(snapshot_download(name, allow_patterns=["*.json", "*.safetensors", "merges.txt"], etag_timeout=5))
    except Exception as error:  # of the network, of the hub, or of a name that is none
        raise UserError(f"{name}: no such folder, and not available from the hub ({type(error).__name__})",
                        "give a folder with config.json and model.safetensors, or connect to the network") from None


def load(path):
    """A folder or hub name of a Hugging Face model, or nanoGPT's ckpt.pt -> (config keys, weights, tokenizer or None).

    UserError for families, settings and files that this program cannot read.
    """
    path = Path(path)
    if path.is_file():
        content = read_tensors(path)
        if not all(isinstance(content.get(key), dict) for key in ("model", "model_args")):
            raise UserError(f"{path}: not nanoGPT's checkpoint", "wanted: a file with model and model_args")
        weights = {str(name).removeprefix("_orig_mod."): tensor for name, tensor in content["model"].items()}
        return convert(path, NanoGPT(), content["model_args"], weights), None
    folder = path if path.is_dir() else fetch(str(path))
    if not (folder / "config.json").is_file():
        raise UserError(f"{folder}: no config.json in this folder", "give a folder with config.json and model.safetensors")
    theirs = read_json(folder / "config.json")
    kind = theirs.get("model_type")
    if kind not in list(FAMILIES):  # it may be of any type
        raise UserError(f"{folder}: models of type {kind} are not known", f"known: {', '.join(FAMILIES)}")
    weights = read_weights(folder)
    if "wte.weight" in weights:
        weights = {f"transformer.{name}": tensor for name, tensor in weights.items()}
    if kind == "gpt_neox" and "lm_head.weight" in weights:
        weights["embed_out.weight"] = weights.pop("lm_head.weight")
    return convert(folder, FAMILIES[kind](), theirs, weights), own_tokenizer(folder, kind)


def dense(part):
    """Whether it is a tensor of which every element is there; a small file can claim vast ones."""
    import torch

    return (isinstance(part, torch.Tensor) and part.layout is torch.strided and part.is_cpu
            and part.nbytes <= part.untyped_storage().nbytes())


def convert(path, family, theirs, weights):
    """-> (config keys, weights) of ours, of the same shapes."""
    import torch

    from checkpoints import fill
    from model import GPT

    if theirs.get("quantization_config"):
        raise UserError(f"{path}: quantized weights", "give the model in 16 or 32 bits")
    if not all(map(dense, weights.values())):
        raise UserError(f"{path}: weights that are no dense tensors", "download it again")
    try:
        values = {key: value for key, value in family.settings(theirs).items() if value is not None}
        made = to_ours(family, build(Config, values), weights)
    except KeyError as error:
        raise UserError(f"{path}: its configuration lacks {error}", "is it a whole config.json?") from None
    except UserError as error:
        raise UserError(f"{path}: {error.problem}", error.advice) from None
    except (TypeError, AttributeError, ValueError, RuntimeError, ArithmeticError) as error:
        raise UserError(f"{path}: its configuration or weights are not of this kind ({error})", "download it again") from None
    if "embed.weight" not in made:
        raise UserError(f"{path}: no token embeddings among its weights", "is it a whole language model?")
    # A file may call them tied and hold two matrices all the same.
    head = made.get("head.weight", made["embed.weight"])
    tied = theirs.get("tie_word_embeddings", family.tied) and torch.equal(head, made["embed.weight"])
    if tied:
        made["head.weight"] = made["embed.weight"]
    config = build(Config, values | {"tied": tied})
    with torch.device("meta"), warnings.catch_warnings(action="ignore"):  # nothing is copied: names and shapes are compared
        fill(GPT(config, made["embed.weight"].size(0)), made, path)
    return config.model_dump(exclude_unset=True) | {"block_size": config.block_size}, made


def own_tokenizer(folder, kind):
    """-> the tokenizer that lies in a model's folder, or None. GPT-2's is run by tiktoken."""
    import tokenizer

    if kind == "gpt2" and (folder / "vocab.json").is_file():
        from tiktoken_ext.openai_public import r50k_pat_str

        vocabulary = read_json(folder / "vocab.json")
        try:
            tokens = [b"" if word == "<|endoftext|>" else tokenizer.byte_level(word)
                      for word in sorted(vocabulary, key=vocabulary.get)]
            return tokenizer.BPE(tokens, r50k_pat_str, vocabulary.get("<|endoftext|>"))
        except (KeyError, ValueError, TypeError) as error:
            raise UserError(f"{folder / 'vocab.json'}: not a vocabulary of bytes ({error!r})", "download it again") from None
    if (folder / "tokenizer.json").is_file():
        return tokenizer.load(folder / "tokenizer.json")
    return None


def must_be_free(path, key):
    """Nothing is ever written over."""
    if path.exists() and (not path.is_dir() or any(path.iterdir())):
        raise UserError(f"{path}: exists", f"give another --{key}")


def import_model(path, options):
    """Make a run's folder of a foreign model."""
    import checkpoints
    import tokenizer
    from data.prepare import prepare

    out = Path(options.out_dir or f"out/{Path(path).stem if Path(path).is_file() else Path(path).name}")
    must_be_free(out, "out_dir")
    (values, weights), made = load(path)
    if options.tokenizer:
        made = tokenizer.load(prepare(options.dataset, options.tokenizer, 1024) / "tokenizer.json")
    if made is None:
        raise UserError(f"{path}: comes without a tokenizer", "give it: --tokenizer char, gpt2 or the path of a tokenizer.json")
    size = weights["embed.weight"].size(0)
    if made.vocab_size > size:
        raise UserError(f"{path}: {size} embeddings, and the tokenizer has {made.vocab_size} ids", "give its own --tokenizer")
    made.pad(size)
    values |= {"dataset": options.dataset, "tokenizer": str(out / "tokenizer.json"), "out_dir": str(out),
               "length_unit": min(options.length_unit, values["block_size"])}
    config = build(Config, values)
    out.mkdir(parents=True)
    tokenizer.save(made, out / "tokenizer.json")
    checkpoints.save(out / "best.pt", {"step": 0, "model": weights, "data_sha256": "", "config": config.essence()})
    (out / "config.toml").write_text(config.toml(), encoding="utf-8")
    parameters = sum(tensor.numel() for name, tensor in weights.items() if not (config.tied and name == "head.weight"))
    print(f"{out}: {config.position} positions, {parameters:,} parameters, {size:,} ids")


# To the outside


PLAIN = {"attention": "softmax", "window": None, "random_positions": None, "rope_values": False, "head_bias": False,
         "canon": None}
EXPORTS = [  # (model type, architecture, what the config must say)
    ("gpt2", "GPT2LMHeadModel", {"position": "learned", "norm": "layernorm", "activation": ("gelu", "gelu_tanh"),
                                 "qk_norm": False, "parallel_block": False, "n_kv_head": None, "head_dim": None}),
    ("gpt_neox", "GPTNeoXForCausalLM", {"position": "rope", "norm": "layernorm", "activation": ("gelu", "gelu_tanh"),
                                        "qk_norm": False, "n_kv_head": None, "head_dim": None}),
    ("llama", "LlamaForCausalLM", {"position": "rope", "norm": "rmsnorm", "activation": "swiglu", "qk_norm": False,
                                   "parallel_block": False, "rope_fraction": 1}),
    ("qwen3", "Qwen3ForCausalLM", {"position": "rope", "norm": "rmsnorm", "activation": "swiglu", "qk_norm": "weighted",
                                   "parallel_block": False, "rope_fraction": 1, "bias": False}),
]


def mismatches(config, wanted):
    """-> sentences about keys that are not as wanted."""
    wanted = {**wanted, **PLAIN, "qkv_bias": (None, config.bias)}
    found = [f"{key} = {getattr(config, key)}" for key, values in wanted.items()
             if getattr(config, key) not in (values if isinstance(values, tuple) else (values,))]
    if config.rope_scaling == "ntk" or (config.rope_scaling != "none" and config.rope_factor == "auto"):
        found.append(f"rope_scaling = {config.rope_scaling} with rope_factor = {config.rope_factor}")
    return found


def export(folder, path):
    """Write a run as a folder that transformers.AutoModelForCausalLM loads: of type gpt2, gpt_neox, llama or qwen3."""
    from safetensors.torch import save_file

    import run

    path = Path(path)
    must_be_free(path, "export")
    restored = run.restore(folder, device="cpu")
    config, weights = restored.trained, restored.model.state_dict()
    problems = {kind: mismatches(config, wanted) for kind, _, wanted in EXPORTS}
    kind, architecture, _ = min(EXPORTS, key=lambda row: len(problems[row[0]]))
    if problems[kind]:
        raise UserError(f"{folder}: not exportable; nearest is {kind}, which has no {', '.join(problems[kind])}",
                        "gpt2 (learned) and gpt_neox (rope) have layernorm and gelu, llama and qwen3 (rope) rmsnorm and swiglu")
    family = FAMILIES[kind]()
    theirs = {"architectures": [architecture], "model_type": kind, "vocab_size": weights["embed.weight"].size(0),
              "tie_word_embeddings": config.tied, "dtype": "float32", "bos_token_id": None, "eos_token_id": None,
              **family.describe(config)}
    path.mkdir(parents=True, exist_ok=True)
    save_file(to_theirs(family, config, weights), path / "model.safetensors", metadata={"format": "pt"})
    (path / "config.json").write_text(json.dumps(theirs, indent=1) + "\n", encoding="utf-8")
    print(f"{path}: {architecture}")


class Pretrained(Options):
    export: str | None = Field(None, min_length=1)
    """Folder to write a run to as a Hugging Face model; without it, a foreign model is read."""
    out_dir: str | None = Field(None, min_length=1)
    """Folder of the run that is made of a foreign model; out/<its name> unless given."""
    tokenizer: str | None = Field(None, min_length=1)
    """Its tokenizer where it comes without one: char (of the text of dataset), byte, gpt2, or the path of a tokenizer.json."""
    dataset: str = Field("stdlib", min_length=1)
    """The text on which lengths.py will evaluate it."""
    length_unit: int = Field(256, ge=4)
    """Tokens that the contexts of its length curves are multiples of; its block_size if that is less."""


@helped(Pretrained, "python pretrained.py FOLDER_OR_NAME [--out_dir RUN] | RUN --export FOLDER")
def main(argv):
    words, values = parse(argv, Pretrained)
    options = build(Pretrained, values)
    if len(words) != 1:
        raise UserError(f"{len(words)} models given", "name one; --help shows the rest")
    if options.export:
        export(words[0], options.export)
    else:
        import_model(words[0], options)
    return 0


if __name__ == "__main__":
    command(main)
