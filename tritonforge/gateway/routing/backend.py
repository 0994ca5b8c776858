"""Where answers come from: the Backend protocol. The service calls it; the router and its places are behind it."""

from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

from tritonforge.client import Chunk
from tritonforge.errors import Overloaded
from tritonforge.gateway.routing.model_info import Served

if TYPE_CHECKING:  # it imports what imports this
    from tritonforge.gateway.work import Work


class Unreachable(Overloaded):
    """Nobody answers at the address, or its connection broke: not a refusal, a failure."""


@dataclass(frozen=True, slots=True)
class Prompt:
    """Token ids of a prompt; `truncated_tokens` as the tokenizer says, None when the ids are the client's own.

    A router keeps with it what the ids were made from, so that another tokenizer can be asked: `text`, `options`, the
    model `made_by` and its release's digest.
    """

    token_ids: Sequence[int]
    truncated_tokens: int | None = None
    text: str = ""
    options: Mapping[str, Any] = field(default_factory=dict)
    made_by: str = ""
    digest: str = ""


class Generation(Protocol):
    """One running request of a backend. Iterate it to its end, or `abandon` it; never both at once.

    `served` says who answers, from the first chunk on; None where there is only one who could.
    """

    served: Served | None

    def chunks(self) -> AsyncIterator[Chunk]:
        """Its responses as they come; the last one has the statistics. Raises TritonForgeError."""

    async def abandon(self) -> dict[str, int] | None:
        """End it now and free what it holds; the statistics of what was done, None when they are not known."""


class Backend(Protocol):
    """One place that tokenizes and generates. Errors are TritonForgeError of every kind."""

    async def tokenize(self, text: str, options: Mapping[str, Any]) -> Prompt:
        """The prompt that `text`, or the option `messages` with an empty text, makes."""

    def generate(
        self, prompt: Prompt, options: Mapping[str, Any], request_id: str, work: "Work | None" = None
    ) -> Generation:
        """Begin an answer; nothing is sent before its first chunk is asked for.

        `work` is what `options` were made of, for places that take OpenAI's own requests.
        """

    async def ready(self) -> bool:
        """Whether it can answer now."""

    async def close(self) -> None:
        """Let go of its connections."""
