"""Batches to the device: targets, and two pinned buffers under a device that takes its time."""

import contextlib
import threading
import time

import torch

from feed import Feed, targets_of
from loss import IGNORE


class SlowDevice:
    """Copies as a GPU does: queued, done later, from whatever is in the buffer by then."""

    def __init__(self, seconds: float) -> None:
        self.seconds, self.queue, self.log = seconds, [], []

    def ahead(self):
        return contextlib.nullcontext()

    def pinned_like(self, tensor):
        return torch.empty_like(tensor)

    def to_device(self, pinned):
        self.queue.append((pinned, torch.empty_like(pinned)))
        return self.queue[-1][1]

    def started(self):
        event, work, self.queue = Event(self.log), self.queue, []
        self.log.append(f"queued {event.number}")

        def copy():
            time.sleep(self.seconds)
            for pinned, there in work:
                there.copy_(pinned)
            self.log.append(f"copied {event.number}")
            event.done.set()

        threading.Thread(target=copy).start()
        return event

    def hand_over(self, inputs, event):
        """A stream would wait by itself; the test waits where it looks."""


class Event:
    count = 0

    def __init__(self, log):
        self.done, self.log, self.number = threading.Event(), log, Event.count
        Event.count += 1

    def synchronize(self):
        self.done.wait()
        self.log.append(f"waited {self.number}")


def batch(value: int) -> dict[str, torch.Tensor]:
    ids = torch.full((2, 4), value)
    return {"input_ids": ids, "mask": torch.ones_like(ids, dtype=torch.bool)}


def test_a_buffer_is_not_filled_again_before_its_copy_is_done():
    device, Event.count = SlowDevice(0.05), 0
    feed = Feed(torch.device("cpu"), doc_mask=False, copies=device)
    inputs = [feed(batch(value)) for value in range(6)]
    for event in feed.events:
        event.done.wait()
    assert [i.input_ids.unique().item() for i in inputs] == list(range(6))
    log = device.log
    for n in range(4):  # the third batch waits for the first, the fourth for the second ...
        assert log.index(f"copied {n}") < log.index(f"waited {n}") < log.index(f"queued {n + 2}")
    assert "waited 4" not in log and "waited 5" not in log


def test_the_next_batch_is_prepared_while_the_last_one_is_copied():
    device, Event.count = SlowDevice(0.2), 0
    feed = Feed(torch.device("cpu"), doc_mask=False, copies=device)
    feed(batch(0))
    feed(batch(1))
    assert device.log == ["queued 0", "queued 1"]  # both under way, nobody waited
    for event in feed.events:
        event.done.wait()


def test_targets_end_with_the_document_under_the_mask():
    ids, doc_ids = torch.arange(12).view(2, 6), torch.tensor([[0, 0, 1, 2, 2, 2], [0] * 6])
    mask = torch.ones(2, 6, dtype=torch.bool)
    mask[1, 4:] = False
    given = {"input_ids": ids, "mask": mask, "doc_ids": doc_ids}
    i = IGNORE
    assert targets_of(given).tolist() == [[1, 2, 3, 4, 5, i], [7, 8, 9, i, i, i]]
    masked = [[1, i, i, 4, 5, i], [7, 8, 9, i, i, i]]
    assert targets_of(given, doc_mask=True).tolist() == masked
