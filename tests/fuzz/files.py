"""Targets: files that somebody else may have written."""

import json
import logging
from collections.abc import Callable
from pathlib import Path

import msgspec
import numpy as np
import torch
from safetensors.torch import save

from adaspec.decisions import DECISIONS_NAME, last_decisions
from adaspec.drafters.checkpoint import (
    load_drafter,
    parameter_shapes,
    read_drafter_config,
    weights_limit,
)
from adaspec.drafters.config import parse_config, render_config
from adaspec.drafters.origin import Expectation, Origin, TargetMarks, read_origin
from adaspec.errors import AdaSpecError
from adaspec.feedback.channel import open_channel
from adaspec.feedback.keys import make_keys, read_any_keys
from adaspec.training.trainer import load_state as load_training
from adaspec.training.trainer import save_state as save_training
from adaspec.versions import VersionStore, open_writer
from adaspec.versions.manifest import Pointer
from adaspec.versions.trust import SIGNATURE_NAME, sign, signer_of
from online.state import LearnerState, dump_rng, load_state, restore_rng, save_state
from tests.fuzz.mutation import either, mutate_bytes, mutate_json, mutate_safetensors
from tests.fuzz.target import Target, attempt
from tests.versions.tiny import tiny_drafter_directory

SIGNING = "11" * 32
DEEP_JSON = b'{"extra": ' + b"[" * 100_000


def of_file(path: Path, read: Callable[[], bool | None]) -> Callable[[bytes], bool]:
    """A check that writes the bytes to ``path`` and reads them back through ours."""

    def check(data: bytes) -> bool:
        path.write_bytes(data)
        return bool(attempt(read, AdaSpecError))

    return check


def _store(directory: Path, signing: str | None = None) -> VersionStore:
    drafter = tiny_drafter_directory(directory / "drafter")
    open_writer(directory / "store", drafter, signing).close()
    signer = None if signing is None else signer_of(signing)
    return VersionStore(directory / "store", signer)


def manifest(directory: Path) -> Target:
    """The manifest of a version, which says whose and how large its weights are."""
    store = _store(directory)
    path = store.path(0) / "manifest.json"
    seed = path.read_bytes()

    def read() -> bool:
        found = store.manifest(0)
        assert msgspec.json.decode(msgspec.json.encode(found), type=type(found)) == found
        return True

    return Target(of_file(path, read), [seed], either(mutate_json), {"nesting": DEEP_JSON})


def pointer(directory: Path) -> Target:
    """The pointer to the live version."""
    store = _store(directory)
    path = store.directory / "CURRENT"
    seed = path.read_bytes()

    def read() -> bool:
        found = store.current()
        return msgspec.json.decode(msgspec.json.encode(found), type=Pointer) == found

    return Target(of_file(path, read), [seed], either(mutate_json), {"nesting": DEEP_JSON})


def signature(directory: Path) -> Target:
    """A signature: none but the learner's is accepted."""
    store = _store(directory, SIGNING)
    version = store.path(0)
    right = sign((version / "manifest.json").read_bytes(), SIGNING)
    path = version / SIGNATURE_NAME

    def read() -> bool:
        store.manifest(0)
        assert path.read_bytes() == right
        return True

    return Target(of_file(path, read), [right])


def signed_manifest(directory: Path) -> Target:
    """A manifest beside its signature: no other is accepted."""
    store = _store(directory, SIGNING)
    path = store.path(0) / "manifest.json"
    right = path.read_bytes()

    def read() -> bool:
        store.manifest(0)
        assert path.read_bytes() == right
        return True

    return Target(of_file(path, read), [right], either(mutate_json))


def drafter_weights(directory: Path) -> Target:
    """A drafter's safetensors: loaded as they are, or refused."""
    drafter = tiny_drafter_directory(directory / "drafter")
    path = drafter / "model.safetensors"
    seed = path.read_bytes()

    def read() -> bool:
        tensors = load_drafter(drafter).state_dict()
        return all(bool(torch.isfinite(tensor).all()) for tensor in tensors.values())

    header = b'{"fc.weight":{"dtype":"F32","shape":[%s],"data_offsets":[0,4]}}'
    huge = header % b"4611686018427387904,16"
    found = {
        "a header of 16 EiB": b"\xff" * 8 + seed[8:],
        "a huge tensor": len(huge).to_bytes(8, "little") + huge + b"\0" * 4,
        "another type": save({"fc.weight": torch.zeros(16, 32, dtype=torch.int64)}),
    }
    return Target(of_file(path, read), [seed], either(mutate_safetensors), found)


