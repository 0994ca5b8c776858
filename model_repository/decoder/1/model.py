"""The decoder: token ids in, a stream of text deltas and token ids out; batches in flight.

execute() only validates and hands over: the engine loop computes, the emitter answers.
"""

import os

import numpy as np

from tritonforge.decoder import Decoder
from tritonforge.emitter import Emitter
from tritonforge.errors import InvalidRequest, NotFound, TritonForgeError
from tritonforge.launch.drain import on_drain
from tritonforge.observation.recorder import Recorder
from tritonforge.options import refuse_prompt_options
from tritonforge.release import Release, version_folder
from tritonforge.streams import CancelPoller, ResponseStream
from tritonforge.triton import MetricsReporter, TritonSender, load_error, read_options, read_tensor

DRAIN_S = 30.0
DEAD_LOOP_EXIT_CODE = 70
LOADED_SEQUENCES = 8
"""From so many running sequences on, streams send less often; see SchedulerConfig.stream_interval_ms."""


class TritonPythonModel:
    def initialize(self, args):
        folder = version_folder(args)
        try:
            Release.open(folder.parents[2]).verify()
            self.decoder, self.recorder = Decoder(folder, on_death=self._exit), Recorder()
            labels = {"model": args["model_name"], "version": args["model_version"]}
            self.reporter = MetricsReporter(self.decoder.loop, labels, self.recorder)
        except TritonForgeError as error:
            raise load_error(error) from None
        self.emitter = Emitter()
        loop = self.decoder.loop
        interval_ms = loop.scheduler.config.stream_interval_ms
        self.way_out = (self.emitter, loop.cancel, self._under_load, self.recorder, interval_ms)
        self.poller = CancelPoller(loop.cancel)
        on_drain(self._drain)

    def execute(self, requests):
        for request in requests:
            stream = ResponseStream(TritonSender(request), *self.way_out)
            try:
                self._accept(request, stream)
            except Exception as error:
                stream.fail(error)

    def finalize(self):
        self._drain(DRAIN_S)
        self.poller.stop()
        self.reporter.stop()

    def _drain(self, timeout_s):
        """Refuse new requests, and return once every answer was handed to Triton."""
        self.decoder.loop.drain(timeout_s)
        self.emitter.stop()

    def _under_load(self):
        return self.decoder.loop.scheduler.num_running >= LOADED_SEQUENCES

    def _accept(self, request, stream):
        options = read_options(request)
        if "cancel" in options:
            self._cancel(options, stream)
            return
        input_ids = read_tensor(request, "input_ids")
        if input_ids is None:
            raise InvalidRequest("input_ids is missing; it may be left out only when cancel is the only parameter")
        truncated = read_tensor(request, "prompt_truncated_tokens")
        if truncated is None:  # the prompt is not the tokenizer's
            refuse_prompt_options(options)
        stream.key = self.decoder.submit(
            input_ids.reshape(-1).tolist(),
            options,
            stream.take,
            request_id=request.request_id(),
            truncated_tokens=0 if truncated is None else int(truncated.reshape(-1)[0]),
        )
        self.poller.watch(stream)

    def _cancel(self, options, stream):
        if len(options) > 1 or not isinstance(options["cancel"], str) or not options["cancel"]:
            raise InvalidRequest(f"cancel must be the id of a request and the only parameter, got {options}")
        found = self.decoder.loop.cancel_request_id(options["cancel"])
        found.add_done_callback(lambda done: self.emitter.post(lambda: self._answer_cancel(options, stream, done)))

    def _answer_cancel(self, options, stream, found):
        if found.result():
            stream.finish({"finish_reason": np.array([b"cancelled"], object)})
        else:
            stream.fail(NotFound(f"cancel: no unfinished request has the id {options['cancel']!r}"))

    def _exit(self):
        """A loop that died cannot be repaired in this process: answer what is open, then let the supervisor restart."""
        self.emitter.stop()
        os._exit(DEAD_LOOP_EXIT_CODE)
