"""Memory and cores as the control group around the process allows them."""

from pathlib import Path

import psutil
import pytest

from sglang_patches.cpu import resources

GIB = 1 << 30


@pytest.fixture
def cgroup(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(resources, "_CGROUP", tmp_path)
    memory = psutil.virtual_memory()._replace(total=64 * GIB, available=48 * GIB)
    monkeypatch.setattr(psutil, "virtual_memory", lambda: memory)
    monkeypatch.setattr("os.sched_getaffinity", lambda pid: set(range(16)), raising=False)
    return tmp_path


def write(folder: Path, **files: str) -> None:
    folder.mkdir(exist_ok=True)
    for name, text in files.items():
        (folder / name.replace("__", ".")).write_text(text)


def test_the_host_without_a_control_group(cgroup: Path) -> None:
    assert resources.total_memory() == 64 * GIB
    assert resources.available_memory() == 48 * GIB
    assert resources.usable_cores() == 16


def test_a_v2_limit_counts_and_its_page_cache_does_not(cgroup: Path) -> None:
    stat = f"anon 1\ninactive_file {2 * GIB}\n"
    write(cgroup, memory__max=f"{8 * GIB}", memory__current=f"{5 * GIB}", memory__stat=stat)
    assert resources.total_memory() == 8 * GIB
    assert resources.available_memory() == 5 * GIB


def test_a_v1_limit(cgroup: Path) -> None:
    write(
        cgroup / "memory",
        memory__limit_in_bytes=f"{6 * GIB}",
        memory__usage_in_bytes=f"{2 * GIB}",
        memory__stat="total_inactive_file 0\n",
    )
    assert resources.available_memory() == 4 * GIB


def test_no_limit_is_the_host(cgroup: Path) -> None:
    write(cgroup, memory__max="max\n", memory__current="1\n", cpu__max="max 100000\n")
    assert resources.available_memory() == 48 * GIB
    assert resources.usable_cores() == 16


def test_an_overfull_group_has_nothing_left(cgroup: Path) -> None:
    write(cgroup, memory__max="100", memory__current="200")
    assert resources.available_memory() == 0


@pytest.mark.parametrize(("quota", "cores"), [("250000", 2), ("50000", 1), ("9900000", 16)])
def test_cpu_quota(cgroup: Path, quota: str, cores: int) -> None:
    write(cgroup, cpu__max=f"{quota} 100000\n")
    assert resources.usable_cores() == cores


def test_v1_cpu_quota(cgroup: Path) -> None:
    write(cgroup / "cpu", cpu__cfs_quota_us="300000", cpu__cfs_period_us="100000")
    assert resources.usable_cores() == 3
    write(cgroup / "cpu", cpu__cfs_quota_us="-1")
    assert resources.usable_cores() == 16


@pytest.mark.parametrize(("cores", "threads"), [(1, 1), (2, 1), (4, 1), (5, 2), (16, 8)])
def test_small_machines_use_one_thread(cores: int, threads: int) -> None:
    assert resources.default_threads(cores) == threads
