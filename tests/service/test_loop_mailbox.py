"""`LoopMailbox`: consumers of one event loop wake up together, and no news is lost."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import pytest
from stepgraph.runtime.service.request_handle import LoopMailbox

from ..rigs.service_rig import in_event_loop, make_handle


class Consumers:
    """Tasks that wait for news, each for its own request."""

    def __init__(self, number: int, react: Callable[[int], None] = lambda index: None) -> None:
        self.mailbox = LoopMailbox(asyncio.get_running_loop())
        self.handles = [make_handle(index, self.mailbox) for index in range(number)]
        self.seen = [0] * number
        self.react = react
        self.tasks = [asyncio.create_task(self._consume(index)) for index in range(number)]

    async def _consume(self, index: int) -> None:
        while True:
            await self.mailbox.news(self.handles[index])
            self.seen[index] += 1
            self.react(index)

    def post(self, *indices: int) -> None:
        for index in indices:
            self.mailbox.post(self.handles[index])
        self.mailbox.flush()

    async def settle(self) -> None:
        for _ in range(4):
            await asyncio.sleep(0)

    async def end(self) -> None:
        for task in self.tasks:
            task.cancel()
        await asyncio.gather(*self.tasks, return_exceptions=True)


@in_event_loop
async def test_all_consumers_run_within_one_turn_of_the_loop() -> None:
    consumers = Consumers(3)
    await consumers.settle()
    consumers.post(0, 2)
    consumers.post(2)
    seen: list[list[int]] = []
    asyncio.get_running_loop().call_soon(lambda: seen.append(list(consumers.seen)))
    await consumers.settle()
    assert seen == [[1, 0, 1]]
    consumers.post(1)
    await consumers.settle()
    assert consumers.seen == [1, 1, 1]
    await consumers.end()


@in_event_loop
async def test_a_cancelled_consumer_leaves_the_others() -> None:
    consumers = Consumers(2)
    await consumers.settle()
    consumers.tasks[0].cancel()
    consumers.post(0, 1)
    await consumers.settle()
    assert consumers.seen == [0, 1]
    assert consumers.tasks[0].cancelled()
    await consumers.end()


@pytest.mark.parametrize("error", [SystemExit, KeyboardInterrupt, ValueError])
def test_an_exception_of_a_consumer_delays_no_other(error: type[BaseException]) -> None:
    loop = asyncio.new_event_loop()

    def react(index: int) -> None:
        if index == 0:
            raise error

    async def begin() -> Consumers:
        consumers = Consumers(3, react)
        await consumers.settle()
        return consumers

    consumers = loop.run_until_complete(begin())
    consumers.post(0, 1, 2)
    if issubclass(error, Exception):
        loop.run_until_complete(consumers.settle())
    else:
        with pytest.raises(error):
            loop.run_until_complete(consumers.settle())
    loop.run_until_complete(asyncio.sleep(0))
    assert consumers.seen == [1, 1, 1]
    assert isinstance(consumers.tasks[0].exception(), error)
    loop.run_until_complete(consumers.end())
    loop.close()
    assert consumers.mailbox.closed
    consumers.post(1)  # is dropped
