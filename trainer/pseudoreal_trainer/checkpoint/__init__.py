"""Checkpoints: manifest, pieces, reading, writing, delink, fence and retention, without torch. The storage is in
`storage`; the times of saving are in `training`."""
