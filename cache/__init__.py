"""Bytes and where they live: the KV layout, device pools, prefix index and replay plan."""
