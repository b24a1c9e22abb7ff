from tests.unit.trainer.storage.object_server import bucket, endpoint

__all__ = ["bucket", "endpoint"]
