"""What `clearhead launch` becomes: torchrun, but the ranks' end is one line, and no mistake is tried again.

    python -m clearhead.cli_ranks ARGUMENTS OF TORCHRUN

A rank that ends by a user's mistake leaves its line in the file that torchrun gives it (`tell_launcher`).
Exit codes are those of one process: 2 after what a line can say, 130 after a request to stop, else 1.
"""

import logging
import sys
from collections.abc import Mapping, Sequence
from typing import Any, NoReturn

from torch.distributed import run
from torch.distributed.elastic.agent.server.api import RunResult, WorkerGroup
from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent
from torch.distributed.elastic.multiprocessing.api import SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, ProcessFailure
from torch.distributed.elastic.rendezvous import RendezvousError
from torch.distributed.launcher import api

AGENT: Any = LocalElasticAgent  # what is overridden below has no types


class Agent(AGENT):
    """Watches the ranks of one machine; starts them anew after a crash, but not after a mistake."""

    def _monitor_workers(self, worker_group: WorkerGroup) -> RunResult:
        result: RunResult = super()._monitor_workers(worker_group)
        if result.is_failed() and self._remaining_restarts > 0:
            line, _, mistake = describe(result.failures)
            if mistake:
                self._remaining_restarts = 0
            else:
                total = worker_group.spec.max_restarts
                left = f"restart {total - self._remaining_restarts + 1} of {total}"
                print(f"{line}; all ranks start anew: {left}", file=sys.stderr, flush=True)
        return result


def describe(failures: Mapping[int, ProcessFailure]) -> tuple[str, int, bool]:
    """One line for the ranks' end, the exit code, and whether a user's mistake ended them."""
    for _, failure in sorted(failures.items()):  # the first rank's line is the nearest to the cause
        told = failure.error_file_data
        if "mistake" in told:
            return str(told["message"]).replace("rank 0 stopped: ", ""), 2, bool(told["mistake"])
    if not failures:
        return "clearhead: the ranks ended", 1, False
    rank, failure = min(failures.items(), key=lambda item: item[1].timestamp)
    how = f"exit code {failure.exitcode}" if failure.exitcode >= 0 else f"signal {failure.signal_name()}"
    return f"clearhead: rank {rank} ended with {how}", 1, False


def main(argv: Sequence[str] | None = None) -> NoReturn:
    """Start the ranks, wait for them, and end as they do."""
    logging.disable(logging.CRITICAL)  # torchrun's records say at length what is one line below
    launcher: Any = api
    launcher.LocalElasticAgent = Agent  # no argument of torchrun's takes another agent
    try:
        run.run(run.parse_args(sys.argv[1:] if argv is None else list(argv)))
    except ChildFailedError as error:
        line, code, _ = describe(error.failures)
        print(line, file=sys.stderr)
        raise SystemExit(code) from None
    except (SignalException, KeyboardInterrupt):  # the first rank has said what it saved
        raise SystemExit(130) from None
    except RendezvousError as error:
        print(
            f"clearhead: the machines cannot meet where --meet says: {' '.join(str(error).split())}",
            file=sys.stderr,
        )
        raise SystemExit(1) from None
    raise SystemExit(0)


if __name__ == "__main__":
    main()
