"""How engines and writers leave a run in order: they get no more work, end what they have, and are dismissed."""

from __future__ import annotations

from collections.abc import Awaitable, Callable

from actors.crew import Crew
from actors.failures import Failure, Fault
from actors.ledger import Ledger


class Departures:
    """Takes members out of a run without a loss; a loss while it waits is the crew's to tell.

    Args:
        ledger: knows what they have.
        crew: who they are.
        news: waits until something has changed.
        wake: called when there may be something new to dispatch.
    """

    def __init__(
        self, ledger: Ledger, crew: Crew, news: Callable[[], Awaitable[None]], wake: Callable[[], None]
    ) -> None:
        self._ledger = ledger
        self._crew = crew
        self._news = news
        self._wake = wake

    async def engine(self, name: str) -> None:
        """Returns when the engine has nothing in flight and is no longer known."""
        member = self._crew.engines.get(name)
        if member is None:
            return
        self._ledger.drain_engine(name)
        while not member.lost and self._ledger.engines[name].batches:
            await self._news()
        if not member.lost:
            self._crew.dismiss_engine(name)
            self._wake()

    async def writer(self, name: str) -> None:
        """Returns when all that the writer had is committed and it is no longer known."""
        member = self._crew.writers.get(name)
        if member is None:
            return
        self._ledger.drain_writer(name)
        while not member.lost:
            if self._ledger.expects(name):
                await self._news()
            elif await self._crew.ask_writer(member, member.handle.seal.remote):
                break
        if member.lost:
            return
        if self._ledger.unsealed(name):
            reason = "it was to leave, and didn't commit all that it had"
            await self._crew.writer_lost(member, Failure(Fault.MEMBER, reason))
            return
        self._crew.dismiss_writer(name)
        self._wake()

    async def evict(self, name: str, reason: str) -> None:
        """Gives a member up whose node goes away; nobody is blamed, what it had is done again elsewhere."""
        failure = Failure(Fault.MEMBER, reason, preempted=True)
        if name in self._crew.engines:
            self._crew.engine_lost(self._crew.engines[name], failure)
        elif name in self._crew.writers:
            await self._crew.writer_lost(self._crew.writers[name], failure)
