"""Measuring pictures, videos and speed: resumable manifests, distances, text-image scores, timing, reports."""
