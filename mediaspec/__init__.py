"""mediaspec: lossless and bounded-drift speculative decoding for generative media."""

__version__ = "0.1.0"
