"""Runs a batch: sends its requests to a gateway, some at a time and after everybody else's, and writes what comes.

A request that cannot be answered now is tried again after a while; each gets exactly one line, an answer or an error.
"""

import asyncio
import random
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx2

from tritonforge.errors import SetupError
from tritonforge.gateway.batch.files import Entry, Results, body_of, line_of, read_entries
from tritonforge.gateway.exchange import LOW, PRIORITY_HEADER
from tritonforge.launch.ports import is_loopback

RETRIED = (408, 425, 429, 500, 502, 503, 504)
FIRST_WAIT_S, MOST_WAIT_S = 0.5, 30.0
MOST_TOLD_WAIT_S = 3600.0
"""However long the gateway says to wait: an hour later it may say otherwise."""
AHEAD = 4
"""An ordered batch may be so many times its concurrency ahead of the first request that is not answered yet."""


@dataclass(frozen=True)
class BatchOptions:
    """One batch. `url` is the gateway's address, `tries` how often a request is sent at most."""

    source: Path
    out: Path
    errors: Path
    url: str
    key: str | None = None
    concurrency: int = 16
    ordered: bool = False
    tries: int = 8
    timeout_s: float = 600.0


@dataclass
class Progress:
    """How far a batch is. `before`: lines that an earlier run wrote."""

    total: int
    before: int
    answered: int = 0
    failed: int = 0
    tokens: int = 0
    began: float = field(default_factory=time.monotonic)

    def line(self) -> str:
        """For people."""
        seconds = max(1e-9, time.monotonic() - self.began)
        done = self.answered + self.failed
        left = self.total - self.before - done
        rate = done / seconds
        told = f"{self.before + done}/{self.total} done, {self.failed} errors, {rate:.1f} requests/s"
        told += f", {self.tokens / seconds:.0f} tokens/s"
        return told + (f", about {left / rate:.0f} s left" if done and left else "")


async def run_batch(options: BatchOptions, report: Callable[[Progress], None]) -> Progress:
    """Answer all that has no line yet; `report` is called after each. Raises InvalidRequest, SetupError."""
    entries = read_entries(options.source)
    results = Results(options.out, options.errors)
    try:
        results.check(options.source, entries)
        done = results.done
        pending = [entry for entry in entries if entry.custom_id not in done]
        run = _Run(options, pending, results, Progress(len(entries), len(entries) - len(pending)), report)
        await run.all()
        return run.progress
    finally:
        results.close()


class _Run:
    def __init__(
        self,
        options: BatchOptions,
        pending: list[Entry],
        results: Results,
        progress: Progress,
        report: Callable[[Progress], None],
    ) -> None:
        self._options, self._results, self.progress, self._report = options, results, progress, report
        self._pending: Iterator[tuple[int, Entry]] = iter(enumerate(pending))
        self._ahead = asyncio.Semaphore(options.concurrency * AHEAD if options.ordered else len(pending) + 1)
        self._waiting: dict[int, tuple[Entry, bytes, bool]] = {}
        self._next = 0

    async def all(self) -> None:
        """Send everything; one failure that stands for all others ends the rest."""
        options = self._options
        headers = {PRIORITY_HEADER: LOW} | ({"Authorization": f"Bearer {options.key}"} if options.key else {})
        host = httpx2.URL(options.url)
        async with httpx2.AsyncClient(
            base_url=options.url,
            headers=headers,
            timeout=options.timeout_s,
            limits=httpx2.Limits(max_connections=options.concurrency),
            trust_env=not is_loopback(f"{host.host}:{host.port or 443}"),
        ) as client:
            try:
                async with asyncio.TaskGroup() as group:
                    for _ in range(options.concurrency):
                        group.create_task(self._work(client))
            except ExceptionGroup as failures:
                raise failures.exceptions[0] from None

    async def _work(self, client: httpx2.AsyncClient) -> None:
        while True:
            await self._ahead.acquire()
            place, entry = next(self._pending, (0, None))
            if entry is None:
                self._ahead.release()
                return
            line, tokens, ok = await self._answer(client, entry)
            self.progress.tokens += tokens
            self._keep(place, entry, line, ok=ok)

    def _keep(self, place: int, entry: Entry, line: bytes, *, ok: bool) -> None:
        """Write the line, if ordered not before those of all earlier requests."""
        self._waiting[place] = (entry, line, ok)
        ready = [place]
        if self._options.ordered:
            ready = []
            while self._next in self._waiting:
                ready.append(self._next)
                self._next += 1
        for one in ready:
            known, content, good = self._waiting.pop(one)
            self._results.write(known, content, ok=good)
            self.progress.answered += good
            self.progress.failed += not good
            self._ahead.release()
            self._report(self.progress)

    async def _answer(self, client: httpx2.AsyncClient, entry: Entry) -> tuple[bytes, int, bool]:
        """The line of one request, its tokens, and whether it is an answer."""
        body = body_of(self._options.source, entry)
        for attempt in range(1, self._options.tries + 1):
            last = attempt == self._options.tries
            try:
                response = await client.post(entry.url, json=body)
            except httpx2.RequestError as error:
                if last:
                    told = {"code": "connection_failed", "message": f"{type(error).__name__}: {error}"}
                    return line_of(entry, None, told), 0, False
                await asyncio.sleep(wait_s(attempt, None))
                continue
            if response.status_code == 401:
                raise SetupError("the gateway does not accept the key (401); nothing more was sent; give another key")
            if response.status_code not in RETRIED or last:
                return _line(entry, response)
            await asyncio.sleep(wait_s(attempt, response.headers.get("retry-after")))
        raise AssertionError("tries is at least 1")


def wait_s(attempt: int, told: str | None) -> float:
    """Seconds until the next try: what the gateway said, else twice as long each time, spread by chance."""
    if told is not None and told.isascii() and told.isdigit():
        return min(float(told), MOST_TOLD_WAIT_S) + random.random()
    return min(MOST_WAIT_S, FIRST_WAIT_S * 2 ** (attempt - 1)) * (0.5 + random.random() / 2)


def _line(entry: Entry, response: httpx2.Response) -> tuple[bytes, int, bool]:
    try:
        body: Any = response.json()
    except ValueError:
        body = response.text
    told = {
        "status_code": response.status_code,
        "request_id": response.headers.get("x-request-id", ""),
        "body": body,
    }
    ok = response.status_code == 200
    usage = body.get("usage") if ok and isinstance(body, dict) else None
    tokens = usage.get("completion_tokens") if isinstance(usage, dict) else None
    return line_of(entry, told, None), tokens if type(tokens) is int else 0, ok
