"""Where a request goes: aliases, replicas, breakers, canaries, managed APIs."""
