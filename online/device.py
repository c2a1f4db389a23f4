"""Where the learner computes, and how much of a GPU it may take."""

import contextlib
from collections.abc import Iterator

import torch

from adaspec.errors import AdaSpecError
from online.config import ProcessSection

# PyTorch has no type for it on the CPU.
_NO_HOST_MEMORY = "can't allocate memory"


def learning_device(process: ProcessSection) -> torch.device:
    """The device that the settings name; ``auto`` is the first CUDA GPU, or the CPU without one.

    Raises:
        AdaSpecError: if there is no such GPU.
    """
    count = torch.cuda.device_count()
    name = process.device
    if name == "auto":
        name = "cuda" if count else "cpu"
    if name == "cpu":
        return torch.device(name)
    device = torch.device("cuda", torch.device(name).index or 0)
    if device.index >= count:
        raise AdaSpecError(
            f"process.device is {name}, but this machine has {count} CUDA GPUs; choose another or "
            "use cpu."
        )
    return device


def limit_memory(device: torch.device, process: ProcessSection) -> None:
    """Hold this process's tensors on a GPU to ``gpu_bytes``; beyond, PyTorch raises out of memory.

    A server on the same GPU has sized its KV cache by what it found free, and its own activations
    live in the rest: of the two, the learner must be the one that runs out.
    """
    if device.type == "cuda":
        total = torch.cuda.get_device_properties(device).total_memory
        torch.cuda.set_per_process_memory_fraction(min(1.0, process.gpu_bytes / total), device)


@contextlib.contextmanager
def plain_memory_errors(process: ProcessSection) -> Iterator[None]:
    """Turn an out-of-memory error of a GPU or of the host into one that says what to do.

    Raises:
        AdaSpecError: in its place.
    """
    try:
        yield
    except torch.OutOfMemoryError as error:
        raise AdaSpecError(
            f"the learner needs more than the {process.gpu_bytes >> 20} MiB of GPU memory that "
            "process.gpu_bytes allows, or than the GPU has left; lower objective.chunk_rows or "
            "batch.max_context, raise process.gpu_bytes and lower the server's "
            "--mem-fraction-static to match, or set process.device to cpu."
        ) from error
    except (MemoryError, RuntimeError) as error:
        if isinstance(error, RuntimeError) and _NO_HOST_MEMORY not in str(error):
            raise
        raise AdaSpecError(
            "the learner ran out of memory; lower replay.bytes, or give it more."
        ) from error
