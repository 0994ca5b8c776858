"""Who may ask, and how much: API keys, quotas, streams at once."""
