"""Steps to skip, not finite or far above those before: decided on the device, by all alike."""

import torch


class SpikeGuard:
    """What recent steps were like: their losses and gradient norms.

    A step is beyond where either value exceeds the mean of the last WINDOW good steps by more than
    ``deviations`` of their standard deviations (0: never). It judges from LEAST good steps on.
    """

    WINDOW, LEAST = 128, 32

    def __init__(self, deviations: float, device: torch.device) -> None:
        self.deviations = deviations
        self.window = torch.zeros(2, self.WINDOW, dtype=torch.float64, device=device)
        self.good = torch.zeros((), dtype=torch.int64, device=device)  # steps so far
        self.skips_in_a_row = torch.zeros((), dtype=torch.int64, device=device)
        self.most_skips_in_a_row = torch.zeros_like(self.skips_in_a_row)  # since the launch

    def judge(self, loss: torch.Tensor, norm: torch.Tensor) -> torch.Tensor:
        """Whether to skip the step of this loss and norm: bool, a scalar. It becomes one of the
        good or one more of the skipped."""
        values = torch.stack([loss, norm])
        skipped = ~values.isfinite().all()
        index = torch.arange(self.WINDOW, device=values.device)
        if self.deviations:
            n = self.good.clamp(max=self.WINDOW)
            mean = self.window.sum(1) / n.clamp(min=1)
            difference = torch.where(index < n, self.window - mean[:, None], 0)
            deviation = (difference.square().sum(1) / n.clamp(min=1)).sqrt()
            beyond = (values - mean > self.deviations * deviation).any()
            skipped |= beyond & (n >= self.LEAST)
        here = (index == self.good % self.WINDOW) & ~skipped
        self.window.copy_(torch.where(here, values[:, None], self.window))
        self.good += ~skipped
        self.skips_in_a_row.copy_(torch.where(skipped, self.skips_in_a_row + 1, 0))
        self.most_skips_in_a_row.clamp_(min=self.skips_in_a_row)
        return skipped

    def tensors(self) -> dict[str, torch.Tensor]:
        return {
            "optimizer.spikes.window": self.window,
            "optimizer.spikes.good": self.good,
            "optimizer.spikes.skips_in_a_row": self.skips_in_a_row,
        }
