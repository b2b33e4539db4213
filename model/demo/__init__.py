"""The demo checkpoint: a small V4.1 network that Forebay builds for itself, so that it runs without any download."""
