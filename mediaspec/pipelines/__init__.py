"""Diffusers-style pipelines on the speculative core. Each is imported when it is first asked for: texts need no
diffusers."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .auto import AutoPipeline
    from .class_to_image import ClassToImagePipeline
    from .long_video import LongVideoOutput, LongVideoPipeline
    from .output import ImagePipelineOutput
    from .prompt_bank import PromptBank
    from .prompt_conditioning import install_prompt_bank
    from .prompt_fields import PromptFields
    from .text_generation import TextGenerationOutput, TextGenerationPipeline
    from .text_to_image import TextToImagePipeline
    from .timeline import Timeline
    from .video_continuation import VideoContinuationPipeline
    from .video_history import VideoHistory

__all__ = [
    "AutoPipeline",
    "ClassToImagePipeline",
    "ImagePipelineOutput",
    "LongVideoOutput",
    "LongVideoPipeline",
    "PromptBank",
    "PromptFields",
    "TextGenerationOutput",
    "TextGenerationPipeline",
    "TextToImagePipeline",
    "Timeline",
    "VideoContinuationPipeline",
    "VideoHistory",
    "install_prompt_bank",
]

_HOMES = {
    "AutoPipeline": "auto",
    "ClassToImagePipeline": "class_to_image",
    "ImagePipelineOutput": "output",
    "LongVideoOutput": "long_video",
    "LongVideoPipeline": "long_video",
    "PromptBank": "prompt_bank",
    "PromptFields": "prompt_fields",
    "TextGenerationOutput": "text_generation",
    "TextGenerationPipeline": "text_generation",
    "TextToImagePipeline": "text_to_image",
    "Timeline": "timeline",
    "VideoContinuationPipeline": "video_continuation",
    "VideoHistory": "video_history",
    "install_prompt_bank": "prompt_conditioning",
}


def __getattr__(name: str) -> Any:
    if name in _HOMES:
        from importlib import import_module

        return getattr(import_module(f"{__name__}.{_HOMES[name]}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted(__all__)
