"""One module per command of `forebay`; each is imported only when its command runs."""
