"""Scripts to start from: `sherd train` lists and runs them. Each is one file that works as it is when copied.

A recipe has `parser()`, its options; `check(arguments, world)`, which raises `ConfigError` for what cannot work on that
many ranks; and `main()`.
"""
