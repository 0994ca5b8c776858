"""EngineLoop: the one thread that owns the scheduler and the engine.

Other threads only put messages in its inbox. Every request submitted is answered through its sink, in order, and
exactly once with a final delta: stop, length, cancelled or error, also when it is refused and when the loop dies.
"""

import logging
import secrets
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import replace
from itertools import count
from queue import Empty, SimpleQueue

from tritonforge.engines.base import Engine, SequenceStep
from tritonforge.errors import EngineFailure, Overloaded, TritonForgeError
from tritonforge.generation import Delta, Generation, Sink
from tritonforge.request import FinishReason, GenerateRequest, Request, StepPlan, TokenEvent
from tritonforge.sampling import Draw, sample
from tritonforge.scheduler import Scheduler
from tritonforge.text import Decode

log = logging.getLogger(__name__)


class EngineLoop:
    """Runs requests on `engine` in steps planned by `scheduler`; see the module docstring for its promise.

    Other threads may read the scheduler's counts, and nothing else of it.
    """

    def __init__(
        self,
        engine: Engine,
        scheduler: Scheduler,
        decode: Decode,
        stop_token_ids: frozenset[int] = frozenset(),
        *,
        on_death: Callable[[], None] = lambda: None,
        clock_ns: Callable[[], int] = time.monotonic_ns,
    ) -> None:
        self._engine = engine
        self.scheduler = scheduler
        self._decode = decode
        self._stop_token_ids = stop_token_ids
        self._on_death = on_death
        self._clock_ns = clock_ns
        self._keys = count()
        self._generations: dict[int, Generation] = {}
        self._inbox: SimpleQueue[Callable[[], None]] = SimpleQueue()
        self._refusal: str | None = None
        self._stopping = False
        self._idle = threading.Event()
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._run, name="engine-loop", daemon=True)

    def start(self) -> None:
        """Start the loop's thread."""
        self._thread.start()

    def submit(self, asked: GenerateRequest, sink: Sink) -> int:
        """Hand over a request from any thread, return its key. Raises Overloaded when the loop takes no more work."""
        if self._refusal is not None:
            raise Overloaded(self._refusal)
        if asked.sampling.seed is None and asked.sampling.temperature > 0.0:
            asked = replace(asked, sampling=replace(asked.sampling, seed=secrets.randbits(63)))
        key = next(self._keys)
        stops = frozenset() if asked.ignore_eos else self._stop_token_ids
        request = Request(key, asked.prompt_ids, asked.max_tokens, stops)
        generation = Generation(asked, request, self._decode, sink, self._clock_ns())
        self._post(lambda: self._add(generation))
        return key

    def cancel(self, key: int) -> None:
        """Cancel one request from any thread; nothing happens when it has ended."""
        self._post(lambda: self._cancel(self._generations.get(key)))

    def cancel_request_id(self, request_id: str) -> "Future[int]":
        """Cancel every unfinished request that has this id; the future holds how many there were."""
        found: Future[int] = Future()

        def cancel() -> None:
            matching = [one for one in self._generations.values() if one.asked.request_id == request_id]
            for generation in matching:
                self._cancel(generation)
            found.set_result(len(matching))

        self._post(cancel)
        return found

    def drain(self, timeout_s: float) -> bool:
        """Refuse new requests, let the others end for up to `timeout_s`, cancel what is left, and stop the thread.

        Returns whether all requests ended by themselves.
        """
        self._refusal = self._refusal or "the server is draining and takes no new requests"
        self._post(self._note_idle)
        drained = self._idle.wait(timeout_s)
        self._post(self._stop)
        self._thread.join()
        return drained

    def _post(self, message: Callable[[], None]) -> None:
        """Put a message in the inbox; when the thread is gone, the caller answers it, so that none is lost."""
        self._inbox.put(message)
        if self._closed.is_set():
            self._handle_messages()

    def _handle_messages(self) -> None:
        while True:
            try:
                message = self._inbox.get_nowait()
            except Empty:
                return
            message()

    def _run(self) -> None:
        try:
            while not self._stopping:
                if not self.scheduler.has_work:
                    self._inbox.get()()
                self._handle_messages()
                if self.scheduler.has_work:
                    self.step()
        except BaseException as error:
            self._die(error)
        finally:
            self._closed.set()
            self._handle_messages()
            self._engine.close()

    def step(self) -> None:
        """Schedule, compute, sample, commit, and pass on what happened."""
        plan = self.scheduler.schedule()
        self._stamp_scheduled(plan)
        try:
            tokens = self._compute(plan)
        except EngineFailure as error:
            log.exception("a step of %d requests failed", len(plan.work))
            for work in plan.work:
                self._fail(self._generations[work.request.key], error)
            return
        now = self._clock_ns()
        for request, token_id in zip(_sampling(plan), tokens, strict=True):
            if token_id is None:
                self._fail(self._generations[request.key], EngineFailure("the engine's logits are no numbers"))
        for event in self.scheduler.commit(plan, tokens):
            self._emit(self._generations[event.request.key], event, now)

    def _compute(self, plan: StepPlan) -> list[int | None]:
        """The only slow part: the engine's step, and a sampled token (None: impossible) for each work that samples."""
        logits = self._engine.step([_sequence(work.request, work.num_new_tokens, work.samples) for work in plan.work])
        sampling = _sampling(plan)
        params = [self._generations[request.key].asked.sampling for request in sampling]
        draws = [Draw(one, len(request.output_ids)) for one, request in zip(params, sampling, strict=True)]
        return [None if drawn is None else drawn.token_id for drawn in sample(logits, draws)]

    def _stamp_scheduled(self, plan: StepPlan) -> None:
        now = self._clock_ns()
        for work in plan.work:
            timeline = self._generations[work.request.key].timeline
            if timeline.scheduled_ns is None:
                timeline.scheduled_ns = now

    def _emit(self, generation: Generation, event: TokenEvent, now_ns: int) -> None:
        generation.timeline.token(now_ns)
        reason = event.finish_reason
        text = generation.text.push(event.token_id, final=reason is not None)
        if generation.text.stopped:
            reason = FinishReason.STOP
            self.scheduler.finish(generation.request, reason)
        self._send(generation, Delta(text, (event.token_id,), reason))

    def _send(self, generation: Generation, delta: Delta) -> None:
        if delta.final:
            del self._generations[generation.key]
            self._note_idle()
        generation.sink(generation, delta)

    def _add(self, generation: Generation) -> None:
        self._generations[generation.key] = generation
        try:
            if self._refusal is not None:
                raise Overloaded(self._refusal)
            self.scheduler.add(generation.request)
        except TritonForgeError as error:
            self._send(generation, Delta(finish_reason=FinishReason.ERROR, error=error))

    def _cancel(self, generation: Generation | None) -> None:
        if generation is not None:
            self.scheduler.finish(generation.request, FinishReason.CANCELLED)
            self._send(generation, Delta(generation.text.push(None, final=True), (), FinishReason.CANCELLED))

    def _fail(self, generation: Generation, error: TritonForgeError) -> None:
        self.scheduler.finish(generation.request, FinishReason.ERROR)
        self._send(generation, Delta(finish_reason=FinishReason.ERROR, error=error))

    def _note_idle(self) -> None:
        if self._refusal is not None and not self._generations:
            self._idle.set()

    def _stop(self) -> None:
        self._refusal = self._refusal or "the server has stopped"
        for generation in list(self._generations.values()):
            self._cancel(generation)
        self._stopping = True

    def _die(self, error: BaseException) -> None:
        """Fail every request, and refuse new ones from now on."""
        log.critical("the engine loop died", exc_info=error)
        self._refusal = f"the engine loop died: {type(error).__name__}: {error}"
        for generation in list(self._generations.values()):
            self._send(generation, Delta(finish_reason=FinishReason.ERROR, error=EngineFailure(self._refusal)))
        self._on_death()


def _sampling(plan: StepPlan) -> list[Request]:
    """The requests that get a token from this step, in the order of their logits."""
    return [work.request for work in plan.work if work.samples]


def _sequence(request: Request, num_new_tokens: int, samples: bool) -> SequenceStep:
    start = request.num_computed_tokens
    return SequenceStep(request.tokens(start, start + num_new_tokens), start, request.block_table, int(samples))
