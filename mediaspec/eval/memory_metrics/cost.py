"""What a memory costs in bytes of keys and values."""

from __future__ import annotations

__all__ = ["kv_bytes"]


def kv_bytes(tokens: int, width: int, layers: int, element_bytes: int = 4) -> int:
    """Bytes of the keys and values of history tokens: 2 x layers x tokens x width x bytes per number.

    Example: `kv_bytes(3926, 1536, 30, 2)` is 723,640,320: the packed history of a 1.3 B model.
    """
    if min(tokens, width, layers, element_bytes) < 0:
        raise ValueError("sizes must not be negative")
    return 2 * layers * tokens * width * element_bytes
