"""What modules keep besides parameters: buffers, and batch norm over all ranks."""
