"""Closed forms of speculative and speculative speculative decoding: pure functions on numbers and arrays."""
