"""flash_attn is CUDA code. SkyRL imports two of its names and calls them with packed samples."""
