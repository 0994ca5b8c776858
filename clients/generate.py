"""Ask for one whole answer over HTTP; every JSON key that is not an input is a generation option."""

import argparse
import json
import sys
import urllib.error
import urllib.request


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("prompt")
    parser.add_argument("--url", default="http://127.0.0.1:8000")
    parser.add_argument("--max-tokens", type=int, default=64)
    parser.add_argument("--stop", action="append", default=[])
    arguments = parser.parse_args()

    body = {"text_input": arguments.prompt, "max_tokens": arguments.max_tokens}
    if arguments.stop:
        body["stop"] = json.dumps(arguments.stop)  # options are scalars, so a list travels as a JSON string
    request = urllib.request.Request(
        f"{arguments.url}/v2/models/llm/generate", json.dumps(body).encode(), {"Content-Type": "application/json"}
    )
    try:
        with urllib.request.urlopen(request, timeout=60) as reply:
            answer = json.load(reply)
    except urllib.error.HTTPError as error:
        print(json.load(error)["error"], file=sys.stderr)
        return 1
    print(answer["text_output"])
    print(f"[{answer['completion_tokens']} tokens, {answer['finish_reason']}]", file=sys.stderr)
    return 0


if __name__ == "__main__":
    sys.exit(main())
