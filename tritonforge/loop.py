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

from tritonforge.answer import Answer
from tritonforge.engines.base import Engine, EngineSpec
from tritonforge.errors import EngineFailure, Overloaded, TritonForgeError
from tritonforge.generate_request import GenerateRequest
from tritonforge.generation import Generation, Sink
from tritonforge.in_flight import InFlight
from tritonforge.observation.step_meter import StepMeter
from tritonforge.sampling.sampler import Outcome, draw_step, sequence_steps
from tritonforge.sampling.sampling import Drawn
from tritonforge.scheduling.request import Request, StepPlan
from tritonforge.scheduling.scheduler import Scheduler
from tritonforge.structured.constraints import Grammar
from tritonforge.text import Decode

PROMPT_LOGPROBS_CHUNK = 64
"""Most prompt tokens a step computes of a request that asks for their log-probabilities: each has a row of logits."""

log = logging.getLogger(__name__)


class EngineLoop:
    """Runs requests on `engine` in steps planned by `scheduler`; see the module docstring for its promise.

    Other threads may read the scheduler's counts, the meter, why new requests are refused, and whether the loop died.
    """

    def __init__(
        self,
        engine: Engine,
        scheduler: Scheduler,
        decode: Decode,
        stop_token_ids: frozenset[int] = frozenset(),
        *,
        forget: Callable[[int], None] = lambda key: None,
        on_death: Callable[[], None] = lambda: None,
        clock_ns: Callable[[], int] = time.monotonic_ns,
    ) -> None:
        self._engine = engine
        self.scheduler = scheduler
        self.decode = decode
        self._stop_token_ids = stop_token_ids
        self._on_death = on_death
        self._clock_ns = clock_ns
        self._keys = count()
        self._in_flight = InFlight(scheduler, clock_ns, forget)
        self._inbox: SimpleQueue[Callable[[], None]] = SimpleQueue()
        self.refusal: str | None = None
        self.failed = False
        self.meter = StepMeter()
        self._stopping = False
        self._idle = threading.Event()
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._run, name="engine-loop", daemon=True)

    @property
    def engine_spec(self) -> EngineSpec:
        """The limits of the engine."""
        return self._engine.spec

    def start(self) -> None:
        """Start the loop's thread."""
        self._thread.start()

    def submit(self, asked: GenerateRequest, sink: Sink, grammar: Grammar | None = None) -> int:
        """Hand over a request from any thread, return its key; `grammar` is its compiled structure.

        Raises Overloaded when the loop takes no more work.
        """
        if self.refusal is not None:
            raise Overloaded(self.refusal)
        if asked.sampling.seed is None and asked.sampling.temperature > 0.0:
            asked = replace(asked, sampling=replace(asked.sampling, seed=secrets.randbits(63)))
        now = self._clock_ns()
        answers = [Answer(asked, self._request(asked, now), index, self.decode, grammar) for index in range(asked.n)]
        generation = Generation(asked, answers, sink, now)
        self._post(lambda: self._add(generation))
        return generation.key

    def _request(self, asked: GenerateRequest, now_ns: int) -> Request:
        """The scheduler's state of one answer."""
        return Request(
            next(self._keys),
            asked.prompt_ids,
            asked.max_tokens,
            (frozenset() if asked.ignore_eos else self._stop_token_ids).union(asked.stop_token_ids),
            priority=asked.priority,
            tenant=asked.tenant,
            arrival_ns=now_ns,
            cache_salt=asked.cache_salt,
            reuse_prefix=asked.prompt_logprobs is None,
            max_chunk=None if asked.prompt_logprobs is None else PROMPT_LOGPROBS_CHUNK,
            speculate=asked.speculate and asked.structure is None,
        )

    def cancel(self, key: int) -> None:
        """Cancel one request from any thread; nothing happens when it has ended."""

        def cancel() -> None:
            generation = self._in_flight.get(key)
            if generation is not None:
                self._in_flight.cancel(generation)

        self._post(cancel)

    def cancel_request_id(self, request_id: str) -> "Future[int]":
        """Cancel every unfinished request that has this id; the future holds how many there were."""
        found: Future[int] = Future()

        def cancel() -> None:
            matching = [one for one in self._in_flight.all() if one.asked.request_id == request_id]
            for generation in matching:
                self._in_flight.cancel(generation)
            found.set_result(len(matching))

        self._post(cancel)
        return found

    def drain(self, timeout_s: float) -> bool:
        """Refuse new requests, let the others end for up to `timeout_s`, cancel what is left, and stop the thread.

        Returns whether all requests ended by themselves.
        """
        self.refusal = self.refusal or "the server is draining and takes no new requests"
        self._post(lambda: None)  # wakes the thread, which looks whether it is idle
        drained = self._idle.wait(0 if self._closed.is_set() else timeout_s)
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

    def _next_message(self) -> Callable[[], None]:
        with self.meter.resting():
            return self._inbox.get()

    def _run(self) -> None:
        try:
            while not self._stopping:
                if self.refusal is not None and not self._in_flight:
                    self._idle.set()
                if not self.scheduler.has_work:
                    self._next_message()()
                self._handle_messages()
                self._in_flight.fail_late()
                if self.scheduler.has_work:
                    self.step()
        except BaseException as error:
            self._die(error)
        finally:
            self.meter.rest()
            self._closed.set()
            self._handle_messages()
            self._engine.close()

    def step(self) -> None:
        """Schedule, compute, draw, commit, and pass on what happened."""
        self.meter.begin()
        plan = self.scheduler.schedule()
        self._in_flight.stamp_scheduled(plan)
        try:
            outcomes = self._compute(plan)
        except EngineFailure as error:
            log.exception("a step of %d requests failed", len(plan.work))
            for work in plan.work:
                self._fail(work.request, error)
            return
        drawn = self._take_outcomes(plan, outcomes)
        told = {key: iter(tokens) for key, tokens in drawn.items() if tokens is not None}
        committed = [None if tokens is None else [one.token_id for one in tokens] for tokens in drawn.values()]
        for event in self.scheduler.commit(plan, committed):
            self._in_flight.tell(event, next(told[event.request.key]))
        self.meter.end(plan, sampled=bool(told))

    def _compute(self, plan: StepPlan) -> list[Outcome]:
        """The only slow part: the engine's step, and what is drawn from its logits for each work that samples."""
        answers = self._in_flight.answers
        steps = sequence_steps(plan, answers)
        with self.meter.computing():
            self._engine.copy_blocks(plan.copies)
            logits = self._engine.step(steps)
        return draw_step(plan, logits, answers)

    def _take_outcomes(self, plan: StepPlan, outcomes: list[Outcome]) -> dict[int, list[Drawn] | None]:
        """The tokens that each sampling work of the step drew, by its request's key; None for those that failed."""
        now = self._clock_ns()
        drawn: dict[int, list[Drawn] | None] = {}
        for work, outcome in zip((work for work in plan.work if work.samples), outcomes, strict=True):
            failed = isinstance(outcome, TritonForgeError)
            drawn[work.request.key] = None if failed else outcome
            if failed:
                self._fail(work.request, outcome)
            elif work.request.key in self._in_flight.answers:  # else another answer of its request has failed
                accepted = len(outcome) - 1
                timeline = self._in_flight.of(work.request).timeline
                self.meter.token(timeline.sampled(now, drafted=len(work.draft), accepted=accepted))
        return drawn

    def _fail(self, request: Request, error: TritonForgeError) -> None:
        """End the request of a work with `error`, unless another of its answers has done so already."""
        if request.key in self._in_flight.answers:
            self._in_flight.fail(self._in_flight.of(request), error)

    def _add(self, generation: Generation) -> None:
        if self.refusal is None:
            self._in_flight.add(generation)
        else:
            generation.refuse(Overloaded(self.refusal))

    def _stop(self) -> None:
        self.refusal = self.refusal or "the server has stopped"
        for generation in self._in_flight.all():
            self._in_flight.cancel(generation)
        self._stopping = True

    def _die(self, error: BaseException) -> None:
        """Fail every request, and refuse new ones from now on."""
        log.critical("the engine loop died", exc_info=error)
        self.failed = True
        self.refusal = f"the engine loop died: {type(error).__name__}: {error}"
        self._in_flight.abandon(EngineFailure(self.refusal))
        self._on_death()
