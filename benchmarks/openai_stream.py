"""Streams of OpenAI's completions API over plain asyncio: a client that costs little, for whatever server speaks it."""

import asyncio
import json
import re
import time
from contextlib import suppress
from dataclasses import dataclass

_USAGE = re.compile(rb'"usage": ?{')


@dataclass(frozen=True)
class Timed:
    """Seconds from sending a request to its first text, and from there to its last."""

    ttft_s: float
    decode_s: float


class OpenAIStreams:
    """One server's API: one connection a stream, kept for the next.

    `fields` are sent with every request. Each answer must have as many tokens as were asked for, by the server's usage.
    """

    def __init__(self, port: int, model: str, *, key: str = "none", fields: dict | None = None) -> None:
        self._port, self._model, self._key = port, model, key
        self._fields = {"temperature": 0, "ignore_eos": True} | (fields or {})
        self._idle: list[tuple[asyncio.StreamReader, asyncio.StreamWriter]] = []

    async def ask(self, prompt: str | list[int], tokens: int) -> Timed:
        """Stream one answer of exactly `tokens` tokens. Raises RuntimeError when it is not that."""
        usage = {"stream": True, "stream_options": {"include_usage": True}}
        fields = {"model": self._model, "prompt": prompt, "max_tokens": tokens}
        body = json.dumps(fields | self._fields | usage).encode()
        head = f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {self._key}\r\n"
        head += f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
        start = time.perf_counter()
        reader, writer, status = await self._send(head.encode() + body)
        if b" 200 " not in status:
            raise RuntimeError(f"{status.decode().strip()}: {(await reader.read(2000)).decode()}")
        times, last = [], b""
        async for line in reader:
            if line.startswith(b"data: {"):
                if _USAGE.search(line):
                    last = line
                times.append(time.perf_counter())
            elif line == b"0\r\n":
                await reader.readline()
                break
        counted = json.loads(last[6:])["usage"]["completion_tokens"] if last else None
        if counted != tokens:
            raise RuntimeError(f"asked for {tokens} tokens, the answer's usage says {counted}")
        self._idle.append((reader, writer))
        return Timed(times[0] - start, times[-1] - times[0])

    async def _send(self, request: bytes) -> tuple[asyncio.StreamReader, asyncio.StreamWriter, bytes]:
        """Send a request over a kept connection, or a new one where the server has closed it; and the status line."""
        while self._idle:
            reader, writer = self._idle.pop()
            writer.write(request)
            with suppress(ConnectionError):
                if status := await reader.readline():
                    return reader, writer, status
            writer.close()
        reader, writer = await asyncio.open_connection("127.0.0.1", self._port)
        writer.write(request)
        return reader, writer, await reader.readline()

    async def close(self) -> None:
        """Close the connections."""
        for _, writer in self._idle:
            writer.close()
