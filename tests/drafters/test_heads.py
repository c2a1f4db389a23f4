"""AdaFlash's length head against its published form."""

import torch
from torch.nn import functional as F

from adaspec.drafters.heads import LengthHead


def test_the_share_is_read_from_the_mean_and_the_last_state() -> None:
    torch.manual_seed(0)
    head = LengthHead(hidden_size=6, width=4)
    states = torch.randn(3, 5, 6)  # [requests, block, hidden]
    weights = dict(head.named_parameters())

    def layer(name: str, x: torch.Tensor) -> torch.Tensor:
        return x @ weights[f"{name}.weight"].T + weights[f"{name}.bias"]

    summary = torch.cat([states.sum(1) / 5, states[:, 4]], dim=1)
    down = F.silu(layer("down", summary))
    expected = layer("out", down + F.silu(layer("res.0", down))).sigmoid()
    share = head(states)
    assert share.shape == (3,)
    torch.testing.assert_close(share, expected[:, 0])
