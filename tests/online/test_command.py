import os
import subprocess
import sys

import pytest
import torch

from adaspec.errors import AdaSpecError
from online.command import _settle
from online.config import ProcessSection


def test_the_process_takes_the_share_it_is_allowed() -> None:
    cpu = min(os.sched_getaffinity(0))
    script = (
        "import os, torch\n"
        "from online.command import _settle\n"
        "from online.config import ProcessSection\n"
        f"_settle(ProcessSection(threads=1, nice=7, cpus=({cpu},)))\n"
        "print(os.nice(0), torch.get_num_threads(), sorted(os.sched_getaffinity(0)))\n"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert done.stdout.strip() == f"{os.nice(0) + 7} 1 [{cpu}]"


def test_a_cpu_that_does_not_exist_is_named() -> None:
    with pytest.raises(AdaSpecError, match=r"process\.cpus \[4095\]"):
        _settle(ProcessSection(nice=0, cpus=(4095,)))


def test_a_gpu_that_does_not_exist_is_named() -> None:
    count = torch.cuda.device_count()
    with pytest.raises(AdaSpecError, match=f"this machine has {count} CUDA GPUs"):
        _settle(ProcessSection(nice=0, device=f"cuda:{count}"))
