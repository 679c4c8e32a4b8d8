"""The network: a decoder-only GPT and what it needs to generate text."""

from model.attention import ATTENTION, attend_with, resolve_attention
from model.cache import KVCache, PagedKVCache
from model.config import GPTConfig, build_model, resolve_model
from model.generation import generate
from model.gpt import GPT

__all__ = [
    "ATTENTION",
    "GPT",
    "GPTConfig",
    "KVCache",
    "PagedKVCache",
    "attend_with",
    "build_model",
    "generate",
    "resolve_attention",
    "resolve_model",
]
