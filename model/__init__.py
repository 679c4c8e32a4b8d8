"""The network: a decoder-only GPT and what it needs to generate text."""
