"""Small results of a step on the host, with those that SGLang brings there anyway."""

from collections.abc import Sequence

import torch
from torch import Tensor

_ALIGNMENT = 16  # bytes


class HostRing:
    """Page-locked memory for a few steps, used round and round.

    Copies are queued on the serving stream, ahead of the event that the scheduler waits for before
    it reads the step's tokens (``GenerationBatchResult.copy_done``): once a step's counts are
    there, so are these. No stream, event or allocation of our own is needed; the device spends a
    microsecond or two on each.

    Args:
        steps: whose results are kept before their memory is used again.
        most_bytes: of a step's results together.
    """

    def __init__(self, device: torch.device, steps: int, most_bytes: int) -> None:
        self._on_device = device.type == "cuda"
        shape = (steps, most_bytes) if self._on_device else (0, 0)
        self._memory = torch.empty(shape, dtype=torch.uint8, pin_memory=self._on_device)
        self._next = 0

    def take(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        """The tensors on the host; valid when the step's counts have arrived.

        Args:
            tensors: on the CPU, which nobody writes to any more. They are returned as they are.

        Raises:
            ValueError: if they need more memory than a step has.
        """
        if not self._on_device:
            return list(tensors)
        memory, start, copies = self._memory[self._next], 0, []
        self._next = (self._next + 1) % len(self._memory)
        for tensor in tensors:
            end = start + tensor.nbytes
            if end > len(memory):
                raise ValueError(f"{end} bytes do not fit into the {len(memory)} of a step.")
            copy = memory[start:end].view(tensor.dtype).view(tensor.shape)
            copies.append(copy.copy_(tensor, non_blocking=True))
            start = -(-end // _ALIGNMENT) * _ALIGNMENT
        return copies
