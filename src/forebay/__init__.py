"""Forebay: a continuous-batching inference server for DeepSeek-V4.1-Flash."""

import os

# Read by torch's OpenMP when torch is first imported. Threads that spin while they wait slow every other process on a small machine, and
# this one with them, by an order of magnitude.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
# Read by MKL at its first call: sums in an order that depends neither on the number of threads nor on how a product is cut for them.
os.environ.setdefault("MKL_CBWR", "AUTO,STRICT")

__version__ = "0.1.0"
