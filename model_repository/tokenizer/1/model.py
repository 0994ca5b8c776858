"""The tokenizer: text, one user message (chat) or a chat (messages, tools) in, token ids out; batched dynamically.

All options pass through here on their way to the decoder, so an invalid one is refused before anything is tokenized.
"""

import numpy as np

from tritonforge.errors import TritonForgeError
from tritonforge.options import parse_options
from tritonforge.prompt import build_prompt, read_max_model_len
from tritonforge.release import version_folder
from tritonforge.text import Tokenizer
from tritonforge.triton import error_response, load_error, read_options, read_text, response


class TritonPythonModel:
    def initialize(self, args):
        folder = version_folder(args)
        try:
            self.tokenizer = Tokenizer(folder)
            self.max_model_len = read_max_model_len(folder)
        except TritonForgeError as error:
            raise load_error(error) from None

    def execute(self, requests):
        return [self._answer(request) for request in requests]

    def _answer(self, request):
        try:
            text, options = read_text(request, "text_input"), parse_options(read_options(request))
            prompt = build_prompt(self.tokenizer, text, options, self.max_model_len)
        except Exception as error:
            return error_response(error)  # one bad request must not fail its batch
        return response(
            input_ids=np.array(prompt.token_ids, np.int32),
            prompt_truncated_tokens=np.array([prompt.truncated_tokens], np.int32),
        )
