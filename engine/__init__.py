"""Time: requests, scheduling, batching, running the network and sampling from it."""
