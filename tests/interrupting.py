"""KeyboardInterrupt at a place of its own choosing, as a signal that comes there."""

from __future__ import annotations

from types import FrameType
from typing import Any


class CallInterrupter:
    """Raises KeyboardInterrupt once, when the n-th call into C returns, as a signal does that comes during the call.

    Used with ``sys.setprofile``.

    Args:
        call: Which call.
        rooms: Ends of the file names of those that call.

    Attributes:
        at: Where it was raised, empty if it was not.
    """

    def __init__(self, call: int, rooms: tuple[str, ...]) -> None:
        self._left = call
        self._rooms = rooms
        self.at = ""

    def __call__(self, frame: FrameType, event: str, called: Any) -> None:
        code = frame.f_code
        if event == "c_return" and not self.at and code.co_filename.endswith(self._rooms):
            self._left -= 1
            if self._left < 0:
                self.at = f"{code.co_qualname}: {called.__qualname__}"
                raise KeyboardInterrupt
