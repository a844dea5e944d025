"""All configurations of one model: made ready side by side, then timed one by one, in turns.

In: ways and `Settings`. Out: `Results`, handed to `keep` after every change, so that a run that is killed leaves what
it had. Peers get ready many at a time; ours, which measure kernels while they plan, by default one at a time with
nothing else running, or beside the peers where more than one at a time are asked for. What runs out of memory beside
others is tried again alone.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field, replace

from benchmarks.frontier.rows import Results, Row, Status
from benchmarks.frontier.ways import Treatment, Way
from benchmarks.frontier.workers import Answer, Surroundings, Worker

TIMING_S = 4.0
"""What a round of one configuration is expected to take; kept free at the end of the time."""
STEPS_OF_A_LOOK = 2
"""That are followed for a peak, after those that warm up."""


@dataclass(frozen=True, slots=True)
class Settings:
    device: str
    batch: int
    jobs: int
    our_jobs: int
    parked: int
    """Processes that wait at the same time."""
    steps: int
    rounds: int
    deadline: float
    """On the monotonic clock."""
    prepare_limit_s: float
    surroundings: Surroundings
    to_time: int = 0
    """Configurations, of all models, that are timed once everything is ready; kept in mind from the start."""
    with_digest: bool = False
    """Whether the bits of gradients are compared."""


@dataclass(slots=True)
class Campaign:
    results: Results
    settings: Settings
    keep: Callable[[Results], None]
    tell: Callable[[str], None]
    waiting: dict[str, Worker] = field(default_factory=dict)
    order: list[str] = field(default_factory=list)
    """Names, as the rows are to be listed."""
    lock: threading.Lock = field(default_factory=threading.Lock)

    def __post_init__(self) -> None:
        self.order = [row.name for row in self.results.rows]

    def run(self, ways: Sequence[Way]) -> Results:
        """Wave by wave, as many as may wait at the same time."""
        size = self.settings.parked
        for start in range(0, len(ways), size):
            with ExitStack() as stack:
                stack.callback(self.end)
                self.prepare(ways[start : start + size])
                self.time()
        return self.results

    def prepare(self, ways: Sequence[Way]) -> None:
        """Make them ready; they wait until they are timed or ended."""
        self.order += [way.name for way in ways]
        mine, others = [way for way in ways if way.is_ours], [way for way in ways if not way.is_ours]
        if self.settings.our_jobs > 1:
            # They may be disturbed anyway, and take the longest.
            jobs = (self.settings.our_jobs if mine else 0) + (self.settings.jobs if others else 0)
            turns = [([*mine, *others], max(jobs, 1))]
        else:
            turns = [(others, self.settings.jobs), (mine, 1)]
        for some, jobs in turns:
            self._prepare_all(self._prepare_all(some, jobs), 1)

    def looked_at(self) -> list[Row]:
        """Those that wait, after a few steps beside whatever else runs: peaks hold, times are rough and not kept."""
        found = []
        for name, worker in list(self.waiting.items()):
            limit = self.settings.deadline - time.monotonic()
            answer = worker.time(STEPS_OF_A_LOOK, limit) if limit > 0 else None
            if answer is not None and answer.fields is not None:
                found.append(_with_round(self._row(name), answer))
        return found

    def time(self) -> None:
        """Those that wait, with the device to themselves."""
        for number in range(self.settings.rounds):
            self._time_all(number)

    def _prepare_all(self, ways: Sequence[Way], jobs: int) -> list[Way]:
        """Those that ran out of memory while others had some of it."""
        crowded: list[Way] = []
        with ThreadPoolExecutor(max_workers=jobs) as pool:
            try:
                for way, answer in pool.map(self._prepare, _untreated_first(ways)):
                    if answer.status is Status.OUT_OF_MEMORY and jobs > 1:
                        crowded.append(way)
            except BaseException:
                # The pool waits for its threads, and they for their workers.
                pool.shutdown(wait=False, cancel_futures=True)
                self.end()
                raise
        return crowded

    def _prepare(self, way: Way) -> tuple[Way, Answer]:
        settings = self.settings
        if self._is_spared(way):
            answer = Answer(None, Status.NOT_REACHED, "it is one graph without treatment")
        elif (limit := min(settings.prepare_limit_s, self._time_to_prepare())) <= 0:
            answer = Answer(None, Status.NOT_REACHED, "the time was over")
        else:
            self.tell(f"{way.name}: getting ready")
            answer = self._start(way).ready(limit)
        self._note_prepared(way, answer)
        return way, answer

    def _start(self, way: Way) -> Worker:
        settings = self.settings
        request = {"model": self.results.model, "way": asdict(way), "device": settings.device, "batch": settings.batch}
        request["with_digest"] = settings.with_digest
        worker = Worker(request, f"{self.results.model}-{way.name}", settings.surroundings)
        self.waiting[way.name] = worker
        return worker

    def _note_prepared(self, way: Way, answer: Answer) -> None:
        row = Row(way.name, way.label, way.is_ours, answer.status, answer.reason, budget_bytes=way.budget_bytes)
        if answer.fields is None:
            self._end(way.name)
        else:
            facts = dict(answer.fields)
            row = replace(row, status=Status.NOT_REACHED, reason="not timed", prepare_s=facts.pop("seconds"), **facts)
        self.tell(f"{way.name}: {row.reason if answer.fields is None else f'ready in {row.prepare_s:.0f} s'}")
        self._put(row)

    def _is_spared(self, way: Way) -> bool:
        """Whether the same way without treatment is known to be one graph already."""
        if way.treatment is not Treatment.ONE_GRAPH:
            return False
        return any(row.name == way.untreated_name and row.graphs == 1 for row in self.results.rows)

    def _time_to_prepare(self) -> float:
        remaining = self.settings.deadline - time.monotonic()
        count = max(self.settings.to_time, len(self.waiting) + 1)
        return remaining - min(TIMING_S * self.settings.rounds * count, 0.35 * remaining)

    def _time_all(self, number: int) -> None:
        for name, worker in list(self.waiting.items()):
            limit = self.settings.deadline - time.monotonic()
            answer = worker.time(self.settings.steps, limit) if limit > 0 else None
            if answer is None:
                return
            self._put(_with_round(self._row(name), answer))
            self.tell(f"{name}: round {number + 1}, {_summary(answer)}")
            if answer.fields is None:
                self._end(name)

    def _row(self, name: str) -> Row:
        return next(row for row in self.results.rows if row.name == name)

    def _put(self, row: Row) -> None:
        """In place of the row of the same name, if there is one."""
        with self.lock:
            rows = {item.name: item for item in self.results.rows} | {row.name: row}
            listed = sorted(rows.values(), key=lambda item: self.order.index(item.name))
            self.results = replace(self.results, rows=tuple(listed))
            self.keep(self.results)

    def _end(self, name: str) -> None:
        worker = self.waiting.pop(name, None)
        if worker is not None:
            worker.end()

    def end(self) -> None:
        for name in list(self.waiting):
            self._end(name)


def _with_round(row: Row, answer: Answer) -> Row:
    if answer.fields is None:
        # Steps of earlier rounds were as good as any.
        return row if row.ran else replace(row, status=answer.status, reason=answer.reason)
    facts = answer.fields
    return replace(
        row,
        status=Status.RAN,
        reason="",
        # Before the first round's steps, when the device was shared until then.
        predicted_ms=row.predicted_ms if row.rounds_ms else facts["predicted_ms"],
        rounds_ms=(*row.rounds_ms, tuple(facts["step_ms"])),
        peak_bytes=max(row.peak_bytes or 0, facts["peak_bytes"]),
        reserved_bytes=facts["reserved_bytes"],
    )


def _untreated_first(ways: Iterable[Way]) -> list[Way]:
    """So that a treatment which changes nothing is seen in time."""
    return sorted(ways, key=lambda way: way.treatment is not Treatment.PLAIN)


def _summary(answer: Answer) -> str:
    if answer.fields is None:
        return answer.reason
    return f"{sorted(answer.fields['step_ms'])[len(answer.fields['step_ms']) // 2]:.1f} ms"
