"""Batches to the device: targets, and two pinned buffers under a device that takes its time."""

import contextlib
import threading
import time
import weakref

import torch

from feed import Feed, targets_of
from loss import IGNORE


class SlowDevice:
    """Copies as a GPU does: queued, done later, from whatever is in the buffer by then."""

    def __init__(self, seconds: float) -> None:
        self.seconds, self.queue, self.log, self.steps = seconds, [], [], 0
        self.may_copy = threading.Event()
        self.may_copy.set()

    def queued(self):
        self.steps += 1
        return self.steps

    def ahead(self, event):
        self.log.append(f"behind {event}")
        return contextlib.nullcontext()

    def pinned_like(self, tensor):
        return torch.empty_like(tensor)

    def to_device(self, pinned):
        self.queue.append((pinned, torch.empty_like(pinned)))
        return self.queue[-1][1]

    def handed_over(self):
        event, work, self.queue = Event(self.log), self.queue, []
        self.log.append(f"queued {event.number}")

        def copy():
            self.may_copy.wait()
            time.sleep(self.seconds)
            for pinned, there in work:
                there.copy_(pinned)
            self.log.append(f"copied {event.number}")
            event.done.set()

        event.thread = threading.Thread(target=copy)
        event.thread.start()  # the test waits where a stream would by itself
        return event


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
    for event in feed.copied:
        event.done.wait()
    assert [i.input_ids.unique().item() for i in inputs] == list(range(6))
    log = device.log
    for n in range(4):  # the third batch waits for the first, the fourth for the second ...
        assert log.index(f"copied {n}") < log.index(f"waited {n}") < log.index(f"queued {n + 2}")
    assert "waited 4" not in log and "waited 5" not in log


def test_the_next_batch_is_prepared_while_the_last_one_is_copied():
    device, Event.count = SlowDevice(0), 0
    device.may_copy.clear()
    feed = Feed(torch.device("cpu"), doc_mask=False, copies=device)
    feed(batch(0))
    feed(batch(1))
    # both under way, nobody waited
    assert device.log == ["behind None", "queued 0", "behind 1", "queued 1"]
    device.may_copy.set()
    for event in feed.copied:
        event.done.wait()


def test_inputs_are_held_until_the_step_that_uses_them_is_done():
    """A call lets go of the Inputs of the call before the last, behind that call's step."""
    device, Event.count = SlowDevice(0.0), 0
    feed = Feed(torch.device("cpu"), doc_mask=True, copies=device)
    alive = []
    for value in range(5):
        inputs = feed(batch(value) | {"doc_ids": torch.zeros(2, 4, dtype=torch.int64)})
        alive.append([weakref.ref(inputs.input_ids), weakref.ref(inputs.documents.mask)])
        device.queue.clear()  # the copying thread holds none
        for event in feed.copied:
            if event:
                event.done.wait()
                event.thread.join()
        del inputs
        for n, refs in enumerate(alive):
            assert all((ref() is not None) == (n >= value - 1) for ref in refs), (n, value)
    # call n works behind what was queued before call n - 1, which is the step of call n - 2
    assert [line for line in device.log if "behind" in line] == [
        f"behind {n}" for n in (None, 1, 2, 3, 4)
    ]


def test_targets_end_with_the_document_under_the_mask():
    ids, doc_ids = torch.arange(12).view(2, 6), torch.tensor([[0, 0, 1, 2, 2, 2], [0] * 6])
    mask = torch.ones(2, 6, dtype=torch.bool)
    mask[1, 4:] = False
    given = {"input_ids": ids, "mask": mask, "doc_ids": doc_ids}
    i = IGNORE
    assert targets_of(given).tolist() == [[1, 2, 3, 4, 5, i], [7, 8, 9, i, i, i]]
    masked = [[1, i, i, 4, 5, i], [7, 8, 9, i, i, i]]
    assert targets_of(given, doc_mask=True).tolist() == masked
