"""Collective operations that outlive NICs: see `unbroken.coll`, and `unbroken.torch` for torch.distributed."""
