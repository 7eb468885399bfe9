"""A video network of diffusers (or of our own) as `memory.arvdm.generate` sees it: one class per network, the carrier.

    carrier = WanCarrier(pipe)
    carrier.condition("a red ball", None, 5.0, batch=1)          # texts are encoded once
    history = carrier.encode(video)                              # pixels to scaled latents
    velocity = carrier(x, levels, frame_ids, read, None)         # frames at their own levels, with the memory's
    pixels = carrier.decode(latents)

A carrier uses the pipeline's own components as they are; nothing is copied or changed. It keeps no frames from call to
call except what its `state_dict` holds.

B videos, C channels, n frames of a call, t latent frames, T pictures, h x w latent cells, H x W pixels, S text tokens,
D text channels.
"""

from __future__ import annotations

import inspect
import math
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor

from ...memory.base import FrameMemory, MemoryRead
from ...memory.packers import token_count
from ...memory.registry import make_memory, memory_for
from ...memory.slot_steps import CosinePath, FlowPath, NoisePath, SlotSampler
from ...memory.window_schedule import WindowSchedule
from ..keywords import nearest
from .conditioning import Conditioning, guide
from .overlap_decoder import OverlapDecoder
from .prefix import Prefixed, prefix_frames

__all__ = ["Carrier", "Conditioning", "OverlapDecoder", "Prefixed", "guide", "prefix_frames"]

PREDICTIONS = {"velocity": "flow_prediction", "clean": "sample", "noise": "epsilon", "v": "v_prediction"}
"""What a carrier calls its prediction, and the sampler's name of it."""
PATHS = ("flow", "vp")


