"""What a GPT computes beside attention: loss over a vocabulary, rotary embeddings, RMS norm, products of a few
rows, the draw of a token."""
