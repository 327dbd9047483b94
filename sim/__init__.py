"""A discrete-event simulator of AR, SD and SSD decoding, and the metrics and timeline that it shares with the engine."""