class Carrier(ABC):
    """Base of all carriers: what they share, and what each must say.

    Args:
        pipe_or_model: a diffusers pipeline, or a bare network (then there is no text, and no codec).
        settings: of the class; unknown ones are errors.

    Attributes:
        name: for `carrier_for` and reports.
        prediction: what `__call__` returns: "velocity" (noise - x), "clean", "noise" or "v".
        path: "flow" (x_u = (1 - u) x + u noise) or "vp".
        latent_channels: C; temporal_ratio: pictures per latent frame; spatial_ratio: pixels per latent cell.
        patch: (kt, kh, kw) latent cells of a token.
        model_classes, pipeline_classes: class names that `matches` accepts.
    """

    name: ClassVar[str]
    model_classes: ClassVar[tuple[str, ...]] = ()
    pipeline_classes: ClassVar[tuple[str, ...]] = ()
    prediction: str = "velocity"
    path: str = "flow"
    latent_channels: int
    temporal_ratio: int = 1
    spatial_ratio: int = 1
    patch: tuple[int, int, int] = (1, 2, 2)
    default_size: tuple[int, int] = (480, 832)
    """Height and width in pixels where a call names none."""
    owns_memory: bool = False
    """Whether only its own memory fits, whatever the schedule's references are."""
    guidance_name: ClassVar[str] = "guidance_scale"
    """Argument of `condition` that is the scale of classifier-free guidance."""
    reads_picture: bool = False
    """Whether `condition` takes a picture beside the frames."""
    cost_mode: str = "recompute"
    """How history enters the network, for cost estimates; see `memory.budget.call_cost`."""

    def __init__(self, pipe_or_model: Any, **settings: Any) -> None:
        if settings:
            unknown = next(iter(settings))
            allowed = [name for name in inspect.signature(type(self).__init__).parameters if name != "self"]
            raise ValueError(f"the carrier {self.name!r} has no setting {unknown!r}; {nearest(unknown, allowed)}")
        model = getattr(pipe_or_model, "transformer", None)
        self.pipe: Any = None if isinstance(pipe_or_model, torch.nn.Module) else pipe_or_model
        self.model: Any = pipe_or_model if self.pipe is None else model
        self.conditioning = Conditioning()
        self.actions: Tensor | None = None
        self.poses: Tensor | None = None
        if self.model is None:
            raise ValueError(f"{type(pipe_or_model).__name__} holds no transformer; give a pipeline with its weights")

    # ---- which networks

    @classmethod
    def matches(cls, pipe_or_model: Any) -> bool:
        """Whether this carrier is for it, by class name alone (subclasses count)."""
        names = {base.__name__ for base in type(pipe_or_model).__mro__}
        if names & set(cls.pipeline_classes) or names & set(cls.model_classes):
            return True
        if cls.pipeline_classes:  # families share transformers; a pipeline is known by its own class
            return False
        inner = getattr(pipe_or_model, "transformer", None)
        return inner is not None and cls.matches(inner)

    @property
    def vae(self) -> Any:
        """The codec of the pipeline.

        Raises:
            ValueError: there is none.
        """
        vae = getattr(self.pipe, "vae", None)
        if vae is None:
            raise ValueError(
                f"the carrier {self.name!r} was made of a bare network, which has no codec; give the pipeline, or "
                "latents and output_type='latent'"
            )
        return vae

    @property
    def device(self) -> torch.device:
        """Where the network computes (with offloading, where it will be moved to)."""
        found = getattr(self.pipe, "_execution_device", None)
        return next(self.model.parameters()).device if found is None else torch.device(found)

    @property
    def dtype(self) -> torch.dtype:
        """In which the network computes; some of its parameters may be kept in float32 beside it."""
        found: torch.dtype = self.model.dtype
        return found

    @property
    def default_guidance(self) -> float:
        """Guidance scale where a call names none: what the pipeline's own call takes, 1 for a bare network."""
        if not callable(self.pipe):
            return 1.0
        told = inspect.signature(type(self.pipe).__call__).parameters.get("guidance_scale")
        return float(told.default) if told is not None and isinstance(told.default, (int, float)) else 1.0

    def calls_of(self, guidance_scale: float) -> int:
        """How often one prediction asks the network."""
        return 2 if guidance_scale > 1 else 1

    # ---- texts, actions

    def condition(
        self,
        prompt: str | Sequence[str] | None = None,
        negative_prompt: str | Sequence[str] | None = None,
        guidance_scale: float = 1.0,
        *,
        batch: int = 1,
        device: torch.device | None = None,
        dtype: torch.dtype | None = None,
        image: Tensor | None = None,
        prompt_embeds: Tensor | None = None,
        negative_prompt_embeds: Tensor | None = None,
        **more: Any,
    ) -> None:
        """Encodes the texts of the next calls and keeps them.

        Args:
            prompt: a text, or one per video. negative_prompt: likewise, "" where there is none.
            guidance_scale: 1 or less asks the network once per call, more twice.
            batch: B; one text serves all videos.
            device, dtype: of the embeddings; None are the network's.
            image: [B, 3, H, W] in -1..1, for networks that look at a picture beside the frames.
            prompt_embeds, negative_prompt_embeds: [B or 1, S, D] instead of texts.
            more: for `_condition_more`, which classes with further inputs override.

        Raises:
            ValueError: text and embeddings both, neither where text is needed, or numbers that do not fit.

        Example:
            >>> carrier.condition("a red ball", "blurred", 5.0, batch=2)  # doctest: +SKIP
        """
        device, dtype = device or self.device, dtype or self.dtype
        if not math.isfinite(guidance_scale):
            raise ValueError(f"guidance_scale={guidance_scale!r}; write a finite number, 1 switches guidance off")
        if prompt is not None and prompt_embeds is not None:
            raise ValueError("prompt and prompt_embeds were both given; give one of them")
        if prompt is None and prompt_embeds is None:
            prompt = ""
        embeds, extra = self._texts(prompt, prompt_embeds, "prompt", batch, device, dtype)
        negative: Tensor | None = None
        negative_extra: dict[str, Any] = {}
        if guidance_scale > 1:
            if negative_prompt is None and negative_prompt_embeds is None:
                if prompt_embeds is not None and getattr(self.pipe, "text_encoder", None) is None:
                    raise ValueError(
                        f"{self.guidance_name}={guidance_scale:g} with prompt_embeds and no text encoder needs "
                        f"negative_prompt_embeds too; or write {self.guidance_name}=1"
                    )
                negative_prompt = ""
            negative, negative_extra = self._texts(
                negative_prompt, negative_prompt_embeds, "negative_prompt", batch, device, dtype
            )
        self.conditioning = Conditioning(embeds, negative, float(guidance_scale), extra, negative_extra)
        self._condition_more(image=image, batch=batch, device=device, dtype=dtype, **more)

    def _texts(
        self, text: Any, embeds: Tensor | None, name: str, batch: int, device: torch.device, dtype: torch.dtype
    ) -> tuple[Tensor | None, dict[str, Any]]:
        """What `_encode_text` says of texts; of given embeddings, those for all videos and nothing beside them."""
        if embeds is None:
            texts = [text] * batch if isinstance(text, str) else list(text)
            if len(texts) != batch or not all(isinstance(one, str) for one in texts):
                raise ValueError(f"{name}={text!r}; write one text, or {batch}, one per video")
            return self._encode_text(texts, device, dtype)
        if embeds.dim() != 3 or embeds.shape[0] not in (1, batch):
            raise ValueError(
                f"{name}_embeds has shape {tuple(embeds.shape)}; give [{batch}, tokens, channels], or one row for all"
            )
        return embeds.to(device, dtype).expand(batch, -1, -1), {}

    def _encode_text(
        self, texts: list[str], device: torch.device, dtype: torch.dtype
    ) -> tuple[Tensor | None, dict[str, Any]]:
        """[B, S, D] of texts with the pipeline's `encode_prompt`, None for networks without text; and what the network
        takes beside it (masks, pooled texts), by name of the argument.

        Raises:
            ValueError: a bare network, which has no text encoder.
        """
        if self.pipe is None or not hasattr(self.pipe, "encode_prompt"):
            raise ValueError(
                f"the carrier {self.name!r} has no text encoder here; give prompt_embeds, or the pipeline"
            )
        made = self.pipe.encode_prompt(texts, do_classifier_free_guidance=False, device=device)
        embeds = made[0] if isinstance(made, tuple) else made
        return embeds.to(device, dtype), {}

    def _condition_more(self, *, image: Tensor | None, **more: Any) -> None:
        """Fills `self.conditioning.extra` for classes with further inputs.

        Raises:
            ValueError: an input that the class has not. (A picture that only starts the video comes as history.)
        """
        allowed = {"batch", "device", "dtype"}
        for key in more:
            if key not in allowed and more[key] is not None:
                raise ValueError(f"the carrier {self.name!r} takes no {key!r}; {nearest(key, ['prompt', 'image'])}")

    def check_texts(self, texts: Sequence[str | None]) -> None:  # noqa: B027 - most read any text
        """Raises ValueError for texts that `condition` would refuse, before the first of them is encoded."""

    def steer(self, actions: Tensor | None, poses: Tensor | None) -> None:
        """Keeps actions [B, N, A] and poses [B, N, P] by frame id. Poses are for memories that choose by pose.

        Raises:
            ValueError: actions for a network that takes none.
        """
        if actions is not None:
            raise ValueError(f"the carrier {self.name!r} takes no actions; leave them out, prompts steer it")
        self.poses = poses

    # ---- pictures and latents

    @abstractmethod
    def encode(self, video: Tensor) -> Tensor:
        """Latents [B, C, t, h, w], scaled as the network wants them, of pictures [B, 3, T, H, W] in -1..1."""

    @abstractmethod
    def decode(self, latents: Tensor) -> Tensor:
        """Pictures [B, 3, T, H, W] in -1..1 of scaled latents [B, C, t, h, w]."""

    def decoder(self) -> Any:
        """Decodes a video piece by piece: called with [C, n, h, w] it yields pictures [m, 3, H, W] in 0..1, with
        `state()` and `load()`.

        Wan's causal codec keeps its caches and gives the pictures of a decode in one go; others decode anew from a few
        latents back (`OverlapDecoder`).
        """
        if type(self.vae).__name__ == "AutoencoderKLWan" and self.vae.config.patch_size is None:
            from ..video_denoiser import WanDecoder

            return WanDecoder(self.pipe)
        return OverlapDecoder(self)

    def latent_frames(self, num_frames: int, *, after: bool = False) -> int:
        """Latent frames of T pictures: the first of a video stands for one picture, all others for `temporal_ratio`.

        Args:
            num_frames: T.
            after: the pictures follow a history.
        """
        ratio = self.temporal_ratio
        return math.ceil(num_frames / ratio) if after else 1 + math.ceil((num_frames - 1) / ratio)

    def pictures(self, latent_frames: int, *, after: bool = False) -> int:
        """Pictures of so many latent frames, the other way round."""
        ratio = self.temporal_ratio
        return ratio * latent_frames if after else max(1 + ratio * (latent_frames - 1), 0)

    def latent_shape(self, height: int, width: int) -> tuple[int, ...]:
        """(C, h, w).

        Raises:
            ValueError: sides that do not divide into tokens.
        """
        rows, columns = self.spatial_ratio * self.patch[1], self.spatial_ratio * self.patch[2]
        if height < 1 or width < 1 or height % rows or width % columns:
            raise ValueError(
                f"height={height}, width={width}; {self.name} needs multiples of {rows} and {columns}, for instance "
                f"{max(round(height / rows), 1) * rows} x {max(round(width / columns), 1) * columns}"
            )
        return self.latent_channels, height // self.spatial_ratio, width // self.spatial_ratio

    @staticmethod
    def scaled(latents: Tensor, mean: Sequence[float] | Tensor, deviation: Sequence[float] | Tensor) -> Tensor:
        """(latents - mean) / deviation, with one number per channel; latents [B, C, ...]."""
        wide = [1, -1, *[1] * (latents.dim() - 2)]
        mean = torch.as_tensor(mean).to(latents).view(wide)
        return (latents - mean) / torch.as_tensor(deviation).to(latents).view(wide)

    @staticmethod
    def unscaled(latents: Tensor, mean: Sequence[float] | Tensor, deviation: Sequence[float] | Tensor) -> Tensor:
        """latents * deviation + mean, the other way."""
        wide = [1, -1, *[1] * (latents.dim() - 2)]
        return latents * torch.as_tensor(deviation).to(latents).view(wide) + torch.as_tensor(mean).to(latents).view(
            wide
        )

    def check_video(self, video: Tensor) -> None:
        """Raises ValueError unless video is [B, 3, T, H, W], finite, within -1..1, and fits the network."""
        if video.dim() != 5 or video.shape[1] != 3 or not video.shape[2]:
            raise ValueError(f"video has shape {tuple(video.shape)}; give [B, 3, T, H, W] with at least one picture")
        if not bool(torch.isfinite(video).all()):
            raise ValueError("the video holds NaN or infinite values; give colours in -1..1")
        if float(video.min()) < -1.01 or float(video.max()) > 1.01:
            raise ValueError(
                f"colours reach from {float(video.min()):.3g} to {float(video.max()):.3g}; give -1..1 (pixels / "
                "127.5 - 1)"
            )
        self.latent_shape(*video.shape[3:])

    def check_pictures(self, video: Tensor) -> None:
        """Raises ValueError unless the codec can take video [B, 3, T, H, W] whole, T = ratio k + 1."""
        self.check_video(video)
        ratio, count = self.temporal_ratio, video.shape[2]
        if (count - 1) % ratio:
            low = (count - 1) // ratio * ratio + 1
            raise ValueError(
                f"{count} pictures; the codec of {self.name} takes {ratio}k + 1 of them, write {low} or {low + ratio}"
            )

    def check_latents(self, latents: Tensor) -> None:
        """Raises ValueError unless latents are [B, C, t, h, w] of this network."""
        if latents.dim() != 5 or latents.shape[1] != self.latent_channels or not latents.shape[2]:
            raise ValueError(
                f"latents have shape {tuple(latents.shape)}; give [B, {self.latent_channels}, t, h, w] with at least "
                "one frame"
            )

    # ---- how it is rolled out

    def memory(self, name: str | None = None, **settings: Any) -> FrameMemory | None:
        """A memory by name; None is what suits this network, `default_memory`."""
        if name is None:
            return self.default_memory(**settings)
        return None if name == "none" else make_memory(name, **settings)

    def default_memory(self, **settings: Any) -> FrameMemory | None:
        """That of the default schedule's references."""
        if settings:
            raise ValueError(
                f"memory settings {sorted(settings)} need a name, as in dict(name='sink_window', sink=1, last=4)"
            )
        return memory_for(self.schedule().references)

    @abstractmethod
    def schedule(self, **settings: Any) -> WindowSchedule:
        """The schedule that suits this network; settings as `steps` change its numbers."""

    def schedule_for(self, height: int, width: int, **settings: Any) -> WindowSchedule:
        """`schedule` for a size in pixels, for networks whose timestep shift depends on it."""
        return self.schedule(**settings)

    def follow(self, schedule: WindowSchedule) -> None:  # noqa: B027 - most need not know
        """Told what a rollout is about to follow."""

    def sampler(self, kind: str = "euler", **settings: Any) -> SlotSampler:
        """Steps between levels, for this network's path and prediction."""
        if self.prediction not in PREDICTIONS or self.path not in PATHS:
            raise ValueError(
                f"the carrier {self.name!r} says prediction={self.prediction!r}, path={self.path!r}; allowed are "
                f"{', '.join(PREDICTIONS)} and {', '.join(PATHS)}"
            )
        path: NoisePath = FlowPath() if self.path == "flow" else CosinePath()
        return SlotSampler(path, kind, PREDICTIONS[self.prediction], **settings)

    def dimensions(self) -> dict[str, int] | None:
        """D, feed-forward width and layers of the network for cost estimates, by the names of `call_cost`; None where
        its config does not tell."""
        config = self.model.config

        def told(*names: str) -> int | None:
            return next((int(config[n]) for n in names if isinstance(config.get(n), int)), None)

        heads, size = told("num_attention_heads"), told("attention_head_dim")
        dim = heads * size if heads and size else told("hidden_size")
        layers = told("num_layers", "num_hidden_layers")
        if dim is None or layers is None:
            return None
        return {"dim": dim, "ffn": told("ffn_dim", "intermediate_size") or 4 * dim, "layers": layers}

    def frame_tokens(self, height: int, width: int) -> int:
        """Tokens of a window frame, from pixels."""
        _, rows, columns = self.latent_shape(height, width)
        return token_count(1, rows, columns, self.patch)

    def memory_tokens(self, read: MemoryRead) -> int:
        """Tokens that the network reads of a memory."""
        if read.tokens is not None:
            return len(read.tokens)
        sizes = [(group.frames.shape, group.kernel) for group in read.groups]
        return sum(token_count(shape[2], shape[3], shape[4], kernel) for shape, kernel in sizes)

    def expected_memory(self, memory: FrameMemory | None, frames: int, height: int, width: int) -> tuple[int, int]:
        """Tokens that a step reads of a memory after `frames` latent frames were written, and bytes it holds then.

        The memory is filled with empty frames of one channel, in float32, and left empty.
        """
        if memory is None or not frames:
            return 0, 0
        channels, rows, columns = self.latent_shape(height, width)
        thin = memory.packer is None and not any(isinstance(one, torch.nn.Module) for one in vars(memory).values())
        size = 1 if thin else channels
        poses = torch.zeros(1, 1, 3)
        for start in range(frames):
            memory.write(torch.zeros(1, size, 1, rows, columns), [start], poses)
        read = memory.read([frames], torch.zeros(1, size, 1, rows, columns), poses[:, 0])
        tokens, held = self.memory_tokens(read), memory.nbytes
        memory.reset()
        return tokens, held * (channels if thin else 1)

    @abstractmethod
    def __call__(
        self, x: Tensor, levels: Tensor, frame_ids: Tensor, read: MemoryRead, actions: Tensor | None
    ) -> Tensor:
        """The network's prediction for frames of a window, see `memory.arvdm.Denoiser`.

        Args:
            x: [B, C, n, h, w].
            levels: [n] float64 in 0..1.
            frame_ids: [n] int64.
            read: what the memory shows.
            actions: [B, n, A] or None.

        Returns:
            [B, C, n, h, w] in the dtype of x.
        """

    def check_call(self, x: Tensor, levels: Tensor, frame_ids: Tensor) -> None:
        """Raises ValueError for windows that the network cannot take."""
        if x.dim() != 5 or x.shape[1] != self.latent_channels:
            raise ValueError(
                f"{self.name} takes frames [B, {self.latent_channels}, n, h, w], not {tuple(x.shape)}; encode() makes "
                "them of pictures"
            )
        if levels.shape != (x.shape[2],) or frame_ids.shape != (x.shape[2],):
            raise ValueError(
                f"levels {tuple(levels.shape)} and frame_ids {tuple(frame_ids.shape)} for {x.shape[2]} frames; give "
                "one of each per frame"
            )

    # ---- what it keeps between calls

    def reset(self) -> None:
        """Forgets what it keeps of a video, also actions and poses; texts stay."""
        self.actions = self.poses = None

    def state_dict(self) -> dict[str, Tensor]:
        """What it keeps of a video, empty for most."""
        return {}

    def load_state_dict(self, state: dict[str, Tensor]) -> None:
        """Takes what `state_dict` gave.

        Raises:
            ValueError: a state for a carrier that keeps none.
        """
        if state:
            raise ValueError(f"the carrier {self.name!r} keeps nothing between calls; the state has {sorted(state)}")
