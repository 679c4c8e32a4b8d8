"""The network: a decoder-only GPT and what it needs to generate text."""

from model.attention import ATTENTION, resolve_attention
from model.config import GPTConfig
from model.gpt import GPT
from model.kv_cache import KVCache
from model.sampling import generate

__all__ = ["ATTENTION", "GPT", "GPTConfig", "KVCache", "generate", "resolve_attention"]
