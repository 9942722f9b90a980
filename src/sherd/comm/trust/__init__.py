"""What a rank believes of what arrives.

`seal` (keys, and the HMAC that says a rank of this job wrote something), `sealed_store` (a store whose values carry it),
`plain` (data that can be read without running anything), `objects` (Python objects, plain or sealed pickles).
"""
