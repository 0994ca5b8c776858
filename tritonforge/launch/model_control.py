"""Triton's model control, for the launcher alone: loads and unloads models with the key that keeps clients out.

Over gRPC: Triton's HTTP endpoint loads in the thread that serves its connections, so their streams would stand still.
"""

import secrets
from dataclasses import dataclass, field

import grpc
from tritonclient.grpc import service_pb2, service_pb2_grpc

from tritonforge.errors import DeadlineExceeded, EngineFailure, Overloaded

RESTRICTED = ("model-repository", "shared-memory", "logging", "trace")
"""Triton's APIs that need the key: they run code, read memory, write files, or change the server for everybody."""
HEADER = "tritonforge-key"
_GRPC_PREFIX = "triton-grpc-protocol-"


def new_key() -> str:
    """A key that nobody can guess."""
    return secrets.token_hex(32)


def restrictions(key: str) -> tuple[str, ...]:
    """The arguments that make tritonserver refuse RESTRICTED without the key."""
    value = f"{','.join(RESTRICTED)}:{HEADER}={key}"
    return (f"--grpc-restricted-protocol={value}", f"--http-restricted-api={value}")


@dataclass(frozen=True)
class ModelControl:
    """Model control of the server behind `channel`."""

    channel: grpc.Channel
    key: str = field(repr=False)

    def load(self, model: str, timeout: float) -> None:
        """Load the model as the repository now says; EngineFailure, with the model's own words, when it fails.

        DeadlineExceeded after `timeout` seconds; the server goes on loading then.
        """
        self._call("RepositoryModelLoad", service_pb2.RepositoryModelLoadRequest(model_name=model), timeout)

    def unload(self, model: str, timeout: float) -> None:
        """Unload the model; its running requests go on, and Triton lets go of it when they have ended."""
        self._call("RepositoryModelUnload", service_pb2.RepositoryModelUnloadRequest(model_name=model), timeout)

    def _call(self, name: str, request: object, timeout: float) -> None:
        stub = service_pb2_grpc.GRPCInferenceServiceStub(self.channel)
        try:
            getattr(stub, name)(request, timeout=timeout, metadata=((f"{_GRPC_PREFIX}{HEADER}", self.key),))
        except grpc.RpcError as error:
            if error.code() is grpc.StatusCode.UNAVAILABLE:
                raise Overloaded(f"the server does not answer: {error.details()}") from None
            if error.code() is grpc.StatusCode.DEADLINE_EXCEEDED:
                raise DeadlineExceeded(f"model {request.model_name}: {name} took longer than {timeout:g} s") from None
            raise EngineFailure(_cause(error.details() or error.code().name)) from None


def _cause(details: str) -> str:
    """What a load says of itself, in one line, without its traceback."""
    return " ".join(details.split("\n\nAt:")[0].split())
