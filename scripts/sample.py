"""Generate text from a checkpoint: `python -m scripts.sample checkpoint=PATH prompt="To be, or not to be"`.

Without `checkpoint` the newest run is used. `prompts=FILE` continues each line of a file, in batches. Without a prompt,
prompts are read from the terminal, one after the other, until an empty line; without a terminal a new document begins.
A single text is streamed as it is drawn; several are printed in order, each when it has ended. The prompt stands in
[brackets]. The last line is one JSON object.
"""

import codecs
import json
import sys
import time
from collections import defaultdict
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

import tiktoken

from conf.program import program
from model import GPT, generate
from model.cache import EIGHT_BIT_DTYPES
from model.sampling import check_sampling, marked
from scripts.bench.report import refuse_out_of_range, refuse_unknown
from training.checkpoint import open_checkpoint
from training.hardware import HardwareConfig, set_up
from training.trained import given_or_newest, load_trained


@dataclass
class SampleModelConfig:
    attention: str = "auto"  # auto | flash | naive | tiled | sdpa; all else is the checkpoint's


@dataclass
class SampleSettings:
    checkpoint: str | None = None  # a checkpoint or a run's folder; null: the newest under runs/
    prompt: str = ""  # text to continue, as typed; empty: read from the terminal, or else a new document
    prompts: str | None = None  # a UTF-8 file of prompts, one a line; /dev/stdin: a pipe
    num_samples: int = 1  # continuations of each prompt
    max_new_tokens: int = 256  # length of a continuation; the end-of-text token ends it earlier
    temperature: float = 0.8  # divides the logits; 0: always the likeliest token
    top_k: int | None = 200  # only the k likeliest tokens; null: all
    top_p: float | None = None  # only the likeliest tokens that make up this probability; null: all
    seed: int = 0  # of the draws, the same for each prompt
    batch_size: int = 64  # texts that are continued at a time
    cache: str | None = None  # keys and values on a GPU: null: as attention | int8 | e4m3, half the memory
    model: SampleModelConfig = field(default_factory=SampleModelConfig)
    hardware: HardwareConfig = field(default_factory=HardwareConfig)

    def __post_init__(self) -> None:
        refuse_out_of_range("", self, "num_samples", "max_new_tokens", "batch_size")
        refuse_unknown("", self, cache=EIGHT_BIT_DTYPES)
        check_sampling(self.temperature, self.top_k, self.top_p)
        if not 0 <= self.seed < 1 << 64:
            raise ValueError(f"seed={self.seed} must lie between 0 and 2^64 - 1")
        if self.hardware.compile:
            raise ValueError("hardware.compile=true: no part of sampling is compiled; leave it out")
        if self.hardware.cuda_graphs is not None:
            raise ValueError(f"hardware.cuda_graphs={self.hardware.cuda_graphs} is of training steps; leave it out")
        self.prompt = as_utf8(self.prompt)
        if self.prompts == "":
            raise ValueError("prompts is empty; give a file with a prompt a line, or leave it out")
        if self.prompt and self.prompts:
            raise ValueError(f"prompts={self.prompts} is one thing and prompt={self.prompt} another; give one of them")

    def texts(self) -> list[str]:
        """The prompts, at least one."""
        if self.prompts is None:
            return [self.prompt]
        try:
            # not splitlines, which cuts at U+2028 and form feeds too; -sig: without the mark that Windows puts first
            lines = Path(self.prompts).read_text(encoding="utf-8-sig").split("\n")
        except UnicodeDecodeError as error:
            raise ValueError(
                f"prompts={self.prompts} is not UTF-8 ({error.reason} at byte {error.start}); convert it with iconv"
            ) from error
        if prompts := [line for line in lines if line.strip()]:
            return prompts
        raise ValueError(f"prompts={self.prompts} has no line with text; write one prompt a line")


def as_utf8(typed: str) -> str:
    """Decode what was typed as UTF-8: Python turns bytes that the locale lacks (LC_ALL=C) into half surrogate pairs.

    Raises ValueError where they are not UTF-8 either: the tokenizer would read U+FFFD in their place.
    """
    found = typed.encode(errors="surrogateescape")
    try:
        return found.decode()
    except UnicodeDecodeError as error:
        place = len(found[: error.start].decode())
        raise ValueError(f"the prompt {typed!r} is not UTF-8 at character {place}; type it as UTF-8") from error


