"""Sizes and memory of a `FrameDiT`."""

from __future__ import annotations

from typing import Any

from transformers import PretrainedConfig

from .frame_history import ALIASES, MEMORIES, pack_length
from .frame_positions import POSITIONS

__all__ = ["FrameDiTConfig"]


class FrameDiTConfig(PretrainedConfig):
    """Sizes of a `FrameDiT`.

    Args:
        hidden_size: D; memory_size: M; num_hidden_layers: L; num_attention_heads: divides D.
        channels: C of the codec; grid: G; patch: cells along the side of a token.
        num_frames: w, frames of an AR step.
        num_actions: action ids are 0..num_actions - 1.
        memory: one of `frame_history.MEMORIES`; "full" is "prepend".
        window: recent frames that every memory but "none" reads.
        retrieve: old frames that "retrieve" picks.
        channel_frames: old frames on the channels of "channel".
        memory_limit: most old frames or blocks that are read, 0 for no limit.
        packed_size: P of packed tokens that are unpacked into frames when they are read (`block_codec`); 0 reads the
            packed tokens themselves, of width M.
        position: "column" or "pose", see `frame_positions`.
        field_of_view: degrees, of "pose".

    Raises:
        ValueError: sizes that do not fit each other, an unknown memory or position.
    """

    model_type = "mediaspec_frame_dit"

    hidden_size: int = 128
    memory_size: int = 192
    num_hidden_layers: int = 4
    num_attention_heads: int = 4
    channels: int = 40
    grid: int = 8
    patch: int = 2
    num_frames: int = 4
    num_actions: int = 3
    memory: str = "window"
    window: int = 4
    retrieve: int = 4
    channel_frames: int = 8
    memory_limit: int = 0
    packed_size: int = 0
    position: str = "column"
    field_of_view: float = 60.0

    def __post_init__(self, **kwargs: Any) -> None:
        self.memory = ALIASES.get(self.memory, self.memory)
        if self.memory not in MEMORIES:
            raise ValueError(f"memory={self.memory!r} is none of {', '.join(MEMORIES)}; write 'window'")
        if self.position not in POSITIONS:
            raise ValueError(f"position={self.position!r}; write 'column' (turning) or 'pose' (walking)")
        if self.hidden_size % self.num_attention_heads:
            raise ValueError(
                f"hidden_size={self.hidden_size} must be a multiple of num_attention_heads={self.num_attention_heads}"
            )
        if self.grid % self.patch or (
            pack_length(self.memory) and (self.grid // self.patch) % pack_length(self.memory)
        ):
            raise ValueError(
                f"grid={self.grid} in patches of {self.patch} does not divide into blocks of {self.memory}; write "
                "grid=8, patch=2"
            )
        least = {
            "num_frames": 1, "num_actions": 1, "window": 1, "retrieve": 1, "channel_frames": 1, "memory_limit": 0,
            "packed_size": 0,
        }  # fmt: skip
        for name, value in least.items():
            if getattr(self, name) < value:
                raise ValueError(f"{name}={getattr(self, name)} is not allowed; write {value} or more")
        super().__post_init__(**kwargs)

    @property
    def tokens(self) -> int:
        """Of a frame."""
        return (self.grid // self.patch) ** 2
