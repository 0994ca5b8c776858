"""One Locust test in one process: what a local runner, a master or a worker does between start and stop.

The Locust file wires it to events. A master hands out shards and judges; a worker walks its shard; a local runner does
both. Needs gevent, with gRPC initialised for it.
"""

import contextlib
import os
import time
from typing import Any

import gevent
from locust.env import Environment

from loadtests import metrics
from loadtests.arrivals import Walk
from loadtests.faults import fault_of
from loadtests.fields import InvalidContract
from loadtests.metrics import ms
from loadtests.prompts import prompts_sha256
from loadtests.raw_files import ShardWriter, shard_path
from loadtests.records import CANCELLED, OK, Record
from loadtests.report_text import table
from loadtests.runs import Run, report_of
from loadtests.schedule import Slot, build_schedule, schedule_sha256, shard_of
from loadtests.sender import Sender
from loadtests.target import inspect, server_state

PROGRESS_S = 10.0
BARRIER_S = 2.0
LATE_WORKER_S = 30.0


def _ask_for_priority() -> None:
    """A client that waits for a core measures itself. It needs little CPU: where allowed, it goes first."""
    with contextlib.suppress(OSError):
        os.setpriority(os.PRIO_PROCESS, 0, -10)


class RequestFailed(Exception):
    """What Locust shows of a request that did not end ok."""


def run_of(options: Any, host: str | None, **fixed: str) -> Run:
    """The run that Locust's options describe; `fixed` values (of a master) win. Raises typed errors."""
    out = options.out or f"artifacts/reports/locust-{time.strftime('%Y%m%d-%H%M%S')}"
    values = {"out": out, "salt": options.salt or None, "run_id": options.run_id or None, **fixed}
    run = Run.prepare(
        contract=options.contract,
        url=host or "127.0.0.1:8001",
        release=options.release or None,
        tokenizer=options.tokenizer or None,
        profile=options.contract_profile or None,
        http_url=options.http_url or None,
        metrics_url=options.metrics_url or None,
        server_pid=options.server_pid or None,
        **values,
    )
    if len(run.profiles) > 1:
        raise InvalidContract(
            f"one Locust test runs one profile: give --contract-profile, one of {', '.join(run.profiles)}"
        )
    return run


class Walker:
    """Walks shard `shard` of `of`, from `start_ns` (of this process's perf_counter_ns) on, or at once."""

    def __init__(self, environment: Environment, run: Run, *, shard: int = 0, of: int = 1, start_ns: int = 0):
        _ask_for_priority()
        self._environment = environment
        self._profile = run.contract.profile(run.profiles[0])
        schedule = build_schedule(self._profile)
        slots = shard_of(schedule, shard, of)
        prompts = [run.prompts[self._profile.id][slot.index] for slot in slots]
        digests = {"schedule_sha256": schedule_sha256(schedule), "prompts_sha256": prompts_sha256(prompts)}
        digests["contract_sha256"] = run.contract.sha256
        addresses = {"url": run.url, "http_url": run.http_url, "model": run.contract.target.model}
        self._sender = Sender(self._profile, run_id=run.run_id, **addresses)
        self._walk = Walk(
            self._profile,
            slots,
            prompts,
            sender=self._sender,
            fault=fault_of(self._profile, run.server_pid) if shard == 0 else None,
            writer=ShardWriter(shard_path(run.out, self._profile.id, shard), self._profile.id, shard, of, **digests),
            shard=shard,
            start_ns=start_ns,
            on_record=self._fire,
        )
        self.schedule: list[Slot] = schedule

    def run(self) -> None:
        """Walk the shard to its end; an interrupted walk still writes its records."""
        with contextlib.closing(self._sender):
            progress = gevent.spawn(self._progress)
            try:
                self._walk.run()
            finally:
                progress.kill()

    def _progress(self) -> None:
        while True:
            gevent.sleep(PROGRESS_S)
            print(f"progress: {self._profile.id}: {self._walk.progress()}", flush=True)

    def _fire(self, record: Record) -> None:
        """Locust's charts: E2E with the outcome, TTFT, TPOT and tokens per second of answers that ended ok.

        A request that was cancelled on purpose is neither a failure nor an E2E of an answer: it has a row of its own.
        """
        name = f"{self._profile.id}/{record.phase}"
        failed = None if record.status in (OK, CANCELLED) else RequestFailed(f"{record.status} {record.code}")
        ended = record.end_ns - record.scheduled_ns if record.end_ns is not None else 0
        if record.status == CANCELLED:
            self._event("CANCELLED", name, ms(ended), record)
            return
        self._event("E2E", name, ms(metrics.e2e_ns(record) if failed is None else ended), record, failed)
        if failed is None:
            self._event("TTFT", name, ms(metrics.ttft_ns(record)), record)
            if (tpot := metrics.tpot_ns(record)) is not None:
                self._event("TPOT", name, ms(tpot), record)
                self._event("TOKENS/S", name, 1e9 / max(tpot, 1), record)

    def _event(self, kind: str, name: str, value_ms: float, record: Record, error: Exception | None = None) -> None:
        self._environment.events.request.fire(
            request_type=kind,
            name=name,
            response_time=value_ms,
            response_length=record.received_tokens,
            exception=error,
            context={"status": record.status, "request_id": record.request_id},
        )


class Judge:
    """The side of a test that owns its folder: asks the target before and after, merges, judges, prints."""

    def __init__(self, run: Run, *, raw_only: bool):
        self.run, self._raw_only = run, raw_only
        self._target: dict[str, Any] = {}
        self._before: dict[str, Any] | None = None

    def start(self) -> None:
        """Check that the target is ready and make the folder; a campaign has done both. Raises Unreachable."""
        if self._raw_only:
            return
        self._target = inspect(self.run.url, self.run.contract.target.model)
        self._before = server_state(self.run)
        self.run.create_folder()

    def finish(self) -> int:
        """Judge, print the table, and return the exit code; 0 when only records were wanted."""
        if self._raw_only:
            return 0
        self.run.note_server(self.run.profiles[0], self._before, server_state(self.run))
        verdict = self.run.conclude(self._target)
        print(f"{table(report_of(self.run.out))}\nreport: {self.run.out / 'report.html'}", flush=True)
        return verdict.exit_code

    def deadline_s(self) -> float:
        """When a master stops waiting for its workers: after the schedule, the drain and some patience."""
        profile = self.run.contract.profile(self.run.profiles[0])
        return (
            BARRIER_S + sum(phase.seconds for phase in profile.arrivals.phases) + profile.client.drain_s + LATE_WORKER_S
        )
