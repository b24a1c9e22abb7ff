"""Checkpoints: manifest, pieces, reading and writing, the delink, the fence, retention. Never torch.

Where they are kept is in `storage`; when they are saved, in `training`.
"""
