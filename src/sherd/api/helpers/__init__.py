"""What a script needs around its loop: `process` (who am I, and the communicator that helpers use), `coordination`,
`metrics`, `seeding`, `bars` and `log`."""
