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

from loadtests.contract import Profile
from loadtests.raw_files import ShardWriter
from loadtests.records import CENSORED, NOT_ISSUED, TIMEOUT, Record
from loadtests.schedule import Slot
from loadtests.sender import Sender
from loadtests.streams import Ending, StreamBase

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
        sender: Sender,
        writer: ShardWriter,
        shard: int = 0,
        start_ns: int = 0,
        on_record: Callable[[Record], None] = lambda record: None,
        fault: Callable[[], None] | None = None,
    ):
        self._profile, self._slots, self._sender, self._shard = profile, slots, sender, shard
        self._writer, self._on_record, self._fault, self._start_ns = writer, on_record, fault, start_ns
        self._prompts = dict(zip((slot.index for slot in slots), prompts, strict=True))
        self._streams = [sender.prepare(slot, self._prompts[slot.index]) for slot in slots]
        self._attempts: dict[int, list[tuple[int, int, str]]] = {}
        self._fault_ns: int | None = None
        self._open: dict[int, StreamBase] = {}
        self._greenlets: dict[int, gevent.Greenlet] = {}
        self._t0 = 0
        self._lag_ns: list[int] = []
        self._samples: list[tuple[int, int]] = []
        self._recorded: set[int] = set()

    def run(self) -> None:
        """Walk, drain, record. The writer is closed whatever happens; only a whole walk is marked finished."""
        finished = False
        with _no_garbage_collection():
            self._sender.connect()
            _sleep_until(self._start_ns)
            cpu, self._t0 = time.process_time_ns(), time.perf_counter_ns()
            helpers = [gevent.spawn(self._probe)]
            if self._fault is not None:
                helpers.append(gevent.spawn_later(self._profile.fault.at_s, self._do_fault))
            try:
                self._issue()
                self._drain()
                finished = True
            finally:
                gevent.killall(helpers)
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
            t0_ns=self._t0,
            start_late_ns=self._t0 - self._start_ns if self._start_ns else 0,
            fault_ns=self._fault_ns,
        )

    def progress(self) -> str:
        """One line for people: seconds, recorded, open."""
        seconds = (time.perf_counter_ns() - self._t0) / 1e9 if self._t0 else 0.0
        return f"{seconds:.0f} s: {len(self._recorded)} of {len(self._slots)} requests done, {len(self._open)} open"

    def _do_fault(self) -> None:
        self._fault_ns = time.perf_counter_ns() - self._t0
        self._fault()

    def _issue(self) -> None:
        for slot, stream in zip(self._slots, self._streams, strict=True):
            _sleep_until(self._t0 + slot.at_ns)
            if len(self._open) >= self._profile.client.max_in_flight:
                self._record(slot, stream, Ending(NOT_ISSUED, "MAX_IN_FLIGHT"))
                continue
            self._open[slot.index] = stream
            self._greenlets[slot.index] = gevent.spawn(self._one, slot, stream)

    def _one(self, slot: Slot, stream: StreamBase) -> None:
        """Send a request, again where the profile retries, and record how it ended."""
        attempts = self._attempts.setdefault(slot.index, [])
        while True:
            ending = self._attempt(slot, stream)
            if not self._sender.wait_before_retry(slot, attempts, stream, ending) or slot.index in self._recorded:
                break
            attempts.append((stream.sent_ns - self._t0, stream.end_ns - self._t0, ending.status))
            stream = self._sender.prepare(slot, self._prompts[slot.index], len(attempts))
            self._open[slot.index] = stream
        self._open.pop(slot.index, None)
        self._greenlets.pop(slot.index, None)
        self._record(slot, stream, ending)

    def _attempt(self, slot: Slot, stream: StreamBase) -> Ending:
        """Send one stream, cancelled where the schedule says so."""
        timer = None
        if slot.cancel_after_tokens is not None:
            stream.on_tokens = lambda received: self._cancel_at(slot, stream, received)
        if slot.cancel_after_ms is not None:
            timer = gevent.spawn_later(slot.cancel_after_ms / 1000, self._sender.cancel_on_purpose, stream)
        try:
            return self._sender.send(stream)
        finally:
            if timer is not None and stream.cancel_ns is None:
                timer.kill(block=False)

    def _cancel_at(self, slot: Slot, stream: StreamBase, received: int) -> None:
        if stream.cancel_ns is None and slot.cancel_after_tokens <= received < slot.output_tokens:
            stream.cancel_ns = time.perf_counter_ns()
            gevent.spawn(self._sender.cancel_on_purpose, stream)

    def _record(self, slot: Slot, stream: StreamBase, ending: Ending) -> None:
        """Write the one record of a slot."""
        if slot.index in self._recorded:
            return
        self._recorded.add(slot.index)
        sent = stream.sent_ns != 0 and ending.status != NOT_ISSUED
        cancelled = stream.cancel_ns is not None and stream.cancel_ns <= stream.end_ns
        record = Record(
            index=slot.index,
            request_id=stream.request_id,
            shard=self._shard,
            phase=slot.phase,
            measured=slot.measured,
            scheduled_ns=slot.at_ns,
            prompt_tokens=slot.prompt_tokens,
            output_tokens=slot.output_tokens,
            tenant=slot.tenant,
            item=slot.item,
            sent_ns=stream.sent_ns - self._t0 if sent else None,
            end_ns=stream.end_ns - self._t0 if sent else None,
            chunks=tuple((at - self._t0, count) for at, count in stream.chunks) if sent else (),
            cancel_ns=stream.cancel_ns - self._t0 if cancelled else None,
            attempts=tuple(self._attempts.get(slot.index, ())),
            answer="".join(stream.text) if stream.keep_text and sent else None,
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
            self._record(by_index[index], stream, ending)
            self._greenlets[index].kill(block=False)

    def _stop(self, stream: StreamBase, ending: Ending) -> None:
        """End a stream, in the decoder too."""
        if stream.stop(ending):
            gevent.spawn(self._sender.abandon, stream)

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

    def _watch(self, stream: StreamBase, now: int) -> None:
        client = self._profile.client
        if stream.paused:
            return
        if now - stream.last_ns > client.idle_gap_s * 1e9:
            self._stop(stream, Ending(TIMEOUT, "IDLE_GAP", f"no response for {client.idle_gap_s:g} s"))
        elif now - stream.sent_ns > client.deadline_s * 1e9:
            self._stop(stream, Ending(TIMEOUT, "DEADLINE", f"not finished after {client.deadline_s:g} s"))


def _sleep_until(at_ns: int) -> None:
    """A timer counts from the event loop's own idea of now, which may be old: it can fire too early."""
    while (wait := at_ns - time.perf_counter_ns()) > 0:
        gevent.sleep(wait / 1e9)


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
