"""From autograd's hook to the sum over all ranks, and `p.grad`."""
