"""Ask many prompts at once with asyncio, one stream each; the decoder batches them in flight."""

import argparse
import asyncio
import sys
import time

import numpy as np
import tritonclient.grpc.aio as triton


async def ask(client: triton.InferenceServerClient, number: int, max_tokens: int) -> int:
    text = triton.InferInput("text_input", [1, 1], "BYTES")
    text.set_data_from_numpy(np.array([[f"Write a sentence about the number {number}.".encode()]], dtype=object))

    async def requests():
        options = {"chat": True, "stream": True, "max_tokens": max_tokens}
        yield {"model_name": "llm", "inputs": [text], "parameters": options}

    answer, tokens = "", 0
    async for result, error in client.stream_infer(requests()):
        if error is not None:
            raise error
        answer += result.as_numpy("text_output")[0, 0].decode()
        tokens += result.as_numpy("token_ids").size
    print(f"{number}: {answer!r}")
    return tokens


async def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--url", default="127.0.0.1:8001")
    parser.add_argument("--count", type=int, default=16)
    parser.add_argument("--max-tokens", type=int, default=64)
    arguments = parser.parse_args()
    started = time.monotonic()
    async with triton.InferenceServerClient(arguments.url) as client:
        try:
            tokens = await asyncio.gather(*(ask(client, n, arguments.max_tokens) for n in range(arguments.count)))
        except triton.InferenceServerException as error:
            print(error.message(), file=sys.stderr)
            return 1
    seconds = time.monotonic() - started
    print(f"[{arguments.count} answers, {sum(tokens) / seconds:.0f} tokens per second]", file=sys.stderr)
    return 0


if __name__ == "__main__":
    sys.exit(asyncio.run(main()))
