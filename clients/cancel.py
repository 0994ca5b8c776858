"""Cancel a running answer of the ensemble by its request id: closing the stream would not reach the decoder."""

import argparse
import queue
import sys
import uuid

import numpy as np
import tritonclient.grpc as triton


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--url", default="127.0.0.1:8001")
    parser.add_argument("--after", type=int, default=5, help="cancel after this many responses")
    arguments = parser.parse_args()

    request_id = uuid.uuid4().hex
    text = triton.InferInput("text_input", [1, 1], "BYTES")
    text.set_data_from_numpy(np.array([[b"Once upon a time"]], dtype=object))
    nothing = triton.InferInput("input_ids", [1, 0], "INT32")
    nothing.set_data_from_numpy(np.zeros((1, 0), dtype=np.int32))
    options = {"stream": True, "max_tokens": 1000, "ignore_eos": True}
    responses, answers = queue.SimpleQueue(), queue.SimpleQueue()
    with triton.InferenceServerClient(arguments.url) as client, triton.InferenceServerClient(arguments.url) as control:
        client.start_stream(lambda result, error: responses.put((result, error)))
        control.start_stream(lambda result, error: answers.put((result, error)))
        client.async_stream_infer("llm", [text], request_id=request_id, parameters=options)
        final, count = False, 0
        while not final:
            result, error = responses.get(timeout=60)
            if error is not None:
                print(error.message(), file=sys.stderr)
                return 1
            count += 1
            final = result.get_response().parameters["triton_final_response"].bool_param
            if count == arguments.after:
                control.async_stream_infer("decoder", [nothing], parameters={"cancel": request_id})
        finish_reason = result.as_numpy("finish_reason")[0, 0].decode()
        print(f"[{result.as_numpy('completion_tokens')[0, 0]} tokens, {finish_reason}]")
    return 0


if __name__ == "__main__":
    sys.exit(main())
