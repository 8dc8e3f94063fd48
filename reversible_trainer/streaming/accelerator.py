"""The accelerator as a sweep sees it: what arrives, what runs, what leaves, all of it in the ledger."""

from __future__ import annotations

import collections
import concurrent.futures
import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax

from reversible_trainer.streaming.ledger import Ledger
from reversible_trainer.streaming.placement import Pending, Placement
from reversible_trainer.streaming.programs import Program
from reversible_trainer.streaming.recorder import Lane, Recorder, Tally
from reversible_trainer.tree import Tree, tree_bytes

Visit = tuple[str, int]  # what to do, with which block
Recorded = concurrent.futures.Future[None] | None  # done when a copy's recording is; None if nobody records


class Accelerator:
    """Sends, runs and fetches, never more than `prefetch` blocks ahead.

    Python enqueues faster than a device works: without back-pressure every block would be
    on its way at once, and memory would grow with depth.
    """

    def __init__(self, placement: Placement, ledger: Ledger, prefetch: int, transactional: bool = False):
        self.placement, self.ledger, self.prefetch, self.transactional = placement, ledger, prefetch, transactional
        self._tokens: collections.deque[Any] = collections.deque()  # of the programs not yet waited for
        self._ran = 0  # programs
        self._departures: dict[str, collections.deque[tuple[Pending, Recorded]]] = collections.defaultdict(
            collections.deque
        )
        self._visit: tuple[str | None, int | None] = (None, None)  # at work
        self.recorder: Recorder | Tally | None = None

    def place(self, tag: str, tree: Tree) -> Tree:
        """Puts arrays from anywhere onto the accelerator."""
        arrays = self.placement.to_accelerator(tree)
        self.ledger.track(tag, arrays)
        self.ledger.event(f"place {tag}")
        return arrays

    def run(self, program: Program, *arguments: Tree) -> tuple[Any, ...]:
        """Enqueues a program and returns its outputs at once."""
        leaves = jax.tree.leaves(arguments)
        start = self._now()
        with _annotation(program.name, self.ledger.block):
            *outputs, token = self.placement.execute(program, leaves)
        self.ledger.forget([leaves[i] for i in program.donated])
        parts = jax.tree.unflatten(program.out_tree, outputs)
        for tag, part in zip(program.tags, parts, strict=True):
            self.ledger.track(tag, part)
        self.ledger.track("metrics", token)
        self.ledger.dispatch(program.bytes, leaves, [*outputs, token])
        self.ledger.event(program.name)
        if self.recorder:
            wait = functools.partial(jax.block_until_ready, token)
            self.recorder.add("run", program.name, self._visit, program.flops, start, wait)
        self._tokens.append(token)
        self._ran += 1
        return parts

    def stream(
        self, visits: Sequence[Visit], entries: Callable[[Visit], tuple[dict[str, Tree], bool]]
    ) -> Iterator[tuple[Visit, list[Tree]]]:
        """Yields every visit with its arrays on the accelerator, later ones already on their way.

        Args:
          visits: In order.
          entries: What a visit needs, by tag, and whether it takes that from the host
            for good (it will be fetched back, changed). A transactional accelerator leaves
            the host its arrays all the same.

        The body of the loop is expected to `run` at least one program per visit.
        """
        upcoming = collections.deque(visits)
        arrivals: collections.deque[tuple[Visit, Arrival]] = collections.deque()
        left_host: collections.deque[int] = collections.deque()
        at_work: int | None = None

        def send_ahead() -> None:
            while upcoming and len(arrivals) < max(self.prefetch, 1):
                block = upcoming[0][1]
                if block == at_work or any(block == visit[1] for visit, _ in arrivals):
                    return  # it is to be sent what that visit has yet to make
                visit = upcoming.popleft()
                trees, moved = entries(visit)
                arrivals.append((visit, self.send(trees, moved, self.transactional, visit)))

        for _ in visits:
            if not self.prefetch:
                self.catch_up(0)
            if not arrivals:
                send_ahead()
            visit, arrival = arrivals.popleft()
            arrays = arrival.arrays()
            left_host.append(arrival.moved_bytes)
            del arrival  # with it goes the host's copy of what was moved, once it has been read
            self._let_go(self.prefetch)
            at_work, self._visit = visit[1], visit
            self.ledger.block = at_work
            if self.prefetch:  # before this visit's programs, behind which it would wait
                send_ahead()
            ran = self._ran
            yield visit, arrays
            at_work = None
            # Never wait for the programs just enqueued: the device would idle until the next ones.
            self.catch_up(self._ran - ran)
            while len(left_host) > 1:
                self.ledger.host(-left_host.popleft())
            if self.placement.same_memory:
                self.ledger.forget(arrays)
            del arrays
        self.ledger.host(-sum(left_host))

    def send(self, trees: dict[str, Tree], moved: bool, keep: bool = False, visit: Visit | None = None) -> Arrival:
        """Starts copying arrays, by tag, from the host.

        Args:
          trees: The arrays.
          moved: Whether the host gives them away.
          keep: Whether it has others that must outlive what is done with these.
          visit: For which visit; by default the one at work.
        """
        at, start = visit or self._visit, self._now()
        with _annotation("send", at[1]):
            pending = self.placement.send(list(trees.values()), keep=moved and keep)
        for tag, part in zip(trees, pending.tracked(), strict=True):
            self.ledger.track(tag, part)
        nbytes = tree_bytes(trees)
        arrived = self._record_copy("send", " ".join(trees), at, nbytes, start, pending)
        self.ledger.event("send")
        return Arrival(self.ledger, list(trees), pending, nbytes if moved and not keep else 0, arrived)

    def fetch(self, tree: Tree, kind: str = "blocks") -> Tree:
        """Starts copying arrays to the host, those of a block all in one call; the result may be used at once.

        At most `prefetch` + 1 calls of a kind are under way: more calls for a block would wait for its own program.
        """
        start = self._now()
        with _annotation("fetch", self.ledger.block):
            pending = self.placement.fetch(tree)
        nbytes = tree_bytes(tree)
        recorded = self._record_copy("fetch", kind, self._visit, nbytes, start, pending, computed=tree)
        self.ledger.host(nbytes)
        if self.placement.same_memory:
            self.ledger.forget(tree)
        self._departures[kind].append((pending, recorded))
        self._let_go(self.prefetch + 1, kind)
        return pending.arrays()

    def finish(self) -> None:
        """Ends a sweep: nothing is waited for, and nothing is held any longer."""
        self._departures.clear()
        self._visit, self.ledger.block = (None, None), None

    def abandon(self) -> None:
        """Forgets a sweep that has failed."""
        self._departures.clear()
        self._tokens.clear()
        self._visit, self.ledger.block = (None, None), None

    def catch_up(self, keep: int) -> None:
        """Waits for all programs but the last `keep`."""
        while len(self._tokens) > keep:
            self.placement.wait(self._tokens.popleft())

    def _let_go(self, keep: int, kind: str = "blocks") -> None:
        """Waits for all copies of a kind to the host but the last `keep`."""
        departures = self._departures[kind]
        while len(departures) > keep:
            pending, recorded = departures.popleft()
            if recorded is not None:
                recorded.result()  # a thread holds what is copied until then
            pending.wait()

    def _now(self) -> float:
        return self.recorder.now() if self.recorder else 0.0

    def _record_copy(
        self,
        lane: Lane,
        name: str,
        visit: tuple[str | None, int | None],
        nbytes: int,
        start: float,
        pending: Pending,
        computed: Tree = None,
    ) -> Recorded:
        """Notes a copy, if steps are recorded; it begins when the tree `computed` has been."""
        if self.recorder is None or self.placement.same_memory:
            return None
        ready = functools.partial(jax.block_until_ready, computed)
        return self.recorder.add(lane, name, visit, nbytes, start, pending.block, ready)


class Arrival:
    """Arrays on their way to the accelerator.

    Attributes:
      moved_bytes: Those that the host gives away.
    """

    def __init__(
        self,
        ledger: Ledger,
        tags: list[str],
        pending: Pending,
        moved_bytes: int,
        recorded: Recorded,
    ):
        self._ledger, self._tags, self._pending, self._recorded = ledger, tags, pending, recorded
        self.moved_bytes = moved_bytes

    def arrays(self) -> list[Tree]:
        """The arrays, a tree for each tag."""
        if self._recorded is not None:
            self._recorded.result()  # a thread waits for these arrays; they may be given away only then
        arrays = self._pending.arrays()
        for tag, part in zip(self._tags, arrays, strict=True):
            self._ledger.track(tag, part)
        return arrays


def _annotation(name: str, block: int | None) -> Any:
    """Names what is enqueued in the traces of `jax.profiler`."""
    return jax.profiler.TraceAnnotation(name if block is None else f"{name} {block}")
