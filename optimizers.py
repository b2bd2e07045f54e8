"""AdamW, and Muon with AdamW beside it, both stepped at one learning rate."""

import torch

Names = dict[torch.nn.Parameter, str]


class Optimizers:
    """The optimizers of a model's parameters, tied weights once. ``kind``: adamw or muon.

    AdamW (Loshchilov & Hutter 2019) decays matrices only. Muon (Jordan et al. 2024) has the
    matrices of the layers, at an update as large as AdamW's (Liu et al. 2025), so that one learning
    rate serves both; embeddings, head and vectors stay with AdamW.

    All state is allocated from the start: checkpoints have one shape from step 0 on and the memory
    report is true before the first step.
    """

    def __init__(
        self, names: Names, kind: str, weight_decay: float, betas: tuple[float, float]
    ) -> None:
        self.names = names
        hidden = {p for p, name in names.items() if name.startswith("h.") and p.dim() == 2}
        hidden = hidden if kind == "muon" else set()
        rest = [p for p in names if p not in hidden]
        groups = [
            {"params": [p for p in rest if p.dim() >= 2], "weight_decay": weight_decay},
            {"params": [p for p in rest if p.dim() < 2], "weight_decay": 0.0},
        ]
        self.adamw = torch.optim.AdamW(groups, betas=betas, fused=True)
        for p in rest:
            self.adamw.state[p] = {
                "step": torch.zeros((), dtype=torch.float32, device=p.device),
                "exp_avg": torch.zeros_like(p),
                "exp_avg_sq": torch.zeros_like(p),
            }
        self.muon = None
        if hidden:
            self.muon = torch.optim.Muon(
                [p for p in names if p in hidden],
                weight_decay=weight_decay,
                adjust_lr_fn="match_rms_adamw",
            )
            for p in hidden:
                self.muon.state[p] = {"momentum_buffer": torch.zeros_like(p)}

    @property
    def all(self) -> list[torch.optim.Optimizer]:
        return [self.adamw] + [self.muon] * (self.muon is not None)

    @torch.no_grad()
    def step(self, lr: float, scale: torch.Tensor, skipped: torch.Tensor) -> None:
        """One step on ``scale`` times the gradients; none at all where ``skipped``, a bool scalar
        on the device, is true. The gradients are gone afterwards."""
        # Fused AdamW divides by grad_scale, and does nothing where found_inf is 1: scaling costs no
        # pass over the gradients and skipping no wait for the device.
        self.adamw.grad_scale = (1 / scale).float()
        self.adamw.found_inf = skipped.float()
        for optimizer in self.all:
            for group in optimizer.param_groups:
                group["lr"] = lr
        self.adamw.step()
        if self.muon is not None and not skipped.item():  # Muon cannot but be told by the host
            gradients = [p.grad for p in self.muon.param_groups[0]["params"]]
            torch._foreach_mul_(gradients, scale.to(gradients[0].dtype))
            self.muon.step()
        self.zero_grad()

    def zero_grad(self) -> None:
        for optimizer in self.all:
            optimizer.zero_grad(set_to_none=True)

    def tensors(self) -> dict[str, torch.Tensor]:
        """``optimizer.<state>.<parameter>``: the tensors themselves."""
        return {
            f"optimizer.{key}.{self.names[p]}": value
            for optimizer in self.all
            for p, state in optimizer.state.items()
            for key, value in state.items()
        }
