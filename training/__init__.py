"""What the training loop calls: optimisers, schedules, checkpoints, the run log, FLOPs accounting."""
