"""The network: what DeepSeek-V4.1 computes, and nothing about time, bytes at rest or people."""
