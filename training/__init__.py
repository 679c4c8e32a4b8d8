"""What the training loop calls: one file for each question that it asks."""
