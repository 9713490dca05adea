"""Capture: SGLang with a hook in every scheduler process, and the way of the states out of it.

In the order in which a state meets them: `collector` switches the model's own collector on, `hook` takes what
it collected, `tap` copies it into the ring (`ring`, `wire`), `intake` drains the ring, `join` puts chunks
together again, and `engine` is the session that an actor drives. `proof` shows at start that all of it is
right.
"""
