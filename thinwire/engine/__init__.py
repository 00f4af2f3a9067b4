"""The engine: the only place with threads, process groups and training-loop knowledge.

`ddp.attach` and `optimizer.distribute` plug a recipe into a training loop and return a `session`;
buckets go into an `Intake`, whose `lane` takes `steps` beside backward; `peers` speaks to the other
ranks; `fusion` packs.
"""
