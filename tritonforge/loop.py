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
from tritonforge.deadlines import Deadlines, RetryAfter
from tritonforge.engines.base import Engine
from tritonforge.errors import EngineFailure, Overloaded, TritonForgeError
from tritonforge.generation import Delta, Generation, Sink
from tritonforge.request import FinishReason, GenerateRequest, Request, StepPlan, TokenEvent, Work
from tritonforge.sampler import Outcome, draw_step, sequence_steps
from tritonforge.sampling import Drawn
from tritonforge.scheduler import Scheduler
from tritonforge.structured import Grammar
from tritonforge.text import Decode

PROMPT_LOGPROBS_CHUNK = 64
"""Most prompt tokens a step computes of a request that asks for their log-probabilities: each has a row of logits."""

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
        forget: Callable[[int], None] = lambda key: None,
        on_death: Callable[[], None] = lambda: None,
        clock_ns: Callable[[], int] = time.monotonic_ns,
    ) -> None:
        self._engine = engine
        self.scheduler = scheduler
        self._decode = decode
        self._stop_token_ids = stop_token_ids
        self._forget = forget
        self._on_death = on_death
        self._clock_ns = clock_ns
        self._keys = count()
        self._generations: dict[int, Generation] = {}
        self._answers: dict[int, Answer] = {}  # by the key of their Request; a generation's is that of its first
        self._deadlines = Deadlines()
        self._retry_after = RetryAfter()
        self._inbox: SimpleQueue[Callable[[], None]] = SimpleQueue()
        self._refusal: str | None = None
        self._stopping = False
        self._idle = threading.Event()
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._run, name="engine-loop", daemon=True)

    def start(self) -> None:
        """Start the loop's thread."""
        self._thread.start()

    def submit(self, asked: GenerateRequest, sink: Sink, grammar: Grammar | None = None) -> int:
        """Hand over a request from any thread, return its key; `grammar` is its compiled structure.

        Raises Overloaded when the loop takes no more work.
        """
        if self._refusal is not None:
            raise Overloaded(self._refusal)
        if asked.sampling.seed is None and asked.sampling.temperature > 0.0:
            asked = replace(asked, sampling=replace(asked.sampling, seed=secrets.randbits(63)))
        now = self._clock_ns()
        answers = [Answer(asked, self._request(asked, now), index, self._decode, grammar) for index in range(asked.n)]
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
                self._shed_late()
                if self.scheduler.has_work:
                    self.step()
        except BaseException as error:
            self._die(error)
        finally:
            self._closed.set()
            self._handle_messages()
            self._engine.close()

    def step(self) -> None:
        """Schedule, compute, draw, commit, and pass on what happened."""
        plan = self.scheduler.schedule()
        self._stamp_scheduled(plan)
        try:
            outcomes = self._compute(plan)
        except EngineFailure as error:
            log.exception("a step of %d requests failed", len(plan.work))
            for work in plan.work:
                self._fail(self._generation(work.request), error)
            return
        now = self._clock_ns()
        sampling = [work for work in plan.work if work.samples]
        drawn = {}
        for work, outcome in zip(sampling, outcomes, strict=True):
            if isinstance(outcome, TritonForgeError):
                self._fail(self._generation(work.request), outcome)
                drawn[work.request.key] = None
            else:
                self._note_drawn(work, outcome, now)
                drawn[work.request.key] = outcome
        told = {key: iter(tokens or ()) for key, tokens in drawn.items()}
        tokens = [tokens and [one.token_id for one in tokens] for tokens in drawn.values()]
        for event in self.scheduler.commit(plan, tokens):
            self._tell(event, next(told[event.request.key]))

    def _compute(self, plan: StepPlan) -> list[Outcome]:
        """The only slow part: the engine's step, and what is drawn from its logits for each work that samples."""
        self._engine.copy_blocks(plan.copies)
        logits = self._engine.step(sequence_steps(plan, self._answers))
        return draw_step(plan, logits, self._answers)

    def _generation(self, request: Request) -> Generation:
        parent = request if request.parent is None else request.parent
        return self._generations[parent.key]

    def _stamp_scheduled(self, plan: StepPlan) -> None:
        now = self._clock_ns()
        for work in plan.work:
            timeline = self._generation(work.request).timeline
            if timeline.scheduled_ns is None:
                timeline.scheduled_ns = now

    def _note_drawn(self, work: Work, drawn: list[Drawn], now_ns: int) -> None:
        timeline = self._generation(work.request).timeline
        timeline.sampled(now_ns)
        if work.draft:
            timeline.draft_tokens += len(work.draft)
            timeline.accepted_tokens += len(drawn) - 1

    def _tell(self, event: TokenEvent, drawn: Drawn) -> None:
        """Pass on one committed token; those that follow a stop string are nobody's any more."""
        answer = self._answers[event.request.key]
        if answer.finish_reason is not None:
            return
        generation = self._generation(event.request)
        prompt = None if answer.num_told_tokens else generation.echo(answer)
        text = answer.tell(event)
        if answer.finish_reason is not None:
            self.scheduler.finish(event.request, answer.finish_reason)
        self._fork(generation)
        self._send(generation, Delta(text, (drawn,), answer.finish_reason, answer.index, prompt=prompt))

    def _fork(self, generation: Generation) -> None:
        """The prompt is computed: let the other samples share it."""
        while generation.unforked:
            child = generation.unforked.pop(0)
            self.scheduler.fork(generation.answers[0].request, child.request)

    def _send(self, generation: Generation, delta: Delta) -> None:
        """The one way to a client; the last delta of a request takes it out of the loop."""
        if not generation.unfinished:
            delta = replace(delta, final=True)
            for answer in generation.answers:
                del self._answers[answer.request.key]
                self._forget(answer.request.key)
            del self._generations[generation.key]
            self._retry_after.ended(self._clock_ns())
            self._note_idle()
        generation.sink(generation, delta)

    def _add(self, generation: Generation) -> None:
        self._generations[generation.key] = generation
        self._answers |= {answer.request.key: answer for answer in generation.answers}
        try:
            if self._refusal is not None:
                raise Overloaded(self._refusal)
            pushed = self.scheduler.add(generation.answers[0].request)
        except Overloaded as error:
            self._fail(generation, self._with_retry(error))
        except TritonForgeError as error:
            self._fail(generation, error)
        else:
            self._deadlines.watch(generation)
            for request in pushed:
                why = f"pushed out of the full queue, of which tenant {request.tenant!r} held the most"
                self._fail(self._generation(request), self._with_retry(Overloaded(why)))

    def _with_retry(self, error: Overloaded) -> Overloaded:
        seconds = self._retry_after.seconds(self.scheduler.num_waiting, self._clock_ns())
        return Overloaded(f"{error.args[0]}; retry in about {seconds} s")

    def _shed_late(self) -> None:
        for generation, error in self._deadlines.missed(self._clock_ns()):
            self._fail(generation, self._with_retry(error) if isinstance(error, Overloaded) else error)

    def _cancel(self, generation: Generation | None) -> None:
        for answer in [] if generation is None else generation.unfinished:
            self.scheduler.finish(answer.request, FinishReason.CANCELLED)
            text = answer.end(FinishReason.CANCELLED)
            self._send(generation, Delta(text, (), FinishReason.CANCELLED, answer.index))

    def _fail(self, generation: Generation, error: TritonForgeError) -> None:
        """End all answers of a request with `error`; nothing happens when it has ended."""
        unfinished = generation.unfinished
        for answer in unfinished:
            self.scheduler.finish(answer.request, FinishReason.ERROR)
            answer.end(FinishReason.ERROR)
        if unfinished:
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
            for answer in generation.answers:
                answer.finish_reason = FinishReason.ERROR
            self._send(generation, Delta(finish_reason=FinishReason.ERROR, error=EngineFailure(self._refusal)))
        self._on_death()
