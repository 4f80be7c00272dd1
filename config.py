"""What a run is: one flat, validated config.

    python train.py configs/rope.toml configs/my_changes.toml --position learned --learning_rate=3e-4 --no_bias

Files and the command line are merged, the later wins; options.py has the grammar. Plain data: no torch.
"""
import copy
import hashlib
import json
import re
from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field, create_model, model_validator

from options import Options, UserError, build, nearest, parse, read_toml

Auto = Literal["auto"]

# The parameters each rope scaling takes beside the factor, as in Hugging Face's `rope_parameters`; rope.SCALINGS has
# the functions, and a test holds the two equal.
SCALING_PARAMETERS = {
    "none": (),
    "linear": (),
    "ntk": (),
    "dynamic": (),
    "yarn": ("beta_fast", "beta_slow", "attention_factor", "mscale", "mscale_all_dim", "truncate"),
    "llama3": ("low_freq_factor", "high_freq_factor"),
    "longrope": ("short_factor", "long_factor", "attention_factor"),
}
REQUIRED = {  # those of them without a default, and what they are like
    **dict.fromkeys(("low_freq_factor", "high_freq_factor"), "both; Llama 3.1 has 1 and 4"),
    **dict.fromkeys(("short_factor", "long_factor"), "both, a number for each plane"),
}

# Keys that may differ when a run is continued: they change what is written or when it stops, and of numbers the rounding.
NEUTRAL = ("out_dir", "overwrite", "log_interval", "checkpoint_interval", "stop_at", "parallel", "wandb", "wandb_project",
           "wandb_group")


