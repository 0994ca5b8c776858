"""SchedulerConfig: the scheduler's limits, as decoder.json holds them."""

from dataclasses import dataclass

from tritonforge.errors import InvalidRequest


@dataclass(frozen=True)
class SchedulerConfig:
    """Limits of a step and of the queue; counts (requests, or tokens where the name says so) are positive.

    `watermark` is the share of the KV blocks that an admission leaves free; `ageing_ms` is the head start of a priority
    class over the next. `stream_interval_ms` is the least time between two responses of a stream under load, unless its
    request says otherwise; the scheduler itself does not use it.
    """

    max_num_seqs: int
    max_num_batched_tokens: int
    max_waiting: int
    max_waiting_tokens: int
    ageing_ms: int = 2000
    watermark: float = 0.01
    stream_interval_ms: int = 100

    def __post_init__(self) -> None:
        for name in self.__dataclass_fields__:
            value = getattr(self, name)
            if name != "watermark" and (type(value) is not int or value < 1):
                raise InvalidRequest(f"scheduler.{name} must be a positive integer, got {value!r}")
        if type(self.watermark) not in (int, float) or not 0 <= self.watermark < 1:
            raise InvalidRequest(f"scheduler.watermark must be in [0, 1), got {self.watermark!r}")
        if self.max_num_batched_tokens < self.max_num_seqs:
            raise InvalidRequest(
                f"scheduler.max_num_batched_tokens must be at least max_num_seqs {self.max_num_seqs}, "
                f"got {self.max_num_batched_tokens}"
            )
