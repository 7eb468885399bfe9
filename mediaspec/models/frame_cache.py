"""What a rollout keeps of its past: keys and values of frames and packed blocks, worked out once, when written.

A cache reads the same as `FrameDiT.read` on all past frames, without going over them again.
"""

from __future__ import annotations

import torch
from torch import Tensor

from .frame_blocks import KeysValues
from .frame_dit import FrameDiT, History, Memory
from .frame_history import pack_length

__all__ = ["FrameCache"]


class _Rows:
    """A tensor that grows along dimension 1 and can forget its front; `first` is the number of its first row."""

    def __init__(self) -> None:
        self.data: Tensor | None = None
        self.first = self.start = self.stop = 0

    def append(self, rows: Tensor) -> None:
        need = self.stop - self.start + rows.shape[1]
        if self.data is None or self.stop + rows.shape[1] > self.data.shape[1]:
            # twice the room: copying stays a constant share of the work
            grown = rows.new_empty(rows.shape[0], max(2 * need, 16), *rows.shape[2:])
            if self.data is not None:
                grown[:, : self.stop - self.start] = self.data[:, self.start : self.stop]
            self.stop, self.start, self.data = self.stop - self.start, 0, grown
        self.data[:, self.stop : self.stop + rows.shape[1]] = rows
        self.stop += rows.shape[1]

    def forget(self, before: int) -> None:
        """Drops rows below number `before`."""
        gone = min(max(before - self.first, 0), len(self))
        self.first, self.start = self.first + gone, self.start + gone

    def __len__(self) -> int:
        return self.stop - self.start

    @property
    def rows(self) -> Tensor:
        assert self.data is not None
        return self.data[:, self.start : self.stop]

    def pick(self, index: Tensor) -> Tensor:
        """Rows numbered index [B, n]."""
        batch = torch.arange(len(index), device=index.device)[:, None]
        return self.rows[batch, index - self.first]

    @property
    def nbytes(self) -> int:
        return self.rows.numel() * self.rows.element_size() if self.data is not None else 0


