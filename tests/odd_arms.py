"""Loaders with a fault each, for the comparison to show."""

import os
import signal
import sys
import time
from itertools import islice
from pathlib import Path

import numpy as np

import loaders
from blocks_loaders import ARMS, MemmapBlocks
from scripts.processes import EVERY

PAUSE = 0.02  # seconds
LEFT_BEHIND = Path("/dev/shm/odd_arms_left_this")


class SlowBlocks(MemmapBlocks):
    """Takes its time for every step."""

    def steps(self):
        for step in super().steps():
            time.sleep(PAUSE)
            yield step


class TwiceBlocks(MemmapBlocks):
    """Gives block 5 twice, and block 3 never."""

    def read(self, numbers):
        return super().read(np.where(numbers == 3, 5, numbers))


class ForeignBlocks(MemmapBlocks):
    """Gives a block that is not there."""

    def read(self, numbers):
        blocks = super().read(numbers)
        blocks[numbers == 3] = 7
        return blocks


class ForgetfulBlocks(MemmapBlocks):
    """Begins again after a resume."""

    def load_state_dict(self, state):
        pass


class CrashingBlocks(MemmapBlocks):
    """Dies as by the kernel's hand, with something in shared memory."""

    def steps(self):
        LEFT_BEHIND.write_bytes(b"x")
        mapped = np.memmap(LEFT_BEHIND, np.uint8, "r")
        yield from islice(super().steps(), 5)
        time.sleep(2 * EVERY)  # until it was looked at
        assert mapped[0]
        os.kill(os.getpid(), signal.SIGKILL)


def register() -> None:
    """Make this process know them, and not find webdataset."""
    odd = {"slow": SlowBlocks, "twice": TwiceBlocks}
    odd |= {"forgetful": ForgetfulBlocks, "crashing": CrashingBlocks, "foreign": ForeignBlocks}
    ARMS.update(odd)
    loaders.LOADERS.update(odd)
    sys.modules["webdataset"] = None
