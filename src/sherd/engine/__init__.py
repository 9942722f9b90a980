"""The engine: everything between autograd and the next forward.

In reading order:

buckets       tracked parameters, packed into buckets: the objects that the rest works on
parameters    where parameters live: copies, one copy per host, or slices that are gathered on use
gradients     from autograd's hook to the sum over all ranks, and `p.grad`
consistency   what must be the same on all ranks, and the errors that name a difference

optimizer     the user's optimizer, whole or in shards, and whether it may be sharded

modules       state of modules other than parameters: buffers and synchronised batch norm
policy        what ranks exchange, and when: what a strategy decides
engine        a training step: forward, backward, update
assembly      builds the engine of a model as its policy says
"""
