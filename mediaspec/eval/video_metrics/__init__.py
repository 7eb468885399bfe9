"""What a finished video is measured by: one metric per file, pure functions on frames, flow or features.

Letters: T frames, H rows, W columns, D features, N frames of one temporal attention call.
"""

from .attention_row import AttentionDiagnosis, diagnose_attention
from .consistency import adjacent_cosines, consistency_chain, cscv, frame_similarity
from .dynamic import DYNAMIC_FPS, dynamic_stride, is_dynamic, motion_radii
from .flicker import temporal_flicker
from .flow import FLOWS, estimate_flow, load_flow
from .interpolation import interpolation_smoothness
from .spectrum import SPECTRUM_BINS, fast_change, temporal_spectrum
from .warping import backward_warp, visible, warping_error

__all__ = [
    "DYNAMIC_FPS",
    "FLOWS",
    "SPECTRUM_BINS",
    "AttentionDiagnosis",
    "adjacent_cosines",
    "backward_warp",
    "consistency_chain",
    "cscv",
    "diagnose_attention",
    "dynamic_stride",
    "estimate_flow",
    "fast_change",
    "frame_similarity",
    "interpolation_smoothness",
    "is_dynamic",
    "load_flow",
    "motion_radii",
    "temporal_flicker",
    "temporal_spectrum",
    "visible",
    "warping_error",
]
