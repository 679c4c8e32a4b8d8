"""What the training loop calls: optimizers, schedules, checkpoints, the run log, FLOPs accounting."""
