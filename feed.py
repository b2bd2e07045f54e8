"""From a loader's batch on the host to what a micro-step takes, on the device.

On a GPU the next batch is copied and prepared on a stream of its own while the device is at work on
the last one: nobody waits for a copy but the batch's own step.
"""

from typing import NamedTuple

import torch
from torch.utils._pytree import tree_leaves

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

    def ahead(self) -> torch.cuda.StreamContext:
        return torch.cuda.stream(self.stream)

    def pinned_like(self, tensor: torch.Tensor) -> torch.Tensor:
        return torch.empty_like(tensor, pin_memory=True)

    def to_device(self, pinned: torch.Tensor) -> torch.Tensor:
        return pinned.to(self.device, non_blocking=True)

    def started(self) -> torch.cuda.Event:
        """An event behind all that is queued on the stream; ``synchronize`` waits for it."""
        return self.stream.record_event()

    def hand_over(self, inputs: Inputs, event: torch.cuda.Event) -> None:
        """Let the current stream use them once they are there, and keep their memory until then."""
        current = torch.cuda.current_stream(self.device)
        current.wait_event(event)
        for tensor in tree_leaves(inputs):
            if isinstance(tensor, torch.Tensor):
                tensor.record_stream(current)


class Feed:
    """``feed(batch)`` gives the Inputs. ``copies`` is how they get to the device, None on a CPU."""

    def __init__(self, device: torch.device, doc_mask: bool, copies=None) -> None:
        self.doc_mask, self.flex = doc_mask, device.type == "cuda"
        self.copies = CudaCopies(device) if copies is None and self.flex else copies
        self.buffers: list[Batch] = [{} for _ in range(BUFFERS)]
        self.events = [None] * BUFFERS
        self.turn = 0

    def __call__(self, batch: Batch) -> Inputs:
        if self.copies is None:
            return self._prepared(batch)
        buffers, event = self.buffers[self.turn], self.events[self.turn]
        if event is not None:
            event.synchronize()  # what was copied from these buffers is there
        for name, tensor in batch.items():
            if name not in buffers or buffers[name].shape != tensor.shape:
                buffers[name] = self.copies.pinned_like(tensor)
            buffers[name].copy_(tensor)
        with self.copies.ahead():
            inputs = self._prepared({k: self.copies.to_device(t) for k, t in buffers.items()})
        event = self.events[self.turn] = self.copies.started()
        self.copies.hand_over(inputs, event)
        self.turn = (self.turn + 1) % BUFFERS
        return inputs

    def _prepared(self, batch: Batch) -> Inputs:
        documents = documents_of(batch["doc_ids"], self.flex) if self.doc_mask else None
        targets = targets_of(batch, self.doc_mask)
        return Inputs(batch["input_ids"], targets, documents, batch["mask"].sum())
