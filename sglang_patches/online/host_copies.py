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
        copies = []
        with torch.cuda.stream(self._stream):
            for tensor in tensors:
                copy = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
                copies.append(copy.copy_(tensor, non_blocking=True))
                tensor.record_stream(self._stream)
            done.record()
        return copies, done.synchronize
