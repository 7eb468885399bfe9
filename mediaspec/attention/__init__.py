"""Attention policies: which keys a layer keeps or reads, and what a strip of its attention says about it."""
