"""Block-diffusion drafter: configuration, network, checkpoints, block layout and loss."""
