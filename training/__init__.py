"""What the training loop calls: one file for each concern."""
