"""From a loader's batch on the host to what a micro-step takes, on the device.

On a GPU the next batch is copied and prepared on a stream of its own while the device is at work on
the last one: nobody waits for a copy but the batch's own step.
"""

from typing import NamedTuple

import torch

from attention import Documents, documents_of
from loss import IGNORE

Batch = dict[str, torch.Tensor]
BUFFERS = 2  # pinned: one being copied from, one being filled


class Inputs(NamedTuple):
    """A micro-batch on the device."""

    input_ids: torch.Tensor  # int64 (B, T)
    targets: torch.Tensor  # int64 (B, T), the next token or IGNORE
    documents: Documents | None  # under --doc-mask
    tokens: torch.Tensor  # int64 scalar: real ones


def targets_of(batch: Batch, doc_mask: bool = False) -> torch.Tensor:
    """Next-token targets int64 (B, T): IGNORE at the last position and where no token follows,
    under ``doc_mask`` also where one of another document does."""
    ids, mask = batch["input_ids"], batch["mask"]
    targets = torch.full_like(ids, IGNORE)
    has_next = mask[:, :-1] & mask[:, 1:]
    if doc_mask:
        has_next = has_next & (batch["doc_ids"][:, :-1] == batch["doc_ids"][:, 1:])
    targets[:, :-1] = torch.where(has_next, ids[:, 1:], IGNORE)
    return targets


def documents_by_eos(input_ids: torch.Tensor, eos_id: int) -> torch.Tensor:
    """``doc_ids`` of packed blocks (B, T) whose loader does not say where documents begin."""
    return torch.nn.functional.pad(input_ids == eos_id, (1, -1)).cumsum(1)


class CudaCopies:
    """Copies to a GPU (CUDA or HIP) on a stream of their own."""

    def __init__(self, device: torch.device) -> None:
        self.device, self.stream = device, torch.cuda.Stream(device)

    def pinned_like(self, tensor: torch.Tensor) -> torch.Tensor:
        return torch.empty_like(tensor, pin_memory=True)

    def to_device(self, pinned: torch.Tensor) -> torch.Tensor:
        return pinned.to(self.device, non_blocking=True)

    def queued(self) -> torch.cuda.Event:
        """An event behind all that the model has to do by now."""
        return torch.cuda.current_stream(self.device).record_event()

    def ahead(self, event: torch.cuda.Event | None) -> torch.cuda.StreamContext:
        """Inside, work goes to the own stream, behind ``event``."""
        if event is not None:
            self.stream.wait_event(event)
        return torch.cuda.stream(self.stream)

    def handed_over(self) -> torch.cuda.Event:
        """An event behind all copies by now, which the model's stream waits for."""
        event = self.stream.record_event()
        torch.cuda.current_stream(self.device).wait_event(event)
        return event


class Feed:
    """``feed(batch)`` gives the Inputs. ``copies`` is how they get to the device, None on a CPU.

    What a call makes on the stream of its own is held until the model is done with it: the call
    after the next lets go of it, and makes its own behind what was queued up to the call between
    them. So no memory is used again too early, and a copy waits for the step before the last only.
    """

    def __init__(self, device: torch.device, doc_mask: bool, copies=None) -> None:
        self.doc_mask, self.flex = doc_mask, device.type == "cuda"
        self.copies = CudaCopies(device) if copies is None and self.flex else copies
        self.buffers: list[Batch] = [{} for _ in range(BUFFERS)]
        self.copied = [None] * BUFFERS  # events
        self.held: list[Inputs | None] = [None] * BUFFERS
        self.queued = None  # at the last call
        self.turn = 0

    def __call__(self, batch: Batch) -> Inputs:
        if self.copies is None:
            return self._prepared(batch)
        turn, buffers = self.turn, self.buffers[self.turn]
        if self.copied[turn] is not None:
            self.copied[turn].synchronize()  # what was copied from these buffers is there
        for name, tensor in batch.items():
            if name not in buffers or buffers[name].shape != tensor.shape:
                buffers[name] = self.copies.pinned_like(tensor)
            buffers[name].copy_(tensor)
        before, self.queued = self.queued, self.copies.queued()
        with self.copies.ahead(before):
            self.held[turn] = None
            there = {name: self.copies.to_device(buffers[name]) for name in batch}
            self.held[turn] = self._prepared(there)
        self.copied[turn] = self.copies.handed_over()
        self.turn = (turn + 1) % BUFFERS
        return self.held[turn]

    def _prepared(self, batch: Batch) -> Inputs:
        documents = documents_of(batch["doc_ids"], self.flex) if self.doc_mask else None
        targets = targets_of(batch, self.doc_mask)
        return Inputs(batch["input_ids"], targets, documents, batch["mask"].sum())
