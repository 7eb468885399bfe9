"""Diffusers-style pipelines on the speculative core."""

from .auto import AutoPipeline
from .class_to_image import ClassToImagePipeline
from .output import ImagePipelineOutput
from .text_generation import TextGenerationOutput, TextGenerationPipeline
from .text_to_image import TextToImagePipeline

__all__ = [
    "AutoPipeline",
    "ClassToImagePipeline",
    "ImagePipelineOutput",
    "TextGenerationOutput",
    "TextGenerationPipeline",
    "TextToImagePipeline",
]
