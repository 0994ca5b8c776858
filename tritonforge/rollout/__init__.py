"""Two releases on one server: a canary beside the stable one, who is sent to which, and how one replaces the other."""
