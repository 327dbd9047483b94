"""Messages as bytes and back: JSON that pydantic checks against the message's types, with arrays as they lie in memory behind it.

Nothing that comes in is executed, as a pickle would be: whoever sends bytes can make a message of ours, or an error.
"""

from __future__ import annotations

import struct
from typing import Annotated, Any, cast

import numpy as np
from pydantic import PlainSerializer, PlainValidator, SerializationInfo, TypeAdapter, ValidationInfo

# Which message it is, and the bytes of its JSON.
HEAD = struct.Struct("<BI")


def _set_aside(array: np.ndarray, info: SerializationInfo) -> tuple[str, int, int]:
    """Put an array behind the text, which says its type, where it begins and how many entries it has."""
    pieces = cast("list[bytes]", info.context)
    begin = sum(map(len, pieces))
    pieces.append(array.tobytes())
    return array.dtype.str, begin, array.size


def _taken_up(place: object, info: ValidationInfo) -> np.ndarray:
    name, begin, size = cast("tuple[str, int, int]", place)
    dtype = np.dtype(name)
    if dtype.kind not in "fiu" or begin < 0 or size < 0:
        raise ValueError(f"{place} is no array of numbers")
    return np.frombuffer(cast("memoryview", info.context), dtype, size, begin).copy() if size else np.empty(0, dtype)


# An array of numbers in one dimension, as a field of a message.
Array = Annotated[np.ndarray, PlainValidator(_taken_up), PlainSerializer(_set_aside)]


class Encoding:
    """The messages that two sides know, each by its place in the list, which both must have alike."""

    def __init__(self, *kinds: type) -> None:
        self._kinds = kinds
        self._numbers = {kind: number for number, kind in enumerate(kinds)}
        # Made when first needed: all of them would take a start a tenth of a second.
        self._adapters: dict[type, TypeAdapter[Any]] = {}

    def encode(self, message: object) -> bytes:
        """Return the bytes of a message; ValueError if it is none of these kinds."""
        number = self._numbers.get(type(message))
        if number is None:
            raise ValueError(f"{type(message).__name__} is no message")
        arrays: list[bytes] = []
        text = self._adapter(type(message)).dump_json(message, context=arrays)
        return b"".join((HEAD.pack(number, len(text)), text, *arrays))

    def decode(self, data: bytes) -> object:
        """Return the message that these bytes are; ValueError if they are none."""
        if len(data) < HEAD.size:
            raise ValueError(f"{len(data)} bytes are no message")
        number, length = HEAD.unpack_from(data)
        if number >= len(self._kinds):
            raise ValueError(f"there is no message {number}")
        end = HEAD.size + length
        return self._adapter(self._kinds[number]).validate_json(data[HEAD.size : end], context=memoryview(data)[end:])

    def _adapter(self, kind: type) -> TypeAdapter[Any]:
        found = self._adapters.get(kind)
        if found is None:
            found = self._adapters[kind] = TypeAdapter(kind)
        return found
