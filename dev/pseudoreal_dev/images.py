from enum import StrEnum
from .containerd import Containerd
class Target(StrEnum):
    OPERATOR = "operator"
    TRAINER = "trainer"
def build(target): ...
def load(image, containerd): ...
