"""The mixed load of a soak: streams with random prompts and options, cancels, bad requests, floods of the queue.

`soak` runs it. Each request ends in one outcome, which is compared with those that its kind may have.
"""

import contextlib
import math
import random
import threading
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

import grpc

from loadtests.prompts import WORDS
from tritonforge.client import DECODER, cancel, generate, infer_request, stream
from tritonforge.errors import InvalidRequest, NotFound, Overloaded, TritonForgeError

TIMEOUT_S = 180.0
FLOOD = 320
"""More than run and wait together in the shipped recipes (32 and 128)."""
FINISHED, CANCELLED, REFUSED, SHED, FAILED = "finished", "cancelled", "refused", "shed", "failed"
"""refused: INVALID_ARGUMENT. shed: UNAVAILABLE, the queue is full. failed: any other error, and never expected."""
EXPECTED = {
    "stream": {FINISHED, SHED},
    "whole": {FINISHED, SHED},
    "close": {FINISHED, CANCELLED, SHED},
    "cancel": {FINISHED, CANCELLED, SHED},
    "bad": {REFUSED},
    "flood": {FINISHED, CANCELLED, SHED},
}
"""The outcomes that each kind of request may have. A request may finish before its cancellation arrives."""
WEIGHTS = {"stream": 5, "whole": 1, "close": 2, "cancel": 2, "bad": 2}
SHARED_PREFIX = " ".join(WORDS[:150])

OPTIONS: dict[str, Callable[[random.Random], Any]] = {
    "temperature": lambda rng: rng.choice((0.0, 0.3, 0.8, 1.5)),
    "top_k": lambda rng: rng.choice((0, 1, 20, 1000)),
    "top_p": lambda rng: rng.choice((0.1, 0.9, 1.0)),
    "seed": lambda rng: rng.getrandbits(40),
    "stop": lambda rng: rng.choice((" the", ["\n", " and"], "never said")),
    "ignore_eos": lambda rng: rng.random() < 0.5,
    "chat": lambda rng: rng.random() < 0.5,
    "min_p": lambda rng: rng.choice((0.0, 0.05, 0.5)),
    "min_tokens": lambda rng: rng.randint(0, 8),
    "repetition_penalty": lambda rng: rng.choice((0.9, 1.0, 1.3)),
    "presence_penalty": lambda rng: rng.choice((-0.5, 0.0, 1.0)),
    "frequency_penalty": lambda rng: rng.choice((-0.5, 0.0, 1.0)),
    "logit_bias": lambda rng: f'{{"{rng.randint(3, 1000)}": {rng.choice((-100, -1, 5))}}}',
    "bad_words": lambda rng: rng.choice((" the", [" a", " of the"])),
    "stop_token_ids": lambda rng: str([rng.randint(3, 1000)]),
    "include_stop_in_output": lambda rng: rng.random() < 0.5,
    "logprobs": lambda rng: rng.choice((0, 1, 5)),
    "echo": lambda rng: rng.random() < 0.5,
    "json_object": lambda rng: rng.random() < 0.5,
    "priority_class": lambda rng: rng.randint(0, 9),
    "tenant": lambda rng: rng.choice("abc"),
    "speculate": lambda rng: rng.random() < 0.5,
}
"""How a value of each option is drawn. Options that the served release does not know are left out, see `known`."""
BESIDE_NO_STRUCTURE = ("ignore_eos", "min_tokens", "bad_words", "logit_bias")
"""They can forbid the only tokens that a structure allows; such a request is refused, and rightly."""

BAD: tuple[dict[str, Any], ...] = (
    {"text": ""},
    {"text": "word " * 3000},
    {"text": "x" * 1_100_000},
    {"text": b"caf\xe9"},
    {"text": "Hi", "max_tokens": 0},
    {"text": "Hi", "max_tokens": 10**6},
    {"text": "Hi", "max_tokens": "ten"},
    {"text": "Hi", "temperature": -1.0},
    {"text": "Hi", "temperature": math.nan},
    {"text": "Hi", "top_p": 2.0},
    {"text": "Hi", "temprature": 1.0},
    {"text": "Hi", "stop": "[]"},
    {"text": "", "messages": "[oops"},
)