@program("tool", SampleSettings)
def main(settings: SampleSettings, run_dir: Path) -> None:
    hardware = set_up(settings.hardware)
    checkpoint = open_checkpoint(given_or_newest(settings.checkpoint))
    model, tokenizer = load_trained(checkpoint, hardware.device, hardware.dtype, attention=settings.model.attention)
    if model.config.mask is not None:
        raise ValueError(
            f"{checkpoint.path} was trained with model.mask={model.config.mask}, of which nothing can be kept between "
            "tokens, so that it generates no text; train again with model.mask=null"
        )
    if settings.cache and model.config.attention != "flash":
        raise ValueError(f"cache={settings.cache} needs model.attention=flash, which runs on a GPU; leave it out")
    nothing_given = not settings.prompt and settings.prompts is None
    asked = typed_prompts(tokenizer) if nothing_given and sys.stdin and sys.stdin.isatty() else [settings.texts()]
    print(f"{checkpoint.path} after {checkpoint.step} steps, seed {settings.seed}\n", file=sys.stderr)
    drawn, seconds = 0, 0.0
    for texts in asked:
        started = time.perf_counter()
        with hardware.autocast():
            drawn += continue_texts(model, texts, tokenizer, settings)
        seconds += time.perf_counter() - started
    result = {
        "checkpoint": str(checkpoint.path),
        "step": checkpoint.step,
        "tokens": drawn,
        "tokens_per_second": round(drawn / max(seconds, 1e-9), 1),
    }
    print(json.dumps(result))


def typed_prompts(tokenizer: tiktoken.Encoding) -> Iterator[list[str]]:
    """Yield each typed line, as a list of one, until an empty line or the end of the input.

    A line that the tokenizer cannot encode is refused, and the next one is read.
    """
    with suppress(ImportError):
        import readline  # noqa: F401  # lines of any length, where a terminal cuts at 4,095 bytes, and a history
    print("a prompt a line; an empty line ends", file=sys.stderr)
    while True:
        question = "> " if sys.stdout and sys.stdout.isatty() else ""  # a pipe gets the texts and the JSON object alone
        if not question:
            print("> ", end="", file=sys.stderr, flush=True)
        try:
            line = input(question)
        except EOFError:
            print(file=sys.stderr)  # ends the line of the question
            return
        if not line:
            return
        try:
            line = as_utf8(line)
            tokenizer.encode_ordinary(line)
        except ValueError as error:
            print(f"error: {error}", file=sys.stderr)
            continue
        yield [line]


def continue_texts(model: GPT, texts: list[str], tokenizer: tiktoken.Encoding, settings: SampleSettings) -> int:
    """Print each text and what follows it; return how many tokens were drawn."""
    prompts = [tokenizer.encode_ordinary(text) or [tokenizer.eot_token] for text in texts]
    for text, prompt in zip(texts, prompts, strict=True):
        if len(prompt) > model.seq_len:
            shown = text if len(text) <= 40 else f"{text[:40]}..."
            said = f"the prompt {shown!r} has {len(prompt):,} tokens"
            print(f"{said}; the model reads the last {model.seq_len:,} of them", file=sys.stderr)
    steps = generate(  # refuses before anything is printed
        model,
        prompts,
        max_new_tokens=settings.max_new_tokens,
        temperature=settings.temperature,
        top_k=settings.top_k,
        top_p=settings.top_p,
        seed=settings.seed,
        num_samples=settings.num_samples,
        stop_token=tokenizer.eot_token,
        batch_size=settings.batch_size,
        cache_dtype=EIGHT_BIT_DTYPES.get(settings.cache),
    )
    count = len(texts) * settings.num_samples
    # a single text is streamed: a character whose bytes are not complete waits for the rest
    stream = codecs.getincrementaldecoder("utf-8")(errors="replace") if count == 1 else None
    if stream:
        print(marked(texts[0]), end="", flush=True)

    def ended(tokens: list[int]) -> bool:
        return len(tokens) == settings.max_new_tokens or tokens[-1:] == [tokenizer.eot_token]

    samples: defaultdict[int, list[int]] = defaultdict(list)  # being drawn, or waiting to be printed in order
    printed = drawn = 0
    for step in steps:
        for number, token in step:
            samples[number].append(token)
            drawn += 1
            if stream and token != tokenizer.eot_token:
                print(stream.decode(tokenizer.decode_bytes([token])), end="", flush=True)
        while not stream and printed < count and ended(samples[printed]):
            text, number = texts[printed // settings.num_samples], printed % settings.num_samples + 1
            heading = f"--- {number}\n" if settings.num_samples > 1 else ""
            tokens = [token for token in samples.pop(printed) if token != tokenizer.eot_token]
            continuation = tokenizer.decode_bytes(tokens)
            print(f"{heading}{marked(text)}{continuation.decode('utf-8', errors='replace')}\n", flush=True)
            printed += 1
    if stream:
        print(stream.decode(b"", final=True), end="\n\n", flush=True)
    return drawn


if __name__ == "__main__":
    main()
