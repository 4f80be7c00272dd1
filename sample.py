"""Text from a trained model, as it is generated.

    python sample.py out/rope-1337 --prompt "def " --tokens 500 --temperature 0.8
"""
import codecs
import sys

from pydantic import Field

from config import Evaluation, run_arguments
from options import STEERING, UserError, command, helped


class Sample(Evaluation):
    prompt: str | None = None
    """Text to go on from; the beginning of a document, or a line break where the text has no documents, unless given."""
    prompt_file: str | None = None
    """A UTF-8 file to go on from, instead of prompt."""
    tokens: int = Field(300, ge=1, le=10**9)
    """Tokens to generate."""
    samples: int = Field(1, ge=1, le=4096)
    """Texts to generate, as one batch."""
    temperature: float = Field(0.8, ge=0)
    """Below 1 sharpens the distribution, above 1 flattens it; 0 takes the likeliest token every time."""
    top_k: int | None = Field(None, ge=1)
    """Choose among this many likeliest tokens."""
    top_p: float | None = Field(None, gt=0, le=1)
    """Choose among the likeliest tokens that together have this probability."""
    seed: int = Field(1337, ge=0, lt=2**63)
    """Seeds the choices."""


def choose(logits, temperature, top_k, top_p, generator):
    """logits (B, V) -> (B, 1) token ids. In float64 on the CPU: alike on every device, and no setting is too extreme."""
    import torch

    logits = logits.double().cpu()
    if not logits.isfinite().all():
        raise UserError("the model's output is not finite",
                        "its weights are damaged: take the other of --checkpoint best and last, or train it again")
    if temperature == 0:
        return logits.argmax(-1, keepdim=True)
    logits = (logits - logits.amax(-1, keepdim=True)) / temperature
    if top_k is not None and top_k < logits.size(-1):
        logits = logits.masked_fill(logits < logits.topk(top_k).values[:, -1:], -torch.inf)
    probabilities = logits.softmax(-1)
    if top_p is not None:
        ordered, order = probabilities.sort(descending=True)
        beyond = ordered.cumsum(-1) - ordered >= top_p  # the likelier ones have top_p already; the first always stays
        probabilities = probabilities.scatter(1, order, ordered.masked_fill(beyond, 0.0))
    reached = probabilities.cumsum(-1)
    drawn = torch.rand(len(logits), 1, generator=generator, dtype=torch.float64) * reached[:, -1:]
    return torch.searchsorted(reached, drawn, right=True)  # the first that reaches beyond; never one of probability 0


def stream(model, ids, tokens, temperature=1.0, top_k=None, top_p=None, generator=None):
    """Go on from ids (B, T), T >= 1, with `tokens` new ids, each (B, 1), yielded as they are chosen.

    Where positions end (learned ones), it starts again with the last half of what they reach.
    """
    import torch

    reach = model.position.reach

    def restart(ids):
        size = min(reach, ids.size(1) + tokens)
        return model.past(size), model.position.random_subset(size, 0, ids.device), ids

    past, pos, new = restart(ids if ids.size(1) <= reach else ids[:, -(reach // 2):])
    for _ in range(tokens):
        if past[0].seen + new.size(1) > reach:
            past, pos, new = restart(ids[:, -(reach // 2):])
        with torch.inference_mode():
            logits = model.head(model.hidden(new, pos, past)[:, -1]).float()
            new = choose(logits, temperature, top_k, top_p, generator).to(ids.device)
            ids = torch.cat((ids, new), 1)
        yield new


def starting_text(options):
    if options.prompt_file is None:
        return options.prompt
    if options.prompt is not None:
        raise UserError("prompt and prompt_file are both given", "give one of them")
    try:
        with open(options.prompt_file, encoding="utf-8-sig") as file:  # line ends become "\n", as in prepared text
            return file.read()
    except OSError as error:
        raise UserError(f"prompt_file = {options.prompt_file}: {error.strerror}", "give the path of a text file") from None
    except UnicodeDecodeError as error:
        raise UserError(f"prompt_file = {options.prompt_file}: not UTF-8", str(error)) from None


def encode_start(prompt, tokenizer):
    """-> ids of the prompt, or of the start of a document where that has none."""
    if ids := [int(i) for i in tokenizer.encode(prompt or "")]:
        return ids
    if tokenizer.separator is not None:
        return [tokenizer.separator]
    return [tokenizer.tokens.index(b"\n") if b"\n" in tokenizer.tokens else 0]


@helped(Sample, 'python sample.py RUN [--prompt "..."] [--key value ...]')
def main(argv):
    folder, options = run_arguments(argv, Sample)
    prompt = starting_text(options)
    import torch  # takes seconds to import; --help and refusals do without

    import run

    restored = run.restore(folder, options.checkpoint, **options.changes())
    model, tokenizer = restored.model, restored.tokenizer
    start = encode_start(prompt, tokenizer)
    device = model.embed.weight.device
    ids = torch.tensor([start] * options.samples, device=device)
    generator = torch.Generator().manual_seed(options.seed)
    # The first text appears as it grows; a character may span tokens, so bytes are decoded as they complete it.
    decoder, texts = codecs.getincrementaldecoder("utf-8")(errors="replace"), [[] for _ in range(options.samples)]
    shown = STEERING if sys.stdout.isatty() else {}
    print((prompt or "").translate(shown), end="", flush=True)
    for new in stream(model, ids, options.tokens, options.temperature, options.top_k, options.top_p, generator):
        new = new[:, 0].tolist()
        for text, token in zip(texts, new):
            text.append(token)
        print(decoder.decode(tokenizer.decode_bytes(new[:1])).translate(shown), end="", flush=True)
    print(decoder.decode(b"", final=True))
    for text in texts[1:]:
        print(f"---------------\n{prompt or ''}{tokenizer.decode(text)}".translate(shown))
    return 0


if __name__ == "__main__":
    command(main)
