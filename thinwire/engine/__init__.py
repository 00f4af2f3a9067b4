"""The engine: the only place with threads, process groups and training-loop knowledge.

`ddp.attach` and `optimizer.distribute` plug a recipe into a training loop; `sync.Sync` takes the
steps; `lane` overlaps them with backward; `peers` speaks to the other ranks; `fusion` packs.
"""
