"""What the videos of a call go on from: pictures, or the histories of an earlier call.

T pictures, H x W pixels, C channels, h x w latent cells.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from .carriers.base import Carrier
from .continuation_inputs import digest, frame_table
from .video_history import VideoHistory
from .video_input import to_video

__all__ = ["Start", "read_start"]


@dataclass
class Start:
    """The beginning of a call's videos; empty for videos from noise alone.

    Args:
        past: one history per video, or none.
        pixels: given pictures [1, 3, T, H, W] in -1..1.
        height, width: pixels that the videos must have then; None leaves them open.
        latents: the encoded pictures [1, C, t, h, w], once there are any.
    """

    past: list[VideoHistory]
    pixels: Tensor | None = None
    height: int | None = None
    width: int | None = None
    latents: Tensor | None = None

    @property
    def frames(self) -> int:
        """Latent frames of the pictures that the first call of the chain was given."""
        if self.past:
            return self.past[0].given
        return 0 if self.latents is None else self.latents.shape[2]

    @property
    def shown(self) -> int:
        """Pictures that earlier calls made."""
        return self.past[0].pictures if self.past else 0

    def picture(self, i: int) -> Tensor | None:
        """[1, 3, H, W]: the last picture given, for networks that look at one beside the frames."""
        if self.past:
            return self.past[i].image
        return None if self.pixels is None else self.pixels[:, :, -1]

    def encode(self, carrier: Carrier) -> None:
        """Fills `latents`."""
        if self.pixels is not None:
            self.latents = carrier.encode(self.pixels.to(carrier.device)).float()

    def check(self, carrier: Carrier, shared: dict[str, Any], output_type: str) -> None:
        """Raises ValueError unless the histories fit `shared`, the settings of this call, and one another."""
        for one in self.past:
            one.check(shared)
        if output_type != "latent" and carrier.temporal_ratio > 1 and not all(one.decoder for one in self.past):
            raise ValueError("the history was made with output_type='latent', without pictures; go on with the same")
        if len({(one.pictures, one.given) for one in self.past}) > 1:
            raise ValueError("the histories are of videos of different lengths; go on with them one by one")

    def tables(self, i: int, actions: Any, poses: Any, frames: int) -> tuple[Tensor | None, Tensor | None]:
        """Actions and poses of video `i` by frame id, [1, N, ...] each; see `frame_table`.

        Args:
            frames: latent frames of this chain that they must reach to, given ones not counted.
        """
        old = self.past[i] if self.past else None
        first = 0 if old is None else self.frames + int(old.rollout["emitted"])
        needed, before = self.frames + frames, (None, None) if old is None else (old.actions, old.poses)
        return (
            frame_table(actions, "actions", needed, before[0], first, self.frames),
            frame_table(poses, "poses", needed, before[1], first, self.frames),
        )

    def digest(self, i: int) -> str | None:
        """Short hash of the history of video `i`."""
        return digest(*self.past[i].rollout.values()) if self.past else None


def read_start(
    carrier: Carrier,
    video: Any,
    image: Any,
    history: VideoHistory | Sequence[VideoHistory] | None,
    height: int | None,
    width: int | None,
) -> Start:
    """Reads the arguments of a call; pictures are not encoded yet.

    Args:
        carrier: whose codec takes only some numbers of pictures: the first ones beyond are left out.
        video, image, history, height, width: as in `VideoContinuationPipeline`.

    Raises:
        ValueError: several of them, or something that is none.
    """
    if sum(one is not None for one in (video, image, history)) > 1:
        raise ValueError("give one of video, image and history; each is what the video goes on from")
    past = [history] if isinstance(history, VideoHistory) else list(history or [])
    if past:
        ratio, cells = carrier.spatial_ratio, past[0].latent_shape
        return Start(past, None, height or cells[1] * ratio, width or cells[2] * ratio)
    if video is None and image is None:
        return Start([], None, height, width)
    pixels = to_video(video if image is None else image, height, width, "video" if image is None else "image")
    if image is not None and pixels.shape[2] > 1:
        raise ValueError(f"image holds {pixels.shape[2]} pictures; give them as video")
    pixels = pixels[:, :, (pixels.shape[2] - 1) % carrier.temporal_ratio :]
    return Start([], pixels, pixels.shape[3], pixels.shape[4])
