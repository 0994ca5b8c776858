"""TritonForge: from a Hugging Face checkpoint to a proven LLM service on NVIDIA Triton Inference Server."""

__version__ = "0.1.0"
