"""``jaxtrain generate``: text of a trained decoder or encoder-decoder, shown as it is written."""

import contextlib
import dataclasses
import sys
import time
from collections.abc import Iterable, Iterator

import jax
import numpy as np
from jax.sharding import Mesh

from jaxtrain.data.chat import ChatTemplate, encode_marked, encode_prompt
from jaxtrain.data.tokenizers import special_ids_of
from jaxtrain.hf.opening import ModelOptions, Opened, ends_of
from jaxtrain.host.least import check_least
from jaxtrain.models.decoder import DecoderConfig
from jaxtrain.models.decoding import longest_row
from jaxtrain.models.generate import beam_search, padded_length, prompts, stream, whole_rows
from jaxtrain.serve.api import Text, token_bytes
from jaxtrain.serve.command import template_of

# New tokens, where --max-tokens is left out.
MOST = 256
CUTS = ("top_k", "top_p", "min_p")


@dataclasses.dataclass(frozen=True, kw_only=True)
class GenerateOptions(ModelOptions):
    """Writes text with a trained model, and shows it as it comes: what continues a prompt, the
    target of an encoder-decoder's source, or the answers of a chat.

    Only what is written is printed on standard output. The speed follows on standard error.
    """

    prompt: str | None = None
    """Text to continue, or the source; left out, standard input. It may spell out special tokens of
    the tokenizer, except in a chat."""
    chat: bool = False
    """Answer the prompt as a user's message, or line by line each message of standard input, with
    all messages before it. On a terminal, the end of input (Ctrl-D) ends the chat."""
    chat_template: str | None = None
    """A chat template: chatml, plain, a file or a folder; left out, the model's own."""
    system: str | None = None
    """Message of the system that a chat begins with."""
    stop: tuple[str, ...] = ()
    """Texts that end the answer and are not part of it."""
    max_tokens: int | None = None
    """Most new tokens; left out, 256, or as many as the model's positions leave."""
    min_tokens: int = 0
    """New tokens before one that ends the text."""
    temperature: float = 0.8
    """0 always takes the most probable token."""
    top_k: int | None = None
    """Draw from the k most probable tokens."""
    top_p: float | None = 0.95
    """Draw from the smallest set of tokens with this much probability."""
    min_p: float | None = None
    """Draw from tokens that are at least this many times as probable as the most probable one."""
    repetition_penalty: float = 1.0
    """Above 1, tokens that have occurred become less probable."""
    repetition_window: int | None = None
    """Last tokens that the penalty counts; left out, all."""
    seed: int = 0
    """Seed for sampling."""
    samples: int = 1
    """Number of texts to write; all but the first are shown when all are written."""
    beams: int = 1
    """Number of texts that a search for the most probable text follows; 1 searches for none."""


def run_generate(options: GenerateOptions, rest: list[str]) -> int:
    """Prints what the model writes, and how fast."""
    del rest
    check_least(options, max_tokens=1, min_tokens=0, samples=1, beams=1)
    for name in ("chat_template", "system"):
        if getattr(options, name) is not None and not options.chat:
            flag = f"--{name.replace('_', '-')}"
            raise ValueError(f"{flag} is given without --chat, which alone reads it: give both")
    if options.chat and options.samples > 1:
        raise ValueError(f"--samples is {options.samples}, and --chat needs one answer: give one")
    for name in ("samples", "temperature", *CUTS) if options.beams > 1 else ():
        if (value := getattr(options, name)) not in (0, getattr(GenerateOptions, name)):
            raise ValueError(
                f"--{name.replace('_', '-')} {value} is for texts that are drawn, and --beams "
                f"{options.beams} searches for one: leave either out"
            )
    if "" in options.stop:
        raise ValueError("--stop has an empty text, which every text has: leave it out")
    if not 0 <= options.seed < 2**32:
        raise ValueError(f"--seed is {options.seed}: give a number from 0 to 2^32 - 1")
    opened, mesh = options.open("decoder", "encoder-decoder")
    writer = Writer(options, opened, mesh)
    with _to_the_end():
        if options.chat:
            template = template_of(options.chat_template, opened.folder, opened.tokenizer)
            _chat(options, writer, template)
        else:
            asked = options.prompt
            if asked is None:
                asked = sys.stdin.read().removesuffix("\n")
            writer.write(encode_prompt(asked, opened.tokenizer).tolist())
    print(writer.speed(), file=sys.stderr)
    return 0


def _chat(options: GenerateOptions, writer: "Writer", template: ChatTemplate | None) -> None:
    """Answers each message, with those before it."""
    if template is None:
        raise ValueError(
            f"the model in '{writer.opened.folder}' has no chat template: give --chat-template"
        )
    messages = []
    if options.system is not None:
        messages.append({"role": "system", "content": options.system})
    for asked in [options.prompt] if options.prompt is not None else _lines():
        messages.append({"role": "user", "content": asked})
        ids, _ = next(encode_marked([template.prompt(messages)], writer.opened.tokenizer))
        answer = writer.write(ids.tolist())
        messages.append({"role": "assistant", "content": answer})


