"""Reads a text as it streams by and keeps what matters: failures, warnings, memory readings, pieces of the job.

Never raises on any input; time is linear in the text, memory bounded. The failure that counts is the first in time on
the rank that failed first: see :func:`first_failure`.
"""

from __future__ import annotations

import re
from collections import Counter, OrderedDict, deque
from collections.abc import Iterable, Iterator
from typing import BinaryIO

from estimator.diagnose import fragments, memory_lines
from estimator.diagnose.blocks import DECISIVE_PER_BLOCK, Block, Finder, blocks, pieces
from estimator.diagnose.clauses import facts_in
from estimator.diagnose.evidence import Evidence, Fact, Failure, Fragment, Reading, Span
from estimator.diagnose.facts_outside import FACT_NEEDLES, outside_facts
from estimator.diagnose.kinds import EXCEPTION, EXCEPTION_NEEDLES, KINDS, NEEDLES, Kind
from estimator.diagnose.lines import Line, prefix_of, rank_prefix, read_line, segments, time_of
from estimator.diagnose.messages import COMPLETE, MAX_CONTINUATION, Message
from estimator.diagnose.order import first_failure
from estimator.diagnose.phases import FRAME, PHASE_LINES, phase_of, sites_of

MAX_FAILURES = 400
MAX_READINGS = 512
MAX_RANKS = 65_536
MAX_FRAMES = 80
MAX_FRAME_OWNERS = 128
READ_BYTES = 1 << 20

_ITERATION = re.compile(r"iteration\s{1,12}(\d{1,9})\s{0,4}/|\bstep: {1,6}(\d{1,9})\b|\(after (\d{1,9}) iterations\)")
_MULTIPLE = frozenset({"torch_oom"})
_CONTINUED = frozenset({"torch_oom", "torch_oom_bare", "cuda_malloc_async", "absurd_request"})
_WEAK_NEEDLES = (b"Error", b"Exception")
_INFORMATIVE = tuple(
    dict.fromkeys(
        text.encode()
        for text in (
            *fragments.NEEDLES,
            *memory_lines.NEEDLES,
            *FACT_NEEDLES,
            *(part for _, parts in PHASE_LINES for part in parts),
            'File "',
            "Traceback",
            "iteration ",
            "step: ",
        )
    )
)
_KIND_NEEDLES = tuple((needle, number) for number, kind in enumerate(KINDS) for needle in kind.needles)
_PHASE_NEEDLES = tuple((part, phase) for phase, parts in PHASE_LINES for part in parts)
SATURATED_PER_BLOCK = 60
"""Decisive lines of a block that are still read once :data:`MAX_FAILURES` are kept."""
_FINDER = Finder(NEEDLES, (*_INFORMATIVE, *_WEAK_NEEDLES))


def parse_evidence(lines: Iterable[bytes | str]) -> Evidence:
    """What a text says. ``lines``: with or without newlines; an open binary file will do (:func:`file_lines` bounds
    the length of its lines)."""
    reader = _Reader()
    for block in blocks(lines):
        reader.block(block)
    return reader.finish()


def parse_text(text: str | bytes) -> Evidence:
    """:func:`parse_evidence` of a text that is in memory."""
    return parse_evidence([text])


def file_lines(file: BinaryIO) -> Iterator[bytes]:
    """Lines of a file, read in pieces that end at a newline where there is one; nothing longer than two MiB."""
    rest = b""
    while chunk := file.read(READ_BYTES):
        chunk = rest + chunk
        cut = chunk.rfind(b"\n") + 1
        if cut == 0 and len(chunk) < 2 * READ_BYTES:
            rest = chunk
            continue
        cut = cut or len(chunk)
        rest = chunk[cut:]
        yield chunk[:cut]
    if rest:
        yield rest


