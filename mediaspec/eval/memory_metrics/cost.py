"""What a memory costs: tokens read, bytes of keys and values, seconds per frame."""

from __future__ import annotations

from dataclasses import asdict, dataclass

__all__ = ["MemoryCost", "kv_bytes"]


def kv_bytes(tokens: int, width: int, layers: int, element_bytes: int = 4) -> int:
    """Bytes of the keys and values of history tokens: 2 x layers x tokens x width x bytes per number.

    Example: `kv_bytes(3926, 1536, 30, 2)` is 723,640,320: the packed history of a 1.3 B model.
    """
    if min(tokens, width, layers, element_bytes) < 0:
        raise ValueError("sizes must not be negative")
    return 2 * layers * tokens * width * element_bytes


@dataclass(frozen=True)
class MemoryCost:
    """Args: memory_tokens read per AR step at the end of the context; kv_bytes of all that is kept; seconds_per_frame,
    median over AR steps after the first."""

    memory_tokens: int
    kv_bytes: int
    seconds_per_frame: float

    def as_dict(self) -> dict[str, float]:
        return asdict(self)
