"""NorMuon: Muon with an equally long step for each row, that is, for each output of the matrix.

    r = β₂ r + (1 − β₂) · mean(O²) of each row        w = w − lr · (λ w + 0.2 · O / √r̂)

The rows of a square or wide O are orthonormal, so already equally long. In a tall O (gate or up) the columns are, and
some rows get several times the step of others. β₂ and the bias correction r̂ are AdamW's. State: Muon's, and one
float32 per row, on the rank that has the row.

The paper also scales each step to a fixed norm, which it nearly has after the division.

Li et al., NorMuon, 2025. https://arxiv.org/abs/2510.05491
"""

import torch

from optimizers.muon import Muon


class NorMuon(Muon):
    def matrix_states(self, name, shape, rows):
        return super().matrix_states(name, shape, rows) | {"row_avg_sq": ((shape[0], 1), torch.float32)}

    def scaled(self, o, states, side, scalars):
        o = o.float()
        r = states["row_avg_sq"]
        square = o.square().mean(dim=1, keepdim=True)
        r.lerp_(torch.where(scalars[0].isfinite(), square, r), 1 - self.adamw.betas[1])
        return o / (r.sqrt() * scalars[3] + 1e-8), 0.2  # scalars[3] is AdamW's 1 / √(1 − β₂ᵗ)
