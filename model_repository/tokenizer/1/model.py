"""The tokenizer: text, one user message (chat) or a whole chat (messages) in, token ids out; batched dynamically.

All options pass through here on their way to the decoder, so an invalid one is refused before anything is tokenized.
"""

from pathlib import Path

import numpy as np

from tritonforge.chat import parse_messages
from tritonforge.contract import MAX_TEXT_BYTES
from tritonforge.errors import InvalidRequest, TritonForgeError
from tritonforge.request import parse_options
from tritonforge.text import Tokenizer
from tritonforge.triton import error_response, load_error, read_options, read_text, response


class TritonPythonModel:
    def initialize(self, args):
        try:
            self.tokenizer = Tokenizer(Path(args["model_repository"]) / args["model_version"])
        except TritonForgeError as error:
            raise load_error(error) from None

    def execute(self, requests):
        return [self._answer(request) for request in requests]

    def _answer(self, request):
        try:
            token_ids = self._encode(read_text(request, "text_input"), parse_options(read_options(request)))
        except Exception as error:
            return error_response(error)  # one bad request must not fail its batch
        return response(input_ids=np.array(token_ids, np.int32))

    def _encode(self, text, options):
        if options["cancel"] is not None:
            raise InvalidRequest("cancel must be sent to the decoder, alone")
        for name, value in (("text_input", text), ("messages", options["messages"] or "")):
            if len(value.encode()) > MAX_TEXT_BYTES:
                raise InvalidRequest(f"{name} must be at most {MAX_TEXT_BYTES} bytes, got {len(value.encode())}")
        if options["messages"] is not None:
            if text:
                raise InvalidRequest("text_input must be empty when messages is given")
            return self.tokenizer.encode_chat(parse_messages(options["messages"]))
        if not text:
            raise InvalidRequest("text_input must not be empty")
        if options["chat"]:
            return self.tokenizer.encode_chat([{"role": "user", "content": text}])
        return self.tokenizer.encode(text)
