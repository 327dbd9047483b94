"""Speculative speculative decoding."""
