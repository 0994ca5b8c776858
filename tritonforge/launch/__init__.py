"""The launcher of a tritonserver: finds it, starts it, watches it, replaces it, and says from outside how it is."""
