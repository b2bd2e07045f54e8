"""When to stop before the last step: a signal, a time limit, a save that failed.

Each rank casts its vote in the step's all-reduce, so that all of them stop after the same step.
"""

import argparse
import os
import signal
import time
from collections.abc import Callable

import torch

from flags import magnitude

SAME_SIGNAL = 2.0  # seconds: a launcher and a scheduler may both send the one they mean
SIGNALS = (signal.SIGTERM, signal.SIGINT)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("stopping")
    group.add_argument(
        "--time-limit",
        type=magnitude,
        default=0.0,
        help="save and stop after so many minutes since the launch (0: no limit)",
    )


class Stopping:
    """This rank's wish to stop, and what all ranks have agreed on.

    Until ``close``, the first SIGTERM or SIGINT is a wish; a second one ends the process at once.
    ``failed`` is asked whether something went wrong in the background.
    """

    def __init__(
        self, minutes: float, began: float, device: torch.device, failed: Callable[[], object]
    ) -> None:
        self.deadline = began + 60 * minutes if minutes else float("inf")
        self.failed, self.device = failed, device
        self.signal: signal.Signals | None = None
        self.came = 0.0
        self.before = {number: signal.signal(number, self._handle) for number in SIGNALS}
        # the last step's votes, on their way to the host: nobody waits for the step under way
        self.votes = torch.zeros((), dtype=torch.float64, pin_memory=device.type == "cuda")
        self.copied: torch.cuda.Event | None = None

    def wanted(self) -> bool:
        return self.signal is not None or time.monotonic() > self.deadline or bool(self.failed())

    def agreed(self, votes: torch.Tensor) -> bool:
        """Whether any rank wished to stop, from the votes of a step on the device: equal on all
        ranks. On a GPU the answer is that of the step before."""
        if self.device.type != "cuda":
            return votes.item() > 0
        seen = self.copied is not None
        if seen:
            self.copied.synchronize()
            seen = self.votes.item() > 0
        self.votes.copy_(votes, non_blocking=True)
        self.copied = torch.cuda.Event()
        self.copied.record()
        return seen

    def reason(self) -> str:
        """Why this rank wished to stop; empty where it did not."""
        if self.signal is not None:
            return self.signal.name
        if time.monotonic() > self.deadline:
            return "--time-limit"
        return "an error" if self.failed() else ""

    def close(self) -> None:
        for number, handler in self.before.items():
            signal.signal(number, handler)

    def _handle(self, number: int, _frame: object) -> None:
        now = time.monotonic()
        if self.signal is None:
            self.signal, self.came = signal.Signals(number), now
        elif now - self.came > SAME_SIGNAL:
            signal.signal(number, signal.SIG_DFL)
            os.kill(os.getpid(), number)