class _Reader:
    def __init__(self) -> None:
        self.failures: list[Failure] = []
        self.noise: list[Failure] = []
        self.warnings: list[Failure] = []
        self.facts: dict[str, Fact] = {}
        self.readings: dict[tuple[str, int | None, str], Reading] = {}
        self.fragments: list[Fragment] = []
        self.counts: Counter[str] = Counter()
        self.ranks: set[int] = set()
        self.frames: OrderedDict[int | None, deque[str]] = OrderedDict()
        self.iteration: int | None = None
        self.phase: str | None = None
        self.message: Message | None = None
        self.collector: fragments.Collector | None = None
        self.root_cause_lines = 0
        self.num_lines = 0
        self.num_bytes = 0
        self.truncated = False

    # ------------------------------------------------------------------ lines

    def block(self, block: Block) -> None:
        data = block.data
        if self.num_lines == 0 and (kind := fragments.whole_document(data[:4000].decode("utf-8", "replace"))):
            self.collector = fragments.document_collector(kind)
        most = SATURATED_PER_BLOCK if len(self.failures) >= MAX_FAILURES else DECISIVE_PER_BLOCK
        ends, chosen, cut = _FINDER.lines(data, most)
        self.truncated |= cut
        self.num_bytes += len(data)
        index, position = 0, 0
        candidates = chosen.tolist()
        while index < len(ends):
            while position < len(candidates) and candidates[position] < index:
                position += 1
            following = self.message is not None or self.collector is not None or self.root_cause_lines > 0
            candidate = position < len(candidates) and candidates[position] == index
            if not candidate and not following:
                if position >= len(candidates):
                    break
                index = candidates[position]
                continue
            start = int(ends[index - 1]) + 1 if index else 0
            self._line(data, start, int(ends[index]), block.first_line + index, candidate)
            index += 1
        self.num_lines = block.first_line - 1 + len(ends)

    def _line(self, data: bytes, start: int, stop: int, number: int, candidate: bool) -> None:
        if stop == start or (stop - start == 1 and data[start:stop] == b"\r"):
            self._blank(number)
            return
        for column, piece in pieces(data, start, stop):
            line = read_line(number, column, piece)
            rank, prefix = prefix_of(line.text)
            self._collect(line, line.text[rank_prefix(line.text) :], data, start)
            if self.root_cause_lines > 0:
                self.root_cause_lines -= 1
                candidate = True
            if candidate:
                self._candidate(line, rank)
            elif self.message is not None:
                self._continue(line, prefix, rank)

    def _blank(self, number: int) -> None:
        if self.collector is not None and not self.collector.feed(""):
            self._close_collector()
        if self.message is not None and self.message.blank():
            self._close_message()

    # ------------------------------------------------------------------ pieces of a job

    def _collect(self, line: Line, text: str, data: bytes, start: int) -> None:
        if self.collector is not None:
            took = self.collector.feed(text)
            if took:
                return
            last = bool(self.collector.parts) and self.collector.parts[-1] is text
            self._close_collector()
            if last:
                return
        if len(self.fragments) >= fragments.MAX_FRAGMENTS:
            return
        if '"architectures"' in text or '"num_hidden_layers"' in text or '"zero_optimization"' in text:
            self._start_json(line, data, start)
            return
        started = fragments.start_of(text, line.number)
        if started is None:
            return
        if started.kind == "bridge_yaml" and not text.startswith("_target_") and start >= 2:
            before = data[data.rfind(b"\n", max(0, start - 400), start - 1) + 1 : start - 1].decode("utf-8", "replace")
            head = before[rank_prefix(before) :].rstrip()
            if head.endswith(":"):
                started.feed(head)
        self.collector = started
        if not started.feed(text):
            self._close_collector()

    def _start_json(self, line: Line, data: bytes, start: int) -> None:
        """JSON in a log begins at a brace some lines before the key that was recognised."""
        begin = data.rfind(b"{", max(0, start - 8000), start)
        if begin < 0:
            inside = line.raw.find("{")
            if inside < 0:
                return
            begin = start + inside
        head = data[begin:start].decode("utf-8", "replace") if begin < start else ""
        collector = fragments.Collector("json", line.number, lambda _: True, lambda _: False)
        for part in head.splitlines():
            collector.feed(part[rank_prefix(part) :] if collector.parts else part)
        text = line.text if head else line.text[line.text.find("{") :]
        self.collector = collector
        if not collector.feed(text):
            self._close_collector()

    def _close_collector(self) -> None:
        if self.collector is None:
            return
        piece = self.collector.fragment()
        self.collector = None
        if len(self.fragments) < fragments.MAX_FRAGMENTS and piece.text.strip():
            self.fragments.append(piece)

    # ------------------------------------------------------------------ what a line says

    def _candidate(self, line: Line, rank: int | None) -> None:
        text = line.text
        if rank is not None and len(self.ranks) < MAX_RANKS:
            self.ranks.add(rank)
        self._context(line, rank)
        found = False
        for start, stop, owner in segments(text):
            if owner is not None and len(self.ranks) < MAX_RANKS:
                self.ranks.add(owner)
            found |= self._segment(line, start, stop, owner)
        if not found and self.message is not None:
            self._continue(line, prefix_of(text)[1], rank)

    def _context(self, line: Line, rank: int | None) -> None:
        text = line.text
        if "Traceback (most recent call last)" in text:
            self.frames.pop(rank, None)
        if "File " in text:
            self._frames(text, rank)
        match = _ITERATION.search(text) if "iteration" in text or "step:" in text else None
        if match:
            self.iteration = int(next(group for group in match.groups() if group))
            self.phase = "training"
        for phase in [phase for part, phase in _PHASE_NEEDLES if part in text]:
            self.phase = phase
        reading = memory_lines.read_memory_line(text, rank, self.iteration, lambda a, b: _span(line, a, b))
        if reading is not None:
            self._keep_reading(reading)
        if "Root Cause" in text:
            self.root_cause_lines = 12
        for fact, keep_last in outside_facts(text, self.root_cause_lines > 0, lambda a, b: _span(line, a, b)):
            if keep_last or fact.name not in self.facts:
                self.facts[fact.name] = fact

    def _frames(self, text: str, rank: int | None) -> None:
        for count, match in enumerate(FRAME.finditer(text)):
            if count == MAX_FRAMES:
                return
            owner = self.frames.get(rank)
            if owner is None:
                if len(self.frames) >= MAX_FRAME_OWNERS:
                    self.frames.popitem(last=False)
                owner = self.frames[rank] = deque(maxlen=MAX_FRAMES)
            path = "/".join(match[1].replace("\\", "/").split("/")[-5:])
            owner.append(f"{path} {match[3] or ''}".rstrip())

    def _keep_reading(self, reading: Reading) -> None:
        key = (reading.source, reading.rank)
        if len(self.readings) >= MAX_READINGS and (*key, "last") not in self.readings:
            self.truncated = True
            return
        self.readings.setdefault((*key, "first"), reading)
        self.readings[(*key, "last")] = reading
        highest = self.readings.get((*key, "highest"))
        if highest is None or _height(reading) > _height(highest):
            self.readings[(*key, "highest")] = reading

    # ------------------------------------------------------------------ failures

    def _segment(self, line: Line, start: int, stop: int, rank: int | None) -> bool:
        text = line.text[start:stop]
        for number in sorted({number for needle, number in _KIND_NEEDLES if needle in text}):
            kind = KINDS[number]
            match = kind.pattern.search(text)
            if match is None:
                continue
            self._close_message()
            if kind.kind_id in _MULTIPLE:
                begins = [m.start() for _, m in zip(range(64), kind.pattern.finditer(text), strict=False)]
            else:
                begins = [0 if kind.place == "host" else match.start()]
            for i, begin in enumerate(begins):
                end = begins[i + 1] if i + 1 < len(begins) else len(text)
                self._open(kind, line, start + begin, start + end, rank)
            return True
        if any(needle in text for needle in EXCEPTION_NEEDLES):
            _, prefix = prefix_of(text)
            if EXCEPTION.pattern.match(text, prefix) or EXCEPTION.pattern.match(text[prefix:]):
                self._close_message()
                self._open(EXCEPTION, line, start + prefix, stop, rank)
                return True
        return False

    def _open(self, kind: Kind, line: Line, start: int, stop: int, rank: int | None) -> None:
        self._close_message()
        self.counts[kind.kind_id] += 1
        if len(self._list(kind)) >= MAX_FAILURES:
            self.truncated = True
            return
        owner = rank if rank in self.frames else None
        frames = tuple(self.frames.pop(owner)) if owner in self.frames else ()
        self.message = Message(kind, rank, frames, self.iteration, self.phase, time_of(line.text))
        self.message.add(line, start, stop)
        whole = stop >= len(line.text.rstrip())
        if kind.kind_id not in _CONTINUED or not whole or COMPLETE.search(self.message.text):
            self._close_message()

    def _continue(self, line: Line, prefix: int, rank: int | None) -> None:
        message = self.message
        if message is None:
            return
        text = line.text
        foreign = rank is not None and message.rank is not None and rank != message.rank
        if foreign or message.num_lines > MAX_CONTINUATION or "Traceback" in text or 'File "' in text:
            self._close_message()
            return
        message.add(line, prefix, len(text))
        if COMPLETE.search(message.text):
            self._close_message()

    def _close_message(self) -> None:
        message, self.message = self.message, None
        if message is None:
            return
        facts = tuple(facts_in(message.kind.kind_id, message.text, message.span))
        own_phase = phase_of(message.frames)
        failure = Failure(
            kind=message.kind,
            rank=message.rank,
            span=message.span(0, len(message.text.rstrip())),
            facts=facts,
            phase=own_phase or (message.phase if message.phase != "training" else None),
            sites=sites_of(message.frames),
            frames=message.frames[-12:],
            iteration=message.iteration,
            time=message.time,
        )
        self._list(message.kind).append(failure)

    def _list(self, kind: Kind) -> list[Failure]:
        if kind.place == "noise":
            return self.noise
        return self.warnings if kind.place == "warning" else self.failures

    def finish(self) -> Evidence:
        self._close_message()
        self._close_collector()
        root = self.facts.get("root_cause_rank")
        kept = {id(r): r for r in self.readings.values()}
        first = first_failure(self.failures, self.noise, root.value if root else None)
        return Evidence(
            failures=tuple(self.failures),
            first=first,
            noise=tuple(self.noise[:32]),
            warnings=tuple(self.warnings[:32]),
            readings=tuple(kept.values()),
            facts=tuple(self.facts.values()),
            fragments=tuple(self.fragments),
            counts=dict(self.counts),
            ranks=tuple(sorted(self.ranks)),
            iteration=self.iteration,
            num_lines=self.num_lines,
            num_bytes=self.num_bytes,
            truncated=self.truncated,
        )


def _span(line: Line, start: int, stop: int) -> Span:
    column, text = line.span(start, stop)
    return Span(line.number, column, text)


def _height(reading: Reading) -> int:
    values = (
        reading.value("max_reserved_bytes"),
        reading.value("max_allocated_bytes"),
        reading.value("allocated_bytes"),
    )
    return max((v for v in values if v is not None), default=0)
