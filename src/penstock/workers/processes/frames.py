"""Pickled messages between the driver and a worker process, each with its length before it.

A call is (number, method, arguments), its answer (number, result, error). While a worker starts it also
sends (STAGE, (what it does, since when), None).
"""

from __future__ import annotations

import asyncio
import pickle
import struct
from typing import Any

FRAME = struct.Struct("!Q")
STAGE = -1


async def read_frame(reader: asyncio.StreamReader) -> Any:
    """Return the next pickled message; raise IncompleteReadError at the end of the stream."""
    (length,) = FRAME.unpack(await reader.readexactly(FRAME.size))
    return pickle.loads(await reader.readexactly(length))


def frame(message: Any) -> bytes:
    """Return a pickled message with its length before it."""
    payload = pickle.dumps(message, protocol=pickle.HIGHEST_PROTOCOL)
    return FRAME.pack(len(payload)) + payload


def write_frame(writer: asyncio.StreamWriter, message: Any) -> None:
    payload = pickle.dumps(message, protocol=pickle.HIGHEST_PROTOCOL)
    writer.write(FRAME.pack(len(payload)))
    writer.write(payload)
