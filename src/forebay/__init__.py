"""Forebay: a continuous-batching inference server for DeepSeek-V4.1-Flash."""

import os

# Read by torch's OpenMP when torch is first imported. Threads that spin while they wait slow every other process on a small machine, and
# this one with them, by an order of magnitude.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

__version__ = "0.1.0"
