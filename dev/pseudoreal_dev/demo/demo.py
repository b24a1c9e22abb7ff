"""`make demo`: the whole product on a real Kubernetes, from nothing to a trained model."""

from collections.abc import Callable

from pseudoreal_dev.demo import chart, llama, quickstart
from pseudoreal_dev.demo.target import Target, choose
from pseudoreal_dev.machine.progress import Cost, progress, totals

DEMOS: dict[str, Callable[[Target], None]] = {"quickstart": quickstart.run, "llama": llama.run}


def run(name: str) -> None:
    """Run a demo. Raises DevError if a part fails; the text names the part and the remedy."""
    target = choose()
    chart.install(target.kubernetes, target.operator_image, target.trainer_image)
    DEMOS[name](target)
    spent = totals(progress.timings)
    once, always = spent[Cost.FIRST_RUN], spent[Cost.EVERY_RUN]
    progress.console.print(progress.table())
    progress.say(
        f"time: {once + always:.0f} s, of which {once:.0f} s only a first run pays, and {always:.0f} s every run"
    )
    progress.say("\nlook around:\n  " + "\n  ".join(target.hints(name)))
