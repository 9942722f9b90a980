"""What a rank believes of what arrives.

`seal` (keys, and the HMAC that shows that a rank of this job wrote something), `sealed_store` (a store whose values
carry one), `plain` (data that can be read without running anything), `objects` (Python objects: plain data, or pickles
where they can be trusted).
"""
