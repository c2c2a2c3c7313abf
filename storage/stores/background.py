"""An event loop in a thread of its own, for clients that are asynchronous: calls into it end at their deadline whatever
the server does. Must not know what is called."""

import asyncio
import os
import threading
from collections.abc import Awaitable, Callable
from typing import TypeVar

T = TypeVar("T")

_GRACE_SECONDS = 10.0  # for a cancelled call to let go of its connection, and to abort what it began at the server


class BackgroundLoop:
    """Belongs to the process that made it: after a fork the child has no such thread, and must make its own."""

    def __init__(self, name: str) -> None:
        self.loop = asyncio.new_event_loop()
        self._pid = os.getpid()
        self._thread = threading.Thread(target=self._work, name=name, daemon=True)
        self._thread.start()

    @property
    def usable(self) -> bool:
        """False in a child process, and once it was stopped."""
        return self._pid == os.getpid() and self._thread.is_alive()

    def run(self, action: Callable[[], Awaitable[T]], *, seconds: float) -> T:
        """Runs a call and returns its result. Raises TimeoutError after `seconds`; the call is then cancelled."""

        async def bounded() -> T:
            return await asyncio.wait_for(action(), seconds)

        future = asyncio.run_coroutine_threadsafe(bounded(), self.loop)
        try:
            return future.result(seconds + _GRACE_SECONDS)
        except BaseException:
            future.cancel()
            raise

    def stop(self, last: Callable[[], Awaitable[object]] | None = None) -> None:
        """Runs one last call, briefly, and ends the thread. In a child process it does nothing."""
        if not self.usable:
            return

        async def farewell() -> None:
            try:
                if last is not None:
                    await asyncio.wait_for(last(), 1.0)
            finally:
                self.loop.call_soon(self.loop.stop)

        asyncio.run_coroutine_threadsafe(farewell(), self.loop)
        if threading.current_thread() is not self._thread:  # a garbage collection may run anywhere
            self._thread.join(2.0)

    def _work(self) -> None:
        asyncio.set_event_loop(self.loop)
        self.loop.run_forever()
        self.loop.close()
