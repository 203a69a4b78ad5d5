"""Any text is read without an exception, in bounded time and memory; snapshots that are more than data are refused."""

from __future__ import annotations

import contextlib
import gzip
import io
import os
import pickle
import random
import time
import tracemalloc
from pathlib import Path
from typing import Any

import pytest
from corpus import texts
from hypothesis import given, settings
from hypothesis import strategies as st

from estimator.diagnose import diagnose, file_lines, parse_evidence, parse_text
from estimator.diagnose.snapshot import SnapshotRefused, read_snapshot
from estimator.diagnose.snapshot.reader import load_plain

CORPUS = [text.text for text in texts()]


def sound(text: str | bytes) -> None:
    diagnosis = diagnose(parse_text(text))
    assert diagnosis.outcome in ("gpu_memory", "not_gpu_memory", "needs_input")
    diagnosis.as_dict()


@settings(max_examples=300)
@given(st.binary(max_size=2000))
def test_any_bytes(data: bytes) -> None:
    sound(data)


@settings(max_examples=300)
@given(st.data())
def test_texts_cut_joined_and_damaged(data: Any) -> None:
    parts = []
    for _ in range(data.draw(st.integers(1, 3))):
        text = data.draw(st.sampled_from(CORPUS))
        start = data.draw(st.integers(0, len(text)))
        stop = data.draw(st.integers(start, len(text)))
        parts.append(text[start:stop])
    joined = "".join(parts)
    for _ in range(data.draw(st.integers(0, 5))):
        at = data.draw(st.integers(0, len(joined)))
        joined = joined[:at] + data.draw(st.text(max_size=4)) + joined[at:]
    sound(joined)


@pytest.mark.parametrize(
    "line",
    [
        "CUDA out of memory. Tried to allocate " * 5000,
        "[rank0]: " * 50_000,
        "\x1b[31m" * 100_000,
        "(" * 200_000,
        '  File "' * 40_000,
        "Tried to allocate " + "9" * 300_000 + " GiB",
        "{" * 100_000 + '"num_hidden_layers"',
        "a: " * 100_000 + "_target_: x",
        " " * 500_000 + "out of memory",
        "\r" * 200_000,
    ],
    ids=lambda line: line[:12].strip() or repr(line[:1]),
)
def test_lines_made_to_be_slow(line: str) -> None:
    started = time.process_time()
    sound(line)
    assert time.process_time() - started < 5


def test_a_long_log_streams(tmp_path: Path) -> None:
    """20 MB of training log with one failure near its end; a hundred are measured by benchmarks/diagnosis.py."""
    path = tmp_path / "train.log"
    line = b"[2025-01-01 10:00:00] iteration %8d/ 100000 | lm loss: 1.234567E+00 | grad norm: 0.123 | TFLOPs: 401.2\n"
    with path.open("wb") as file:
        for i in range(180_000):
            file.write(line % i)
        file.write(CORPUS[0].encode())
    tracemalloc.start()
    with path.open("rb") as file:
        evidence = parse_evidence(file_lines(file))
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert evidence.first is not None
    assert evidence.first.iteration == 179_999
    assert peak < 64 << 20


class Evil:
    """What a pickle can do when it is loaded."""

    def __init__(self, marker: Path) -> None:
        self.marker = marker

    def __reduce__(self) -> Any:
        return os.system, (f"touch {self.marker}",)


def hostile_pickles(marker: Path) -> dict[str, bytes]:
    nested: Any = Evil(marker)
    for _ in range(50):
        nested = {"x": [nested]}
    return {
        "system": pickle.dumps(Evil(marker)),
        "protocol 0": pickle.dumps(Evil(marker), protocol=0),
        "nested": pickle.dumps(nested),
        "in a snapshot": pickle.dumps({"segments": [Evil(marker)], "device_traces": []}),
        "global": b"cos\nsystem\n.",
        "stack global": b"\x80\x04\x8c\x02os\x8c\x06system\x93\x8c\x04true\x85R.",
        "inst": b"(S'true'\nios\nsystem\n.",
        "extension": b"\x80\x02\x82\x01.",
        "persistent": b"Pabc\n.",
        "build": b"\x80\x02}}b.",
        "a huge piece": b"\x80\x04\x8e" + (1 << 62).to_bytes(8, "little") + b"x.",
        "memo": b"\x80\x02}r\xff\xff\xff\x7f.",
        "deep": b"]" * 3_000_000 + b".",
        "not a pickle": b"hello",
        "empty": b"",
        "cut": pickle.dumps({"segments": []})[:-3],
        "bomb": gzip.compress(b"\x80\x04" + b"\x00" * (300 << 20)),
        "a text": CORPUS[0].encode(),
        "no snapshot": pickle.dumps([1, 2, 3]),
    }


@pytest.mark.parametrize("name", list(hostile_pickles(Path("x"))))
def test_a_pickle_that_is_more_than_data_is_refused(name: str, tmp_path: Path) -> None:
    marker = tmp_path / "executed"
    path = tmp_path / "snapshot.pickle"
    path.write_bytes(hostile_pickles(marker)[name])
    with pytest.raises(SnapshotRefused) as refusal:
        read_snapshot(path, memory_bytes=1 << 30, timeout_seconds=60)
    assert not marker.exists()
    assert 10 < len(str(refusal.value)) < 300


@settings(max_examples=300)
@given(st.binary(max_size=300), st.integers(0, 2**32))
def test_damaged_pickles_do_nothing_but_refuse(noise: bytes, seed: int) -> None:
    data = bytearray(pickle.dumps({"segments": [{"address": 1, "blocks": [{"size": 512}]}], "device_traces": [[]]}))
    chooser = random.Random(seed)
    for byte in noise[:8]:
        data[chooser.randrange(len(data))] = byte
    with contextlib.suppress(SnapshotRefused):
        load_plain(io.BytesIO(bytes(data) + noise), limit=1 << 20)