def known(channel: grpc.Channel) -> tuple[str, ...]:
    """The options of the table above that the served release knows. Raises InvalidRequest when it refuses a value."""
    names = []
    for name, draw in OPTIONS.items():
        try:
            generate(
                channel, infer_request("llm", text="Hi", max_tokens=8, **{name: draw(random.Random(0))}), TIMEOUT_S
            )
        except InvalidRequest as error:
            if "unknown option" not in str(error):
                raise
        else:
            names.append(name)
    return tuple(names)


@dataclass
class Tally:
    """How many requests of each kind ended how; `surprises` are the first outcomes that were not expected."""

    counts: Counter[tuple[str, str]] = field(default_factory=Counter)
    sent: int = 0
    surprises: list[str] = field(default_factory=list)
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def send(self) -> None:
        """A request is about to be sent."""
        with self._lock:
            self.sent += 1

    def end(self, kind: str, outcome: str, detail: str) -> None:
        """A request has ended."""
        with self._lock:
            self.counts[kind, outcome] += 1
            if outcome not in EXPECTED[kind] and len(self.surprises) < 20:
                self.surprises.append(f"{kind} {outcome}: {detail[:300]}")

    def total(self, *outcomes: str) -> int:
        """Requests that ended in one of `outcomes`."""
        return sum(count for (_, outcome), count in self.counts.items() if outcome in outcomes)


class Load:
    """Plays requests on one channel until `stop` is set; `tally` says how they ended."""

    def __init__(self, channel: grpc.Channel, options: tuple[str, ...], stop: threading.Event) -> None:
        self.tally = Tally()
        self._channel, self._options, self._stop = channel, options, stop

    def work(self, seed: int) -> None:
        """One client: a request after the other, seeded."""
        rng = random.Random(f"worker {seed}")
        while not self._stop.is_set():
            kind = rng.choices(tuple(WEIGHTS), tuple(WEIGHTS.values()))[0]
            self._play(kind, self._bad(rng) if kind == "bad" else self._good(rng, kind), rng.randint(0, 30))

    def floods(self, seed: int, every_s: float) -> None:
        """A flood at once and then one every `every_s` seconds: FLOOD requests at the same time."""
        rng = random.Random(f"floods {seed}")
        with ThreadPoolExecutor(FLOOD) as pool:
            while not self._stop.is_set():
                for _ in range(FLOOD):
                    ids = [rng.randint(3, 40_000) for _ in range(rng.randint(1, 64))]
                    request = infer_request(DECODER, input_ids=ids, stream=True, max_tokens=rng.randint(1, 64))
                    pool.submit(self._play, "flood", request, rng.randint(0, 8))
                self._stop.wait(every_s)

    def _good(self, rng: random.Random, kind: str):
        options = {name: OPTIONS[name](rng) for name in self._options if rng.random() < 0.25}
        if options.get("json_object"):
            options = {name: value for name, value in options.items() if name not in BESIDE_NO_STRUCTURE}
        text = " ".join(rng.choices(WORDS, k=rng.randint(1, 300)))
        if rng.random() < 0.3:
            text = f"{SHARED_PREFIX} {text}"
        max_tokens = rng.randint(8, 160)
        return infer_request("llm", text=text, stream=kind != "whole", max_tokens=max_tokens, **options)

    def _bad(self, rng: random.Random):
        return infer_request("llm", **rng.choice(BAD))

    def _play(self, kind: str, request, leave_after: int) -> None:
        self.tally.send()
        try:
            outcome, detail = self._outcome(kind, request, leave_after), ""
        except InvalidRequest as error:
            outcome, detail = REFUSED, str(error)
        except Overloaded as error:
            outcome, detail = SHED, str(error)
        except TritonForgeError as error:
            outcome, detail = FAILED, f"{type(error).__name__} {error}"
        self.tally.end(kind, outcome, detail)

    def _outcome(self, kind: str, request, leave_after: int) -> str:
        """Read the stream to its end, or cancel it after `leave_after` chunks, as the kind says."""
        answer = stream(self._channel, request, TIMEOUT_S)
        for position, chunk in enumerate(answer):
            if chunk.finish_reason is not None:
                return CANCELLED if chunk.finish_reason == "cancelled" else FINISHED
            if position != leave_after:
                continue
            if kind in ("close", "flood"):
                answer.close()
                return CANCELLED
            if kind == "cancel":
                self._cancel(request.id)
        raise AssertionError("a stream ends with a finish reason or raises")

    def _cancel(self, request_id: str) -> None:
        with contextlib.suppress(NotFound):  # it has finished meanwhile
            cancel(self._channel, request_id)