def version_weights(directory: Path) -> Target:
    """The safetensors of a version: only those that its manifest describes."""
    store = _store(directory)
    path = store.path(0) / "model.safetensors"
    right = path.read_bytes()

    def read() -> bool:
        store.stage(0)
        assert path.read_bytes() == right
        return True

    return Target(of_file(path, read), [right], either(mutate_safetensors))


def weights_index(directory: Path) -> Target:
    """The index of a drafter in shards."""
    drafter = tiny_drafter_directory(directory / "drafter")
    path = drafter / "model.safetensors.index.json"
    names = load_drafter(drafter).state_dict()
    seed = json.dumps({"weight_map": dict.fromkeys(names, "model.safetensors")}).encode()

    def read() -> bool:
        load_drafter(drafter)
        return True

    found = {
        "another directory": b'{"weight_map": {"a": "../drafter/model.safetensors"}}',
        "a NUL": b'{"weight_map": {"a": "x\\u0000"}}',
        "half a pair": b'{"weight_map": {"a": "\\ud800"}}',
        "nesting": DEEP_JSON,
    }
    return Target(of_file(path, read), [seed], either(mutate_json), found)


def drafter_config(directory: Path) -> Target:
    """A drafter's config.json: what is accepted describes a network of bounded size."""
    drafter = tiny_drafter_directory(directory / "drafter")
    path = drafter / "config.json"
    seed = path.read_bytes()
    values = json.loads(seed)

    def read() -> bool:
        config = read_drafter_config(drafter)
        assert parse_config(render_config(config)) == config
        assert weights_limit(parameter_shapes(config)) < 1 << 46
        return True

    def with_(**changes: object) -> bytes:
        return json.dumps({**values, **changes}).encode()

    found = {
        "a trillion layers": with_(num_hidden_layers=10**12, layer_types=None),
        "a million layers": with_(num_hidden_layers=10**6, layer_types=None),
        "a size of 10 ** 30": with_(hidden_size=10**30),
        "an epsilon of 10 ** 400": with_(rms_norm_eps=10**400),
        "an endless number": seed.replace(b": 16,", b": " + b"9" * 5000 + b",", 1),
        "10 ** 400 layers to spread taps over": json.dumps(
            {
                **{key: value for key, value in values.items() if key != "dflash_config"},
                "num_target_layers": 10**400,
                "mask_token_id": 3,
            }
        ).encode(),
        "nesting": DEEP_JSON,
    }
    return Target(of_file(path, read), [seed], either(mutate_json), found)


def origin(directory: Path) -> Target:
    """What a drafter says it was trained with."""
    marks = TargetMarks(
        weights="00", vocabulary="11", template=None, quantisation=None, head=(0.5, 1.0)
    )
    expected = Expectation(committed_per_pass=2.5, survival=(0.75, 0.5), setting="greedy")
    whole = Origin(target=marks, taps=(0, 1), expected=expected)

    def read() -> bool:
        found = read_origin(directory)
        assert found is not None
        if found.expected is not None:
            found.expected.accepted_by_length()
        return True

    path = directory / "origin.json"
    seed = msgspec.json.encode(whole)
    return Target(of_file(path, read), [seed], either(mutate_json), {"nesting": DEEP_JSON})


def key_file(directory: Path) -> Target:
    """A file of keys: what is accepted can be used by sockets and signatures, or is refused."""
    seeds = [path.read_bytes() for path in make_keys(directory / "keys").values()]
    path = directory / "some.keys"
    path.touch(mode=0o600)

    def read() -> bool:
        keys = read_any_keys(path)
        signing = getattr(keys, "signing", None)
        assert signing is None or len(signer_of(signing)) == 64
        return msgspec.json.decode(msgspec.json.encode(keys), type=type(keys)) == keys

    found = {"nesting": b'{"role": "server", ' + DEEP_JSON[1:], "a large file": b" " * (1 << 18)}
    return Target(of_file(path, read), seeds, either(mutate_json), found)


