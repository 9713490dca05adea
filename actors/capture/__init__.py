"""Capture: SGLang with a hook in every scheduler process, and the way of the states out of it.

In the order in which a state meets them: `sources` takes it from the model's own `collector`, its `layer_inputs` or
its final norm, `hook` and `captured` stand round the model's forward, `tap` copies it into the ring (`ring`, `wire`),
`intake` drains the ring, `join` puts chunks together again, and `session` is what an actor drives. `proof` shows at
start that all of it is right; `statistics` and `second_look` watch it during the run. What differs between releases
of SGLang is in `adapter`.
"""
