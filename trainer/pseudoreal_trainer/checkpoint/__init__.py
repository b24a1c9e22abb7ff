"""Checkpoints: manifest, pieces, reading and writing, the delink, the fence, retention. No torch. Where checkpoints are
kept is in `storage`; when they are saved, in `training`."""
