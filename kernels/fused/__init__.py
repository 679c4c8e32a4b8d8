"""What a GPT computes beside attention: the loss over a vocabulary, and rotary embeddings."""
