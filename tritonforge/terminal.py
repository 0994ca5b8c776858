"""Streams answers to a terminal: one generation, or a chat of many turns. Text on stdout, the rest on stderr.

The command line calls it. It must not know how the server is started.
"""

import contextlib
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import grpc
from tritonclient.grpc.service_pb2 import ModelInferRequest

from tritonforge.client import Chunk, connect, infer_request, stream
from tritonforge.errors import TritonForgeError

MODEL = "llm"
PROMPT = "\n> "


@dataclass(frozen=True)
class Answer:
    """What was shown: the text, why it ended ("cancelled" also when the user interrupted) and what was measured.

    `ttft_s` is the time from sending the request to the first chunk, `decode_s` from there to the last one, in seconds.
    """

    text: str
    finish_reason: str
    completion_tokens: int
    ttft_s: float | None
    decode_s: float

    def summary(self) -> str:
        """One line: tokens, TTFT, tokens per second after the first one, finish reason."""
        parts = [f"{self.completion_tokens} tokens"]
        if self.ttft_s is not None:
            parts.append(f"TTFT {self.ttft_s * 1000:.0f} ms")
        if self.completion_tokens > 1 and self.decode_s > 0:
            parts.append(f"{(self.completion_tokens - 1) / self.decode_s:.1f} tok/s")
        return f"[{', '.join(parts)}, {self.finish_reason}]"


def show(channel: grpc.Channel, request: ModelInferRequest, timeout: float | None = None) -> Answer:
    """Send `request`, write its text to stdout as it comes, and return the answer.

    Ctrl-C cancels it; what was shown is then the answer. Raises the typed error of the request.
    """
    sent = time.monotonic()
    times: list[float] = []
    chunks: list[Chunk] = []
    with contextlib.closing(stream(channel, request, timeout)) as answer, contextlib.suppress(KeyboardInterrupt):
        for chunk in answer:
            times.append(time.monotonic())
            chunks.append(chunk)
            sys.stdout.write(chunk.text)
            sys.stdout.flush()
    return Answer(
        text="".join(chunk.text for chunk in chunks),
        finish_reason=(chunks[-1].finish_reason if chunks else None) or "cancelled",
        completion_tokens=sum(len(chunk.token_ids) for chunk in chunks),
        ttft_s=times[0] - sent if times else None,
        decode_s=times[-1] - times[0] if times else 0.0,
    )


def generate(url: str, prompt: str, *, chat: bool, timeout: float | None, **options: object) -> Answer:
    """Answer one prompt; `chat` makes it one user message of the model's chat template."""
    request = infer_request(MODEL, text=prompt, stream=True, chat=chat or None, **options)
    with connect(url) as channel:
        answer = show(channel, request, timeout)
    _note(f"\n{answer.summary()}")
    return answer


def chat(url: str, *, system: str | None, timeout: float | None, read: Callable[[str], str] = input, **options: object):
    """Talk in turns until Ctrl-D, or Ctrl-C at the prompt; Ctrl-C in an answer cancels that answer only.

    A turn that fails is told in one line and forgotten, so that the chat can go on.
    """
    messages = [{"role": "system", "content": system}] if system else []
    with connect(url) as channel:
        for said in _turns(read):
            asked = [*messages, {"role": "user", "content": said}]
            request = infer_request(MODEL, text="", stream=True, messages=asked, **options)
            try:
                answer = show(channel, request, timeout)
            except TritonForgeError as error:
                _note(f"{error}")
                continue
            _note(f"\n{answer.summary()}")
            messages = [*asked, {"role": "assistant", "content": answer.text}]


def _turns(read: Callable[[str], str]) -> Iterator[str]:
    """What the user says, one turn after the other; empty lines are skipped."""
    with contextlib.suppress(EOFError, KeyboardInterrupt):
        while True:
            said = read(PROMPT).strip()
            if said:
                yield said


def _note(line: str) -> None:
    print(line, file=sys.stderr, flush=True)
