"""The pipe between the server and its relay process: messages of frames over a socket pair.

Plain sockets, since every microsecond that the server's end runs Python is one that the scheduler
thread may have to wait for: a message is two calls into the kernel, which hold no lock of Python's.
"""

import socket
import struct
from collections.abc import Sequence

_PREFIX = struct.Struct("<Q")
_MOST_FRAMES = 64
_MOST_BYTES = 16 << 30  # of a message; the taps of a long prefill batch are a few GiB
_UNSEEN_BYTES = 64 << 20  # memory that an announced size alone may take


def send_frames(pipe: socket.socket, frames: Sequence[bytes | memoryview]) -> None:
    """Send a message; waits while the other end is behind.

    Raises:
        OSError: if the other end is gone.
    """
    head = [_PREFIX.pack(len(frames)), *(_PREFIX.pack(len(frame)) for frame in frames)]
    pipe.sendall(b"".join((*head, frames[0])))
    for frame in frames[1:]:
        pipe.sendall(frame)


def receive_frames(pipe: socket.socket) -> list[memoryview]:
    """The next message, in memory of its own; waits for it.

    Raises:
        EOFError: if the other end is gone.
        ValueError: if what arrives is no message.
    """
    (count,) = _PREFIX.unpack(_receive(pipe, _PREFIX.size))
    if not 0 < count <= _MOST_FRAMES:
        raise ValueError(f"a message of {count} frames was announced; at most {_MOST_FRAMES} fit")
    sizes = struct.unpack(f"<{count}Q", _receive(pipe, count * _PREFIX.size))
    if sum(sizes) > _MOST_BYTES:
        raise ValueError(f"{sum(sizes)} bytes were announced; at most {_MOST_BYTES} are taken")
    return [_receive(pipe, size) for size in sizes]


def _receive(pipe: socket.socket, size: int) -> memoryview:
    memory = bytearray()
    while len(memory) < size:
        done = len(memory)
        memory += bytes(min(size - done, max(done, _UNSEEN_BYTES)))
        _fill(pipe, memoryview(memory)[done:])
    return memoryview(memory)


def _fill(pipe: socket.socket, memory: memoryview) -> None:
    while memory:
        received = pipe.recv_into(memory)
        if received == 0:
            raise EOFError("the other end of the pipe is closed")
        memory = memory[received:]
