"""Open-loop arrivals: walks a shard of the schedule, one greenlet a request, and never waits for an answer.

The Locust user runs `Walk`; it needs gevent. Beside the walk a probe wakes every 50 ms: it samples the open requests,
measures how late it is itself, and ends streams that are silent for too long or past their deadline.
"""

import contextlib
import gc
import os
import time
from collections.abc import Callable, Sequence

import gevent
import grpc

from loadtests.contract import Profile
from loadtests.records import CENSORED, NOT_ISSUED, TIMEOUT, Record, ShardWriter
from loadtests.schedule import Slot
from loadtests.streams import Ending, Stream, build_request, on_channel
from tritonforge.client import DECODER, cancel
from tritonforge.errors import TritonForgeError

PROBE_S = 0.05
GRACE_S = 2.0


class Walk:
    """One worker's share of one profile. `run` returns when every request has a record; `stop` ends it early."""

    def __init__(
        self,
        profile: Profile,
        slots: Sequence[Slot],
        prompts: Sequence[str],
        *,
        channel: grpc.Channel,
        model: str,
        run_id: str,
        writer: ShardWriter,
        shard: int = 0,
        on_record: Callable[[Record], None] = lambda record: None,
    ):
        self._profile, self._slots, self._channel, self._shard = profile, slots, channel, shard
        self._stub, self._model, self._writer, self._on_record = on_channel(channel), model, writer, on_record
        self._requests = [
            build_request(model, slot, prompt, f"{run_id}-{profile.id}-{slot.index}")
            for slot, prompt in zip(slots, prompts, strict=True)
        ]
        self._open: dict[int, Stream] = {}
        self._greenlets: dict[int, gevent.Greenlet] = {}
        self._t0 = 0
        self._lag_ns: list[int] = []
        self._samples: list[tuple[int, int]] = []
        self._recorded: set[int] = set()

    def run(self) -> None:
        """Walk, drain, record. The writer is closed whatever happens; only a whole walk is marked finished."""
        finished = False
        with _no_garbage_collection():
            cpu, self._t0 = time.process_time_ns(), time.perf_counter_ns()
            probe = gevent.spawn(self._probe)
            try:
                self._issue()
                self._drain()
                finished = True
            finally:
                probe.kill()
                self._close(cpu, finished=finished)

    def _close(self, cpu_before: int, *, finished: bool) -> None:
        """End and record what is still open, then write the end line with this worker's health."""
        self._end_all(Ending(CENSORED, "STOPPED", "the run was stopped while the request was open"))
        self._writer.finish(
            finished=finished,
            wall_ns=time.perf_counter_ns() - self._t0,
            cpu_ns=time.process_time_ns() - cpu_before,
            lag_ns=self._lag_ns,
            in_flight=self._samples,
            nice=os.getpriority(os.PRIO_PROCESS, 0),
        )

    def progress(self) -> str:
        """One line for people: seconds, recorded, open."""
        seconds = (time.perf_counter_ns() - self._t0) / 1e9 if self._t0 else 0.0
        return f"{seconds:.0f} s: {len(self._recorded)} of {len(self._slots)} requests done, {len(self._open)} open"

    def _issue(self) -> None:
        for slot, request in zip(self._slots, self._requests, strict=True):
            wait = self._t0 + slot.at_ns - time.perf_counter_ns()
            if wait > 0:
                gevent.sleep(wait / 1e9)
            if len(self._open) >= self._profile.client.max_in_flight:
                self._record(slot, request.id, None, Ending(NOT_ISSUED, "MAX_IN_FLIGHT"))
                continue
            stream = Stream(request, slot.output_tokens)
            self._open[slot.index] = stream
            self._greenlets[slot.index] = gevent.spawn(self._one, slot, stream)

    def _one(self, slot: Slot, stream: Stream) -> None:
        ending = stream.run(self._stub, self._profile.client.deadline_s)
        del self._open[slot.index]
        del self._greenlets[slot.index]
        self._record(slot, stream.request.id, stream, ending)

    def _record(self, slot: Slot, request_id: str, stream: Stream | None, ending: Ending) -> None:
        """Write the one record of a slot."""
        if slot.index in self._recorded:
            return
        self._recorded.add(slot.index)
        stream = stream if stream and stream.sent_ns else None
        record = Record(
            index=slot.index,
            request_id=request_id,
            shard=self._shard,
            phase=slot.phase,
            measured=slot.measured,
            scheduled_ns=slot.at_ns,
            prompt_tokens=slot.prompt_tokens,
            output_tokens=slot.output_tokens,
            sent_ns=stream.sent_ns - self._t0 if stream else None,
            end_ns=stream.end_ns - self._t0 if stream else None,
            chunks=tuple((at - self._t0, count) for at, count in stream.chunks) if stream else (),
            **vars(ending),
        )
        self._writer.request(record)
        self._on_record(record)

    def _drain(self) -> None:
        """Wait for the open requests, but no longer than drain_s; what is open then is censored, which is a miss."""
        gevent.joinall(list(self._greenlets.values()), timeout=self._profile.client.drain_s)
        self._end_all(
            Ending(CENSORED, "DRAIN", f"still open {self._profile.client.drain_s:g} s after the last arrival")
        )

    def _end_all(self, ending: Ending) -> None:
        """End every open stream and record it, also one whose greenlet does not come back."""
        for stream in list(self._open.values()):
            self._stop(stream, ending)
        gevent.joinall(list(self._greenlets.values()), timeout=GRACE_S)
        by_index = {slot.index: slot for slot in self._slots}
        for index, stream in list(self._open.items()):
            stream.end_ns = time.perf_counter_ns()
            self._record(by_index[index], stream.request.id, stream, ending)
            self._greenlets[index].kill(block=False)

    def _stop(self, stream: Stream, ending: Ending) -> None:
        """End a stream; the decoder behind an ensemble does not see that, so it is told by request id as well."""
        if stream.stop(ending) and self._model != DECODER:
            gevent.spawn(self._cancel_by_id, stream.request.id)

    def _cancel_by_id(self, request_id: str) -> None:
        with contextlib.suppress(TritonForgeError, grpc.RpcError):
            cancel(self._channel, request_id)

    def _probe(self) -> None:
        while True:
            due = time.perf_counter_ns() + round(PROBE_S * 1e9)
            gevent.sleep(PROBE_S)
            now = time.perf_counter_ns()
            self._lag_ns.append(now - due)
            self._samples.append((now - self._t0, len(self._open)))
            for stream in list(self._open.values()):
                if stream.sent_ns:
                    self._watch(stream, now)

    def _watch(self, stream: Stream, now: int) -> None:
        client = self._profile.client
        if now - stream.last_ns > client.idle_gap_s * 1e9:
            self._stop(stream, Ending(TIMEOUT, "IDLE_GAP", f"no response for {client.idle_gap_s:g} s"))
        elif now - stream.sent_ns > client.deadline_s * 1e9:
            self._stop(stream, Ending(TIMEOUT, "DEADLINE", f"not finished after {client.deadline_s:g} s"))


@contextlib.contextmanager
def _no_garbage_collection():
    """Collector pauses would be measured as the server's; what exists is frozen, the collector is off meanwhile."""
    gc.collect()
    gc.freeze()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()
        gc.unfreeze()
