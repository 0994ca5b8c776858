"""Turns slots into requests on the wire, and a request into attempts: which protocol, which channel, which options.

The walk of arrivals uses it; it needs gevent. It must not know when requests are due.
"""

import contextlib
import random
import time
from collections.abc import Sequence

import gevent
import grpc

from loadtests.contract import Profile, Tenant
from loadtests.records import SHED
from loadtests.schedule import Slot
from loadtests.streams import SMALL_WINDOW, Ending, Stream, StreamBase, build_request, on_channel, open_channel
from tritonforge.client import DECODER, cancel
from tritonforge.errors import NotFound, TritonForgeError

CANCEL_TRIES = 100
CANCEL_PAUSE_S = 0.01


class Sender:
    """Sends the requests of one profile to `url` (gRPC) and, for http-sse, `http_url`; both are host:port."""

    def __init__(self, profile: Profile, *, url: str, http_url: str, model: str, run_id: str):
        self._profile, self._model, self._run_id, self._http_url = profile, model, run_id, http_url
        self._channels = contextlib.ExitStack()
        self.channel = self._channels.enter_context(open_channel(url))
        self._stub = on_channel(self.channel)
        self._slow_stub = self._stub
        if any(tenant.slow for tenant in profile.tenants):
            self._slow_stub = on_channel(self._channels.enter_context(open_channel(url, *SMALL_WINDOW)))
        self._tenants = {tenant.id: tenant for tenant in profile.everyone()}
        self._items = {item.id: item for item in profile.quality}

    def close(self) -> None:
        self._channels.close()

    def connect(self, timeout_s: float = 10.0) -> None:
        """Connect before the clock starts: no request pays for it. A target that is gone shows in the records."""
        with contextlib.suppress(grpc.FutureTimeoutError):
            grpc.channel_ready_future(self.channel).result(timeout=timeout_s)

    def prepare(self, slot: Slot, prompt: str, attempt: int = 0) -> StreamBase:
        """The stream of a slot's attempt, not yet sent."""
        tenant, item = self._tenants[slot.tenant], self._items.get(slot.item)
        options = dict(self._profile.options) | self._options_of(tenant)
        if item is not None:
            options |= {"ignore_eos": None, **dict(item.options)}
        request_id = f"{self._run_id}-{self._profile.id}-{slot.index}" + (f".{attempt}" if attempt else "")
        common = {
            "wanted_tokens": slot.output_tokens,
            "forced": item is None,
            "slow": tenant.slow,
            "keep_text": item is not None,
        }
        if self._profile.protocol == "http-sse":
            from loadtests.http_streams import HttpStream

            own = {"max_tokens": slot.output_tokens, "ignore_eos": True, "stream": True} | options
            body = {"text_input": prompt, **{name: value for name, value in own.items() if value is not None}}
            return HttpStream(request=body, url=self._http_url, model=self._model, request_id=request_id, **common)
        return Stream(request=build_request(self._model, slot, prompt, request_id, **options), **common)

    @staticmethod
    def _options_of(tenant: Tenant) -> dict[str, str | int]:
        named = {"tenant": tenant.id} if tenant.id else {}
        return named if tenant.priority_class is None else {**named, "priority_class": tenant.priority_class}

    def send(self, stream: StreamBase) -> Ending:
        """Send a prepared stream and read it to its end."""
        deadline_s = self._profile.client.deadline_s
        if isinstance(stream, Stream):
            return stream.run(self._slow_stub if stream.slow else self._stub, deadline_s)
        return stream.run(deadline_s)

    def wait_before_retry(self, slot: Slot, attempts: Sequence[tuple], stream: StreamBase, ending: Ending) -> bool:
        """True after the pause that the retry policy wants; False when this ending is not to be tried again."""
        retry = self._profile.retry
        if retry is None or ending.status != SHED or stream.received or len(attempts) + 1 >= retry.max_attempts:
            return False
        attempt = len(attempts) + 1
        rng = random.Random(f"{self._profile.data.seed}/retry/{slot.index}/{attempt}")
        gevent.sleep(rng.random() * retry.base_ms * retry.factor ** (attempt - 1) / 1000)
        return True

    def cancel_on_purpose(self, stream: StreamBase) -> None:
        """Ask the decoder to cancel a stream by its id; one that has not got there yet is asked for again."""
        stream.cancel_ns = stream.cancel_ns or time.perf_counter_ns()
        for _ in range(CANCEL_TRIES):
            if stream.end_ns:
                return
            try:
                cancel(self.channel, stream.request_id)
                return
            except NotFound:
                gevent.sleep(CANCEL_PAUSE_S)
            except (TritonForgeError, grpc.RpcError):
                return

    def abandon(self, stream: StreamBase) -> None:
        """Tell the decoder that a stream was given up: behind an ensemble it does not see a closed call."""
        if self._model != DECODER and isinstance(stream, Stream):
            with contextlib.suppress(TritonForgeError, grpc.RpcError):
                cancel(self.channel, stream.request_id)
