"""From autograd's hook to the sum that all ranks agree on."""
