"""Results on disk: what was acknowledged stays, what was cut off is not half there."""

import json

import pytest

from estimator.profiling.store import ResultFile, read_records


def test_later_lines_win(tmp_path):
    path = tmp_path / "results.jsonl"
    with ResultFile(path) as results:
        results.append({"run_id": "a", "outcome": "error"})
        results.append({"run_id": "a", "outcome": "ok"})
    with ResultFile(path) as results:
        assert results.records["a"]["outcome"] == "ok"
    assert len(path.read_text().splitlines()) == 2


def test_a_line_cut_in_half_is_removed(tmp_path):
    path = tmp_path / "results.jsonl"
    path.write_text(json.dumps({"run_id": "a"}) + "\n" + '{"run_id": "b", "outc')
    with ResultFile(path) as results:
        assert set(results.records) == {"a"}
        results.append({"run_id": "b"})
    assert [json.loads(line)["run_id"] for line in path.read_text().splitlines()] == ["a", "b"]


def test_a_broken_line_in_the_middle_is_named():
    with pytest.raises(ValueError, match="line 2: not JSON"):
        read_records('{"run_id": "a"}\n{"run_id"\n{"run_id": "c"}\n', "file")
    with pytest.raises(ValueError, match="line 1: a record"):
        read_records("[]\n", "file")


def test_two_sweeps_do_not_share_a_file(tmp_path):
    with ResultFile(tmp_path / "r.jsonl"), pytest.raises(RuntimeError, match="another sweep"):
        ResultFile(tmp_path / "r.jsonl")
