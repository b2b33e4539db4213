"""Forebay: a continuous-batching inference server for DeepSeek-V4.1-Flash."""

__version__ = "0.1.0"