class Config(Options):
    # ---- text
    dataset: str = Field("stdlib", min_length=1)
    """A name data/prepare.py knows (stdlib, shakespeare, enwik8, ...), the path of a UTF-8 text file or folder, or a task with
    an answer: task:copy, reverse, addition, parity, sort, passkey (tasks.py)."""
    tokenizer: str = Field("bpe", min_length=1)
    """char, byte, bpe (trained on the training split), the name of a tiktoken encoding such as gpt2, or a tokenizer.json."""
    vocab_size: int = Field(1024, ge=257, le=1_000_000)
    """Size of the vocabulary that tokenizer = "bpe" trains; the other tokenizers bring their own."""

    # ---- model
    n_layer: int = Field(4, ge=1, le=1000)
    """Number of transformer blocks."""
    n_head: int = Field(4, ge=1, le=1000)
    """Attention heads in each block."""
    n_embd: int = Field(128, ge=1, le=65536)
    """Width of the residual stream."""
    block_size: int = Field(256, ge=4, le=2**24)
    """Tokens in a training window: the training length."""
    n_kv_head: int | None = Field(None, ge=1, le=1000)
    """Heads of keys and values, each shared by several heads of queries (grouped-query attention); n_head unless given."""
    head_dim: int | None = Field(None, ge=1, le=65536)
    """Dimensions of each head; n_embd / n_head unless given."""
    mlp_hidden: int | None = Field(None, ge=1, le=2**20)
    """Width of the MLP; 4 n_embd, for swiglu two thirds of it, unless given."""
    attention: Literal["softmax", "linear"] = "softmax"
    """linear: cost grows with the length instead of its square (RoFormer, section 3.3)."""
    window: int | None = Field(None, ge=1, le=10**12)
    """Each token sees this many tokens, itself included; all before it unless given."""
    dropout: float = Field(0.0, ge=0, lt=1)
    """Share of activations dropped in training."""
    bias: bool = False
    """Biases in linear layers and layer norms."""
    qkv_bias: bool | None = None
    """Biases of queries, keys and values; as bias unless given."""
    head_bias: bool = False
    """Bias of the output logits."""
    norm: Literal["layernorm", "rmsnorm"] = "layernorm"
    """Normalization before attention and MLP."""
    norm_eps: float = Field(1e-5, gt=0, le=1)
    """What norms add to the variance."""
    activation: Literal["gelu", "gelu_tanh", "relu2", "swiglu"] = "gelu"
    """Nonlinearity of the MLP; gelu_tanh is GPT-2's approximation, relu2 the square of relu."""
    qk_norm: bool | Literal["weighted"] = False
    """Normalize each head's queries and keys before they are rotated; weighted: with learned weights."""
    parallel_block: bool = False
    """Attention and MLP read the same input instead of one after the other."""
    canon: int | None = Field(None, ge=2, le=64)
    """Canon layers: before attention and MLP, each token is mixed with those before it, so many in all; none unless given."""
    tied: bool = True
    """One matrix for token embeddings and output logits."""
    embedding_std: float = Field(0.02, gt=0, le=100)
    """Initial standard deviation of token embeddings and of positions added to them."""

    # ---- position
    position: Literal["none", "learned", "sinusoidal", "rope", "alibi", "t5", "kerple", "fire"] = "rope"
    """How the model learns where a token stands."""
    learned_extension: Literal["none", "interpolate"] = "none"
    """learned: end at block_size, or resample the table to longer windows."""
    t5_buckets: int = Field(32, ge=4, le=65536)
    """t5: learned numbers for each head."""
    t5_max_distance: int = Field(128, ge=4, le=10**12)
    """t5: all distances from here on share the last bucket."""
    kerple_kernel: Literal["log", "power"] = "log"
    """kerple: how scores fall with distance."""
    fire_hidden: int = Field(32, ge=1, le=65536)
    """fire: width of the network that maps distances to scores."""
    fire_threshold: float | None = Field(None, gt=0, le=1e9)
    """fire: where the threshold that it learns begins; block_size / 4 unless given."""
    random_positions: int | None = Field(None, ge=4, le=2**24)
    """Train each batch on a sorted random choice of so many positions instead of 0, 1, 2 ... (Ruoss et al. 2023)."""
    rope_base: float = Field(10000.0, gt=1, le=1e12)
    """rope: plane i of a head turns by rope_base^(-2i/d) radians a position."""
    rope_fraction: float = Field(1.0, gt=0, le=1)
    """rope: share of each head's dimensions that is rotated; the rest carries no position."""
    rope_values: bool = False
    """rope: turn values as well, an ablation."""
    rope_scaling: Literal["none", "linear", "ntk", "dynamic", "yarn", "llama3", "longrope"] = "none"
    """rope: how the planes are slowed for windows longer than rope_original_context."""
    rope_factor: Auto | Annotated[float, Field(ge=1, le=1e6)] = "auto"
    """rope: the stretch, or auto = max(1, evaluated length / rope_original_context), which is 1 at the training length."""
    rope_original_context: int | None = Field(None, ge=1, le=10**12)
    """rope: the training length that scalings refer to; block_size unless given."""
    beta_fast: float | None = Field(None, ge=1e-6, le=1e6)
    """yarn: planes that turn more often than this within the original context stay as they are (32 unless given)."""
    beta_slow: float | None = Field(None, ge=1e-6, le=1e6)
    """yarn: planes that turn less often than this are stretched by the whole factor (1 unless given)."""
    attention_factor: float | None = Field(None, gt=0, le=1e6)
    """yarn, longrope: multiplies queries and keys; follows from the factor unless given."""
    mscale: float | None = Field(None, gt=0, le=1e6)
    """yarn: with mscale_all_dim, attention_factor is (0.1 mscale ln(factor) + 1) / (0.1 mscale_all_dim ln(factor) + 1)."""
    mscale_all_dim: float | None = Field(None, gt=0, le=1e6)
    """yarn: see mscale."""
    truncate: bool | None = None
    """yarn: the ramp begins and ends at whole planes (true unless given)."""
    low_freq_factor: float | None = Field(None, gt=0, le=1e6)
    """llama3: planes that turn less often than this within the original context are stretched by the whole factor."""
    high_freq_factor: float | None = Field(None, gt=0, le=1e6)
    """llama3: planes that turn more often than this within the original context stay as they are."""
    short_factor: tuple[Annotated[float, Field(gt=0, le=1e6)], ...] | None = None
    """longrope: how much each plane is slowed up to the original context."""
    long_factor: tuple[Annotated[float, Field(gt=0, le=1e6)], ...] | None = None
    """longrope: how much each plane is slowed beyond the original context."""

    # ---- training
    init_from: str | None = Field(None, min_length=1)
    """A run's folder to begin from: its best weights, and its text, model and positions where these are not given anew."""
    optimizer: Literal["adamw", "muon"] = "muon"
    """adamw for everything, or muon for the matrices of the blocks and adamw for the rest."""
    batch_size: int = Field(8, ge=1, le=2**20)
    """Windows in a micro-batch."""
    gradient_accumulation_steps: int = Field(1, ge=1, le=2**20)
    """Micro-batches in an iteration."""
    max_iters: int = Field(400, ge=1, le=10**12)
    """Iterations in the run."""
    learning_rate: float = Field(0.01, gt=0, le=1e6)
    """Highest learning rate of adamw; on its own, with optimizer = "adamw", it wants about 0.003."""
    muon_learning_rate: float = Field(0.08, gt=0, le=1e6)
    """Highest learning rate of muon; it follows the same schedule."""
    muon_momentum: float = Field(0.9, ge=0, lt=1)
    """Momentum of muon; short runs want less than the usual 0.95."""
    muon_heads: bool = False
    """muon takes each head of queries, keys and values as a matrix of its own, which is cheaper."""
    min_lr: float = Field(0.0, ge=0)
    """Where learning_rate ends."""
    lr_decay: Literal["cosine", "linear"] = "linear"
    """Shape of the decay to min_lr."""
    decay_fraction: float = Field(1.0, gt=0, le=1)
    """Last share of the run over which the learning rate decays; 1 = from the end of the warm-up."""
    warmup_iters: Auto | Annotated[int, Field(ge=0)] = "auto"
    """Iterations over which the learning rate rises; auto = 20, or half of a run shorter than 40."""
    weight_decay: float = Field(0.1, ge=0, le=1e6)
    """Weight decay of matrices; vectors and position parameters get none."""
    beta1: float = Field(0.9, ge=0, lt=1)
    """First moment's decay in adamw."""
    beta2: float = Field(0.99, ge=0, lt=1)
    """Second moment's decay in adamw."""
    grad_clip: float = Field(1.0, ge=0)
    """Largest norm of the gradient; 0 = no clipping."""
    seed: int = Field(1337, ge=0, lt=2**31)
    """Seeds initial weights, batches, dropout, each from a generator of its own."""
    target_val_loss: float | None = Field(None, gt=0)
    """Stop at the first evaluation whose loss over the whole validation split is at most this."""
    stop_at: int | None = Field(None, ge=1)
    """Stop after this iteration, saved, to be continued later."""

    # ---- evaluation
    eval_interval: int = Field(100, ge=1)
    """Iterations between evaluations."""
    eval_windows: int = Field(64, ge=2)
    """Fixed validation windows for each of them; the last evaluation takes the whole split."""
    log_interval: int = Field(10, ge=1)
    """Iterations between lines of the log."""
    checkpoint_interval: int = Field(100, ge=1)
    """Iterations between writings of last.pt."""
    length_interval: int = Field(0, ge=0)
    """Iterations between length curves; 0 = at the end only."""
    length_windows: int = Field(64, ge=2)
    """Windows, or problems of a task, behind every point of a length curve."""
    length_unit: int | None = Field(None, ge=4, le=2**24)
    """Tokens that its contexts are multiples of; block_size, or that of the run in init_from, unless given."""

    # ---- machine
    device: str = Field("auto", pattern=r"^(auto|cpu|mps|cuda(:\d+)?)$")
    """auto, cpu, cuda, cuda:N or mps."""
    dtype: Literal["auto", "float32", "bfloat16"] = "auto"
    """Precision of training (autocast); evaluation is always in float32. auto = bfloat16 on CUDA; a CPU takes it only if
    asked to, and only where the processor computes in it."""
    compile: Auto | bool = "auto"
    """Compile the blocks with torch.compile; auto = on CUDA, and on CPUs for runs long enough to gain from it."""
    parallel: Literal["auto", "none", "ddp", "fsdp"] = "auto"
    """How processes started by torchrun share the work: each holds the whole model (ddp) or, where that is beyond one device, a
    part of each matrix (fsdp); auto = ddp."""
    threads: int = Field(0, ge=0, le=1024)
    """CPU threads; 0 = as many as torch takes, one for each core."""

    # ---- results
    out_dir: str | None = Field(None, min_length=1)
    """The run's folder; out/<config's name>[-key=value ...]-<seed> unless given."""
    overwrite: bool = Field(False, exclude=True)
    """Delete the run in out_dir first."""
    wandb: Literal["offline", "online", "disabled"] = "offline"
    """offline keeps everything on this machine."""
    wandb_project: str = Field("positions", min_length=1)
    """Project in wandb."""
    wandb_group: str | None = Field(None, min_length=1)
    """Group in wandb; the encoding unless given."""

    @model_validator(mode="after")
    def consistent(self):
        """Refuse what each key alone cannot show to be wrong."""
        if self.head_dim is None and self.n_embd % self.n_head:
            raise contradiction(self, "n_embd", f"must be divisible by n_head = {self.n_head}, or give head_dim")
        if self.n_head % self.kv_heads:
            raise contradiction(self, "n_kv_head", f"must divide n_head = {self.n_head}")
        if self.attention == "linear" and self.window:
            raise contradiction(self, "window", 'needs attention = "softmax": a sum over the past cannot be cut')
        if self.position == "sinusoidal" and self.n_embd % 2:
            raise contradiction(self, "n_embd", "must be even for sinusoidal positions: sines and cosines come in pairs")
        if self.learned_extension != "none" and self.position != "learned":
            raise contradiction(self, "learned_extension", f'needs position = "learned", and it is "{self.position}"')
        if self.t5_max_distance <= self.t5_buckets // 2:
            raise contradiction(self, "t5_max_distance", f"must be above t5_buckets / 2 = {self.t5_buckets // 2}")
        if self.random_positions:
            if self.random_positions < self.block_size:
                raise contradiction(self, "random_positions", f"must be at least block_size = {self.block_size}")
            if self.learned_extension != "none":
                raise contradiction(self, "learned_extension", "random positions have a table of their own length")
            if self.rope_scaling != "none":
                raise contradiction(self, "rope_scaling", "random positions extend the training length by themselves")
        self.consistent_rope()
        if self.warmup >= self.max_iters:
            raise contradiction(self, "warmup_iters", f"must be below max_iters = {self.max_iters}")
        if self.min_lr > self.learning_rate:
            raise contradiction(self, "min_lr", f"must be at most learning_rate = {self.learning_rate}")
        return self

    def consistent_rope(self):
        """Refuse what contradicts itself in the rope_... keys and the parameters of scalings."""
        if self.position == "rope":
            if self.head_size % 2:
                key = "head_dim" if self.head_dim else "n_embd"
                raise contradiction(self, key, f"gives heads of {self.head_size}, and rope turns pairs of dimensions")
            if self.rope_dim % 2 or self.rope_dim == 0:
                raise contradiction(self, "rope_fraction",
                                    f"rotates {self.rope_dim} of {self.head_size} dimensions; must be an even number above 0")
            if self.rope_scaling in ("ntk", "dynamic") and self.rope_dim < 4:
                raise contradiction(self, "rope_scaling", f"divides by rotary dimension - 2, and that is {self.rope_dim}")
        for key, neutral in (("rope_scaling", ("none",)), ("rope_values", (False,)), ("rope_factor", ("auto", 1))):
            if self.position != "rope" and getattr(self, key) not in neutral:
                raise contradiction(self, key, f'needs position = "rope", and it is "{self.position}"')
        if self.rope_scaling == "none" and self.rope_factor not in ("auto", 1):
            raise contradiction(self, "rope_factor", f"needs a rope_scaling: {', '.join(list(SCALING_PARAMETERS)[1:])}")
        if self.rope_scaling == "dynamic" and self.rope_factor == "auto":
            raise contradiction(self, "rope_factor", "dynamic follows the length by itself, twice is too much: give a number")
        taken = SCALING_PARAMETERS[self.rope_scaling]
        for name in sorted(set().union(*SCALING_PARAMETERS.values()) - set(taken)):
            if getattr(self, name) is not None:
                takers = ", ".join(s for s, p in SCALING_PARAMETERS.items() if name in p)
                raise contradiction(self, name, f"is a parameter of rope_scaling = {takers}; here it is {self.rope_scaling}")
        missing = [name for name in taken if name in REQUIRED and getattr(self, name) is None]
        if missing:
            raise UserError(f"{', '.join(missing)}: missing",
                            f"rope_scaling = {self.rope_scaling} needs {REQUIRED[missing[0]]}")
        if (self.beta_fast or 32) <= (self.beta_slow or 1):
            raise contradiction(self, "beta_fast", f"must be above beta_slow = {self.beta_slow or 1}")
        if (self.mscale is None) != (self.mscale_all_dim is None):
            raise contradiction(self, "mscale", "mscale and mscale_all_dim only work together")
        if self.mscale and self.attention_factor:
            raise contradiction(self, "mscale", "attention_factor is what it is for, and that is given")
        if self.rope_scaling == "llama3" and self.low_freq_factor >= self.high_freq_factor:
            raise contradiction(self, "low_freq_factor", f"must be below high_freq_factor = {self.high_freq_factor}")
        for name in ("short_factor", "long_factor"):
            if (factors := getattr(self, name)) and len(factors) != self.rope_dim // 2:
                raise UserError(f"{name}: {len(factors)} numbers", f"one for each of the {self.rope_dim // 2} planes")
        if self.rope_scaling == "longrope" and self.original_context < 2:
            raise contradiction(self, "rope_original_context", "longrope divides by its logarithm")
        sharpens = self.rope_scaling in ("yarn", "longrope") and self.attention_factor != 1
        if sharpens and self.attention == "linear":
            raise contradiction(self, "rope_scaling", "sharpens scores; linear attention has none: give attention_factor = 1")

    @property
    def has_answers(self):
        """Whether the data set is a task with an answer (tasks.py), and not a text."""
        return self.dataset.startswith("task:")

    @property
    def head_size(self):
        """Dimensions of each head."""
        return self.head_dim or self.n_embd // self.n_head

    @property
    def kv_heads(self):
        """Heads of keys and values."""
        return self.n_kv_head or self.n_head

    @property
    def mlp_width(self):
        """Width of the MLP. swiglu has three matrices where the others have two; two thirds keep the parameters equal."""
        return self.mlp_hidden or (8 * -(-self.n_embd // 3) if self.activation == "swiglu" else 4 * self.n_embd)

    @property
    def rope_dim(self):
        """Rotated dimensions of each head."""
        return int(self.rope_fraction * self.head_size)

    @property
    def warmup(self):
        """Iterations over which the learning rate rises."""
        return min(20, self.max_iters // 2) if self.warmup_iters == "auto" else self.warmup_iters

    @property
    def original_context(self):
        """The training length that rope scalings refer to."""
        return self.rope_original_context or self.block_size

    @property
    def unit(self):
        """Tokens that the contexts of length curves are multiples of."""
        return self.length_unit or self.block_size

    def factor(self, length):
        """The stretch that rope_factor comes to for a window of `length` tokens."""
        return max(1.0, length / self.original_context) if self.rope_factor == "auto" else self.rope_factor

    def applied(self, length):
        """The stretch that positions really get in a window of `length` tokens; 1 without a scaling."""
        if self.learned_extension == "interpolate":
            return max(1.0, length / self.block_size)
        if self.rope_scaling == "dynamic":
            return max(1.0, self.rope_factor * length / self.original_context - (self.rope_factor - 1))
        if self.rope_scaling == "longrope" and length <= self.original_context:
            return 1.0
        return 1.0 if self.rope_scaling == "none" else self.factor(length)

    def reading(self):
        """How positions are read in an evaluation, as records of length curves say it: -> {"scaling", "factor", "settings"}."""
        if self.learned_extension != "none":
            return {"scaling": self.learned_extension, "factor": "auto", "settings": {}}
        if self.rope_scaling == "none":
            return {"scaling": "none", "factor": 1.0, "settings": {}}
        keys = set(SCALING_PARAMETERS[self.rope_scaling])
        if self.original_context != self.unit:  # otherwise it is what a reader expects
            keys.add("rope_original_context")
        return {"scaling": self.rope_scaling, "factor": self.rope_factor,
                "settings": self.model_dump(include=keys, exclude_none=True)}

    def essence(self):
        """-> {key: value} of all that decides what is computed; keys without a value are left out."""
        return self.model_dump(exclude_none=True, exclude=set(NEUTRAL))

    def toml(self):
        """The effective config as text that `read_toml` reads again; keys without a value are left out."""
        text = "".join(f"{key} = {json.dumps(value, ensure_ascii=False)}\n"
                       for key, value in self.model_dump(exclude_none=True).items())
        return text.replace("\x7f", "\\u007f")  # the one character that JSON allows in a string and TOML does not


NAMES = list(Config.model_fields)
MODEL = NAMES[NAMES.index("n_layer"):NAMES.index("init_from")]  # what decides what the weights of a model mean

# Keys that may be given anew when a trained model is evaluated: how positions are read, and where it computes.
READING = ("learned_extension", "rope_scaling", "rope_factor", "rope_original_context",
           *dict.fromkeys(sum(SCALING_PARAMETERS.values(), ())), "device")


class Checkpoint(Options):
    """Which weights of a run are evaluated, and which of its keys are read in place of the trained ones."""

    checkpoint: Literal["best", "last"] = "best"
    """Which weights of the run."""

    def changes(self):
        """-> {key: value} of READING that were given."""
        return self.model_dump(include=set(READING), exclude_none=True)


def fields(keys, optional=False):
    """-> the Config's fields of these names for pydantic's create_model, with None as the default if they are optional."""
    chosen = {key: copy.deepcopy(Config.model_fields[key]) for key in keys}
    if optional:
        for field in chosen.values():
            field.default = None
    return {key: (field.annotation | None if optional else field.annotation, field) for key, field in chosen.items()}


Evaluation = create_model("Evaluation", __base__=Checkpoint, **fields(READING, optional=True))  # lengths.py, sample.py


def contradiction(config, key, why):
    return UserError(f"{key} = {getattr(config, key)}", why)


def read_config(folder):
    """-> the Config that a run's folder was trained with. UserError, with the nearest run, if there is none."""
    folder = Path(folder)
    if not (folder / "config.toml").is_file():
        if folder.is_file():
            raise UserError(f"{folder}: a file, not a run's folder", "name the folder, such as out/rope-1337")
        below, beside = ([p.parent.name for p in sorted(place.glob("*/config.toml"))] for place in (folder, folder.parent))
        advice = nearest(folder.name, beside) if beside else "train one first"
        raise UserError(f"{folder}: no run in this folder", f"below it are {', '.join(below[:9])}" if below else advice)
    try:
        return build(Config, read_toml(folder / "config.toml"))
    except UserError as error:
        raise UserError(f"{folder / 'config.toml'}: {error.problem}", error.advice) from None


def refuse_difference(path, before, now, free=NEUTRAL):
    """A run is continued only under its own config {key: value}; `free` keys may differ, and max_iters may grow."""
    for key in Config.model_fields:
        old, new = before.get(key), getattr(now, key)
        if now.init_from and key in ("init_from", "tokenizer"):  # known by its name, wherever its folder lies now
            old, new = Path(str(old)).name, Path(str(new)).name
        if key not in free and old != new and not (key == "max_iters" and isinstance(old, int) and new > old):
            raise UserError(f"{path}: holds a run with {key} = {old}, not {new}",
                            "give another --out_dir, or --overwrite to delete that run")


def with_changes(trained, changes):
    """-> {key: value} of a trained Config in which some are changed; another scaling starts from its own defaults."""
    values = trained.model_dump(exclude_none=True)
    if changes.get("rope_scaling", trained.rope_scaling) != trained.rope_scaling:
        for key in {"rope_factor", *sum(SCALING_PARAMETERS.values(), ())} & values.keys():
            del values[key]
    return values | changes


def inherited(folder, changes, trained=None):
    """-> the keys of a run's text, model and positions, changed, for a run that begins from its weights.

    trained: its Config, where the folder does not hold it yet.
    """
    trained, folder = trained or read_config(folder), Path(folder)
    given = {"tokenizer": str(folder / "tokenizer.json"), "length_unit": trained.unit, **changes, "init_from": str(folder)}
    scaled = given.get("rope_scaling", trained.rope_scaling) != "none"
    given = {"rope_original_context": trained.original_context if scaled else None, **given}
    if trained.position == "fire":  # its threshold goes with the weights, not with the new block_size
        given = {"fire_threshold": trained.fire_threshold or trained.block_size / 4, **given}
    keys = [*NAMES[:NAMES.index("init_from")], *given]
    return {k: v for k, v in with_changes(trained, given).items() if v is not None and k in keys}


def load(argv):
    """Config files and command line -> Config, with out_dir filled in."""
    files, changes = parse(argv, Config)
    values = {}
    for file in files:
        values |= read_toml(file)
    values |= changes
    if isinstance(values.get("init_from"), str) and values["init_from"]:
        values = inherited(values["init_from"], values)
    config = build(Config, values)
    if config.out_dir is None:
        name = "+".join(Path(f).stem for f in files) or config.position
        shown = {k: v for k, v in changes.items() if k not in (*NEUTRAL, "seed")}
        name += "".join(f"-{k}={Path(v).name if k in ('dataset', 'init_from') else v}" for k, v in sorted(shown.items()))
        if len(name.encode("utf-8", "replace")) > 160:  # file systems end names at 255 bytes
            name = f"{name[:35]}-{hashlib.sha256(name.encode('utf-8', 'replace')).hexdigest()[:12]}"
        folder = re.sub(r"[^\w.=+-]", "_", f"{name}-{config.seed}")
        config = config.model_copy(update={"out_dir": f"out/{folder}"})
    return config


def run_arguments(argv, model):
    """The command line of a program about one run: -> (its folder, options)."""
    words, values = parse(argv, model)
    if len(words) != 1:
        raise UserError(f"{len(words)} run folders given", "name one, such as out/rope-1337; --help shows the rest")
    return words[0], build(model, values)
