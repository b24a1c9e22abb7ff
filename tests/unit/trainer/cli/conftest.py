from tests.unit.trainer.checkpoint.storage.object_server import bucket, endpoint

__all__ = ["bucket", "endpoint"]
