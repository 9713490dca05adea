"""Who does the work: engines, writers, the coordinator, and the messages between them."""
