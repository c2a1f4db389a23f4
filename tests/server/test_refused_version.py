"""A damaged version on a live server: refused, told to the learner, and the next one goes live."""

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from adaspec.drafters.checkpoint import read_tensors
from adaspec.feedback import FeedbackReceiver, RollbackRecord, open_channel
from adaspec.versions import Provenance, VersionWriter, open_writer
from tests.server.launch import Server, serve
from tests.server.reference import ReferenceModel

pytestmark = [pytest.mark.server, pytest.mark.timeout(400)]

PROMPT = [5, 40, 90, 17, 33]
LENGTH = 16
PROVENANCE = Provenance(
    parent=0, mode="full", objective="", optimiser="", steps=1, tokens_seen=1, gate=None
)


@pytest.fixture
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Of channel and store, with a path short enough for sockets."""
    return tmp_path_factory.mktemp("c")


@pytest.fixture
def server(tiny_target: Path, tiny_drafter: Path, directory: Path) -> Iterator[Server]:
    config = directory / "adaspec.toml"
    config.write_text(
        f'[tap]\nenabled = true\n[channel]\ndirectory = "{directory / "channel"}"\n'
        f'store = "{directory / "store"}"\n'
    )
    arguments = ("--speculative-algorithm", "ADASPEC", "--dtype", "float32")
    arguments += ("--speculative-draft-model-path", str(tiny_drafter))
    log = directory / "server.log"
    with serve(tiny_target, *arguments, log_path=log, config=config) as running:
        yield running


@pytest.fixture
def writer(tiny_drafter: Path, directory: Path) -> Iterator[VersionWriter]:
    writer = open_writer(directory / "store", tiny_drafter)
    yield writer
    writer.close()


def publish(writer: VersionWriter, drafter: Path, damage: Callable[[Path], None]) -> int:
    tensors = {name: 1.01 * tensor for name, tensor in read_tensors(drafter).items()}
    number = writer.add(tensors, PROVENANCE).number
    writer.point(number, "published by a test")  # which a writer does only with a good file
    damage(writer.path(number) / "model.safetensors")  # a server looks every few seconds
    return number


def flip_a_bit(file: Path) -> None:
    content = bytearray(file.read_bytes())
    content[-1] ^= 1
    file.write_bytes(content)


def test_a_damaged_version_is_refused_and_told(
    server: Server, writer: VersionWriter, directory: Path, tiny_target: Path, tiny_drafter: Path
) -> None:
    expected = ReferenceModel(tiny_target).greedy(PROMPT, LENGTH)
    receiver = FeedbackReceiver(open_channel(directory / "channel").feedback, writer.lineage)
    sampling = {"temperature": 0, "max_new_tokens": LENGTH, "ignore_eos": True}

    def serve_until(condition: Callable[[], object]) -> object:
        for _ in range(300):
            answer = server.generate(input_ids=PROMPT, sampling_params=sampling)
            assert answer["output_ids"] == expected
            if (met := condition()) is not None:
                return met
        raise AssertionError("it did not come true")

    def notice() -> RollbackRecord | None:
        while (record := receiver.receive(0.1)) is not None:
            if isinstance(record, RollbackRecord):
                return record
        return None

    bad = publish(writer, tiny_drafter, flip_a_bit)
    told = serve_until(notice)
    assert isinstance(told, RollbackRecord)
    assert (told.version, told.restored, told.cause) == (bad, 0, "refusal")
    assert "the file is damaged" in told.reason
    good = publish(writer, tiny_drafter, lambda file: None)
    swapped = f"drafter swapped from version 0 to {good}"
    serve_until(lambda: True if swapped in server.log() else None)
    assert "Traceback" not in server.log()
    receiver.close()
