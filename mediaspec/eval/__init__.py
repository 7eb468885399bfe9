"""Measuring pictures and speed: resumable manifests, distances, text-image scores, interleaved timing, reports."""
