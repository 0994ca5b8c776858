"""How the stub server answers: honest by default, with faults and lies to choose from."""

from collections.abc import Callable
from dataclasses import dataclass, field

Statistics = dict[str, int]


@dataclass
class Behaviour:
    """How the stub answers. The honest default: first token after 20 ms, then one every 5 ms.

    `jitter`: each pause is longer or shorter by up to this share of it. Faults: `fail_in_band_at` and `hang_at` are a
    number of tokens after which a request breaks, for one request in `every`; `stall_s` is one long gap in the middle;
    `freeze` (start, length, since the first request) halts all. `lie` changes the statistics of the last response.
    `refuse_first`: the first attempt of one in `every` is refused. `late_limit_s`: a request that would wait longer
    behind others is dropped with an error, to look fast. `answer` gives the text for a prompt. `cancel_takes_s`: so
    much later a cancelled request ends, and goes on meanwhile.
    """

    first_s: float = 0.020
    gap_s: float = 0.005
    jitter: float = 0.0
    every: int = 1
    fail_in_band_at: int | None = None
    fail_message: str = "INTERNAL: the stub was told to fail"
    hang_at: int | None = None
    stall_s: float = 0.0
    freeze: tuple[float, float] | None = None
    no_responses: bool = False
    no_final: bool = False
    drop_tokens: int = 0
    one_response: bool = False
    version: str = "1"
    refuse_first: bool = False
    late_limit_s: float | None = None
    answer: Callable[[str], str] | None = None
    cancel_takes_s: float = 0.0
    tokens_per_response: int = 1
    lie: Callable[[Statistics], Statistics] = field(default=lambda statistics: statistics)