def control_token(directory: Path) -> Target:
    """The token of a channel, which an operator's command sends to the learner."""
    channel = open_channel(directory / "channel")
    assert channel.token is not None
    channel.make_control_token()

    def read() -> bool:
        return channel.control_token() != ""

    found = {"not UTF-8": b"\xff\xfe", "a large file": b"x" * (1 << 20)}
    return Target(of_file(channel.token, read), [channel.token.read_bytes()], found=found)


def _learner_state(directory: Path) -> Callable[[], bool]:
    logging.getLogger("online.state").setLevel(logging.ERROR)
    rng = np.random.default_rng(0)
    state = LearnerState(
        lineage="0" * 16, mode="frozen-kv", parent=0, sequence=1, steps=2, skipped_steps=0,
        tokens_seen=3, optimiser_steps=2, steps_since_gate=1, learning_seconds=1.5, published=0,
        kept=1, rolled_back=0, failures=0, rng=dump_rng(rng),
    )  # fmt: skip
    save_state(directory, state, {"weight": torch.ones(4), "moment": torch.zeros(4)})

    def read() -> bool:
        saved = load_state(directory, "0" * 16, "frozen-kv")
        if saved is not None:
            restore_rng(np.random.default_rng(1), saved.state.rng)
        return saved is not None

    return read


def learner_state(directory: Path) -> Target:
    """What a learner goes on from: a state that cannot be read is skipped."""
    read = _learner_state(directory)
    path = directory / "00000000" / "state.json"
    seed = path.read_bytes()
    values = json.loads(seed)

    def with_rng(rng: object) -> bytes:
        return json.dumps({**values, "rng": rng}).encode()

    found = {
        "nesting": DEEP_JSON,
        "a generator of another kind": with_rng('{"bit_generator": "MT19937", "state": {}}'),
        "a generator's state that is none": with_rng("[]"),
        "a generator's state of nothing": with_rng('{"bit_generator": "PCG64"}'),
        "a generator's state that is nested": with_rng("[" * 100_000),
    }
    return Target(of_file(path, read), [seed], either(mutate_json), found)


def learner_weights(directory: Path) -> Target:
    """The tensors of that state."""
    read = _learner_state(directory)
    path = directory / "00000000" / "training.safetensors"
    return Target(of_file(path, read), [path.read_bytes()], either(mutate_safetensors))


def decisions(directory: Path) -> Target:
    """The log of decisions: lines of another form are left out."""
    line = {"time": 1.5, "live": {"number": 1}, "note": "n", "verdict": None}
    other = line | {"verdict": {"action": "keep", "reason": "r"}, "status": {"steps": 1}}
    path = directory / DECISIONS_NAME

    def read() -> bool:
        return len(last_decisions(directory)) > 0

    seeds = [b"\n".join(json.dumps(each).encode() for each in (line, other)) + b"\n"]
    lines = [json.dumps(each).encode() for each in (line, other)]
    found = {"nesting": DEEP_JSON[:60_000], "not UTF-8": lines[0].replace(b'"n"', b'"\xff"')}
    return Target(of_file(path, read), [*seeds, *lines], either(mutate_json), found)


def training_checkpoint(directory: Path) -> Target:
    """What an interrupted training goes on from."""
    path = directory / "checkpoint.pt"
    state = {
        "config": b"{}",
        "drafter": {"weight": torch.ones(3)},
        "optimisers": [{"state": {0: {"step": torch.tensor(1.0)}}, "groups": [{"lr": 0.1}]}],
        "step": 3,
    }
    save_training(path, state)

    def read() -> bool:
        return load_training(path).keys() == state.keys()

    return Target(of_file(path, read), [path.read_bytes()], mutate_bytes)


FILES = {
    "manifest": manifest,
    "pointer": pointer,
    "signature": signature,
    "signed-manifest": signed_manifest,
    "drafter-weights": drafter_weights,
    "version-weights": version_weights,
    "weights-index": weights_index,
    "drafter-config": drafter_config,
    "origin": origin,
    "keys": key_file,
    "control-token": control_token,
    "learner-state": learner_state,
    "learner-weights": learner_weights,
    "decisions": decisions,
    "training-checkpoint": training_checkpoint,
}
