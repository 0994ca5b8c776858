"""One prompt's way through the backend. The exchange makes one for each prompt of its request."""

from collections.abc import AsyncGenerator

from tritonforge.client import Chunk
from tritonforge.gateway.routing.backend import Generation, Prompt


class Run:
    """One prompt's way through the backend, and what is known of its cost."""

    def __init__(self, generation: Generation, prompt: Prompt, offset: int) -> None:
        self.generation, self.prompt, self.offset = generation, prompt, offset
        self.statistics: dict[str, int] | None = None
        self.seen_tokens = 0
        self.answered = False
        self.complete = False
        """Nobody wants the rest: a filter has ended all its answers."""

    async def chunks(self) -> AsyncGenerator[tuple["Run", Chunk], None]:
        """The backend's chunks."""
        async for chunk in self.generation.chunks():
            self.answered = True
            self.seen_tokens += len(chunk.token_ids)
            self.statistics = chunk.statistics or self.statistics
            yield self, chunk
            if self.complete:
                await self.abandon()
                return

    async def abandon(self) -> None:
        """End it, if it has not ended."""
        self.statistics = await self.generation.abandon() or self.statistics

    def usage(self, name: str) -> int:
        """prompt_tokens, completion_tokens or cached_tokens; without statistics what was seen of them."""
        if self.statistics is not None:
            return self.statistics[name]
        seen = {"prompt_tokens": len(self.prompt.token_ids), "completion_tokens": self.seen_tokens}
        return seen.get(name, 0) if self.answered else 0
