"""What the rest of the engine is about: parameters that are tracked, packed into buckets, each with a body of its own.

tracked       what is known of one parameter
inventory     a model's parameters and buffers, compared between the ranks
exchange      what is kept of a sum and in which memory, and how ranks reduce into it
bucket        what is exchanged together: its parameters, their values, the local gradient, the sum, the norms
bucket_list   the buckets that are trained; replaced as a whole when that changes
ring          slots that peers read, and the reductions under way
norms         norms of the sums that do not depend on who owns what
memory        flat memory for buckets
checksum      by which ranks find out whether they have the same
"""
