"""Device tensors to the host behind the back of the serving stream."""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor


class HostCopier:
    """Starts copies to pinned memory on a stream of its own; on the CPU there is nothing to do.

    Args:
        device: where the tensors are.
    """

    def __init__(self, device: torch.device) -> None:
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None

    def start(self, tensors: Sequence[Tensor]) -> tuple[list[Tensor], Callable[[], None]]:
        """Copy without waiting.

        On a device, the tensors are packed on the serving stream into one piece of memory, which
        is a single copy away from the host: few calls, and what the next step overwrites (a CUDA
        graph its outputs, the scheduler its lengths) is safe.

        Args:
            tensors: on the CPU, which nobody writes to any more.

        Returns:
            The same tensors on the host, valid once the function returned with them has returned;
            from a device, in one piece of page-locked memory.
        """
        if self._stream is None:
            return list(tensors), lambda: None
        # The widest elements first, so that every tensor is aligned where it begins.
        order = sorted(range(len(tensors)), key=lambda i: -tensors[i].element_size())
        packed = torch.cat([tensors[i].reshape(-1).view(torch.uint8) for i in order])
        memory = torch.empty(packed.shape, dtype=torch.uint8, pin_memory=True)
        # A blocking event puts the waiting thread to sleep, away from the scheduler's core.
        done = torch.cuda.Event(blocking=True)
        self._stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._stream):
            memory.copy_(packed, non_blocking=True)
            packed.record_stream(self._stream)
            done.record()
        copies, start = list(tensors), 0
        for i in order:
            end = start + tensors[i].nbytes
            copies[i] = memory[start:end].view(tensors[i].dtype).view(tensors[i].shape)
            start = end
        return copies, done.synchronize
