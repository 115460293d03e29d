"""Training: SFT, reference log-probabilities and DPO on packed rows; checkpoints, resume and launch."""
