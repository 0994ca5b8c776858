"""Which tokens of which requests the next step computes, and where their keys and values are kept. Pure."""