@contextlib.contextmanager
def _to_the_end() -> Iterator[None]:
    """Ends its body where a terminal says so, by the end of input or Ctrl-C, on a line of its
    own."""
    try:
        yield
    except (EOFError, KeyboardInterrupt):
        print(flush=True)


def _lines() -> Iterator[str]:
    """The lines of standard input that are not empty, as they come."""
    while sys.stdin.isatty():
        yield from filter(str.strip, [input("> ")])
    yield from (line.removesuffix("\n") for line in sys.stdin if line.strip())


class Writer:
    """Writes texts with a model, one after another, and measures how fast."""

    def __init__(self, options: GenerateOptions, opened: Opened, mesh: Mesh):
        self.opened = opened
        self._options, self._mesh = options, mesh
        special = special_ids_of(opened.tokenizer)
        self._special = dict.fromkeys(special.values(), b"")
        # A stop that spells a special token ends a text by that token, which has no letters.
        stops = (special[stop] for stop in options.stop if stop in special)
        self._ends = (*ends_of(opened.folder, opened.tokenizer), *stops)
        # The answer is a text of its own, and no part of the one before it.
        self._begins = options.chat or not isinstance(opened.model, DecoderConfig)
        self._read = self._written = self._rows = self._texts = 0
        self._reading = self._writing = 0.0

    def write(self, ids: list[int]) -> str:
        """Prints the text that follows some tokens while it is written, and returns it; then the
        others, where several are asked for."""
        start, kept = time.monotonic(), []
        chosen = self._chosen(ids)
        kept.append(next(chosen))
        first = time.monotonic()
        self._reading += first - start

        def tokens() -> Iterator[int]:
            yield int(kept[0][0])
            for tokens_B in chosen:
                kept.append(tokens_B)
                yield int(tokens_B[0])

        try:
            said = self._show(tokens())
            for row in range(1, self._options.samples):
                kept.extend(chosen)
                print("-" * 40)
                self._show(int(tokens_B[row]) for tokens_B in kept)
        finally:
            self._writing += time.monotonic() - first
        return said

    def _show(self, tokens: Iterable[int]) -> str:
        """Prints the text of a row's tokens as they come, to its end, and returns it."""
        text, said, is_begun = Text(self._options.stop), "", False
        self._rows += 1
        for token in tokens:
            self._written += 1
            if token in self._ends:
                break
            begins = self._begins and not is_begun
            piece = token_bytes(self.opened.tokenizer, token, self._special, begins=begins)
            is_begun = is_begun or piece is not None
            part = text.add(piece or b"")
            said += part
            print(part, end="", flush=True)
            if text.stopped:
                break
        part = "" if text.stopped else text.add(b"", last=True)
        print(part, flush=True)
        return said + part

    def speed(self) -> str:
        """Says how many tokens were read and written in which time."""
        # The first of each row comes with its prompt.
        rate = (self._written - self._rows) / self._writing if self._writing else 0.0
        return (
            f"{self._written} tokens written, {rate:.1f} per second; {self._read} tokens of "
            f"prompts read in {self._reading:.1f} s, with compiling"
        )

    def _chosen(self, ids: list[int]) -> Iterator[np.ndarray]:
        """Yields the new tokens that follow some, one of each row at a time."""
        options, (model, params, tokenizer, _, begin) = self._options, self.opened
        is_decoder = isinstance(model, DecoderConfig)
        # A decoder's text follows what begins one; as in training, an end follows a source.
        row = [*begin[options.chat], *ids] if is_decoder else [*ids, tokenizer.eod]
        row = row or [tokenizer.eod]  # a model without a beginning that is asked for any text
        self._read += len(row)
        most, size = options.max_tokens, padded_length(len(row))
        if (limit := longest_row(model)) is not None:
            size = max(len(row), min(size, limit))
            most = most or max(1, min(MOST, limit - len(row)))
        # All devices that split rows have some; lengths in powers of two are few programs.
        rows = np.zeros((whole_rows(options.samples, self._mesh), size), np.int32)
        rows[:, : len(row)] = row
        given = {
            "prompt_lengths": [len(row)] * len(rows),
            "max_new_tokens": most or MOST,
            "repetition_penalty": options.repetition_penalty,
            "repetition_window": options.repetition_window,
            "min_tokens": options.min_tokens,
            "eod": self._ends,
        }
        if options.beams > 1:
            with jax.set_mesh(self._mesh):
                found, _ = beam_search(model, params, rows, beams=options.beams, **given)
            yield from np.asarray(found).T
            return
        drawn = {name: getattr(options, name) for name in ("temperature", *CUTS)}
        # Each text of a chat has draws of its own.
        rng, self._texts = jax.random.key(options.seed + self._texts), self._texts + 1
        batch = prompts(model, rows, rng=rng, **given, **drawn)
        yield from stream(model, params, batch, mesh=self._mesh)
