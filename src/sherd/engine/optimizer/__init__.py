"""The user's optimizer, on what a rank owns, and whether it may be stepped in parts.

shard         steps what this rank owns, in runs
runs          adjacent parameters that are stepped as one tensor
portions      what is loaded, stepped and stored at once; flat state
shown         what the user sees of the state where a rank has all of it
state         state cut to what an owner has, and gathered again
whole         steps what this rank owns whole, each parameter in its own shape
layers        norms of layers that are cut across ranks
unsplit       what is not elementwise, on whole parameters
inner         objects of the user's class that step other tensors
elementwise   whether an optimizer may be stepped in parts, and what may be merged; `probe` and `regimes` try it
forecast      how much state a first step will create, and what a step costs
"""
