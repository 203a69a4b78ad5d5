"""What is read in each text of the corpus, and the cause that is named first."""

from __future__ import annotations

import pytest
from corpus import FRAMINGS, LOSS, SIZES, Text, modern, modern_facts, texts
from shares import shares

from estimator.diagnose import diagnose, parse_text

CORPUS = tuple(texts())


@pytest.mark.parametrize("text", CORPUS, ids=lambda text: text.name)
def test_facts_and_first_cause(text: Text) -> None:
    evidence = parse_text(text.text)
    first = evidence.first
    assert first is not None
    assert first.kind.kind_id == text.kind
    facts = {fact.name: fact for fact in reversed(first.facts)}
    assert {name: facts[name].value for name in text.facts} == text.facts
    assert first.rank == text.rank
    if text.phase is not None:
        assert first.phase == text.phase
    if text.line is not None:
        assert first.span.line == text.line
    diagnosis = diagnose(evidence)
    assert diagnosis.causes[0].cause == text.cause
    assert diagnosis.outcome == text.outcome
    assert diagnosis.summary


@pytest.mark.parametrize("text", CORPUS, ids=lambda text: text.name)
def test_every_fact_stands_where_it_says(text: Text) -> None:
    """Line, column and verbatim text of a fact are those of the text."""
    if text.name.startswith("framed_ansi"):
        pytest.skip("colour codes are taken out of spans")
    lines = text.text.replace("\r\n", "\n").split("\n")
    for fact in parse_text(text.text).all_facts():
        head = fact.span.text.splitlines()[0]
        assert lines[fact.span.line - 1][fact.span.column :].startswith(head)


def test_the_corpus_is_large_enough() -> None:
    assert len(CORPUS) >= 60
    assert len({text.name for text in CORPUS}) == len(CORPUS)
    kinds = {text.kind for text in CORPUS}
    assert all(
        sum(text.kind == kind for text in CORPUS) >= 3 for kind in kinds - {"illegal_access", "exception", "time_limit"}
    )


def test_the_shares_of_the_documentation() -> None:
    found = shares(CORPUS)
    assert sum(share.texts for share in found.values()) == len(CORPUS)
    assert all(share.right_facts == share.facts and share.right_causes == share.texts for share in found.values())


def test_framings_may_be_combined() -> None:
    """A ranked, coloured log with Windows line ends says the same."""
    text = LOSS + f"torch.OutOfMemoryError: {modern(SIZES[0])}\n"
    for name in ("ansi", "rank", "crlf"):
        text = FRAMINGS[name][0](text)
    first = parse_text(text).first
    assert first is not None
    facts = {fact.name: fact.value for fact in reversed(first.facts)}
    assert {name: facts.get(name) for name in modern_facts(SIZES[0])} == modern_facts(SIZES[0])
    assert first.rank == 5
