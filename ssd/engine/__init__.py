"""The two-device engine."""
