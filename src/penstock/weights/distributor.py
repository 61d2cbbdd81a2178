"""A distributor: brings published weights to its node, one copy over the network per node.

Each node has one distributor, a process of its own. It receives a publication from the distributor of a
node that holds it, into weight buffers of its own node (`shared_memory.py`), and serves it to others; engines read
the buffers as they would on the trainer's node, and decode meanwhile. Who receives from whom is decided by
`workers/pool/weights.py`.

The receiver connects, names the publication and the weights that it holds already, and gets one frame for
each bucket: the whole bucket or, with `sync.kind = delta`, its difference to those weights. It keeps the
differences to pass them on. Engines check the digest of what came out.

Between two updates few 16-bit weights change their bits, and most of those by one unit in the last place.
A delta holds, for every 16-bit word that changed, the gap to the one before (Huffman-coded bytes), the sign
of the change (a bit) and its size (mostly one: compressed away). Padding and float32 are words like others.
"""

from __future__ import annotations

import asyncio
import hmac
import json
import os
import secrets
import socket
import socketserver
import struct
import threading
import zlib
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from penstock.errors import RunError, WeightsGone
from penstock.files import ScratchFolder, weight_folder
from penstock.types import WeightHandle
from penstock.weights.protocol import Endpoint
from penstock.weights.shared_memory import SHARED_MEMORY, SharedMemorySync, location_of

DELTA_HEADER = struct.Struct("<III")  # bytes of the gaps, of the signs, of the sizes
_RUN = 255  # a byte that stands for so many units and is continued
_MOST_SHARE = 0.3  # of the words: above it a delta is hardly smaller, and slow to make


