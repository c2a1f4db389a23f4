"""Device tensors to the host behind the back of the serving stream."""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

_ALIGNMENT = 64  # bytes


class HostCopier:
    """Starts copies to pinned memory on a stream of its own; on the CPU there is nothing to do.

    Args:
        device: where the tensors are.
    """

    def __init__(self, device: torch.device) -> None:
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None

    def start(self, tensors: Sequence[Tensor]) -> tuple[list[Tensor], Callable[[], None]]:
        """Copy without waiting.

        Args:
            tensors: which nobody writes to any more, neither here nor in a CUDA graph.

        Returns:
            The same tensors on the host, valid once the function returned with them has returned.
        """
        if self._stream is None:
            return list(tensors), lambda: None
        self._stream.wait_stream(torch.cuda.current_stream())
        # A blocking event puts the waiting thread to sleep, away from the scheduler's core.
        done = torch.cuda.Event(blocking=True)
        copies = _pinned_like(tensors)
        with torch.cuda.stream(self._stream):
            for copy, tensor in zip(copies, tensors, strict=True):
                copy.copy_(tensor, non_blocking=True)
                tensor.record_stream(self._stream)
            done.record()
        return copies, done.synchronize


def _pinned_like(tensors: Sequence[Tensor]) -> list[Tensor]:
    """Page-locked tensors of the same shapes and types, in one piece of memory."""
    starts, end = [], 0
    for tensor in tensors:
        starts.append(end)
        end += -(-tensor.nbytes // _ALIGNMENT) * _ALIGNMENT
    memory = torch.empty(end, dtype=torch.uint8, pin_memory=True)
    return [
        memory[start : start + tensor.nbytes].view(tensor.dtype).view(tensor.shape)
        for start, tensor in zip(starts, tensors, strict=True)
    ]
