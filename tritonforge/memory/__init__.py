"""What a decoder takes of the machine's memory: planned before it is built, measured, and looked at while it serves."""
