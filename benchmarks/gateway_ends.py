"""How soon the gateway acts: a client that leaves, and a key that is revoked.

    python -m benchmarks.gateway_ends RELEASE [--times 20]

Left: from closing a stream's connection until no KV block is held, by metrics of the decoder that are up to
100 ms old. Revoked: from the end of a revocation until the key is refused, and until a stream that it began
has ended.
"""

import argparse
import http.client
import json
import statistics
import tempfile
import threading
import time
from pathlib import Path

from benchmarks.gateway import gateway_process
from benchmarks.observe import decoder_metrics
from tritonforge.gateway.limits.keys import create_key, revoke_key
from tritonforge.server import Server

LONG = {"prompt": "Once upon a time", "stream": True, "ignore_eos": True, "max_tokens": 1900}


class Client:
    """One key's requests to a gateway."""

    def __init__(self, port: int, key: str, model: str) -> None:
        self._port, self._model = port, model
        self._headers = {"Authorization": f"Bearer {key}", "Content-Type": "application/json"}

    def begin(self) -> tuple[http.client.HTTPConnection, http.client.HTTPResponse]:
        """A stream whose first text has come."""
        connection = http.client.HTTPConnection("127.0.0.1", self._port, timeout=60)
        connection.request("POST", "/v1/completions", json.dumps(LONG | {"model": self._model}), self._headers)
        answer = connection.getresponse()
        if answer.status != 200:
            raise RuntimeError(f"{answer.status}: {answer.read().decode()}")
        answer.readline()
        return connection, answer

    def is_refused(self) -> bool:
        """Whether the key is."""
        connection = http.client.HTTPConnection("127.0.0.1", self._port, timeout=60)
        connection.request("GET", "/v1/models", headers=self._headers)
        status = connection.getresponse().status
        connection.close()
        return status == 401


def seconds_until_free(server: Server, client: Client) -> float:
    """From leaving a stream until all KV blocks are free."""
    connection, answer = client.begin()
    while is_free(server):  # until the metrics know of it
        time.sleep(0.002)
    answer.close()
    connection.close()
    start = time.perf_counter()
    while not is_free(server):
        time.sleep(0.002)
    return time.perf_counter() - start


def is_free(server: Server) -> bool:
    """Whether no KV block is held, by the decoder's metrics."""
    found = decoder_metrics(server)
    return found["kv_blocks_free"] == found["kv_blocks"]


def seconds_until_revoked(port: int, keys: Path, model: str) -> tuple[float, float]:
    """From a revocation until the key is refused, and until its stream has ended."""
    entry, key = create_key(keys, "left")
    client = Client(port, key, model)
    while client.is_refused():  # until the gateway knows the new key
        time.sleep(0.01)
    connection, answer = client.begin()
    ended: list[float] = []

    def read_on() -> None:
        answer.read()
        ended.append(time.perf_counter())

    reader = threading.Thread(target=read_on)
    reader.start()
    revoke_key(keys, entry.id)
    start = time.perf_counter()
    while not client.is_refused():
        time.sleep(0.002)
    refused = time.perf_counter() - start
    reader.join()
    connection.close()
    return refused, ended[0] - start


def told(name: str, seconds: list[float]) -> str:
    """Median and greatest, in ms."""
    return f"{name}: median {statistics.median(seconds) * 1e3:.0f} ms, at most {max(seconds) * 1e3:.0f} ms"


def main() -> None:
    """Start both servers and measure."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("release", type=Path)
    parser.add_argument("--times", type=int, default=20)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder, Server(options.release) as server:
        keys, model = Path(folder) / "keys.json", server.release.name
        _, key = create_key(keys, "stays")
        with gateway_process(server, keys) as port:
            client = Client(port, key, model)
            left = [seconds_until_free(server, client) for _ in range(options.times)]
            revoked = [seconds_until_revoked(port, keys, model) for _ in range(options.times)]
    print(told(f"a client leaves until its blocks are free, {len(left)} times", left))
    print(told("a key is revoked until it is refused", [one for one, _ in revoked]))
    print(told("a key is revoked until its stream has ended", [one for _, one in revoked]))


if __name__ == "__main__":
    main()
