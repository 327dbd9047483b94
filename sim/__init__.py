"""A discrete-event simulator of AR, SD and SSD decoding."""
