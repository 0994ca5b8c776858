"""InFlight: the unfinished requests of an engine loop, from their arrival to the one delta that ends them.

The loop's thread is the only user. A request leaves through `_send` alone, with its final delta: answered, refused,
shed, cancelled or failed.
"""

from collections.abc import Callable, Mapping
from dataclasses import replace

from tritonforge.answer import Answer
from tritonforge.deadlines import Deadlines, RetryAfter
from tritonforge.errors import Overloaded, TritonForgeError
from tritonforge.generation import Delta, Generation
from tritonforge.sampling.sampling import Drawn
from tritonforge.scheduling.request import FinishReason, Request, StepPlan, TokenEvent
from tritonforge.scheduling.scheduler import Scheduler


class InFlight:
    """See the module's docstring. `forget` is called with the key of each scheduler request that has ended."""

    def __init__(self, scheduler: Scheduler, clock_ns: Callable[[], int], forget: Callable[[int], None]) -> None:
        self._scheduler = scheduler
        self._clock_ns = clock_ns
        self._forget = forget
        self._generations: dict[int, Generation] = {}
        self._answers: dict[int, Answer] = {}
        self._deadlines = Deadlines()
        self._retry_after = RetryAfter()

    def __bool__(self) -> bool:
        return bool(self._generations)

    @property
    def answers(self) -> Mapping[int, Answer]:
        """The answers by the key of their scheduler request."""
        return self._answers

    def all(self) -> list[Generation]:
        """All unfinished requests, oldest first."""
        return list(self._generations.values())

    def get(self, key: int) -> Generation | None:
        """The request that was submitted under `key`, if it is unfinished."""
        return self._generations.get(key)

    def of(self, request: Request) -> Generation:
        """The request that a scheduler request is an answer of."""
        return self._generations[(request if request.parent is None else request.parent).key]

    def add(self, generation: Generation) -> None:
        """Take in a new request, or end it and those that are pushed out for it with the reason."""
        self._generations[generation.key] = generation
        self._answers |= {answer.request.key: answer for answer in generation.answers}
        try:
            pushed = self._scheduler.add(generation.answers[0].request)
        except TritonForgeError as error:
            self.fail(generation, error)
            return
        self._deadlines.watch(generation)
        for request in pushed:
            why = f"pushed out of the full queue, of which tenant {request.tenant!r} held the most"
            self.fail(self.of(request), Overloaded(why))

    def stamp_scheduled(self, plan: StepPlan) -> None:
        """Note for each request of a step when it was first worked on."""
        now = self._clock_ns()
        for work in plan.work:
            timeline = self.of(work.request).timeline
            if timeline.scheduled_ns is None:
                timeline.scheduled_ns = now

    def tell(self, event: TokenEvent, drawn: Drawn) -> None:
        """Pass on one committed token; those that follow a stop string are nobody's any more."""
        answer = self._answers.get(event.request.key)
        if answer is None or answer.finish_reason is not None:
            return
        generation = self.of(event.request)
        prompt = None if answer.num_told_tokens else generation.echo(answer)
        text = answer.tell(event)
        if answer.finish_reason is not None:
            self._scheduler.finish(event.request, answer.finish_reason)
        for child in generation.take_unforked():  # the prompt is computed: let the other samples share it
            self._scheduler.fork(generation.answers[0].request, child.request)
        self._send(generation, Delta(text, (drawn,), answer.finish_reason, answer.index, prompt=prompt))

    def cancel(self, generation: Generation) -> None:
        """End the answers of a request that have not ended yet."""
        for answer in generation.unfinished:
            self._scheduler.finish(answer.request, FinishReason.CANCELLED)
            text = answer.end(FinishReason.CANCELLED)
            self._send(generation, Delta(text, (), FinishReason.CANCELLED, answer.index))

    def fail(self, generation: Generation, error: TritonForgeError) -> None:
        """End all answers of a request with `error`, unless it has ended. One that is shed learns when to retry."""
        if isinstance(error, Overloaded):
            seconds = self._retry_after.seconds(self._scheduler.num_waiting, self._clock_ns())
            error = Overloaded(f"{error.args[0]}; retry in about {seconds} s")
        unfinished = generation.unfinished
        for answer in unfinished:
            self._scheduler.finish(answer.request, FinishReason.ERROR)
            answer.finish_reason = FinishReason.ERROR
        if unfinished:
            self._send(generation, Delta(finish_reason=FinishReason.ERROR, error=error))

    def fail_late(self) -> None:
        """End the requests that missed a limit of their own."""
        for generation, error in self._deadlines.missed(self._clock_ns()):
            self.fail(generation, error)

    def abandon(self, error: TritonForgeError) -> None:
        """End all requests with `error`, without the scheduler: it cannot be trusted any more."""
        for generation in self.all():
            for answer in generation.answers:
                answer.finish_reason = FinishReason.ERROR
            self._send(generation, Delta(finish_reason=FinishReason.ERROR, error=error))

    def _send(self, generation: Generation, delta: Delta) -> None:
        """The one way to a client; a request's last delta takes it out."""
        if not generation.unfinished:
            delta = replace(delta, final=True)
            for answer in generation.answers:
                del self._answers[answer.request.key]
                self._forget(answer.request.key)
            del self._generations[generation.key]
            self._retry_after.ended(self._clock_ns())
        generation.sink(generation, delta)
