"""The engine: what happens to a gradient between autograd and the next forward.

The way of a gradient: `inventory` (what a model consists of), `trained` (which of it is trained), `choices` (what
a strategy decides), `backward` (when a round begins and ends), `intake` (autograd's hook), `collector` (what has
arrived), `flat`, `ring`, `gradients` and `whole_gradients` (how it is reduced), `norms` and `measured`, `window`
(accumulation), `agreement` (what ranks tell each other), `settings` and `watch` (what must be the same on all of them),
`parameter` and `grad_access` (what a user sees of it), `rounds` (all of these together); `elementwise`,
`optimizer_state` and `optimizer_shard` (who updates what); `mesh` (which ranks hold a copy of the parameters together)
and `stores` (where they live), `host_store`, `copy_on_write` and `page_map` (one copy per host, and what a rank wrote
of its own), `edits`, `editing` and `checksum` (what ranks compare), `torn` (after an update that failed), `restore`
(after a `distribute` that was refused); `rooms` (memory of gradients that somebody keeps); `buffers` (kept equal) and
`sync_batch_norm`; and `engine`, where a step brings them together.

Some stores keep slices and gather parameters while they are used: `pages` (memory that comes and goes), `route` (what
is used next), `apart`, `gathering` (what is whole, and for how long), `on_use` (how use is noticed), `transforms`,
`gathered_store` and `host_gathered_store`.
"""
