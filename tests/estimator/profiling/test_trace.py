"""The allocator's history in its small form."""

from estimator.profiling.trace import compact


def entry(action, address, size, stream, time_us, line):
    frames = [{"filename": "/usr/lib/site-packages/torch/nn/x.py", "line": line, "name": "forward"}]
    return {"action": action, "addr": address, "size": size, "stream": stream, "time_us": time_us, "frames": frames}


def test_frames_and_streams_are_tables_and_phases_count_events():
    entries = [
        entry("alloc", 1, 512, 0, 10, 7),
        entry("alloc", 2, 1000, 99, 20, 7),
        entry("free_completed", 1, 512, 0, 30, 8),
        {"action": "snapshot", "stream": 0},
    ]
    document = compact(entries, [("model_build", 20), ("wrap", 30)])
    assert document["events"] == [["alloc", 1, 512, 0, 0], ["alloc", 2, 1000, 1, 0], ["free_completed", 1, 512, 0, 1]]
    assert document["frames"] == ["torch/nn/x.py:7:forward", "torch/nn/x.py:8:forward"]
    assert document["streams"] == [0, 99]
    assert document["phases"] == [["model_build", 2], ["wrap", 3]]
