"""One request over HTTP generate_stream (server-sent events), timed like one over gRPC.

The sender uses it for profiles whose protocol is http-sse. Needs gevent sockets. Each line is stamped before it is
parsed. HTTP requests have no id in this Triton version: they are joined to the server's account by their last event.
"""

import json
import time
from dataclasses import dataclass
from typing import Any

from geventhttpclient import HTTPClient
from geventhttpclient.response import HTTPConnectionClosed, HTTPParseError

from loadtests.records import ERROR, TIMEOUT
from loadtests.streams import Ending, StreamBase, failed
from tritonforge.client import typed_error
from tritonforge.contract import STATISTICS
from tritonforge.errors import Overloaded, TritonForgeError

DATA = b"data:"
CONNECT_S = 10.0


@dataclass(kw_only=True)
class HttpStream(StreamBase):
    """One open request. `request` is the JSON body, `url` is host:port, `model` the served model's name."""

    request: dict[str, Any]
    url: str
    model: str
    request_id: str
    _client: HTTPClient | None = None

    def run(self, deadline_s: float) -> Ending:
        """Send the request, read its events to the end and say how it ended. Never raises for what a server can do."""
        self.sent_ns = self.last_ns = time.perf_counter_ns()
        ending = Ending(ERROR, "ABANDONED", "the client gave the request up")
        try:
            host, _, port = self.url.rpartition(":")
            self._client = HTTPClient(
                host, port=int(port), connection_timeout=CONNECT_S, network_timeout=deadline_s + 5
            )
            ending = self._read(self._client, json.dumps(self.request))
        except TimeoutError:
            ending = Ending(TIMEOUT, "DEADLINE", f"no event for {deadline_s + 5:g} s")
        except TritonForgeError as error:
            ending = failed(error)
        except (HTTPParseError, HTTPConnectionClosed) as error:
            ending = Ending(ERROR, "TRUNCATED", str(error))
        except OSError as error:
            ending = failed(Overloaded(f"no connection to {self.url}: {error}"))
        except (ValueError, KeyError, TypeError) as error:  # events that are not what the contract says
            ending = Ending(ERROR, "MALFORMED", str(error))
        finally:
            self.end_ns = time.perf_counter_ns()
            self._close()
        return self._stopped or ending

    def _close(self) -> None:
        if self._client is not None:
            self._client.close()

    def _read(self, client: HTTPClient, body: str) -> Ending:
        path = f"/v2/models/{self.model}/generate_stream"
        response = client.request("POST", path, body=body, headers={"Content-Type": "application/json"})
        last, version = None, None
        while line := response.readline(b"\n"):
            at = time.perf_counter_ns()
            line = line.strip()
            if not line:
                continue
            self.last_ns = at
            event = json.loads(line.removeprefix(DATA))
            if "error" in event:
                raise typed_error(str(event["error"]))
            if last is not None:
                return Ending(ERROR, "AFTER_FINAL", "an event came after the final one")
            version = event.get("model_version") or version
            self.add(at, len(_as_list(event.get("token_ids", []))), _as_list(event.get("text_output", ""))[0])
            if event.get("finish_reason"):
                last = event
        if last is None:
            return Ending(ERROR, "TRUNCATED", f"HTTP {response.status_code} ended without a final event")
        statistics = {tensor.name: last[tensor.name] for tensor in STATISTICS if tensor.name in last}
        return self.complete(str(_as_list(last["finish_reason"])[0]), statistics or None, version)


def _as_list(value: Any) -> list:
    """Triton flattens a tensor of one element into a scalar."""
    return value if isinstance(value, list) else [value]
