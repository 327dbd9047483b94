"""Closed forms of speculative and speculative speculative decoding: pure functions on numbers and arrays.

Source: Kumar, Dao, May, Speculative Speculative Decoding, arXiv 2603.03251. Theorems, corollaries and definitions are
quoted by their numbers there. Functions that say "broadcasts" take numbers or arrays and return an array of the broadcast
shape, of zero dimensions for plain numbers.
"""