class FrameCache:
    """The past of a rollout.

    Args:
        model: whose keys and values are kept; in evaluation mode, without gradients.
        keep: frames before the recent ones that are held; older frames (whole blocks, where they are packed) are
            forgotten for good, so that memory stays constant however long the rollout is. None holds all of them.

    Attributes:
        frames: written so far.

    Raises:
        ValueError: a negative `keep`, or one smaller than a packed block.

    Example:
        >>> from mediaspec.models.frame_dit import FrameDiT, FrameDiTConfig, History
        >>> model = FrameDiT(FrameDiTConfig(hidden_size=32, num_hidden_layers=2, memory="prepend")).eval()
        >>> cache = FrameCache(model)
        >>> cache.write(History(torch.randn(1, 9, 40, 8, 8), torch.zeros(1, 9, 2) + 512, torch.ones(1, 9).long(),
        ...                     torch.zeros(1, 9)))
        >>> cache.read(torch.zeros(1, 4, 2) + 512).tokens
        144
    """

    def __init__(self, model: FrameDiT, keep: int | None = None) -> None:
        length = pack_length(model.config.memory)
        if keep is not None and (keep < 0 or 0 < keep < length):
            raise ValueError(f"keep={keep} frames; write 0, {max(length, 1)} or more, or None for all")
        self.model, self.keep = model, keep
        self.frames = 0
        self._poses = _Rows()
        self._kept = _Rows()  # [B, frame, L, 2, n, D]
        self._blocks = _Rows()  # [B, block, L, 2, n / kt^2, D], or [B, block, n / kt^2, P] where the model unpacks
        self._raw = _Rows()  # [B, frame, C, G, G], for packing and channels
        self._raw_actions, self._raw_levels = _Rows(), _Rows()

    @torch.no_grad()
    def write(self, new: History) -> None:
        """Adds finished frames, in their order.

        Raises:
            ValueError: no frames, another batch size, or values that are not finite; nothing is written then.
        """
        if not new.frames:
            raise ValueError("no frames to write; give at least one")
        if self._poses.data is not None and len(self._poses.data) != len(new.poses):
            raise ValueError(f"{len(new.poses)} rows after {len(self._poses.data)}; one cache serves one batch")
        if not all(bool(torch.isfinite(part).all()) for part in (new.latents, new.poses, new.levels)):
            raise ValueError("a frame or its pose holds NaN or infinity; it would spoil everything made after it")
        memory = self.model.config.memory
        if memory == "none":
            self.frames += new.frames
            return
        n = self.model.config.tokens
        kept = self.model.keys_values(self.model.encode_frames(new))
        self.frames += new.frames
        self._poses.append(new.poses)
        self._kept.append(kept.unflatten(3, (new.frames, n)).permute(0, 3, 1, 2, 4, 5))
        length = pack_length(memory)
        if length or memory == "channel":
            self._raw.append(new.latents)
            self._raw_actions.append(new.actions)
            self._raw_levels.append(new.levels)
        old = max(self.frames - self.model.config.window, 0)
        if length:
            self._pack(old // length, length)
        elif memory in ("window", "channel"):
            self._kept.forget(old)
        self._forget(old, length)

    def _forget(self, old: int, length: int) -> None:
        """Drops what lies more than `keep` frames before the recent ones; `old` frames are not recent."""
        keep = 0 if self.model.config.memory == "window" else self.keep
        if keep is None:
            return
        if length:
            # counted in whole blocks, so that the plan of what is left cuts the same blocks
            first = max(old // length - keep // length, 0)
            self._blocks.forget(first)
            self._poses.forget(first * length)
            return
        for rows in (self._poses, self._kept, self._raw, self._raw_actions, self._raw_levels):
            rows.forget(old - keep)

    def _pack(self, wanted: int, length: int) -> None:
        """Packs whole blocks of what has left the recent frames."""
        have = self._blocks.first + len(self._blocks)
        if wanted <= have:
            return
        index = torch.arange(have * length, wanted * length, device=self._raw.rows.device)[None]
        index = index.expand(len(self._raw.rows), -1)
        past = History(
            self._raw.pick(index), self._poses.pick(index), self._raw_actions.pick(index), self._raw_levels.pick(index)
        )
        packed = self.model.pack(past, length)
        if self.model.block_codec is None:
            placed = self.model.place_blocks(packed, past.poses.unflatten(1, (-1, length)))
            packed = self.model.keys_values(placed).unflatten(3, (wanted - have, -1)).permute(0, 3, 1, 2, 4, 5)
        self._blocks.append(packed)
        for rows in (self._kept, self._raw, self._raw_actions, self._raw_levels):
            rows.forget(wanted * length)

    @torch.no_grad()
    def read(self, targets: Tensor) -> Memory:
        """What the next frames (poses [B, w, P]) read."""
        if self.model.config.memory == "none" or not self.frames:
            return Memory()
        # the plan counts from the oldest frame that is held
        reading = self.model.plan(self._poses.rows, targets).later(self._poses.first)
        parts = [self._aged(self._kept.pick(reading.recent), self.frames - reading.recent)]
        crossed = channel = None
        extra = 0
        if reading.older.shape[1]:
            if self.model.config.memory == "channel":
                channel = (self.model.to_tokens(self._raw.pick(reading.older)), self._poses.pick(reading.older))
            else:
                older = self._aged(self._kept.pick(reading.older), self.frames - reading.older)
                if self.model.config.memory == "cross":
                    crossed, extra = older, older.keys.shape[3]
                else:
                    parts.insert(0, older)
        if reading.blocks.shape[1]:
            parts.insert(0, self._read_blocks(reading.blocks))
        keys, values = (torch.cat([getattr(part, name) for part in parts], dim=3) for name in ("keys", "values"))
        attended = keys.shape[3] + extra
        tokens = attended - self.model.unpacked_extra(reading)
        return Memory(KeysValues(keys, values), crossed, channel, tokens, attended)

    def _read_blocks(self, blocks: Tensor) -> KeysValues:
        """Keys and values of blocks, frame numbers [B, N, length]; unpacked now where they are kept packed."""
        packed = self._blocks.pick(blocks[..., -1] // blocks.shape[2])
        if self.model.block_codec is None:
            return self._aged(packed, self.frames - blocks[..., -1])
        poses = self._poses.pick(blocks.flatten(1)).unflatten(1, blocks.shape[1:])
        kept = self.model.keys_values(self.model.place_blocks(packed, poses))
        return self.model.aged(kept, self.model.block_ages(blocks, self.frames))

    def _aged(self, kept: Tensor, ages: Tensor) -> KeysValues:
        """Units [B, U, L, 2, n, D] with ages [B, U] as keys and values."""
        return self.model.aged(
            kept.permute(0, 2, 3, 1, 4, 5).flatten(3, 4), ages.repeat_interleave(kept.shape[4], dim=1)
        )

    @property
    def held(self) -> int:
        """Frames that can still be read in some form."""
        return len(self._poses)

    @property
    def nbytes(self) -> int:
        """Bytes of everything that is kept."""
        every = (self._poses, self._kept, self._blocks, self._raw, self._raw_actions, self._raw_levels)
        return sum(rows.nbytes for rows in every)

    def state_dict(self) -> dict[str, Tensor]:
        """Contents as tensors, for a rollout that goes on another day."""
        state = {"frames": torch.tensor(self.frames)}
        for name, rows in self._named().items():
            if rows.data is not None:
                state[name], state[f"{name}.first"] = rows.rows.clone(), torch.tensor(rows.first)
        return state

    def load_state_dict(self, state: dict[str, Tensor]) -> None:
        """Takes what `state_dict` of a cache of the same model gave.

        Raises:
            ValueError: it is no such state, or of a model with another memory.
        """
        if "frames" not in state:
            raise ValueError("this is no state of a frame cache; save one with state_dict()")
        memory = self.model.config.memory
        wanted = {"poses", "kept"} if memory != "none" else set()
        if pack_length(memory) or memory == "channel":
            wanted |= {"raw", "raw_actions", "raw_levels"}
        held = {name for name in self._named() if name in state} - {"blocks"}
        if int(state["frames"]) and held != wanted:
            raise ValueError(
                f"the state holds {sorted(held)}, memory {memory!r} keeps {sorted(wanted)}; it is another's"
            )
        self.frames = int(state["frames"])
        for name, rows in self._named().items():
            rows.__init__()  # type: ignore[misc]
            if name in state:
                rows.append(state[name])
                rows.first = int(state[f"{name}.first"])

    def _named(self) -> dict[str, _Rows]:
        return {
            "poses": self._poses, "kept": self._kept, "blocks": self._blocks, "raw": self._raw,
            "raw_actions": self._raw_actions, "raw_levels": self._raw_levels,
        }  # fmt: skip
