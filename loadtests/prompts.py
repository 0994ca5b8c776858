"""Prompts of exactly the wanted token count: seeded synthetic text, each beginning with a nonce of its own.

The nonce keeps the server's prefix cache out of the measurement; the salt of a run makes it differ between runs. The
same seed and salt give the same bytes again. Counts are those of the release's own tokenizer.
"""

import hashlib
import random
from collections.abc import Callable, Sequence
from pathlib import Path

from loadtests.fields import InvalidContract
from loadtests.schedule import Slot
from loadtests.workload import Data
from tritonforge.release import digest_of

ATTEMPTS = 20
WORDS = Path(__file__).with_name("words.txt").read_text(encoding="utf-8").split()


class Counter:
    """Token counts of one tokenizer.json. Raises InvalidContract when the file cannot be used."""

    def __init__(self, path: Path):
        from tokenizers import Tokenizer

        try:
            self._tokenizer = Tokenizer.from_file(str(path))
        except Exception as error:
            raise InvalidContract(f"tokenizer must be a tokenizer.json, got {path}: {error}") from error

    def __call__(self, text: str) -> int:
        return len(self._tokenizer.encode(text).ids)


def nonce(profile: str, seed: int, salt: str, index: int) -> str:
    """Eight hex digits that no other prompt of the run has in front, of no other profile either."""
    return hashlib.sha256(f"{profile}/{seed}/{salt}/{index}".encode()).hexdigest()[:8]


def exact_prompt(count: Callable[[str], int], rng: random.Random, start: str, tokens: int) -> str:
    """Text that begins with `start` and has exactly `tokens` tokens: words are added or removed until it fits.

    Raises InvalidContract when `tokens` is too few for `start`, or no text fits within ATTEMPTS tries.
    """
    if count(start) > tokens:
        raise InvalidContract(f"prompt_tokens must be at least {count(start)} (the nonce of a prompt), got {tokens}")
    for _ in range(ATTEMPTS):
        words = [rng.choice(WORDS) for _ in range(tokens)]
        low, high = 0, len(words)
        while low < high:  # the most words that fit: counts grow with the number of words
            middle = (low + high + 1) // 2
            low, high = (middle, high) if count(_join(start, words[:middle])) <= tokens else (low, middle - 1)
        text = _join(start, words[:low])
        if count(text) == tokens:
            return text
    raise InvalidContract(f"no text of exactly {tokens} tokens found in {ATTEMPTS} tries; the tokenizer is unusual")


def _join(start: str, words: Sequence[str]) -> str:
    return " ".join((start, *words))


def shared_prefixes(data: Data, *, profile: str, salt: str, count: Callable[[str], int]) -> list[str]:
    """The common beginnings of a profile's prompts, each of exactly shared_prefix_tokens; [""] without any."""
    if not data.shared_prefix_tokens:
        return [""]
    found = []
    for k in range(data.prefixes):
        start = f"{nonce(profile, data.seed, salt, -1 - k)}:"
        rng = random.Random(f"{profile}/{data.seed}/prefix/{k}")
        found.append(exact_prompt(count, rng, start, data.shared_prefix_tokens) + " ")
    return found


def build_prompts(
    slots: Sequence[Slot],
    *,
    profile: str,
    seed: int,
    salt: str,
    count: Callable[[str], int],
    prefixes: Sequence[str] = ("",),
) -> list[str]:
    """The prompt of each slot, in order. Depends on profile id, seed, salt and the slot, not on the other slots.

    With several `prefixes`, slot k begins with number k modulo their number.
    """
    prompts = []
    for slot in slots:
        rng = random.Random(f"{profile}/{seed}/words/{slot.index}")
        start = f"{prefixes[slot.index % len(prefixes)]}{nonce(profile, seed, salt, slot.index)}:"
        prompts.append(exact_prompt(count, rng, start, slot.prompt_tokens))
    return prompts


def prompts_sha256(prompts: Sequence[str]) -> str:
    """sha256 (hex) of the prompts of one shard."""
    return digest_of(list(prompts))
