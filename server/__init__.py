"""People: HTTP, the command line and configuration."""
