"""The accelerator as a sweep sees it: what arrives, what runs, what leaves, all of it in the ledger."""

from __future__ import annotations

import collections
from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeVar

import jax

from reversible_trainer.streaming.ledger import Ledger
from reversible_trainer.streaming.placement import Pending, Placement
from reversible_trainer.streaming.programs import Program
from reversible_trainer.tree import Tree, tree_bytes

Visit = TypeVar("Visit")


class Accelerator:
    """Sends, runs and fetches, never more than `prefetch` blocks ahead.

    Python enqueues faster than a device works: without back-pressure every block would be
    on its way at once, and memory would grow with depth.
    """

    def __init__(self, placement: Placement, ledger: Ledger, prefetch: int, transactional: bool = False):
        self.placement, self.ledger, self.prefetch, self.transactional = placement, ledger, prefetch, transactional
        self._tokens: collections.deque[Any] = collections.deque()  # of the programs not yet waited for
        self._ran = 0  # programs
        self._departures: collections.deque[Pending] = collections.deque()

    def place(self, tag: str, tree: Tree) -> Tree:
        """Puts arrays from anywhere onto the accelerator."""
        arrays = self.placement.to_accelerator(tree)
        self.ledger.track(tag, arrays)
        self.ledger.event(f"place {tag}")
        return arrays

    def run(self, program: Program, *arguments: Tree) -> tuple[Any, ...]:
        """Enqueues a program and returns its outputs at once."""
        leaves = jax.tree.leaves(arguments)
        *outputs, token = self.placement.execute(program, leaves)
        self.ledger.forget([leaves[i] for i in program.donated])
        parts = jax.tree.unflatten(program.out_tree, outputs)
        for tag, part in zip(program.tags, parts, strict=True):
            self.ledger.track(tag, part)
        self.ledger.track("metrics", token)
        self.ledger.dispatch(program.bytes, leaves, [*outputs, token])
        self.ledger.event(program.name)
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
        upcoming = iter(visits)
        arrivals: collections.deque[tuple[Visit, list[str], list[Pending], int]] = collections.deque()
        left_host: collections.deque[int] = collections.deque()

        def send_next() -> None:
            visit = next(upcoming, None)
            if visit is None:
                return
            trees, moved = entries(visit)
            pending = []
            for tag, tree in trees.items():
                pending.append(self.placement.send(tree, keep=moved and self.transactional))
                self.ledger.track(tag, pending[-1].tracked())
            moved = moved and not self.transactional
            arrivals.append((visit, list(trees), pending, sum(map(tree_bytes, trees.values())) if moved else 0))
            self.ledger.event("send")

        for _ in range(self.prefetch):
            send_next()
        for _ in visits:
            if not arrivals:  # prefetch = 0
                self._wait_for_programs(0)
                send_next()
            visit, tags, pending, moved_bytes = arrivals.popleft()
            arrays = []
            for tag, one in zip(tags, pending, strict=True):
                arrays.append(one.arrays())
                self.ledger.track(tag, arrays[-1])
                del one
            del pending  # with it goes the host's copy of what was moved, once it has been read
            left_host.append(moved_bytes)
            ran = self._ran
            yield visit, arrays
            # Never wait for the programs just enqueued: the device would idle until the next ones.
            self._wait_for_programs(self._ran - ran)
            while len(left_host) > 1:
                self.ledger.host(-left_host.popleft())
            if self.placement.same_memory:
                self.ledger.forget(arrays)
            del arrays
            if self.prefetch:
                send_next()
        self.ledger.host(-sum(left_host))

    def fetch(self, tree: Tree) -> Tree:
        """Starts copying a block's arrays to the host, all in one call; the result may be used at once.

        At most `prefetch` + 1 calls are under way: more calls for a block would wait for its own program.
        """
        pending = self.placement.fetch(tree)
        self.ledger.host(tree_bytes(tree))
        if self.placement.same_memory:
            self.ledger.forget(tree)
        self._departures.append(pending)
        while len(self._departures) > self.prefetch + 1:
            self._departures.popleft().wait()
        return pending.arrays()

    def finish(self) -> None:
        """Ends a sweep: nothing is waited for, and nothing is held any longer."""
        self._departures.clear()

    def abandon(self) -> None:
        """Forgets a sweep that has failed."""
        self._departures.clear()
        self._tokens.clear()
        self.ledger.block = None

    def _wait_for_programs(self, keep: int) -> None:
        while len(self._tokens) > keep:
            self.placement.wait(self._tokens.popleft())
