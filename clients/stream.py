"""Stream one answer over gRPC with plain tritonclient: the text appears as the decoder makes it."""

import argparse
import queue
import sys

import numpy as np
import tritonclient.grpc as triton


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("prompt")
    parser.add_argument("--url", default="127.0.0.1:8001")
    parser.add_argument("--max-tokens", type=int, default=64)
    arguments = parser.parse_args()

    text = triton.InferInput("text_input", [1, 1], "BYTES")
    text.set_data_from_numpy(np.array([[arguments.prompt.encode()]], dtype=object))
    responses = queue.SimpleQueue()
    with triton.InferenceServerClient(arguments.url) as client:
        client.start_stream(lambda result, error: responses.put((result, error)))
        client.async_stream_infer("llm", [text], parameters={"stream": True, "max_tokens": arguments.max_tokens})
        while True:
            result, error = responses.get(timeout=60)
            if error is not None:
                print(error.message(), file=sys.stderr)
                return 1
            print(result.as_numpy("text_output")[0, 0].decode(), end="", flush=True)
            if result.get_response().parameters["triton_final_response"].bool_param:
                break
        finish_reason = result.as_numpy("finish_reason")[0, 0].decode()
        print(f"\n[{result.as_numpy('completion_tokens')[0, 0]} tokens, {finish_reason}]", file=sys.stderr)
    return 0


if __name__ == "__main__":
    sys.exit(main())
