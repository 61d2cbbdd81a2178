"""A port for rank 0 of the trainer, kept free until that rank listens on it.

Seconds pass between the choice of a port and the moment when rank 0 listens: other programs take ports
meanwhile. The socket that chose it therefore stays bound. It listens to nothing and allows sockets of the
same user to bind the port too (SO_REUSEPORT), which `open_store` does.
"""

from __future__ import annotations

import socket


def reserve_port(address: str) -> socket.socket:
    """Return a bound socket; its port is nobody else's until the socket is closed."""
    family = socket.getaddrinfo(address, 0, type=socket.SOCK_STREAM)[0][0]
    reserved = socket.socket(family)
    reserved.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
    reserved.bind((address, 0))
    return reserved


def port_of(reserved: socket.socket) -> int:
    """Return the port that the socket has."""
    return int(reserved.getsockname()[1])