def encode_delta(base: np.ndarray, new: np.ndarray) -> bytes | None:
    """The delta from one array of bytes to another of its size; None if the whole is smaller."""
    rest = len(new) // 8 * 8  # four words at a time are compared first
    old_fours, new_fours = base[:rest].view(np.uint64), new[:rest].view(np.uint64)
    fours = np.flatnonzero(old_fours != new_fours)
    old_words, new_words = old_fours[fours].view(np.uint16), new_fours[fours].view(np.uint16)
    differs = np.flatnonzero(old_words != new_words)
    places = fours[differs >> 2] * 4 + (differs & 3)
    old_words, new_words = old_words[differs], new_words[differs]
    if rest < len(new):
        old_rest, new_rest = base[rest:].view(np.uint16), new[rest:].view(np.uint16)
        differs = np.flatnonzero(old_rest != new_rest)
        places = np.append(places, rest // 2 + differs)
        old_words = np.append(old_words, old_rest[differs])
        new_words = np.append(new_words, new_rest[differs])
    if len(places) > _MOST_SHARE * len(new) / 2:
        return None
    change = (new_words - old_words).view(np.int16).astype(np.int32)
    gaps = _compressed(_bytes_of(np.diff(places, prepend=-1) - 1), zlib.Z_HUFFMAN_ONLY)
    signs = np.packbits(change > 0).tobytes()
    sizes = _compressed(_bytes_of(np.abs(change) - 1), zlib.Z_DEFAULT_STRATEGY)
    delta = DELTA_HEADER.pack(len(gaps), len(signs), len(sizes)) + gaps + signs + sizes
    return delta if len(delta) < len(new) else None


def apply_delta(delta: bytes, words: np.ndarray) -> None:
    """Change an array of 16-bit words, a copy of the base, into the new words."""
    num_gaps, num_signs, num_sizes = DELTA_HEADER.unpack_from(delta)
    start, rest = DELTA_HEADER.size, DELTA_HEADER.size + num_gaps
    gaps = _numbers_of(zlib.decompress(delta[start:rest]))
    signs = np.frombuffer(delta, np.uint8, num_signs, rest)
    rest += num_signs
    sizes = _numbers_of(zlib.decompress(delta[rest : rest + num_sizes])) + 1
    places = np.cumsum(gaps + 1) - 1
    change = np.where(np.unpackbits(signs, count=len(places)), sizes, -sizes)
    words[places] += change.astype(np.int16).view(np.uint16)


def _compressed(octets: np.ndarray, strategy: int) -> bytes:
    compressor = zlib.compressobj(level=1, strategy=strategy)
    return compressor.compress(octets.data) + compressor.flush()


def _bytes_of(numbers: np.ndarray) -> np.ndarray:
    """Numbers as bytes: a 255 for each 255 in the number, then what is left."""
    large = np.flatnonzero(numbers >= _RUN)
    if not len(large):
        return numbers.astype(np.uint8)
    runs, lasts = np.zeros(len(numbers), np.int64), numbers.astype(np.uint8)
    runs[large], lasts[large] = numbers[large] // _RUN, numbers[large] % _RUN
    octets = np.full(int(runs.sum()) + len(numbers), _RUN, np.uint8)
    octets[np.cumsum(runs + 1) - 1] = lasts
    return octets


def _numbers_of(data: bytes) -> np.ndarray:
    octets = np.frombuffer(data, np.uint8)
    lasts = np.flatnonzero(octets != _RUN)
    runs = np.diff(lasts, prepend=-1) - 1
    return octets[lasts] + _RUN * runs


BUCKET_BYTES = 32 * 2**20
_CONNECTIONS = 2  # that share the buckets of one copy, as one core carries less than most links do
_ENCODERS = min(16, os.cpu_count() or 1)  # threads
_MOST_REQUEST_BYTES = 1 << 16
_TIMEOUT_S = 10.0  # of one bucket
_FRAME = struct.Struct("<cQ")  # what follows, and its size
_WHOLE, _DELTA, _GONE = b"W", b"D", b"G"  # a bucket, its delta, why the weights cannot be sent
Identity = tuple[int, str]  # version and digest of weights


@dataclass(slots=True, frozen=True)
class Version:
    """Weights that this node holds, and the way to them from the version before."""

    identity: Identity
    octets: torch.Tensor
    base: Identity | None = None
    deltas: list[Future[bytes | None]] | None = None  # of each bucket; None: better sent whole


class Distributor:
    """Consumes a publication of another node, produces the same publication on this node."""

    def __init__(self, folder: str, node: str, address: str, sends_deltas: bool) -> None:
        """`folder`: that of a dead predecessor, whose weights are kept; empty: there was none."""
        self._folder = ScratchFolder(Path(folder)) if folder else weight_folder()
        self._sync = SharedMemorySync(self._folder.path, node=node)
        self._node = node
        self._held: Version | None = None  # the newest weights of this node
        self._holding = threading.Lock()
        self._progress = 0  # grows with every bucket that was received
        self._encoders = ThreadPoolExecutor(_ENCODERS) if sends_deltas else None
        self._server = _Server(address, self._serve)
        self._endpoint = Endpoint(
            str(self._folder.path), address, self._server.port, secrets.token_hex(32)
        )
        threading.Thread(target=self._server.serve_forever, daemon=True).start()

    async def endpoint(self) -> Endpoint:
        return self._endpoint

    async def progress(self) -> int:
        """A number that changes with every bucket, for the watchdog."""
        return self._progress

    async def remove(self) -> None:
        """Free this node's weights at the end of the run."""
        await asyncio.to_thread(self._server.shutdown)
        self._server.server_close()
        self._held = None
        self._sync.close()
        self._folder.remove()

    # ---- the receiver

    async def receive(self, source: WeightHandle, sender: Endpoint) -> tuple[WeightHandle, int]:
        """Receive the weights of `source`; return the handle of this node's copy and the bytes that came.

        Raise WeightsGone if the sender cannot read them, another RunError if it is not reached.
        """
        return await asyncio.to_thread(self._receive, source, sender)

    def _receive(self, source: WeightHandle, sender: Endpoint) -> tuple[WeightHandle, int]:
        size = source.location["size"]
        base = self._held if self._held and len(self._held.octets) == size else None
        with self._holding:
            writer = self._sync.begin_buffer(size)
        buckets = list(writer.bytes.split(BUCKET_BYTES))
        bases = list(base.octets.split(BUCKET_BYTES)) if base else [None] * len(buckets)
        deltas: list[Future[bytes | None]] = [Future() for _ in buckets]

        def pull(first: int) -> int:
            """Receive every so many-th bucket over a connection of its own; return the bytes that came."""
            num_bytes = 0
            with self._connected(source, sender, base, first) as link:
                for number in range(first, len(buckets), _CONNECTIONS):
                    size = _pull_bucket(link, buckets[number], bases[number], deltas[number])
                    num_bytes += size
                    self._progress += size
            return num_bytes

        try:
            with ThreadPoolExecutor(_CONNECTIONS) as pool:
                num_bytes = sum(pool.map(pull, range(_CONNECTIONS)))
            writer.mark_written(size)
        except (OSError, EOFError) as error:
            raise RunError(f"no weights from {sender.address}: {error}") from error
        finally:
            writer.abandon()
        if self._encoders is not None:
            passed_on = (base.identity, deltas) if base else (None, None)
            self._held = Version(_identity(source), writer.bytes, *passed_on)
        location = location_of(writer, source.location["tensors"], size, self._node)
        return replace(source, location=location), num_bytes

    def _connected(
        self, source: WeightHandle, sender: Endpoint, base: Version | None, first: int
    ) -> socket.socket:
        """A connection on which the sender has been asked for every so many-th bucket."""
        link = socket.create_connection((sender.address, sender.port), _TIMEOUT_S)
        where = {key: source.location[key] for key in ("path", "number", "size", "device")}
        request = {
            "identity": _identity(source),
            "location": where,
            "base": base and base.identity,
            "first": first,
        }
        link.sendall(f"{sender.token} {json.dumps(request)}\n".encode())
        return link

    # ---- the sender

    def _serve(self, link: socket.socket) -> None:
        """Send a receiver what it asks for; a receiver that is lost says so itself."""
        link.settimeout(_TIMEOUT_S)
        with link.makefile("rb") as lines:
            token, _, line = lines.readline(_MOST_REQUEST_BYTES).partition(b" ")
        if not hmac.compare_digest(token, self._endpoint.token.encode()):
            return
        request = json.loads(line)
        identity = (request["identity"][0], request["identity"][1])
        try:
            for kind, octets in self._frames(identity, request):
                link.sendall(_FRAME.pack(kind, len(octets)))
                link.sendall(octets)
        except WeightsGone as gone:
            with self._holding:
                if self._held and self._held.identity == identity:
                    self._held = None
            text = str(gone).encode()
            link.sendall(_FRAME.pack(_GONE, len(text)) + text)

    def _frames(self, identity: Identity, request: dict[str, Any]) -> Iterator[tuple[bytes, Any]]:
        """Yield the requested buckets, each as soon as it is written: its delta, or the whole."""
        version, digest = identity
        handle = WeightHandle(
            version=version, digest=digest, kind=SHARED_MEMORY, location=request["location"]
        )
        with self._holding:
            reader = self._sync.open_buffer(handle)
            octets = reader.bytes
            self._hold(identity, octets, reader.wait_until_written)
            held = self._held
        deltas = None
        if held and held.base and (held.identity, list(held.base)) == (identity, request["base"]):
            deltas = held.deltas
        buckets = octets.split(BUCKET_BYTES)
        for number in range(request["first"], len(buckets), _CONNECTIONS):
            reader.wait_until_written(min((number + 1) * BUCKET_BYTES, len(octets)))
            encoded = deltas[number].result() if deltas else None
            if encoded is None:
                yield _WHOLE, memoryview(buckets[number].numpy())
            else:
                yield _DELTA, encoded

    def _hold(
        self, identity: Identity, octets: torch.Tensor, wait_until_written: Callable[[int], None]
    ) -> None:
        """Hold newer weights than before, and begin to encode the difference; nothing without deltas.

        A buffer that is held is not written again; the older one is free once all is encoded.
        """
        held = self._held
        if self._encoders is None or (held and held.identity[0] > identity[0]):
            return
        if held is None or len(held.octets) != len(octets):
            self._held = Version(identity, octets)
        elif held.identity != identity:
            self._held = Version(
                identity,
                octets,
                held.identity,
                [
                    self._encoders.submit(_encode, wait_until_written, held.octets, octets, start)
                    for start in range(0, len(octets), BUCKET_BYTES)
                ],
            )


class _Server(socketserver.ThreadingTCPServer):
    """Listens on one address of this node; each connection has a thread."""

    daemon_threads = True

    def __init__(self, address: str, serve: Callable[[socket.socket], None]) -> None:
        self.address_family = socket.getaddrinfo(address, 0, type=socket.SOCK_STREAM)[0][0]
        self._serve_connection = serve
        super().__init__((address, 0), socketserver.BaseRequestHandler)

    @property
    def port(self) -> int:
        return int(self.server_address[1])

    def finish_request(self, request: Any, client_address: Any) -> None:
        self._serve_connection(request)


def _encode(
    wait_until_written: Callable[[int], None], base: torch.Tensor, new: torch.Tensor, start: int
) -> bytes | None:
    old, bucket = (octets[start : start + BUCKET_BYTES] for octets in (base, new))
    wait_until_written(start + len(bucket))
    return encode_delta(old.numpy(), bucket.numpy())


def _pull_bucket(
    link: socket.socket, bucket: torch.Tensor, base: torch.Tensor | None, kept: Future[bytes | None]
) -> int:
    """Fill a bucket from the next frame, keep its delta to pass it on; return the bytes that came."""
    kind, size = _FRAME.unpack(_read(link, bytearray(_FRAME.size)))
    if kind == _WHOLE:
        _read(link, bucket.numpy())
        kept.set_result(None)
        return int(size)
    octets = bytes(_read(link, bytearray(size)))
    if kind == _GONE:
        raise WeightsGone(octets.decode())
    assert base is not None, "a delta is sent to a receiver that named its base"
    bucket.copy_(base)
    apply_delta(octets, bucket.numpy().view(np.uint16))
    kept.set_result(octets)
    return int(size)


def _read(link: socket.socket, target: Any) -> Any:
    """Fill `target` from the connection and return it."""
    left = memoryview(target).cast("B")
    while left:
        count = link.recv_into(left)
        if not count:
            raise EOFError("the connection was closed")
        left = left[count:]
    return target


def _identity(handle: WeightHandle) -> Identity:
    return handle.version, handle.digest
