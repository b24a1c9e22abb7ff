from tests.unit.trainer.storage.support.object_server import bucket, endpoint

__all__ = ["bucket", "endpoint"]
