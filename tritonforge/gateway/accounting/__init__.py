"""What is kept of a request once it is over: audit, usage, metrics, traces."""
