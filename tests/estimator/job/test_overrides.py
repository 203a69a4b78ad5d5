"""Reading overrides: both syntaxes, and hostile input."""

from __future__ import annotations

import contextlib
import time
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from estimator.errors import JobError
from estimator.job import build_document, read_overrides
from estimator.job.hydra_lines import read_value
from estimator.job.operations import Unreadable

# text, value; source: hydra-core 1.3's override grammar (basic override syntax)
HYDRA_VALUES: list[tuple[str, Any]] = [
    ("1", 1),
    ("-1", -1),
    ("1_000", 1000),
    ("010", "010"),
    ("1e-4", 1e-4),
    (".5", 0.5),
    ("1.", 1.0),
    ("1e", "1e"),
    ("null", None),
    ("NULL", None),
    ("True", True),
    ("false", False),
    ("yes", "yes"),
    ("", ""),
    ("abc", "abc"),
    ("a b", "a b"),
    ("/a/b-c.d", "/a/b-c.d"),
    ("expandable_segments:True", "expandable_segments:True"),
    ("'null'", "null"),
    ('"a,b"', "a,b"),
    ("'it\\'s'", "it's"),
    ("[]", []),
    ("[1,2, 3]", [1, 2, 3]),
    ("[a,[b,null],'c d']", ["a", ["b", None], "c d"]),
    ("{a:1,b:{c:[x]}}", {"a": 1, "b": {"c": ["x"]}}),
    ("int(3.0)", 3),
    ("str(1)", "1"),
    ("float(1)", 1.0),
]


@pytest.mark.parametrize(("text", "value"), HYDRA_VALUES)
def test_hydra_values(text: str, value: Any) -> None:
    read = read_value(text)
    assert read == value
    assert type(read) is type(value)


@pytest.mark.parametrize("text", ["1,2", "[1", "{a:1", "{a}", "'a", "(a)", "a${b}", "1 [2]", "[" * 100])
def test_unreadable_hydra_values(text: str) -> None:
    with pytest.raises(Unreadable):
        read_value(text)


def test_marks_and_paths() -> None:
    read = read_overrides(["a.b=1", "+a.b=2", "++a.b=3", "~a.b", "cfg.a.b = 4"])
    assert [(o.kind, o.path) for o in read] == [
        ("set", ("a", "b")),
        ("add", ("a", "b")),
        ("force", ("a", "b")),
        ("delete", ("a", "b")),
        ("set", ("a", "b")),
    ]


def test_pasted_block_of_python_is_read_line_by_line() -> None:
    text = '''
        # memory
        import torch
        from megatron.bridge.training.mixed_precision import bf16_mixed

        """what it is for"""
        cfg.ddp.megatron_fsdp_main_grads_dtype = torch.float32
        cfg.env_vars["A"] = "1"
    '''
    assert [o.path for o in read_overrides([text])] == [("ddp", "megatron_fsdp_main_grads_dtype"), ("env_vars", "A")]


def test_several_hydra_lines_in_one_text() -> None:
    read = read_overrides(["train.micro_batch_size=1 \\\n  ddp.use_megatron_fsdp=true\n"])
    assert [o.where for o in read] == ["job.overrides[0]"] * 2


HOSTILE = {
    "import": "import os",
    "import from": "from subprocess import run",
    "call": "cfg.a.b = __import__('os').system('true')",
    "open": "cfg.a.b = open('/etc/passwd').read()",
    "expression": "cfg.a.b = [x for x in range(10**9)]",
    "lambda": "cfg.a.b = (lambda: 1)()",
    "attribute chain": "cfg.a.b = ().__class__.__bases__",
    "format": "cfg.a.b = f'{cfg}'",
    "power": "cfg.a.b = 10**10**10",
    "power tower": "cfg.a.b = 9**9**9**9",
    "shift": "cfg.a.b = 1 << 10**6",
    "long number": "cfg.a.b = " + "9" * 5000,
    "hexadecimal": "cfg.a.b = 0x" + "f" * 5000,
    "text times number": "cfg.a.b = 'a' * 10**9",
    "list times number": "cfg.a.b = [0] * 10**9",
    "nested brackets": "cfg.a.b = " + "[" * 5000 + "]" * 5000,
    "nested parentheses": "cfg.a.b = " + "(" * 90 + "1" + ")" * 90,
    "signs": "cfg.a.b = " + "-" * 50_000 + "1",
    "attributes": "cfg" + ".a" * 40_000 + " = 1",
    "sum": "cfg.a.b = " + "1+" * 40_000 + "1",
    "division by zero": "cfg.a.b = 1 // 0",
    "null byte": "cfg.a.b = '\x00'",
    "null byte in hydra": "a.b=\x00",
    "huge": "a.b=" + "x" * 10_000_000,
    "huge python": "cfg.a.b = '" + "x" * 10_000_000 + "'",
    "statement": "while True: pass",
    "function": "def f(): pass",
    "other name": "x = 1",
    "whole cfg": "cfg = None",
    "item": "cfg.a.b[0] = 1",
    "star": "cfg.a.b = dict(**{})",
    "walrus": "cfg.a.b = (x := 1)",
    "surrogate": "cfg.a.b = \ud800",
    "long hydra number": "a.b=" + "9" * 5000,
    "hydra nesting": "a.b=" + "[" * 5000,
    "hydra key": ".=1",
    "no value": "train.micro_batch_size",
    "empty": "   ",
}


@pytest.mark.parametrize("text", HOSTILE.values(), ids=HOSTILE.keys())
def test_hostile_overrides_are_job_errors_quickly(text: str) -> None:
    start = time.perf_counter()
    with pytest.raises(JobError) as error:
        build_document("llama3_8b_pretrain_config", overrides=[text])
    assert time.perf_counter() - start < 2
    assert all(len(p.message) < 600 and p.path.startswith("job.overrides") for p in error.value.problems)


@pytest.mark.parametrize("overrides", ["train.micro_batch_size=1", 3, {"a": 1}, [1], [None], ["a=1"] * 5000])
def test_not_a_list_of_texts(overrides: Any) -> None:
    with pytest.raises(JobError):
        read_overrides(overrides)


@settings(max_examples=300, deadline=None)
@given(st.text(max_size=200))
def test_any_text_is_read_or_a_job_error(text: str) -> None:
    with contextlib.suppress(JobError):
        read_overrides([text])


@settings(max_examples=200, deadline=None)
@given(st.text(alphabet="cfg.model=[]{}()'\"+-*/ \n,:~x1e_\\$#", max_size=80))
def test_anything_like_an_override_is_read_or_a_job_error(text: str) -> None:
    for candidate in (text, "cfg.model." + text, "model.x=" + text):
        with contextlib.suppress(JobError):
            build_document("llama3_8b_pretrain_config", overrides=[candidate])


SCALARS = st.one_of(
    st.none(), st.booleans(), st.integers(-(2**60), 2**60), st.floats(allow_nan=False, allow_infinity=False)
)


@given(st.lists(SCALARS, max_size=5))
def test_python_literals_are_read_as_python_reads_them(values: list[Any]) -> None:
    (operation,) = read_overrides([f"cfg.a.b = {values!r}"])
    assert operation.evaluate(lambda _: None) == values
