"""The objects that the rest of the engine works on: tracked parameters, packed into buckets.

tracked       one parameter and the state of its gradient
inventory     a model's parameters and buffers, compared between the ranks
exchange      what a rank keeps of a sum, in which memory, and how ranks reduce into it
bucket        parameters that are exchanged together: their values, local gradient, sum and norms
bucket_list   the buckets that are trained; replaced as a whole when that changes
ring          slots that peers read, and the reductions in flight
norms         norms of the sums, independent of which rank owns what
memory        flat memory for buckets
checksum      checksums by which ranks compare tensors
"""
