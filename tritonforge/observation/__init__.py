"""What the decoder tells of itself: metrics, health, request log, traces."""
